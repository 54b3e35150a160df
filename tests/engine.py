"""A door by itself on a throw-away host: a namespace in the sandbox's place, names and origins on the LAN, the test as supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sealnet.kernel import libc
from tests.lab import LAN_PEER, Host, wait_for

GATEWAY, SANDBOX, PORT = "198.18.0.1", "198.18.0.2", 3128
PUBLIC, SECOND, BLACK_HOLE = "93.184.216.34", "93.184.216.35", "93.184.217.1"
PUBLIC_6 = "2606:2800:220::34"
DOOR_UID = 64990
ALLOW = [{"host": "allowed.test", "port": 443}, {"host": "allowed.test", "port": 80}, {"host": "b.test", "port": 8443}]

# Answers from the JSON file argv[1] ({name: [address, ...]}), which is read anew each time, and writes every question to argv[2].
_DNS = r"""
import ipaddress, json, socket, struct, sys

sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[3], 53))
print("listening", flush=True)
while True:
    data, peer = sock.recvfrom(4096)
    at, labels = 12, []
    while data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
        at += 1 + data[at]
    question = data[12 : at + 5]
    kind = struct.unpack_from("!H", data, at + 1)[0]
    name = ".".join(labels)
    with open(sys.argv[2], "a") as log:
        log.write(name + "\n")
    known = json.load(open(sys.argv[1]))
    found = [ipaddress.ip_address(text) for text in known.get(name.lower(), [])]
    found = [each.packed for each in found if each.version == {1: 4, 28: 6}.get(kind)]
    if known.get(name.lower()) == ["silence"]:
        continue
    code = 0 if name.lower() in known else 3
    answer = data[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(found), 0, 0) + question
    for packed in found:
        answer += b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, 0, len(packed)) + packed
    sock.sendto(answer, peer)
"""

# Port 80: HTTP that does what the path says. 443: bytes. 8443: TLS. Each connection and each head is a line of the book, as JSON.
_ORIGIN = r"""
import json, socket, ssl, struct, sys, threading, time

book_path, certificate = sys.argv[1:3]
lock = threading.Lock()

def note(**what):
    with lock, open(book_path, "a") as book:
        book.write(json.dumps(what) + "\n")

def listen(port, serve):
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((everywhere, port))
        sock.listen(1024)
        threading.Thread(target=accept, args=(sock, port, serve), daemon=True).start()

def accept(sock, port, serve):
    while True:
        peer, _ = sock.accept()
        peer.settimeout(30)
        threading.Thread(target=one, args=(peer, port, serve), daemon=True).start()

def one(peer, port, serve):
    try:
        note(port=port, address=peer.getsockname()[0])
        serve(peer)
    except OSError as error:
        note(port=port, error=type(error).__name__)
    finally:
        peer.close()

def head_of(peer):
    data = b""
    while b"\r\n\r\n" not in data:
        more = peer.recv(65536)
        if not more:
            note(port=80, rest=data.decode("latin-1"))
            return None, data
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    note(port=80, head=head.decode("latin-1"))
    return head, rest

def say(peer, status, body=b"", *headers):
    lines = [b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % len(body)]
    peer.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)

def body_of(peer, head, rest):
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if b"content-length" in fields:
        while len(rest) < int(fields[b"content-length"]):
            rest += peer.recv(65536)
        return rest
    if fields.get(b"transfer-encoding") == b"chunked":
        while not rest.endswith(b"0\r\n\r\n"):
            rest += peer.recv(65536)
    return rest

