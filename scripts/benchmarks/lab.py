"""The throw-away host that a subject is measured on, and how sealnet and bwrap alone are started there."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sealnet import client, request
from sealnet import launch as launching
from sealnet.kernel import cgroup, libc
from sealnet.kernel.host import Host
from sealnet.kernel.process import tool
from sealnet.model import argv
from sealnet.model.config import Config
from sealnet.records import State
from sealnet.running import Run, Streams

PYTHON = sys.executable
SEALNET = str(Path(sys.executable).with_name("sealnet"))
# As the package starts it: without site-packages' .pth files, and what those do on this machine.
PACKAGED = (PYTHON, "-IS", str(Path(__file__).parents[1] / "start.py"))
PORT = 8080

# It says that it runs, and stays.
PAYLOAD = ("/bin/sh", "-c", "echo; exec sleep 3600")
BWRAP = (
    "bwrap",
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup"),
    *("--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr", "--dev", "/dev", "--proc", "/proc"),
    # Not the whole of /: bwrap would take the names of all runs along, 200 ms for a thousand.
    *(word for name in ("bin", "lib", "lib64", "sbin") for word in ("--symlink", f"usr/{name}", f"/{name}")),
    "--",
)
# Held runs are not renewed.
CONFIG = Config(lease_ttl_s=86400, max_runs=65536)

_BEGINS_S = 30.0

SILENT = Streams(subprocess.DEVNULL, subprocess.DEVNULL, subprocess.DEVNULL)

_BROKER = """
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    listener.accept()[0].close()
"""


def enter() -> None:
    """Move this process to a fresh host: network and mount namespaces of its own, an empty /run."""
    libc.unshare(libc.CLONE_NEWNS | libc.CLONE_NEWNET)
    libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", "/run", "tmpfs", 0, "mode=0755,nr_inodes=0,size=50%")
    for name in ("netns", "lock", "bench"):
        os.mkdir(f"/run/{name}", 0o755)
    # A run shows its working directory; the root of the file system is entered as it stands, so nothing of this machine's comes in.
    os.chdir("/")
    os.environ.update(HOME="/run/bench", LC_ALL="C.UTF-8")
    for name in ("SEALNET_STATE_DIR", "SEALNET_CONFIG", "SUDO_UID"):
        os.environ.pop(name, None)
    # As on a host where somebody has used `ip netns`, /run/netns becomes a mount of its own. It has an address and a way out, as others.
    for command in (
        "ip link set lo up",
        "ip netns add first",
        "ip netns delete first",
        "ip link add uplink type veth peer name elsewhere",
        "ip address add 100.64.0.2/24 dev uplink",
        "ip link set uplink up",
        "ip link set elsewhere up",
        "ip route add default via 100.64.0.1",
    ):
        subprocess.run(command.split(), check=True)


@contextlib.contextmanager
def pen() -> Iterator[Path]:
    """A cgroup for everything that a subject starts; at the end nothing in it lives and it is gone."""
    made = cgroup.root() / f"sealnet-bench-{os.getpid()}"
    made.mkdir()
    try:
        yield made
    finally:
        cgroup.kill(made, timeout_s=120.0)
        cgroup.remove(made, timeout_s=120.0)


def join(group: Path) -> None:
    """Put this process, and whatever it starts, into the cgroup."""
    (group / "cgroup.procs").write_text("0")


@contextlib.contextmanager
def broker(port: int = PORT) -> Iterator[int]:
    """A server that accepts and hangs up: enough for the preflight of a sealed run."""
    with listen(port) as listener, spawned([PYTHON, "-I", "-S", "-c", _BROKER, str(listener.fileno())], pass_fds=[listener.fileno()]):
        yield port


def listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", port))
    listener.listen(1024)
    return listener


@contextlib.contextmanager
def spawned(argv: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that does not outlive the block."""
    process = subprocess.Popen(argv, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _BEGINS_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {_BEGINS_S:g} s: {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def a_worker() -> Iterator[subprocess.Popen[Any]]:
    """`sealnet worker`, which takes callers."""
    with spawned([*PACKAGED, "worker"], stderr=subprocess.DEVNULL) as worker:
        path = client.path(os.environ)
        wait_until(lambda: os.path.exists(path), "the worker takes callers")
        yield worker
        worker.terminate()
        worker.wait()


def python(module: str, *argv: str, **options: Any) -> contextlib.AbstractContextManager[subprocess.Popen[Any]]:
    """One of this package's own programs, spoken to by lines."""
    command = [PYTHON, "-I", "-m", f"scripts.benchmarks.{module}", *argv]
    return spawned(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, **options)


class Started:
    """A payload that said that it runs. Times are in milliseconds; `end` takes it away and says how long that took."""

    def __init__(self, end: Callable[[], None], marks: dict[str, float]) -> None:
        self._end = end
        self.marks = marks

    def end(self) -> float:
        began = time.perf_counter()
        self._end()
        return (time.perf_counter() - began) * 1e3


class Sealnet:
    """Starts runs through sealnet's own stages, in this process. For one thread."""

    def __init__(self) -> None:
        self.state = State()
        self.state.prepare()
        self.host = Host(self.state.path, self.state.tag)

    def launch(
        self,
        argv: tuple[str, ...] = PAYLOAD,
        *,
        port: int | None = None,
        streams: Streams | None = None,
        checkpoint: Callable[[str], None] = lambda _step: None,
    ) -> Run:
        plan = request.plan(argv, lease_port=port, cwd="/", user="0")
        given = streams or Streams(subprocess.DEVNULL, subprocess.PIPE, subprocess.DEVNULL)
        return launching.launch(plan, host=self.host, state=self.state, config=CONFIG, streams=given, checkpoint=checkpoint)

    def start(self, *, port: int | None = None) -> Started:
        """Marks: each step of the launch, `held`, `exec` (its first byte); all since the call."""
        began = time.perf_counter()
        marks: dict[str, float] = {}

        def mark(step: str) -> None:
            marks[step] = (time.perf_counter() - began) * 1e3

        run = self.launch(port=port, checkpoint=mark)
        mark("held")
        run.release()
        _first_byte(run.spawned)
        mark("exec")

        def end() -> None:
            run.close()
            _close(run.spawned)

        return Started(end, marks)


def as_a_runs() -> list[str]:
    """bwrap with a run's own options and the programs before its payload, and nothing of sealnet: what no launch can be faster than."""
    plan = request.plan(PAYLOAD, cwd="/", user="0", environ={"LANG": "C.UTF-8"})
    fds = argv.Fds(args=0, info=0, status=0, block=0, alive=0, seccomp=0)
    seen = argv.Seen(
        proc=frozenset(name for name in (*argv.READ_ONLY, *argv.MASKED_FILES, *argv.MASKED_DIRECTORIES) if os.path.exists(f"/proc/{name}")),
        sysfs=frozenset(path for path in argv.MASKED_SYS if os.path.isdir(path)),
    )
    words = argv.render_options(plan, "/", "/dev", seen, fds, plan.environment, die_with_parent=True)
    for option in ("--info-fd", "--json-status-fd", "--block-fd", "--sync-fd", "--seccomp"):
        at = words.index(option)
        del words[at : at + 2]
    tools = argv.Tools(**{name: tool(name) for name in ("sh", "bwrap", "setsid", "setpriv", "env")})
    bwrap, *chain = argv.render_command(plan, None, fds, plan.environment, tools, controlling_terminal=False)
    return [bwrap, "--unshare-net", *words, *chain[chain.index("--") :]]


def start_bwrap(command: Sequence[str] = (*BWRAP, *PAYLOAD)) -> Started:
    """The same payload in bwrap alone, in namespaces of every kind."""
    began = time.perf_counter()
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    _first_byte(started)
    marks = {"exec": (time.perf_counter() - began) * 1e3}

    def end() -> None:
        started.kill()
        started.wait()
        _close(started)

    return Started(end, marks)


def _first_byte(process: subprocess.Popen[Any]) -> None:
    if process.stdout is None or not os.read(process.stdout.fileno(), 1):
        raise RuntimeError(f"the payload said nothing (status {process.poll()})")


def _close(process: subprocess.Popen[Any]) -> None:
    if process.stdout is not None:
        process.stdout.close()


def available_bytes() -> int:
    return meminfo()["MemAvailable"]


def meminfo() -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    rows = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 2}


class Holders:
    """Keeps many runs alive, in several processes: one may not hold more than 1,024 descriptors (libnftables), and a run costs four."""

    _EACH = 125
    _AT_ONCE = 2

    def __init__(self, *, port: int | None, keep_payloads: bool = True) -> None:
        self.held = 0
        self._arguments = [str(port or 0), "keep" if keep_payloads else "end"]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Holders:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def hold(self, count: int, *, within_s: float = 420.0) -> int:
        """Start runs until there are `count`, or time is up; how many live."""
        deadline = time.monotonic() + within_s
        wanted = count - self.held
        shares = [self._EACH] * (wanted // self._EACH) + ([wanted % self._EACH] if wanted % self._EACH else [])
        for first in range(0, len(shares), self._AT_ONCE):
            if time.monotonic() > deadline:
                break
            batch = [
                self._stack.enter_context(python("holder", str(share), *self._arguments)) for share in shares[first : first + self._AT_ONCE]
            ]
            for process in batch:
                if process.stdout is None or process.stdout.readline() != "ready\n":
                    raise RuntimeError(f"a holder of runs has ended when {self.held} were held")
            self.held += sum(shares[first : first + self._AT_ONCE])
        return self.held


def in_threads(jobs: list[Callable[[], None]]) -> None:
    """All at once; the first failure is raised when all have ended."""
    failed: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised below, whatever it is
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
