"""A throw-away host for one test: network and mount namespaces of its own, a LAN with a peer, a snapshot before and after.

The pytest process itself moves in and out (setns), so a test may use sealnet's modules directly, and whatever it spawns is born on the
throw-away host. Nothing here touches the machine's own links, rules, sysctls or /run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sealnet.kernel import cgroup, libc

SEALNET = [str(Path(sys.executable).with_name("sealnet"))]
LAN_HOST, LAN_PEER = "192.168.77.1", "192.168.77.2"

# A deadline tells a test that hangs from one that goes on, and nothing else: a loaded machine, or an emulated one, may take its time.
PATIENCE = float(os.environ.get("SEALNET_TESTS_PATIENCE", "4"))

# Stands on lo of every throw-away host and its LAN peer.
_LAB = "throw-away host of a test"

# Moves by itself, or is the machine's and not the namespace's.
_VOLATILE = ("nf_conntrack_count", "/net/core/", "/net/unix/", "tcp_mem", "udp_mem", "random", "nf_log")

# Tries what it is told, a JSON list of [kind, address, port, source] a line, and tells for each `answered`, `silent` or the errno's name,
# and how long that took.
_PROBE = """
import concurrent.futures, errno, json, socket, sys, time

KINDS = {
    "tcp": (socket.SOCK_STREAM, 0), "udp": (socket.SOCK_DGRAM, 0), "sctp": (socket.SOCK_STREAM, 132),
    "ping": (socket.SOCK_DGRAM, socket.IPPROTO_ICMP), "icmp": (socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "gre": (socket.SOCK_RAW, 47),
}
SAID = {"icmp": b"\\x08\\0\\xf7\\xfe\\0\\0\\0\\1", "ping": b"\\x08\\0\\0\\0\\0\\0\\0\\1"}

def attempt(kind, address, port, source=None):
    family, _, _, _, target = socket.getaddrinfo(address, port, flags=socket.AI_NUMERICHOST)[0]
    with socket.socket(family, *KINDS[kind]) as sock:
        sock.settimeout(1.5 if KINDS[kind][0] == socket.SOCK_STREAM else 0.3)
        if source:
            sock.bind((source, 0))
        if kind == "udp":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.connect(target)
        if KINDS[kind][0] == socket.SOCK_STREAM:
            return "answered"
        sock.send(SAID.get(kind, b"hello"))
        try:
            sock.recv(2048)
        except TimeoutError:
            return "silent"
        return "answered"

def judge(target):
    began = time.monotonic()
    try:
        found = attempt(*target)
    except TimeoutError:
        found = "ETIMEDOUT"
    except OSError as error:
        found = errno.errorcode.get(error.errno, str(error))
    return found, time.monotonic() - began

with concurrent.futures.ThreadPoolExecutor(32) as pool:
    for line in sys.stdin:
        print(json.dumps([*pool.map(judge, json.loads(line))]), flush=True)
"""


def wait_for(condition: Callable[[], Any], *, timeout_s: float = 10.0, what: str = "") -> Any:
    """The first true answer of `condition`; fails when there is none in `timeout_s`, as a quiet machine would take it (PATIENCE)."""
    deadline = time.monotonic() + timeout_s * PATIENCE
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {timeout_s:g} s: {what or condition}")
        time.sleep(0.01)
    return answer


@contextlib.contextmanager
def own_cgroup() -> Iterator[None]:
    """Move this process into a new cgroup, and back."""
    before = cgroup.own()
    made = before / f"sealnet-tests-{os.getpid()}"
    made.mkdir()
    (made / "cgroup.procs").write_text("0")
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text("0")
        cgroup.kill(made)
        for directory, _below, _files in os.walk(made, topdown=False):
            os.rmdir(directory)


def is_ours(pid: int) -> bool:
    """Whether a process was started by this test session, whatever it descends from by now."""
    try:
        told = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("0::/") and f"/sealnet-tests-{os.getpid()}" in line for line in told)


def netns_inodes() -> dict[int, int]:
    """Every network namespace that a process is in, with one such process."""
    found: dict[int, int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.setdefault(os.stat(f"/proc/{pid}/ns/net").st_ino, int(pid))
    return found


def _netns_inode(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _ancestors(pid: int) -> list[int]:
    """What a process descends from, but for init, which orphans are given to."""
    found: list[int] = []
    while pid > 1:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            break
        pid = int(status.partition("\nPPid:")[2].split()[0])
        found += [pid] if pid > 1 else []
    return found


class Probe:
    """A process that tries to reach what it is told to."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process
        self.took_s: list[float] = []

    def ask(self, *targets: tuple[Any, ...]) -> list[str]:
        """`answered`, `silent` or the errno's name for each (kind, address, port[, source]); how long each took is in `took_s`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(targets) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the probe has ended with {self.process.wait(60)}: {self.process.stderr and self.process.stderr.read()}")
        told = json.loads(line)
        self.took_s = [took_s for _found, took_s in told]
        return [found for found, _took_s in told]

    def end(self) -> int:
        """Let it end by itself; its status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.send_signal(signal.SIGCONT)
        return self.process.wait(60)


class Host:
    """The throw-away host that the test runs on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = Path("/run/sealnet")
        self._processes: list[subprocess.Popen[Any]] = []
        self._known = set(netns_inodes())
        self._baseline = ""
        # An address that is still being probed for duplicates brings its routes only later, in the middle of the test.
        Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0")
        here = f"""
            link set lo up alias "{_LAB}"
            netns add lan
            link add lan0 type veth peer name eth0 netns lan
            addr add {LAN_HOST}/24 dev lan0
            link set lan0 up
        """
        there = f"""
            link set lo up alias "{_LAB}"
            addr add {LAN_PEER}/24 dev eth0
            link set eth0 up
            route add default via {LAN_HOST}
        """
        self.run("ip", "-batch", "-", input=here)
        self.run("ip", "-n", "lan", "-batch", "-", input=there)
        wait_for(lambda: "dev lan0" in self.run("ip", "-6", "route", "show", "table", "local", "type", "local").stdout, what="lan0 is up")
        self.settled()

    # Commands

    def run(self, *argv: str, check: bool = True, timeout_s: float = 25.0, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command on this host, its output captured as text."""
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout_s * PATIENCE, **options)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(argv)}: status {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def in_lan(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command on the LAN peer."""
        return self.run("ip", "netns", "exec", "lan", *argv, **options)

    def sealnet(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """The installed tool; its status is for the test to judge."""
        return self.run(*SEALNET, *argv, check=False, **options)

    def spawn(self, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        """A process that is ended with the test at the latest."""
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        options.setdefault("text", True)
        process = subprocess.Popen(argv, **options)
        self._processes.append(process)
        return process

    def spawn_run(self, run_id: str, *argv: str, options: tuple[str, ...] = (), **popen: Any) -> subprocess.Popen[Any]:
        """`sealnet run` in the background, returned once its payload runs."""
        process = self.spawn(*SEALNET, "run", "--run-id", run_id, *options, "--", *argv, **popen)
        self.wait_running(run_id, process)
        return process

    def wait_running(self, run_id: str, process: subprocess.Popen[Any] | None = None) -> dict[str, Any]:
        def running() -> dict[str, Any] | None:
            if process is not None and process.poll() is not None:
                said = process.stderr.read() if process.stderr else ""
                raise AssertionError(f"run {run_id} ended with {process.returncode} before it ran: {said}")
            record = self.record(run_id)
            return record if record and record["state"] == "running" else None

        return wait_for(running, what=f"run {run_id} is running")

    def record(self, run_id: str) -> dict[str, Any] | None:
        try:
            return json.loads((self.state / "runs" / run_id / "record.json").read_text())
        except (OSError, ValueError):
            return None

    def unattended(self, run_id: str) -> None:
        """Halt the run's supervisor, so that what is done to the run stays; SIGCONT, or `Probe.end`, lets it go on."""
        record = self.record(run_id)
        assert record is not None
        os.kill(record["supervisor"], signal.SIGSTOP)

    def python(self, text: str, *argv: str, netns: str | None = None, **options: Any) -> subprocess.Popen[Any]:
        """A small Python program in the background."""
        command = ["/usr/bin/python3", "-c", textwrap.dedent(text), *argv]
        return self.spawn(*(["ip", "netns", "exec", netns] if netns else []), *command, **options)

    def probe(self, *prefix: str, **options: Any) -> Probe:
        """A probe that is started by the command `prefix`; without one it is a process of this host's."""
        return Probe(self.spawn(*prefix, "/usr/bin/python3", "-c", _PROBE, stdin=subprocess.PIPE, **options))

    def probe_run(self, run_id: str, *options: str, **popen: Any) -> Probe:
        """A sealed probe; `options` are those of `sealnet run`. Returned once it runs."""
        probe = self.probe(*SEALNET, "run", "--run-id", run_id, *options, "--", **popen)
        self.wait_running(run_id, probe.process)
        # "running" is written before the payload is let go, and a test may halt who does that.
        assert probe.ask() == []
        return probe

    def probe_lan(self) -> Probe:
        """A probe on the LAN peer."""
        return self.probe("ip", "netns", "exec", "lan")

    def probe_inside(self, run_id: str) -> Probe:
        """The test's own process in a run's namespace, with every capability: what no payload can be."""
        return self.probe("nsenter", f"--net=/run/netns/sealnet-{run_id}")

    def inside(self, run_id: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command of the test's own in a run's namespace, with every capability."""
        return self.run("nsenter", f"--net=/run/netns/sealnet-{run_id}", *argv, **options)

    def broker(self, port: int = 8080, address: str = "0.0.0.0", *, netns: str | None = None) -> subprocess.Popen[Any]:
        """An HTTP server that answers everything with 200 and the path; returned once it listens."""
        process = self.python(
            """
            import http.server, socketserver, sys

            class Answer(http.server.BaseHTTPRequestHandler):
                def do_GET(self):
                    body = self.path.encode()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *_):
                    pass

            class Server(socketserver.ThreadingTCPServer):
                allow_reuse_address = True
                daemon_threads = True
                request_queue_size = 128

            server = Server((sys.argv[1], int(sys.argv[2])), Answer)
            print("listening", flush=True)
            server.serve_forever()
            """,
            address,
            str(port),
            netns=netns,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        return process

    def stop(self, process: subprocess.Popen[Any]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(60)

    # What must be left

    def settled(self) -> None:
        """The host is arranged now, with no run on it: it must be so again at the end."""
        self._known |= set(netns_inodes())
        self._baseline = self.snapshot()

    def snapshot(self) -> str:
        """Rulesets (without the gate, with handles), rules, routes and network sysctls, as text."""
        ruleset = json.loads(self.run("nft", "-j", "-a", "list", "ruleset").stdout)["nftables"]
        others = [entry for entry in ruleset if not _is_gate(entry) and "metainfo" not in entry]
        # Counters of the host's own rules count, and elements of its sets count down.
        moving = re.compile(r'"(expires|bytes|packets)": \d+')
        parts = ["ruleset:", *[moving.sub(r'"\1": 0', json.dumps(entry, sort_keys=True)) for entry in others]]
        for family in ("-4", "-6"):
            parts += ["rules:", *self.run("ip", family, "rule").stdout.splitlines()]
            # That a bridge has lost its last port is told a second later.
            told = self.run("ip", family, "route", "show", "table", "all").stdout.replace(" linkdown", "")
            parts += ["routes:", *sorted(line.rstrip() for line in told.splitlines())]
        parts.append("sysctls:")
        for directory, _below, files in os.walk("/proc/sys/net"):
            for name in files:
                path = f"{directory}/{name}"
                if not any(word in path for word in _VOLATILE):
                    with contextlib.suppress(OSError):
                        parts.append(f"{path} = {_first_page(path)}")
        return "\n".join(parts)

    def assert_clean(self) -> None:
        """P1: nothing of any run is left. P2: the host is as it was."""
        left = wait_for(lambda: not self.left_over() or None, timeout_s=3, what=f"nothing is left: {self.left_over()}")
        assert left
        now, before = self.snapshot().splitlines(), self._baseline.splitlines()
        had, has = set(before), set(now)
        changed = [f"+ {line}" for line in now if line not in had] + [f"- {line}" for line in before if line not in has]
        assert not changed, "the host has changed:\n" + "\n".join(changed)

    def left_over(self) -> list[str]:
        """Whatever is still there of a run, in words."""
        return [*self.things_left_over(), *self._processes_left_over()]

    def things_left_over(self) -> list[str]:
        """The same without its processes, which are not told from other tests' at once."""
        found = [f"link {line}" for line in self.run("ip", "-o", "link").stdout.splitlines() if "sealnet" in line or ": seal" in line]
        found += [f"netns name {name}" for name in os.listdir("/run/netns") if name.startswith("sealnet-")]
        for name in ("runs", "subnets"):
            with contextlib.suppress(FileNotFoundError):
                found += [f"{name}/{entry}" for entry in os.listdir(self.state / name)]
        for name in ("leases", "denied"):
            told = self.run("nft", "-j", "list", "set", "inet", "sealnet", name, check=False)
            if told.returncode == 0:
                sets = [entry["set"] for entry in json.loads(told.stdout)["nftables"] if "set" in entry]
                found += [f"element of {name}: {element}" for entry in sets for element in entry.get("elem", [])]
        return found + [f"cgroup {run_id}" for run_id in self._cgroups()]

    def _processes_left_over(self) -> list[str]:
        tag = self._tag()
        lan = os.stat("/run/netns/lan").st_ino
        unknown = {inode: pid for inode, pid in netns_inodes().items() if inode not in self._known and inode != lan}
        return [f"pid {pid} in netns {inode}" for inode, pid in unknown.items() if is_ours(pid) and not self._is_anothers(pid, tag)]

    def _tag(self) -> str:
        return f"{self.state.stat().st_dev:x}:{self.state.stat().st_ino:x}" if self.state.exists() else ""

    def _cgroups(self) -> list[str]:
        tag = self._tag()
        return cgroup.run_ids(tag) if tag else []

    def _is_anothers(self, pid: int, tag: str) -> bool:
        """Whether the namespace of a process belongs to another test that runs on this machine now, by descent or the alias of its lo."""
        family = _ancestors(pid)
        if os.getpid() not in family and any(_netns_inode(ancestor) in self._known for ancestor in family):
            return True
        deadline = time.monotonic() + 1.0
        while True:
            told = self.run("nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-j", "link", "show", "lo", check=False)
            alias = json.loads(told.stdout)[0].get("ifalias", "") if told.returncode == 0 else ""
            # One that has just been made has no alias yet, and one that has just ended cannot be asked any more.
            if alias or time.monotonic() > deadline or not os.path.exists(f"/proc/{pid}/ns/net"):
                break
            time.sleep(0.01)
        gone = not os.path.exists(f"/proc/{pid}/ns/net")
        return gone or alias == _LAB or (alias.startswith("sealnet ") and alias.split(" ")[-1] != tag)

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait(60)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    stream.close()
        # Of a test that failed: its state directory goes, and nobody would ever know whose these are.
        for run_id in self._cgroups():
            if found := cgroup.find(run_id, self._tag()):
                cgroup.kill(found)
                cgroup.remove(found)


def _first_page(path: str) -> str:
    """A sysctl's value. Hundreds are read around every test, so this is as bare as it can be."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).decode(errors="replace").strip()
    finally:
        os.close(descriptor)


def _is_gate(entry: dict[str, Any]) -> bool:
    body = next(iter(entry.values()))
    return body.get("table", body.get("name")) == "sealnet" and body.get("family") == "inet"


@functools.cache
def _load_conntrack() -> None:
    """A kernel that loads it for a rule in the middle of a test has more settings afterwards than before."""
    if modprobe := shutil.which("modprobe", path="/usr/sbin:/sbin"):
        subprocess.run((modprobe, "--quiet", "nf_conntrack"), check=False)


@contextlib.contextmanager
def throw_away_host(directory: Path) -> Iterator[Host]:
    """Move the calling (main) thread to a fresh host, and back."""
    _load_conntrack()
    back = {kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "mnt")}
    here = os.getcwd()
    libc.unshare(libc.CLONE_NEWNS | libc.CLONE_NEWNET)
    try:
        libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
        libc.mount("tmpfs", "/run", "tmpfs", 0, "mode=0755")
        for name in ("netns", "lock"):
            os.mkdir(f"/run/{name}", 0o755)
        host = Host(directory)
        try:
            yield host
        finally:
            host.close()
    finally:
        # setns(2) refuses a thread that shares its working directory with another, so every thread of the test must have ended.
        wait_for(lambda: threading.active_count() == 1, what=f"threads have ended: {threading.enumerate()}")
        libc.setns(back["mnt"], libc.CLONE_NEWNS)
        libc.setns(back["net"], libc.CLONE_NEWNET)
        for fd in back.values():
            os.close(fd)
        os.chdir(here)


@contextlib.contextmanager
def without(host: Host, path: str) -> Iterator[None]:
    """`path` is missing on this throw-away host: its directory is seen through an overlay that hides it."""
    directory, name = os.path.split(os.path.realpath(path))
    hides = host.directory / f"without-{name}"
    hides.mkdir()
    hides.chmod(stat.S_IMODE(os.stat(directory).st_mode))
    # A character device 0:0 in an upper layer is overlayfs's own mark of something removed.
    os.mknod(hides / name, stat.S_IFCHR, os.makedev(0, 0))
    libc.mount("overlay", directory, "overlay", libc.MS_RDONLY, f"lowerdir={hides}:{directory}")
    assert not os.path.exists(path)
    try:
        yield
    finally:
        libc.umount(directory, libc.MNT_DETACH)


def connect(address: str, port: int, *, timeout_s: float = 2.0) -> str:
    """`connected`, or the error's name."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect((address, port))
        except OSError as error:
            return type(error).__name__
    return "connected"


def end(process: subprocess.Popen[Any], signum: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
    """Signal a process and wait for it; its status."""
    process.send_signal(signum)
    return process.wait(timeout_s)
