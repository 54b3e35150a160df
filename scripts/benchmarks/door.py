"""The allowlist proxy beside squid and tinyproxy: each lets one host through and denies all others, and writes down every request."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from scripts.benchmarks.figures import in_turns
from scripts.benchmarks.lab import PYTHON, listen, python, spawned
from scripts.benchmarks.pump import CLIENT
from scripts.benchmarks.result import Effort, Group, Result
from sealnet import request
from sealnet.doors import Door, Listening, account
from sealnet.kernel import libc, links
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.netns import Inside
from sealnet.model.config import DOOR_USER

_DIRECTORY = Path("/run/bench")
_HOST, _SANDBOX = IPv4Address("203.0.113.1"), IPv4Address("203.0.113.2")
# What a declared name may lead to is a public address, so the origin has one, in a namespace of its own.
_WAY_OUT, _ORIGIN = IPv4Address("93.184.216.33"), IPv4Address("93.184.216.34")
_NAME, _DENIED = "origin.test", "denied.test:443"
_PUMP, _CLOSER = 7001, 7002
_SQUID, _TINY = 3128, 8888
_UP_S = 30.0
_HOSTS_AGE_S = 2.5
_DOOR = "door"
_RATES = {1: "CONNECT, one after the other", 32: "CONNECT, 32 clients", 256: "CONNECT, 256 clients"}
_CPU = " CPU"
_STREAMS = {"up": "tunnel, up", "down": "tunnel, down"}
_DENY = "a denied CONNECT, from connect(2) to its answer"
_ECHO = "ping-pong of one byte through a tunnel, median of a round"

# Accepts, and hangs up when the client has.
_CLOSE = """
import os, select, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.setblocking(False)
epoll, open_ = select.epoll(), {}
epoll.register(listener.fileno(), select.EPOLLIN)
while True:
    for fd, _ in epoll.poll():
        if fd == listener.fileno():
            try:
                while True:
                    sock = listener.accept()[0]
                    open_[sock.fileno()] = sock
                    epoll.register(sock.fileno(), select.EPOLLIN)
            except BlockingIOError:
                pass
        else:
            open_.pop(fd).close()