def http(peer):
    head, rest = head_of(peer)
    if head is None:
        return
    path = head.split(b" ")[1]
    if path.startswith(b"/100"):
        peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        say(peer, b"200 OK", b"%d" % len(body_of(peer, head, rest)))
    elif path.startswith(b"/103"):
        peer.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\nX-Sealnet-A: b\r\n\r\n")
        say(peer, b"200 OK", b"after")
    elif path.startswith(b"/204"):
        peer.sendall(b"HTTP/1.1 204 No Content\r\nX-Seen: 1\r\nContent-Length: 5\r\n\r\n")
    elif path.startswith(b"/413"):
        say(peer, b"413 Content Too Large", b"no")
    elif path.startswith(b"/101"):
        peer.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        note(port=80, after=peer.recv(65536).decode("latin-1"))
    elif path.startswith(b"/chunked"):
        peer.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: x-b\r\nX-B: 1\r\nX-Sealnet-Reason: forged\r\n\r\n")
        peer.sendall(b"5\r\nhello\r\n0\r\n\r\n")
    elif path.startswith(b"/short"):
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
    elif path.startswith(b"/nothing"):
        return
    elif path.startswith(b"/hang"):
        peer.recv(1)
    elif path.startswith(b"/403"):
        say(peer, b"403 Forbidden", b"origin", b"Upgrade: websocket", b"Connection: Upgrade")
    else:
        say(peer, b"200 OK", body_of(peer, head, rest) or path)

def raw(peer):
    data = peer.recv(65536)
    note(port=443, data=data[:200].hex())
    if data.startswith(b"ECHO"):
        while data:
            peer.sendall(data)
            data = peer.recv(65536)
    elif data.startswith(b"GIVE "):
        size = int(data[5:].split(b"\n")[0])
        while peer.recv(65536):
            pass
        block = bytes(range(256)) * 256
        for _ in range(size // len(block)):
            peer.sendall(block)
    elif data.startswith(b"TAKE"):
        count = len(data)
        while data := peer.recv(65536):
            count += len(data)
        peer.sendall(b"%d" % count)
    elif data.startswith(b"RESET"):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif data.startswith(b"WAIT"):
        while peer.recv(65536):
            pass
    elif data:
        peer.sendall(b"SEEN ")
        while data:
            peer.sendall(data)
            data = peer.recv(65536)

context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
context.load_cert_chain(certificate)

def tls(peer):
    with context.wrap_socket(peer, server_side=True) as secret:
        head = secret.recv(65536)
        path = head.split(b" ")[1]
        secret.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(path) + path)

listen(80, http)
listen(443, raw)
listen(8443, tls)
print("listening", flush=True)
while True:
    time.sleep(3600)
