"""What would cost the whole machine if it worked: tried by payloads, with root outside as the control, where nothing else is lost."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from e2e.hosts.machine import LEASE, Machine, wait_for
from sealnet.kernel import cgroup
from tests.lab import SEALNET

# Tells for each deed `done` or the errno's name. VALUE is what is written: outside what is there already.
_DEEDS = r"""
import ctypes, errno, glob, json, os, socket, stat, sys, tempfile

libc = ctypes.CDLL(None, use_errno=True)

def call(number, *words):
    found = libc.syscall(*[ctypes.c_long(number), *[w if isinstance(w, bytes) else ctypes.c_long(w) for w in words]])
    if found < 0:
        raise OSError(ctypes.get_errno(), "")

def write(path, value=None):
    fd = os.open(path, os.O_RDWR)
    try:
        value = value if value is not None else os.read(fd, 4096).rstrip(b"\0")
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, value)
    finally:
        os.close(fd)

def node(kind, device):
    with tempfile.TemporaryDirectory() as place:
        os.mknod(f"{place}/node", kind | 0o666, os.makedev(*device))
        os.close(os.open(f"{place}/node", os.O_RDONLY))

def module(name, deed):
    def done():
        if deed == "load":
            fd = os.open(name, os.O_RDONLY)
            call(313, fd, b"", 0)
        else:
            call(176, name.encode(), os.O_NONBLOCK)
    return done

def netlink():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as sock:
        sock.bind((0, 0))

def freeze():
    found = glob.glob("/sys/fs/cgroup/**/cgroup.freeze", recursive=True)
    write(found[-1] if found else "/sys/fs/cgroup/cgroup.freeze", b"0\n")

SETTINGS = %(settings)r
DEEDS = {f"write {path}": (lambda path=path: write(path, %(value)r)) for path in SETTINGS}
DEEDS |= {
    "sysrq": lambda: os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY)),
    "read memory": lambda: os.close(os.open("/dev/mem", os.O_RDONLY)),
    "make a device of memory": lambda: node(stat.S_IFCHR, (1, 1)),
    "make a device of the disk": lambda: node(stat.S_IFBLK, (%(major)d, %(minor)d)),
    "load a module": module(%(module)r, "load"),
    "unload a module": module(%(loaded)r, "unload"),
    "set the host's name": lambda: call(170, os.uname().nodename.encode(), len(os.uname().nodename)),
    "turn off ctrl-alt-del": lambda: call(169, 0xFEE1DEAD, 672274793, 0),
    "set the clock": lambda: __import__("time").clock_settime(0, __import__("time").clock_gettime(0)),
    "raise ports": lambda: call(172, 3),
    "account processes": lambda: call(163, 0),
    "mount": lambda: call(165, b"none", b"/mnt", b"tmpfs", 0, 0),
    "talk to the packet filter": netlink,
    "write a cgroup": freeze,
    "read the kernel's log": lambda: call(103, 9, 0, 0),
}
told = {}
for name, deed in DEEDS.items():
    try:
        deed()
        told[name] = "done"
    except OSError as error:
        told[name] = errno.errorcode.get(error.errno, str(error))
print(json.dumps(told))
"""
_KERNEL = """
    core_pattern modprobe hostname sysrq randomize_va_space dmesg_restrict kptr_restrict yama/ptrace_scope unprivileged_bpf_disabled panic
    pid_max unprivileged_userns_clone