"""

_SQUID_CONF = """
http_port {address}:{port}
acl declared dstdomain {name}
acl ports port {ports}
http_access allow CONNECT declared ports
http_access deny all
access_log stdio:{directory}/squid.log
cache_log {directory}/squid.err
cache deny all
cache_effective_user proxy
coredump_dir none
hosts_file {hosts}
max_filedescriptors 4096
pid_filename none
pinger_enable off
shutdown_lifetime 0 seconds
visible_hostname bench.test
workers 1
"""
_TINY_CONF = """
User nobody
Group nogroup
Listen {address}
Port {port}
Filter "{directory}/filter"
FilterDefaultDeny Yes
FilterExtended On
ConnectPort {pump}
ConnectPort {closer}
LogFile "{directory}/tinyproxy.log"
LogLevel Connect
MaxClients 512
Timeout 600
"""


class Proxy:
    """One that listens: where, the process that it is, and how to put a new one in its place."""

    def __init__(self, port: int, pid: int, start: Callable[[], subprocess.Popen[Any]] | None = None) -> None:
        self.port, self.pid = port, pid
        self._start = start

    def renew(self) -> None:
        """Only of a peer: a door is asked to go on as it is."""
        if self._start is not None:
            self.pid = self._start().pid


def measure(effort: Effort) -> Result:
    result = Result()
    # Of tunnels in one round; the log of a door has room for 150,000.
    count, echoes, mib = (256, 400, 64) if effort.quick else (1024, 3000, 256)
    rounds = effort.rounds(9)
    with ExitStack() as stack:
        sandbox, fds = _lab(stack)
        cpus = sorted(os.sched_getaffinity(0))
        stack.enter_context(python("pump", str(cpus[0]), str(fds[0]), pass_fds=[fds[0]]))
        stack.enter_context(spawned([PYTHON, "-I", "-S", "-c", _CLOSE, str(fds[1])], pass_fds=[fds[1]]))
        proxies = {name: start(stack) for name, start in _STARTS.items() if _is_there(name, result)}
        memory = result.group("memory (PSS)")
        _memory(memory, "nothing open", {name: [_pss(proxy.pid)] for name, proxy in proxies.items()})
        loads = {name: _load(stack, sandbox, proxy, f"{_NAME}:{_CLOSER}", "200") for name, proxy in proxies.items()}
        for parallel, title in _RATES.items():
            amount = max(count // 4, parallel) if parallel == 1 else count
            _rates(
                result, title, rounds, {name: partial(_rate, load, proxies[name], parallel, amount, name) for name, load in loads.items()}
            )
        told = {}
        for name, load in loads.items():
            _ask(load, "hold 200", name)
            told[name] = [_pss(proxies[name].pid)]
            _ask(load, "answer 1", name)
        _memory(memory, "200 tunnels open", told)
        denied = {name: _load(stack, sandbox, proxy, _DENIED, "403") for name, proxy in proxies.items()}
        _compare(result, _DENY, "us", rounds, {name: partial(_ask, load, f"answer {count // 4}", name) for name, load in denied.items()})
        _tunnels(result, stack, sandbox, proxies, cpus, rounds, echoes, mib)
    result.notes.append(
        "Clients, proxy and origin share the machine's CPUs. Each proxy has one process and a log of every request, and resolves the name"
        " from the same file; the door judges the address and looks for a server name as well. Of squid and tinyproxy each round of tunnels"
        " has a new process: squid takes longer for each the more it has had of late."
    )
    return result


def _tunnels(
    result: Result, stack: ExitStack, sandbox: Inside, proxies: dict[str, Proxy], cpus: list[int], rounds: int, echoes: int, mib: int
) -> None:
    client, target = [PYTHON, "-I", "-S", "-c", CLIENT], f"{_NAME}:{_PUMP}"
    clients = {"direct": _client(stack, sandbox, [*client, str(_ORIGIN), str(_PUMP)])}
    for name, proxy in proxies.items():
        clients[name] = _client(stack, sandbox, [*client, str(_HOST), str(proxy.port), target])
    for what, title, unit, amount in (
        ("echo", _ECHO, "us", echoes),
        *((way, shown, "GiB/s", mib) for way, shown in _STREAMS.items()),
    ):
        # One byte bounces within one CPU, so that no wake-up of another is measured; a stream has what there is.
        for process in clients.values():
            os.sched_setaffinity(process.pid, {cpus[0]} if what == "echo" else set(cpus))
        for proxy in proxies.values():
            os.sched_setaffinity(proxy.pid, {cpus[0]} if what == "echo" else set(cpus))
        _compare(result, title, unit, rounds, {name: partial(_ask, process, f"{what} {amount}", name) for name, process in clients.items()})


def _compare(result: Result, title: str, unit: str, rounds: int, measures: dict[str, Callable[[], dict[str, float]]]) -> None:
    control = next((name for name in ("squid", "direct", "tinyproxy") if name in measures), None)
    group = result.group(title)
    for name, values in in_turns(measures, rounds=rounds).items():
        group.add(name, values, unit=unit, control=None if name == control else control)


def _rates(result: Result, title: str, rounds: int, measures: dict[str, Callable[[], dict[str, float]]]) -> None:
    """And what of the CPU the proxy itself took, which is less troubled by what else the machine does."""
    told = in_turns(measures, rounds=rounds)
    for shown, suffix, unit in ((title, "", "/s"), (f"{title}: CPU of the proxy for each", _CPU, "us")):
        group = result.group(shown)
        for name in measures:
            control = "squid" if name != "squid" and "squid" in measures else None
            group.add(name, told[f"{name}{suffix}"], unit=unit, control=control)


def _rate(load: Any, proxy: Proxy, parallel: int, count: int, name: str) -> dict[str, float]:
    # squid walks a list of the tunnels of the last minutes for each new one: a few thousand make it slow, so each round has a new one.
    proxy.renew()
    _ask(load, "rate 1 64", name)
    before = _cpu_s(proxy.pid)
    told = _ask(load, f"rate {parallel} {count}", name)
    return told | {f"{name}{_CPU}": (_cpu_s(proxy.pid) - before) / (count // parallel * parallel) * 1e6}


def _cpu_s(pid: int) -> float:
    """User and system time of all its threads, those that have ended included: the process's own clock (clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)


def _memory(group: Group, what: str, told: dict[str, list[float]]) -> None:
    for name, values in told.items():
        group.add(f"{name}, {what}", values, unit="MiB")


def _ask(process: Any, line: str, name: str) -> dict[str, float]:
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    said = process.stdout.readline()
    if not said:
        raise RuntimeError(f"a client of {name} has ended at {line!r}")
    return {name: float(said)}


def _load(stack: ExitStack, sandbox: Inside, proxy: Proxy, target: str, status: str) -> Any:
    return _client(stack, sandbox, [PYTHON, "-I", "-m", "scripts.benchmarks.load", str(_HOST), str(proxy.port), target, status])


