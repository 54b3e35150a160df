"""One boot of one machine: its disks are left as they were, its output and results come back, and it ends in time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from scripts.machines.failure import NoMachine, TimedOut
from scripts.machines.furnish import CHECKOUT
from scripts.machines.images import Booted

_QEMU = "qemu-system-x86_64"
_MEMORY_MIB = 2048
_RESULTS_BYTES = 64 << 20
_TAIL_LINES = 40
_KVM_PROBE_S = 10

# mitigations: their price under emulation is several times that in silicon. panic with -no-reboot ends qemu. tsc: an emulated one does
# not drift, and what the kernel would take instead costs an exit each time it is asked for the time.
_COMMAND_LINE = "console=ttyS0 panic=-1 mitigations=off random.trust_cpu=on net.ifnames=0 tsc=reliable systemd.show_status=1"
_JOB = "systemd.unit=sealnet-job.service systemd.getty_auto=no"
# Words that neither the kernel nor systemd knows become variables of the first process; guest/start reads this one.
_REBOOTS = "sealnet.reboots"
_SHELL = "systemd.unit=multi-user.target systemd.wants=sealnet-job.service"

# A boot sector: mov dx, 0xf4; mov al, 0x10; out dx, al; and round again. The isa-debug-exit device makes that status 33.
_BOOT_SECTOR = bytes([0xBA, 0xF4, 0x00, 0xB0, 0x10, 0xEE, 0xEB, 0xFD]).ljust(510, b"\0") + b"\x55\xaa"
_BOOT_STATUS = 33

# Not the checkout's, but what was made of it or from it.
_LEFT_OUT = {
    ".git", ".venv", ".vagrant", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "build", "dist",
}  # fmt: skip


@dataclass
class Ended:
    """What a machine said and left. `up_s`: from power on to the command, `took_s` to power off."""

    status: int
    up_s: float
    took_s: float
    results: Path
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


def run(
    booted: Booted,
    disk: Path,
    command: Sequence[str],
    *,
    results: Path,
    timeout_s: float,
    output: IO[bytes] | None = None,
    reboots: bool = False,
) -> Ended:
    """Boot, run the command in /sealnet, power off. Its output goes to `output` and, with the console and what it left, into `results`.

    With `reboots` a reboot is one, after which the command runs again on the same disk; else it is the machine's end.
    Raises TimedOut, and NoMachine when the machine went down before the command had ended.
    """
    results.mkdir(parents=True, exist_ok=True)
    for old in results.iterdir():
        if old.is_file():
            old.unlink()
    console = results / "console.log"
    with TemporaryDirectory(prefix="sealnet-vm-", dir=_scratch()) as scratch:
        returned = Path(scratch) / "results"
        with open(returned, "wb") as file:
            file.truncate(_RESULTS_BYTES)
        job = Path(scratch) / "job"
        pack(job, command)
        argv = [*_machine(booted, disk, job, returned, f"{_JOB} {_REBOOTS}" if reboots else _JOB)]
        if reboots:
            argv.remove("-no-reboot")
        argv += ["-serial", f"file:{console}", "-chardev", "file,id=output,path=/dev/stdout"]
        began = time.monotonic()
        with _started(argv) as process, open(results / "output.log", "wb") as log:
            hearing = _Hearing(process, log, output)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                up = "" if hearing.up_at else ", and its command had not started"
                raise TimedOut(f"cannot finish job: the machine was not off after {timeout_s:.0f} s{up}", output=_tail(console)) from None
            finally:
                process.kill()
                hearing.join()
        took_s = time.monotonic() - began
        unpack(returned, results)
    if not (results / "status").is_file():
        said = hearing.errors.strip()
        raise NoMachine(
            f"cannot finish job: the machine went down before its command had ended{f': {said}' if said else ''}", output=_tail(console)
        )
    return Ended(
        status=int((results / "status").read_text(encoding="ascii")),
        up_s=(hearing.up_at or began) - began,
        took_s=took_s,
        results=results,
        versions=_versions(results / "versions"),
    )


def shell(booted: Booted, disk: Path) -> int:
    """The machine's console, with the checkout in /sealnet. Ends when the machine is powered off."""
    with TemporaryDirectory(prefix="sealnet-vm-", dir=_scratch()) as scratch:
        returned = Path(scratch) / "results"
        returned.write_bytes(b"\0" * 512)
        job = Path(scratch) / "job"
        pack(job, ())
        argv = [*_machine(booted, disk, job, returned, _SHELL), "-serial", "mon:stdio", "-chardev", "null,id=output"]
        return subprocess.run(argv, check=False).returncode


