"""Doors that are shut for a run and open for everybody else: who waits behind them, a payload that tries them, and who came."""

from __future__ import annotations

import contextlib
import json
import socket
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from tests.lab import LAN_HOST, LAN_PEER, Host, wait_for

POOL = IPv4Network("198.18.0.0/15")
# Of the run that is there first, and of the one that comes next.
FIRST_GATEWAY, NEXT_GATEWAY = "198.18.0.1", "198.18.0.5"
_NOBODYS = "198.18.255.1"

# Tries the doors over and over and tells which answered: so many times, or (0) until there is a file `stop`.
_TRY = r"""
import json, os, socket, sys, time

gateway, leased, rounds, doors = sys.argv[1], sys.argv[2] == "leased", int(sys.argv[3]), json.loads(sys.argv[4])
gateway = os.environ.get("SEALNET_BROKER_URL", f"http://{gateway}:").split("/")[2].split(":")[0]
told = os.open("told", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

def say(text):
    os.write(told, f"{text}\n".encode())

def ask_broker():
    with socket.create_connection((gateway, 8080), 0.3 if rounds else 2.0) as sock:
        sock.send(b"GET / HTTP/1.0\r\n\r\n")
        if not sock.recv(64).startswith(b"HTTP/1.0 200"):
            raise OSError("it hung up")

def reach(kind, address, port):
    stream = kind == "tcp"
    family, _, _, _, target = socket.getaddrinfo(address, port, flags=socket.AI_NUMERICHOST)[0]
    with socket.socket(family, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.2 if stream else 0.1)
        sock.connect(target)
        if not stream:
            sock.send(b"hello")
            sock.recv(64)

done, heard = 0, False
while not os.path.exists("stop") if rounds == 0 else done < rounds:
    if leased:
        try:
            ask_broker()
            if not heard:
                heard = True
                say("the broker answered")
        except OSError as error:
            heard = False
            say(f"no broker: {error}")
    for kind, address, port in doors:
        address = address.replace("GATEWAY", gateway)
        if (kind, address, port) == ("tcp", gateway, 8080):
            continue
        try:
            reach(kind, address, port)
            say(f"OPEN {kind} {address} {port}")
        except OSError:
            pass
    done += 1
    say("round")
    if rounds == 0:
        time.sleep(0.02)
"""

# Answers everything, and writes down who came: kind, own address and port, the other's address.
_ANSWER = r"""
import socket, sys, threading

book = open(sys.argv[1], "a", buffering=1)

def note(*words):
    book.write(" ".join(map(str, words)) + "\n")

def serve_tcp(sock):
    while True:
        peer, address = sock.accept()
        note("tcp", peer.getsockname()[0].partition("%")[0], peer.getsockname()[1], address[0].partition("%")[0])
        threading.Thread(target=answer, args=(peer,), daemon=True).start()

def answer(peer):
    try:
        with peer:
            peer.settimeout(2)
            peer.recv(512)
            peer.send(b"HTTP/1.0 200 OK\r\n\r\n")
    except OSError:
        pass

def serve_udp(sock):
    while True:
        data, address = sock.recvfrom(512)
        note("udp", "any", sock.getsockname()[1], address[0].partition("%")[0])
        sock.sendto(data, address)

for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    for kind, port in ((socket.SOCK_STREAM, 8080), (socket.SOCK_STREAM, 7000), (socket.SOCK_DGRAM, 7000)):
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((everywhere, port))
        if kind == socket.SOCK_STREAM:
            sock.listen(256)
        threading.Thread(target=serve_tcp if kind == socket.SOCK_STREAM else serve_udp, args=(sock,)).start()
print("listening", flush=True)
"""


class Doors:
    """Of a host that forwards and its LAN peer: port 8080, where the broker is, and port 7000, at every address."""

    def __init__(self, host: Host) -> None:
        self._host = host
        for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path(f"/proc/sys/net/{name}").write_text("1")
        host.settled()
        self._link_local = json.loads(host.run("ip", "-j", "-6", "addr", "show", "dev", "lan0").stdout)[0]["addr_info"][0]["local"]
        six = f"{self._link_local}%eth0"
        self._doors: list[tuple[str, str, int]] = [
            *(("tcp", address, 7000) for address in ("GATEWAY", LAN_HOST, LAN_PEER, six)),
            *(("udp", address, 7000) for address in ("GATEWAY", LAN_HOST, LAN_PEER, six, "ff02::1%eth0")),
            *(("tcp", address, 8080) for address in (FIRST_GATEWAY, NEXT_GATEWAY, LAN_HOST, LAN_PEER, six)),
        ]
        self._books = {where: host.directory / f"{where}.book" for where in ("host", "lan")}
        for where, book in self._books.items():
            answers = host.python(_ANSWER, str(book), netns=where if where == "lan" else None)
            assert answers.stdout is not None
            assert answers.stdout.readline() == "listening\n"

    def payload(self, gateway: str | None = None, *, leased: bool = False, rounds: int = 0) -> list[str]:
        """A command that writes `told` in its working directory: `round` after each, `OPEN ...`, `the broker answered`, `no broker: ...`.

        The gateway is the run's own, for who is not started by sealnet.
        """
        words = [gateway or _NOBODYS, "leased" if leased else "unleased", str(rounds), json.dumps(self._doors)]
        return ["/usr/bin/python3", "-I", "-S", "-c", _TRY, *words]

    def strangers(self) -> list[str]:
        """Who came to a door that was not theirs."""
        return [line for book in self._books.values() for line in lines(book) if not self._is_welcome(*line.split(" "))]

    def _is_welcome(self, kind: str, address: str, port: str, peer: str) -> bool:
        if ":" in peer:
            return peer == self._link_local
        who = IPv4Address(peer)
        # Sandboxes end in binary 10; their gateways are the host itself.
        return who not in POOL or int(who) & 3 != 2 or (kind, address, port) == ("tcp", str(who - 1), "8080")

    def assert_open_to_the_host(self) -> None:
        """The control: who is not in a run reaches all of it, but for gateways that are gone."""
        directory = self._host.directory / "control"
        directory.mkdir()
        doors = [(kind, address.replace("%eth0", "%lan0").replace("GATEWAY", "127.0.0.1"), port) for kind, address, port in self._doors]
        self._host.run(*self.payload(rounds=1)[:-1], json.dumps(doors), cwd=directory)
        expected = {f"OPEN {kind} {address} {port}" for kind, address, port in doors if not address.startswith(("198.18.", "ff02:"))}
        assert set(lines(directory / "told")) == {*expected, "round"}
        # The answer to a multicast comes from another address, so look who got it; once the peer's link has finished with IPv6.
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.connect(("ff02::1", 7000, 0, socket.if_nametoindex("lan0")))
            heard = f"udp any 7000 {self._link_local}"
            wait_for(lambda: sock.send(b"hello") and heard in lines(self._books["lan"]), what="the peer has heard a multicast")


def lines(path: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace").splitlines()
    return []