def _client(stack: ExitStack, sandbox: Inside, argv: list[str]) -> Any:
    """Born in the sandbox's namespace, and ready."""
    process: Any = sandbox.call(partial(subprocess.Popen, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"a client did not start: {argv[-1]}")
    return process


# The proxies


def _is_there(name: str, result: Result) -> bool:
    if name != _DOOR and shutil.which(name) is None:
        result.missing[name] = "it is not installed"
        return False
    return True


def _door(stack: ExitStack) -> Proxy:
    plan = request.plan(("true",), allow=[f"{_NAME}:{_PUMP}", f"{_NAME}:{_CLOSER}"], cwd="/", user="0")
    listener = socket.create_server((str(_HOST), 0), backlog=256)
    listener.setblocking(False)
    port = int(listener.getsockname()[1])
    log = os.open(_DIRECTORY / "door.log", os.O_WRONLY | os.O_CREAT, 0o600)
    door = Door(account(DOOR_USER, plan.user))
    stack.callback(door.close)
    door.serve("bench", Listening("proxy", listener, port), plan, str(_SANDBOX), log)
    os.close(log)
    return Proxy(port, door.pid)


def _squid(stack: ExitStack) -> Proxy:
    shutil.chown(_DIRECTORY, "proxy")
    text = _SQUID_CONF.format(
        address=_HOST, port=_SQUID, name=_NAME, ports=f"{_PUMP} {_CLOSER}", directory=_DIRECTORY, hosts=_DIRECTORY / "hosts"
    )
    return _peer(stack, "squid", text, ["-N", "-f"], _SQUID)


def _tinyproxy(stack: ExitStack) -> Proxy:
    (_DIRECTORY / "filter").write_text("^origin\\.test$\n", encoding="ascii")
    os.close(os.open(_DIRECTORY / "tinyproxy.log", os.O_WRONLY | os.O_CREAT, 0o600))
    shutil.chown(_DIRECTORY / "tinyproxy.log", "nobody")
    text = _TINY_CONF.format(address=_HOST, port=_TINY, directory=_DIRECTORY, pump=_PUMP, closer=_CLOSER)
    return _peer(stack, "tinyproxy", text, ["-d", "-c"], _TINY)


_STARTS: dict[str, Callable[[ExitStack], Proxy]] = {_DOOR: _door, "squid": _squid, "tinyproxy": _tinyproxy}


def _peer(stack: ExitStack, name: str, configuration: str, options: list[str], port: int) -> Proxy:
    path = _DIRECTORY / f"{name}.conf"
    path.write_text(configuration, encoding="ascii")
    argv = [str(shutil.which(name)), *options, str(path)]
    running = stack.enter_context(ExitStack())

    def start() -> subprocess.Popen[Any]:
        running.close()
        # In a session of its own, as a door is: the scheduler counts by session (sched(7), autogroup).
        process = running.enter_context(spawned(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True))
        _wait_for(name, process, port)
        return process

    return Proxy(port, start().pid, start)


def _wait_for(name: str, process: subprocess.Popen[Any], port: int) -> None:
    deadline = time.monotonic() + _UP_S
    while True:
        try:
            socket.create_connection((str(_HOST), port)).close()
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not listen: {error}") from error
            time.sleep(0.05)
        else:
            return


def _pss(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(rollup.partition("\nPss:")[2].split()[0]) / 1024


# The throw-away host's links


def _lab(stack: ExitStack) -> tuple[Inside, list[int]]:
    """A sandbox with a way to this host, an origin beyond it, and its listening sockets."""
    sandbox, origin = (stack.enter_context(Inside.new(name)) for name in ("door-sandbox", "door-origin"))
    _link("bench0", sandbox, _HOST, _SANDBOX)
    _link("bench1", origin, _WAY_OUT, _ORIGIN)
    sandbox.call(_route, _HOST)
    origin.call(_route, _WAY_OUT)
    # For what is measured without a proxy.
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
    _no_time_wait()
    sandbox.call(_no_time_wait)
    hosts = _DIRECTORY / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{_ORIGIN} {_NAME}\n", encoding="ascii")
    libc.mount(str(hosts), "/etc/hosts", None, libc.MS_BIND)
    # A host's own file is older than a moment, and what is kept of one that is not would be worth nothing.
    time.sleep(_HOSTS_AGE_S)
    listeners = [stack.enter_context(origin.call(listen, port)) for port in (_PUMP, _CLOSER)]
    return sandbox, [listener.fileno() for listener in listeners]


def _link(name: str, other: Inside, near: IPv4Address, far: IPv4Address) -> None:
    with Netlink() as netlink:
        index = links.add_veth(
            netlink,
            name=name,
            mac=f"02:00:00:00:0{name[-1]}:01",
            group=0,
            peer_name="eth0",
            peer_mac=f"02:00:00:00:0{name[-1]}:02",
            netns_fd=other.fd,
        )
        netlink.exchange([links.add_address(index, near, 30), links.bring_up(index)])
    other.call(_far_end, far)


def _far_end(address: IPv4Address) -> None:
    index = links.SANDBOX_INDEX
    with Netlink() as netlink:
        netlink.exchange([links.add_address(index, address, 30), links.bring_up(index)])


def _no_time_wait() -> None:
    """More tunnels than there are ports in the minute that each keeps its own for: who comes later would search for one, or get none."""
    Path("/proc/sys/net/ipv4/tcp_max_tw_buckets").write_text("0", encoding="ascii")


def _route(gateway: IPv4Address) -> None:
    subprocess.run(["ip", "route", "add", "default", "via", str(gateway)], check=True)