@functools.cache
def accelerator() -> str:
    """`kvm` where a machine really runs with it.

    Inside another machine /dev/kvm may open, and even boot a sector, without the processor's help: Linux would stand still there.
    """
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    if not re.search(r"^flags\b.*\b(?:vmx|svm)\b", flags, re.MULTILINE) or not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    with TemporaryDirectory(prefix="sealnet-vm-", dir=_scratch()) as scratch:
        sector = Path(scratch) / "sector"
        sector.write_bytes(_BOOT_SECTOR)
        argv = [
            _QEMU,
            "-accel",
            "kvm",
            "-m",
            "64",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
            "-device",
            "isa-debug-exit,iobase=0xf4",
        ]
        argv += ["-drive", f"file={_escaped(sector)},format=raw,if=ide"]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_KVM_PROBE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return "tcg"
    return "kvm" if done.returncode == _BOOT_STATUS else "tcg"


def _machine(booted: Booted, disk: Path, job: Path, returned: Path, line: str) -> list[str]:
    disks = (
        # What the machine writes goes into a file that has no name.
        ("root", f"file={_escaped(disk)},snapshot=on,cache=unsafe"),
        ("modules", f"file={_escaped(booted.modules)},readonly=on"),
        ("job", f"file={_escaped(job)},readonly=on"),
        ("results", f"file={_escaped(returned)},cache=unsafe"),
    )
    argv = [_QEMU, "-machine", "pc", *_processor(), "-m", str(_MEMORY_MIB), "-nodefaults", "-display", "none", "-no-reboot"]
    argv += ["-kernel", str(booted.kernel), "-initrd", str(booted.initrd), "-append", f"{_COMMAND_LINE} {line}"]
    for name, told in disks:
        argv += ["-drive", f"if=none,id={name},format=raw,{told}", "-device", f"virtio-blk-pci,drive={name},serial={name}"]
    argv += ["-nic", "user,restrict=on,model=virtio-net-pci", "-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
    return [*argv, "-device", "virtserialport,chardev=output,name=sealnet.output"]


def _processor() -> list[str]:
    if accelerator() == "kvm":
        return ["-accel", "kvm", "-cpu", "host", "-smp", "2"]
    # Not `max`: with 5-level page tables the kernel cannot read its own memory here, and shows every path as `xxxx`.
    return ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem", "-smp", "2"]


class _Hearing:
    """Takes in what the machine says: the first line is that it is up, the rest the command's output."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], output: IO[bytes] | None) -> None:
        self.up_at: float | None = None
        self.errors = ""
        self._process, self._log, self._output = process, log, output
        self._threads = [threading.Thread(target=self._hear), threading.Thread(target=self._hear_errors)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _hear(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        if self._process.stdout.readline():
            self.up_at = time.monotonic()
        while part := self._process.stdout.read1():  # type: ignore[attr-defined]
            self._log.write(part)
            self._log.flush()
            if self._output is not None:
                self._output.write(part)
                self._output.flush()

    def _hear_errors(self) -> None:
        assert self._process.stderr is not None  # noqa: S101
        self.errors = self._process.stderr.read().decode(errors="replace")


@contextlib.contextmanager
def _started(argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise NoMachine(f"cannot start machine: {argv[0]}: {error.strerror}") from error
    with process:
        try:
            yield process
        finally:
            process.kill()


def pack(job: Path, command: Sequence[str]) -> None:
    """The checkout, the command and what starts it, as one archive, which is a disk as it is."""
    with tarfile.open(job, "w", format=tarfile.GNU_FORMAT) as archive:

        def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            name = Path(entry.name).name
            if name in _LEFT_OUT or name.endswith(".egg-info"):
                return None
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            return entry

        archive.add(CHECKOUT, "sealnet", filter=owned)
        archive.add(CHECKOUT / "scripts/machines/guest/start", "job/start", filter=owned)
        file = job.with_name("command")
        file.write_bytes(b"".join(os.fsencode(argument) + b"\0" for argument in command))
        archive.add(file, "job/command", filter=owned)


def unpack(returned: Path, results: Path) -> None:
    """Files only, by their last name: the archive comes from the machine."""
    with contextlib.suppress(tarfile.ReadError), tarfile.open(returned, "r:") as archive:
        for entry in archive:
            file = archive.extractfile(entry) if entry.isfile() else None
            name = Path(entry.name).name
            if file is not None and name not in {"console.log", "output.log"}:
                (results / name).write_bytes(file.read())


def _versions(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {key: value for key, _, value in (line.partition(" ") for line in lines)}


def _tail(console: Path) -> str:
    if not console.is_file():
        return ""
    return "\n".join(console.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")


def _scratch() -> str | None:
    """Where a gigabyte may go; /tmp is often memory."""
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