"""
_SETTINGS = (
    *(f"/proc/sys/kernel/{name}" for name in _KERNEL.split()),
    *(f"/proc/sys/vm/{name}" for name in ("overcommit_memory", "drop_caches")),
    *(f"/proc/sys/fs/{name}" for name in ("suid_dumpable", "protected_symlinks")),
    *(f"/proc/sys/net/{name}" for name in ("ipv4/ip_forward", "core/bpf_jit_enable")),
)
# Read as empty, or written only to do something once.
_UNREADABLE = {"/proc/sys/vm/drop_caches"}


def _deeds(machine: Machine, *, value: bytes | None) -> str:
    disk = os.stat("/").st_dev
    settings = [path for path in _SETTINGS if os.path.exists(path) and not (value is None and path in _UNREADABLE)]
    names = {"settings": settings, "value": value, "major": os.major(disk), "minor": os.minor(disk)}
    return _DEEDS % {**names, "module": _module(machine), "loaded": "dummy"}


def _module(machine: Machine) -> str:
    return machine.run("modinfo", "-n", "ifb").stdout.strip()


def _values() -> dict[str, bytes]:
    return {path: Path(path).read_bytes() for path in _SETTINGS if os.path.exists(path) and path not in _UNREADABLE}


def _modules() -> set[str]:
    return {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}


@pytest.mark.parametrize("user", ["root", "1234"])
def test_a_payload_changes_nothing_of_the_machine_that_root_can(machine: Machine, user: str) -> None:
    machine.run("modprobe", "-r", "ifb", check=False)
    machine.run("modprobe", "dummy")
    outside = json.loads(machine.run("/usr/bin/python3", "-c", _deeds(machine, value=None)).stdout)
    machine.run("umount", "/mnt", check=False)
    assert (set(outside.values()), "ifb" in _modules(), "dummy" in _modules()) == ({"done"}, True, False), outside
    machine.run("modprobe", "-r", "ifb")
    machine.run("modprobe", "dummy")
    # What sealnet itself has the kernel load is loaded by then.
    assert machine.sealnet("run", *LEASE, "--user", user, "--chdir", "/", "--", "true").returncode == 0
    values, modules, name = _values(), _modules(), os.uname().nodename

    done = machine.sealnet("run", *LEASE, "--user", user, "--chdir", "/", "--", "/usr/bin/python3", "-c", _deeds(machine, value=b"1"))

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [deed for deed, found in told.items() if found == "done"] == [], told
    assert _modules() - modules == modules - _modules() == set()
    assert (_values(), os.uname().nodename) == (values, name)
    assert len(told) > 30


@pytest.mark.parametrize("user", ["root", "1234"])
def test_no_sysrq_of_a_payload_is_obeyed(machine: Machine, user: str) -> None:
    """`b` reboots at once: had it been obeyed, this machine would be gone."""
    Path("/proc/sys/kernel/sysrq").write_text("1")

    def helped() -> int:
        return machine.run("dmesg").stdout.count("sysrq: HELP")

    before = helped()
    Path("/proc/sysrq-trigger").write_text("h")
    wait_for(lambda: helped() == before + 1, what="root outside is obeyed")
    script = "for key in h b o c; do echo $key >/proc/sysrq-trigger; done 2>&1; mount -t proc proc /mnt; echo b >/mnt/sysrq-trigger; exit 7"

    done = machine.sealnet("run", *LEASE, "--user", user, "--chdir", "/", "--", "sh", "-c", script)

    assert done.returncode == 7
    assert helped() == before + 1


_TYPIST = """
import fcntl, os, sys, termios
told = []
for fd in (0, 1, 2, "/dev/tty"):
    try:
        number = os.open(fd, os.O_RDWR | os.O_NOCTTY) if isinstance(fd, str) else fd
        for letter in b"exit 99\\n":
            fcntl.ioctl(number, termios.TIOCSTI, bytes([letter]))
        told.append("typed")
    except OSError as error:
        told.append(type(error).__name__)
print("tried", *told, flush=True)
"""


@pytest.mark.parametrize("sealed", [False, True], ids=["root outside", "sealed"])
def test_nothing_is_typed_into_the_callers_terminal(machine: Machine, sealed: bool) -> None:
    """A shell at a terminal starts the typist; what that typed, the shell would read next."""
    prefix = [*SEALNET, "run", *LEASE, "--chdir", "/", "--"] if sealed else []
    started = machine.directory / "started"
    started.write_text(shlex.join([*prefix, "/usr/bin/python3", "-c", _TYPIST]) + "\n")
    command = f"bash -c '. {started}; read -t 5 line; echo read $line'"

    done = machine.run("script", "-qec", command, "/dev/null", input="hello\n", check=False)

    assert "tried" in done.stdout, done.stdout
    assert ("typed" in done.stdout) != sealed
    assert not sealed or "exit 99" not in done.stdout


def test_a_frozen_run_stays_shut_and_goes_on(machine: Machine) -> None:
    """Root freezes the run's cgroup: it stands still, its lease is renewed, nothing is open, and it goes on afterwards."""
    machine.control()
    live = machine.live("frozen")
    found = cgroup.find("frozen", machine._tag())
    (found / "cgroup.freeze").write_text("1")
    wait_for(lambda: "frozen 1" in (found / "cgroup.events").read_text(), what="it is frozen")
    asked = len(live.answers())

    code, told = live.check()

    assert len(live.answers()) <= asked + 1
    (found / "cgroup.freeze").write_text("0")
    live.sealed()
    assert code in (0, 1), told
    assert (code == 0) == (told["faults"] == [] and told["inconclusive"] == []), told
    live.end()


def test_nothing_of_a_run_is_on_the_disk(machine: Machine) -> None:
    """A reboot leaves a clean slate: what a run and its killed supervisor leave is in memory, and the root disk is as before."""
    marker, control = machine.directory / "marker", Path("/var/lib/seal-control")
    marker.write_text("")
    with machine.file(str(control), "written"):
        live = machine.live("slate")
        live.process.kill()
        live.process.wait(10)
        find = ("find", "/", "-xdev", "-newer", str(marker), "-not", "-path", f"{machine.directory}*", "-not", "-path", "*/__pycache__*")
        written = [path for path in machine.run(*find, "-type", "f").stdout.splitlines() if "seal" in path or "slate" in path]
    left = machine.things_left_over()
    reaped = machine.sealnet("reap", "slate")

    assert written == [str(control)]
    assert "runs/slate" in left
    assert os.stat("/run/sealnet").st_dev != os.stat("/").st_dev
    assert reaped.returncode == 0
