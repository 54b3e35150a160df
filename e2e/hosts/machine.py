"""A test machine as it is: its own links, ruleset and systemd, a LAN with listeners, and live runs that are watched from outside."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sealnet.cli.check import _check
from tests import lab
from tests.lab import LAN_HOST, LAN_PEER, SEALNET

LEASE = ("--lease-port", "8080")
LAN_HOST6, LAN_PEER6 = "fd77::1", "fd77::2"
ETH0 = "10.0.2.15"
# Where nobody but the control may be heard, and the control's own source port.
FORBIDDEN, CONTROL = 9001, 7777
# scripts/machines/furnish.py.
_MACHINE_ID = "5ea1e75ea1e75ea1e75ea1e75ea1e700"
_BACK_WITHIN_S = 90

_LISTENER = """
import selectors, socket, sys

# The first port is the forbidden one; at the others a broker answers.
port, *served = map(int, sys.argv[1:])
chosen = selectors.DefaultSelector()
for port, kind in ((port, socket.SOCK_STREAM), (port, socket.SOCK_DGRAM), *((one, socket.SOCK_STREAM) for one in served)):
    sock = socket.socket(socket.AF_INET6, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("::", port))
    if kind == socket.SOCK_STREAM:
        sock.listen(512)
    chosen.register(sock, selectors.EVENT_READ, port in served)