"""


class Engine:
    """The door serves `run` with the allow-list of the cases; `records` is its log."""

    def __init__(self, host: Host) -> None:
        self.host = host
        directory = host.directory
        self.names = directory / "names.json"
        self.questions = directory / "questions"
        self.book = directory / "book"
        self.log = directory / "egress.jsonl"
        self.certificate = directory / "ca.pem"
        self.resolves(**{"allowed.test": [PUBLIC], "b.test": [PUBLIC], "evil.test": [PUBLIC]})
        for path in (self.questions, self.book):
            path.write_text("")
        self._arrange()
        self.logs: set[Path] = set()
        self.control: socket.socket | None = None
        self.door = self._start_door()

    def resolves(self, **names: list[str]) -> None:
        known = json.loads(self.names.read_text()) if self.names.exists() else {}
        new = self.names.with_suffix(".new")
        new.write_text(json.dumps(known | names))
        new.rename(self.names)

    def _arrange(self) -> None:
        host = self.host
        host.run("ip", "netns", "add", "box")
        host.run("ip", "link", "add", "box0", "type", "veth", "peer", "name", "eth0", "netns", "box")
        host.run("ip", "addr", "add", f"{GATEWAY}/30", "dev", "box0")
        host.run("ip", "link", "set", "box0", "up")
        for command in (f"addr add {SANDBOX}/30 dev eth0", "link set lo up", "link set eth0 up"):
            host.run("ip", "-n", "box", *command.split())
        for address in (PUBLIC, SECOND):
            host.run("ip", "-n", "lan", "addr", "add", f"{address}/32", "dev", "lo")
            host.run("ip", "route", "add", f"{address}/32", "via", LAN_PEER)
        host.run("ip", "-n", "lan", "-6", "addr", "add", f"{PUBLIC_6}/128", "dev", "lo")
        host.run("ip", "-n", "lan", "-6", "addr", "add", "fd77::2/64", "dev", "eth0", "nodad")
        host.run("ip", "-6", "addr", "add", "fd77::1/64", "dev", "lan0", "nodad")
        host.run("ip", "-6", "route", "add", f"{PUBLIC_6}/128", "via", "fd77::2")
        host.run("ip", "route", "add", f"{BLACK_HOLE}/32", "via", LAN_PEER)
        host.run("ip", "-n", "lan", "route", "add", "blackhole", f"{BLACK_HOLE}/32")
        # The kernel adds an IPv6 address's own route in its own time.
        wait_for(lambda: "fd77::1" in host.run("ip", "-6", "route", "show", "table", "local").stdout, what="the address has its route")
        host.settled()
        resolv = host.directory / "resolv.conf"
        resolv.write_text(f"search corp.test\nnameserver {LAN_PEER}\n")
        resolv.chmod(0o644)
        libc.mount(str(resolv), os.path.realpath("/etc/resolv.conf"), None, libc.MS_BIND)
        hosts = host.directory / "hosts"
        hosts.write_text("127.0.0.1 localhost\n")
        hosts.chmod(0o644)
        libc.mount(str(hosts), os.path.realpath("/etc/hosts"), None, libc.MS_BIND)
        dns = host.python(_DNS, str(self.names), str(self.questions), LAN_PEER, netns="lan")
        host.run(
            *"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=b.test".split(),
            *"-addext subjectAltName=DNS:b.test,DNS:allowed.test".split(),
            "-keyout",
            f"{self.certificate}.key",
            "-out",
            str(self.certificate),
        )
        both = host.directory / "both.pem"
        both.write_text(Path(f"{self.certificate}.key").read_text() + self.certificate.read_text())
        origin = host.python(_ORIGIN, str(self.book), str(both), netns="lan")
        for process in (dns, origin):
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n", process.stderr and process.stderr.read()

    # The privileged side

    def _start_door(self) -> Any:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        ours.settimeout(10)
        number = theirs.fileno()
        command = [sys.executable, "-I", "-m", "sealnet.door", str(DOOR_UID), str(DOOR_UID), str(number)]
        process = self.host.spawn(*command, pass_fds=(number,), stderr=open(self.host.directory / "door.stderr", "w"))  # noqa: SIM115
        theirs.close()
        assert self.hear() == {"ready": True, "serves": []}
        return process

    def hear(self) -> dict[str, Any]:
        message, _fds = self.hear_fds()
        return message

    def hear_fds(self) -> tuple[dict[str, Any], list[int]]:
        assert self.control is not None
        data, fds, _flags, _address = socket.recv_fds(self.control, 65536, 4)
        assert data, f"the door has ended: {(self.host.directory / 'door.stderr').read_text()}"
        return json.loads(data), fds

    def tell(self, message: dict[str, Any], *fds: int) -> None:
        assert self.control is not None
        socket.send_fds(self.control, [json.dumps(message).encode()], list(fds))

    def serve_proxy(
        self, run: str = "run-1", allow: list[dict[str, Any]] | None = None, *, port: int = PORT, log: Path | None = None
    ) -> None:
        entries = [{"private": False} | each for each in (ALLOW if allow is None else allow)]
        with socket.create_server((GATEWAY, port), backlog=1024) as listener:
            fd = os.open(log or self.log, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            message = {"op": "serve", "run": run, "kind": "proxy", "sandbox": SANDBOX, "allow": entries, "own": [GATEWAY, "192.168.77.1"]}
            self.tell(message, listener.fileno(), fd)
            os.close(fd)
        self.logs.add(log or self.log)
        assert self.hear() == {"run": run, "serving": True}

    def serve_relay(self, target: dict[str, Any], run: str = "run-2", port: int = PORT + 1) -> None:
        with socket.create_server((GATEWAY, port)) as listener:
            self.tell({"op": "serve", "run": run, "kind": "relay", "sandbox": SANDBOX, "target": target}, listener.fileno())
        assert self.hear() == {"run": run, "serving": True}

    def stop(self, run: str = "run-1") -> dict[str, Any]:
        self.tell({"op": "stop", "run": run})
        return self.hear()

    # What is seen of it

    def recorded(self) -> list[str]:
        """The addresses that its logs say it connected with."""
        lines = [line for log in self.logs for line in log.read_text().strip("\0").splitlines()]
        return [record["address"] for line in lines if (record := json.loads(line))["verdict"] == "ALLOW" and record["address"]]

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_bytes().decode("ascii").splitlines()]

    def asked_names(self) -> list[str]:
        return self.questions.read_text().lower().split()

    def dialled(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.book.read_text().splitlines()]

    def reached(self) -> list[str]:
        """The addresses at which somebody connected with an origin."""
        return [each["address"] for each in self.dialled() if "address" in each]

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.door.pid}/fd"))

    def unread(self, port: int = PORT) -> list[int]:
        """How many bytes of each connection's the kernel has and the door has not (proc(5), net/tcp: state 1 is established)."""
        end = f"{struct.unpack('<I', socket.inet_aton(GATEWAY))[0]:08X}:{port:04X}"
        rows = [line.split() for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]]
        return [int(row[4].partition(":")[2], 16) for row in rows if row[1] == end and row[3] == "01"]

    def rss_kb(self) -> int:
        return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.door.pid}/status").read_text())[0])

    # The payload

    def connect(self, port: int = PORT, *, timeout_s: float = 10.0, address: str = GATEWAY) -> socket.socket:
        """A connection that comes from the sandbox."""
        with in_netns("box"):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        sock.connect((address, port))
        return sock

    def ask(self, data: bytes, *, port: int = PORT) -> bytes:
        """All that the door answers to these bytes until it has answered one head and its body, or closes."""
        with self.connect(port) as sock:
            sock.sendall(data)
            return answer(sock)

    def tunnel(self, host: str = "allowed.test", port: int = 443) -> socket.socket:
        sock = self.connect()
        sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        got = answer(sock)
        assert got.startswith(b"HTTP/1.1 200 "), got
        return sock

    def in_box(self, *argv: str, **options: Any) -> Any:
        return self.host.run("ip", "netns", "exec", "box", *argv, check=False, **options)

    def close(self) -> None:
        if self.control is not None:
            self.control.close()
        with contextlib.suppress(Exception):
            self.door.wait(60)