print("listening", flush=True)
while True:
    for key, _ in chosen.select():
        if key.data:
            sock, _ = key.fileobj.accept()
            sock.settimeout(5)
            try:
                sock.recv(4096)
                sock.sendall(b"HTTP/1.0 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
            except OSError:
                pass
            sock.close()
            continue
        if key.fileobj.type == socket.SOCK_STREAM:
            sock, peer = key.fileobj.accept()
            sock.close()
        else:
            _, peer = key.fileobj.recvfrom(2048)
        print(key.fileobj.type.name, peer[0], peer[1], flush=True)
"""

_COUNT = f"""
table inet count {{
  chain in {{
    type filter hook prerouting priority -400
    meta l4proto {{ tcp, udp }} th dport {FORBIDDEN} th sport != {CONTROL} counter
    ip saddr 198.18.0.0/15 counter
  }}
}}
"""

# Asks the broker, or the proxy for a host, again and again, and meanwhile knocks at each target. Ends with its standard input.
_PAYLOAD = """
import errno, itertools, json, os, socket, sys, threading, time, urllib.parse

asked, *targets = [json.loads(argument) for argument in sys.argv[1:]]

def ask():
    url = urllib.parse.urlsplit(os.environ["http_proxy" if asked.get("host") else "SEALNET_BROKER_URL"])
    line = f"CONNECT {asked['host']} HTTP/1.1\\r\\nHost: {asked['host']}" if asked.get("host") else "GET /x HTTP/1.0"
    with socket.create_connection((url.hostname, url.port or 80), timeout=5) as sock:
        sock.sendall(line.encode() + b"\\r\\n\\r\\n")
        return "ok" if b" 200 " in sock.recv(64) else "odd"

def asking():
    while True:
        try:
            found = ask()
        except TimeoutError:
            found = "ETIMEDOUT"
        except OSError as error:
            found = errno.errorcode.get(error.errno, str(error))
        print(f"{time.monotonic():.3f} {found}", flush=True)
        time.sleep(0.2)

def knocking():
    found = set()
    for kind, address, port in itertools.cycle(targets):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as sock:
                sock.settimeout(0.5)
                sock.connect((address, port))
                sock.send(b"knock")
        except OSError:
            pass
        time.sleep(0.05)

if asked:
    threading.Thread(target=asking, daemon=True).start()
threading.Thread(target=knocking, daemon=True).start()
print("0 began", flush=True)
sys.stdin.read()
os._exit(0)
"""


def wait_for(condition: Callable[[], Any], *, timeout_s: float = 60.0, what: str | Callable[[], str]) -> Any:
    """As tests.lab.wait_for, but patient: a machine may be emulated."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.2)
    return answer


def is_machine() -> bool:
    """Whether this is a machine of scripts/vm, with systemd as its first process."""
    try:
        identity = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        return False
    return identity == _MACHINE_ID and Path("/run/systemd/system").is_dir()


class Machine(lab.Host):
    """This machine. A LAN peer and the machine itself listen at FORBIDDEN, and write down whoever comes."""

    def __init__(self, directory: Path) -> None:
        self._dad = Path("/proc/sys/net/ipv6/conf/default/accept_dad").read_text()
        self._names = Path("/etc/hosts").read_text()
        super().__init__(directory)
        self._lives: list[Live] = []
        Path("/proc/sys/net/ipv6/conf/lan0/accept_dad").write_text("0")
        self.run("ip", "addr", "add", f"{LAN_HOST6}/64", "dev", "lan0", "nodad")
        self.run("ip", "-n", "lan", "addr", "add", f"{LAN_PEER6}/64", "dev", "eth0", "nodad")
        self.run("ip", "-n", "lan", "route", "add", "default", "via", LAN_HOST6)
        # What arrives there counts, whether or not it is answered; nobody on this machine can take this filter away.
        self.in_lan("nft", "-f", "-", input=_COUNT)
        self.heard = {"lan": self._listen("lan", "9002"), "host": self._listen(None, "8080")}

    def settled(self) -> None:
        """Nothing is kept here: each test says what must stay as it is."""

    def begin(self, directory: Path) -> None:
        """Another test begins: its files, and nobody heard so far."""
        self.directory = directory
        self.run("ip", "addr", "replace", f"{LAN_HOST}/24", "dev", "lan0")
        self.run("ip", "addr", "replace", f"{LAN_HOST6}/64", "dev", "lan0", "nodad")
        self.in_lan("nft", "-f", "-", input=f"delete table inet count\n{_COUNT}")
        self._before = {where: len(self._lines(where)) for where in self.heard}

    def run(self, *argv: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300, **options)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(argv)}: status {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def _listen(self, netns: str | None, served: str) -> Path:
        path = self.directory / f"heard-{netns}"
        with path.open("w") as file:
            self.python(_LISTENER, str(FORBIDDEN), served, netns=netns, stdout=file)
        wait_for(lambda: "listening" in path.read_text(), what=f"the listener in {netns}")
        return path

    # Strangers and the control

    def strangers(self) -> list[str]:
        """Whoever reached a listener and was not the control, and packets that reached the LAN peer."""
        lines = [f"{where}: {line}" for where in self.heard for line in self._lines(where)[self._before[where] :]]
        told = [line for line in lines if not line.endswith(f" {CONTROL}")]
        counted = json.loads(self.in_lan("nft", "-j", "list", "table", "inet", "count").stdout)["nftables"]
        rules = [entry["rule"]["expr"] for entry in counted if "rule" in entry]
        packets = sum(part["counter"]["packets"] for rule in rules for part in rule if "counter" in part)
        return told + ([f"{packets} packets at the LAN peer"] if packets else [])

    def _lines(self, where: str) -> list[str]:
        return [line for line in self.heard[where].read_text().splitlines() if line != "listening"]

    def control(self, *more: tuple[str, str, str]) -> None:
        """This machine itself reaches each listener, by address: (where, kind, address)."""
        for where, kind, address in (
            ("lan", "tcp", LAN_PEER),
            ("lan", "udp", LAN_PEER),
            ("lan", "tcp", LAN_PEER6),
            ("host", "tcp", LAN_HOST),
            ("host", "udp", LAN_HOST),
            *more,
        ):
            before = len(self._lines(where))

            def reached(where: str = where, kind: str = kind, address: str = address, before: int = before) -> bool:
                with contextlib.suppress(OSError):
                    _knock(kind, address)
                return len(self._lines(where)) > before

            wait_for(reached, what=f"the control: this machine reaches {where}, {kind} {address}")

    # The machine's own state

    def looks(self) -> list[str]:
        """Rulesets without handles and the gate, rules, routes and the IP settings: what must be the same before and after a run."""
        ruleset = json.loads(self.run("nft", "-j", "list", "ruleset").stdout)["nftables"]
        lines = [json.dumps(entry, sort_keys=True) for entry in ruleset if not lab._is_gate(entry)]
        moving = re.compile(r'"(expires|bytes|packets|handle)": \d+')
        lines = [moving.sub(r'"\1": 0', line) for line in lines]
        for family in ("-4", "-6"):
            lines += self.run("ip", family, "rule").stdout.splitlines()
            told = self.run("ip", family, "route", "show", "table", "all").stdout.replace(" linkdown", "")
            lines += sorted(re.sub(r" (expires \d+sec|pref medium)", "", line).rstrip() for line in told.splitlines())
        for path in (*Path("/proc/sys/net").glob("ipv[46]/conf/*/*"), *Path("/proc/sys/net/ipv4").glob("ip_*")):
            with contextlib.suppress(OSError):
                lines.append(f"{path} = {path.read_text().strip()}")
        # A container that is started again has another link.
        return [line for line in lines if "veth" not in line]

    def same(self, before: list[str]) -> None:
        now = self.looks()
        changed = [f"+ {line}" for line in now if line not in before] + [f"- {line}" for line in before if line not in now]
        assert not changed, "the machine has changed:\n" + "\n".join(changed)

    def assert_nothing_left(self) -> None:
        """Of no run a link, a name, a record, an element, a cgroup (which its processes are in)."""
        wait_for(lambda: not self.things_left_over(), timeout_s=20, what=lambda: f"nothing is left: {self.things_left_over()}")

    # Runs

    # What `live(..., *web, host="web.test:9002")` is allowed, once `in_lan_web` has put it there.
    web = ("--allow-private", "web.test:9002")

    def in_lan_web(self) -> None:
        """The web server on the LAN peer has a name."""
        with open("/etc/hosts", "a", encoding="ascii") as file:
            file.write(f"{LAN_PEER} web.test\n")

    def live(self, run_id: str, *options: str, targets: tuple[tuple[str, str, int], ...] = (), host: str = "", asks: bool = True) -> Live:
        """A run that asks its broker, or its proxy for `host`, and knocks at all that is forbidden and at `targets`."""
        made = Live(self, run_id, options or LEASE, targets, host=host, asks=asks)
        self._lives.append(made)
        return made

    def gate(self) -> bool:
        return self.run("nft", "list", "table", "inet", "sealnet", check=False).returncode == 0

    @contextlib.contextmanager
    def unit(self, *names: str) -> Iterator[None]:
        """These units run meanwhile."""
        try:
            self.run("systemctl", "start", *names)
            yield
        finally:
            self.run("systemctl", "stop", *names, check=False)

    @contextlib.contextmanager
    def file(self, path: str, text: str) -> Iterator[None]:
        """The file holds this text meanwhile."""
        file = Path(path)
        before = file.read_bytes() if file.exists() else None
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        try:
            yield
        finally:
            if before is None:
                file.unlink()
            else:
                file.write_bytes(before)

    @contextlib.contextmanager
    def sysctls(self, **values: str) -> Iterator[None]:
        """Settings by their name with `__` for `/`, put back afterwards; what the kernel does not have is an error."""
        paths = {name: Path("/proc/sys") / name.replace("__", "/") for name in values}
        before = {name: path.read_text() for name, path in paths.items()}
        for name, path in paths.items():
            path.write_text(values[name])
        try:
            yield
        finally:
            for name, path in paths.items():
                path.write_text(before[name])

    @contextlib.contextmanager
    def undoing(self, *commands: str) -> Iterator[None]:
        """Run these in the end, whatever became of what they undo."""
        try:
            yield
        finally:
            for command in commands:
                self.run(*command.split(), check=False)

    def reap(self) -> None:
        """Of a test that failed: its runs."""
        for one in self._lives:
            if one.process.poll() is None:
                self.sealnet("reap", one.run_id)
        self._lives.clear()
        Path("/etc/hosts").write_text(self._names)

    def close(self) -> None:
        super().close()
        self.run("ip", "netns", "delete", "lan", check=False)
        self.run("ip", "link", "delete", "lan0", check=False)
        self.run("nft", "delete", "table", "inet", "sealnet", check=False)
        Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text(self._dad)


class Live:
    """A run whose payload asks and knocks for as long as it lives."""

    def __init__(
        self, machine: Machine, run_id: str, options: tuple[str, ...], targets: tuple[tuple[str, str, int], ...], *, host: str, asks: bool
    ) -> None:
        self.machine, self.run_id, self._asks = machine, run_id, asks
        self.output, self.errors = machine.directory / f"{run_id}.out", machine.directory / f"{run_id}.err"
        # The first run of a machine has this one; another knocks at somebody else's gateway, which must be as silent.
        gateways = ("198.18.0.1", "198.18.0.5", "198.18.0.9")
        addresses = (*gateways, LAN_HOST, LAN_PEER, ETH0, LAN_HOST6, LAN_PEER6)
        wanted = [*((kind, address, FORBIDDEN) for kind in ("tcp", "udp") for address in addresses), *targets]
        asked = json.dumps({"host": host} if asks else {})
        argv = [*SEALNET, "run", "--run-id", run_id, "--user", "1234", "--chdir", "/", *options, "--"]
        argv += ["/usr/bin/python3", "-c", _PAYLOAD, asked, *map(json.dumps, wanted)]
        with self.output.open("w") as out, self.errors.open("w") as err:
            self.process = machine.spawn(*argv, stdin=subprocess.PIPE, stdout=out, stderr=err)
        wait_for(lambda: "began" in self.output.read_text() or self.process.poll() is not None, timeout_s=120, what=f"run {run_id} began")
        assert self.process.poll() is None, self.errors.read_text()
        record = machine.wait_running(run_id)
        self.record: dict[str, Any] = record
        self.back()

    def answers(self) -> list[tuple[float, str]]:
        """When (time.monotonic) the broker was asked, and `ok` or the errno's name."""
        lines = [line.split() for line in self.output.read_text().splitlines() if line.count(" ") == 1]
        return [(float(at), found) for at, found in lines if found != "began"]

    def back(self) -> None:
        """Wait until it is answered five times in a row from now on."""
        began = time.monotonic()

        def answered() -> bool:
            since = [found for at, found in self.answers() if at > began]
            return len(since) >= 5 and set(since[-5:]) == {"ok"}

        if self._asks:
            wait_for(
                answered, timeout_s=_BACK_WITHIN_S, what=lambda: f"run {self.run_id} is answered: {self.answers()[-5:]}, {self.events()}"
            )
        else:
            time.sleep(0.5)

    def silent(self) -> None:
        """Wait until it has not been answered for two seconds."""

        def silent() -> bool:
            answered = [at for at, found in self.answers() if found == "ok"]
            return time.monotonic() - answered[-1] > 2

        wait_for(silent, timeout_s=30, what=f"run {self.run_id} gets no answer any more")

    def still(self) -> None:
        """Let it ask thirty times more, whatever it is answered: what a manager does to a link comes late."""
        asked = len(self.answers())
        wait_for(lambda: len(self.answers()) > asked + 30, timeout_s=180, what=f"run {self.run_id} goes on asking")

    def until(self, event: str) -> None:
        wait_for(lambda: event in self.events(), what=lambda: f"run {self.run_id} records {event}: {self.events()}")

    def refused(self) -> list[str]:
        """What it got instead of an answer, without repetitions."""
        return sorted({found for _at, found in self.answers() if found != "ok"})

    def silence_s(self) -> float:
        """The longest time between two answers."""
        times = [at for at, found in self.answers() if found == "ok"]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    def events(self) -> list[str]:
        record = self.machine.record(self.run_id)
        return [event["event"] for event in record["events"]] if record else []

    def check(self) -> tuple[int, dict[str, Any]]:
        # As `sealnet check`, without a process of its own: that one takes seconds where the machine is emulated.
        told = _check(self.run_id)
        code = 0 if told["verdict"] == told["confinement"] else 1
        # What it says is held against the kernel's own tables, read by another program.
        ifname = self.record["ifname"]
        if code == 0 and self.record["gateway"]:
            leases = self.machine.run("nft", "list", "set", "inet", "sealnet", "leases").stdout
            assert ifname in leases
            assert "state UP" in self.machine.run("ip", "link", "show", ifname).stdout
        return code, told

    def sealed(self) -> None:
        """It is answered, `check` proves it, and no stranger was heard."""
        self.back()
        wait_for(lambda: self.check()[0] == 0, what=lambda: f"check of {self.run_id} proves it: {self.check()}, {self.events()}")
        assert self.machine.strangers() == []

    def end(self) -> None:
        """Let it end by itself: its status is its own, and nothing of it is left."""
        assert self.process.stdin is not None
        events = self.machine.record(self.run_id)
        kept = os.environ.get("SEALNET_VM_RESULTS")
        if kept:
            line = f"{self.run_id}: silent for {self.silence_s():.2f} s at most, {len(self.answers())} asked, refused {self.refused()}"
            with open(f"{kept}/silences", "a", encoding="utf-8") as file:
                told = [event["detail"] for event in events["events"]] if events else []
                file.write("\n    ".join([line, *told]) + "\n")
        self.process.stdin.close()
        assert self.process.wait(120) == 0, self.errors.read_text()
        # What was under way a moment ago may still be heard.
        time.sleep(0.3)
        assert self.machine.strangers() == []


def _knock(kind: str, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if kind == "tcp":
            # No TIME_WAIT: the port is wanted again.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.settimeout(2)
        sock.bind(("::" if ":" in address else "0.0.0.0", CONTROL))
        sock.connect((address, FORBIDDEN))
        sock.send(b"control")