@contextlib.contextmanager
def in_netns(name: str) -> Iterator[None]:
    """What is opened within is of that namespace for good."""
    here, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        libc.setns(there, libc.CLONE_NEWNET)
        yield
    finally:
        libc.setns(here, libc.CLONE_NEWNET)
        os.close(here)
        os.close(there)


def answer(sock: socket.socket) -> bytes:
    """One response and not a byte more: its head, and as much body as its Content-Length says; or what came before the end, or `RESET`."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            more = sock.recv(1)
            if not more:
                return data
            data += more
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", data)
        left = int(found[1]) if found else 0
        while left and (more := sock.recv(left)):
            data += more
            left -= len(more)
    except ConnectionResetError:
        return data + b"RESET"
    return data


def status(data: bytes) -> int:
    """0 for what is no response."""
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", data)
    return int(found[1]) if found else 0


def ended(sock: socket.socket, timeout_s: float = 5.0) -> str:
    """`closed` or `reset` once the peer has, whatever it sent before; fails when it does neither."""
    sock.settimeout(timeout_s)
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        return "reset"
    return "closed"


def client_hello(name: str | None, *, extra: bytes = b"") -> bytes:
    """The handshake message of a minimal ClientHello."""
    extensions = extra
    if name is not None:
        raw = name.encode()
        entry = struct.pack("!BH", 0, len(raw)) + raw
        extensions += struct.pack("!HHH", 0, len(entry) + 2, len(entry)) + entry
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\2\x13\1" + b"\1\0" + struct.pack("!H", len(extensions)) + extensions
    return b"\1" + len(body).to_bytes(3, "big") + body


def records_of(message: bytes, size: int = 16384) -> bytes:
    """TLS records of so many bytes each."""
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\3\1" + struct.pack("!H", len(part)) + part for part in parts)


def readable(sock: socket.socket, timeout_s: float) -> bool:
    return bool(select.select([sock], [], [], timeout_s)[0])


def soon(condition: Any, what: str, timeout_s: float = 5.0) -> Any:
    return wait_for(condition, timeout_s=timeout_s, what=what)
