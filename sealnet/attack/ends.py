"""The other ends: what listens on the host while the payload tries to reach it, and hears whether it did."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import socket
import socketserver
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from sealnet.errors import CannotSeal, UsageError
from sealnet.kernel import process
from sealnet.kernel.netns import Inside
from sealnet.model.plan import User

_ETH_P_ALL, _IP, _IP6, _ARP, _OUTGOING = 3, 0x0800, 0x86DD, 0x0806, 4
_PREFIX = "sealnet-attack-"


class Ear(Protocol):
    """Tells whether anything has arrived since it was last asked."""

    def heard(self) -> bool: ...


class Listener:
    """Hears connections, which its backlog accepts before anybody looks."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.listen(64)
        sock.setblocking(False)

    def heard(self) -> bool:
        found = False
        while True:
            try:
                self._socket.accept()[0].close()
            except BlockingIOError:
                return found
            found = True


class Datagrams:
    """Hears packets that hold its token: of a UDP socket, or of a raw one, which gets a copy of all."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self._socket, self._token = sock, token.encode()
        sock.setblocking(False)

    def heard(self) -> bool:
        found = False
        while True:
            try:
                found |= self._token in self._socket.recv(65536)
            except BlockingIOError:
                return found


class Lines:
    """Hears what a process prints a line for."""

    def __init__(self, fd: int, token: str) -> None:
        self._fd, self._token = fd, token.encode()
        os.set_blocking(fd, False)

    def heard(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return self._token in os.read(self._fd, 65536)
        return False


class Packet(NamedTuple):
    """One frame: Ethernet type, and where it wants to go; `port` is TCP's or UDP's."""

    ethertype: int
    destination: str
    protocol: int
    port: int


class Wire:
    """A packet socket: on the host end of a run's link it hears whatever leaves the sandbox, on all links whatever the host sends."""

    def __init__(self, sock: socket.socket, *, outgoing: bool) -> None:
        self._socket, self._outgoing = sock, outgoing
        self._packets: list[Packet] = []
        sock.setblocking(False)

    def packets(self) -> list[Packet]:
        """Everything since the beginning."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data, (_link, ethertype, kind, *_rest) = self._socket.recvfrom(256)
                if self._outgoing or kind != _OUTGOING:
                    self._packets.append(_parse(data, ethertype))
        return self._packets

    def ear(self, wanted: Callable[[Packet], bool]) -> Ear:
        return _WireEar(self, wanted)


class _WireEar:
    def __init__(self, wire: Wire, wanted: Callable[[Packet], bool]) -> None:
        self._wire, self._wanted, self._known = wire, wanted, 0

    def heard(self) -> bool:
        packets = self._wire.packets()
        fresh, self._known = packets[self._known :], len(packets)
        return any(map(self._wanted, fresh))


def _parse(data: bytes, ethertype: int) -> Packet:
    """Of a SOCK_DGRAM packet socket: what follows the Ethernet header."""
    if ethertype == _IP and len(data) >= 20:
        size, protocol = (data[0] & 15) * 4, data[9]
        return Packet(ethertype, socket.inet_ntop(socket.AF_INET, data[16:20]), protocol, _port(data, size, protocol))
    if ethertype == _IP6 and len(data) >= 40:
        return Packet(ethertype, socket.inet_ntop(socket.AF_INET6, data[24:40]), data[6], _port(data, 40, data[6]))
    return Packet(ethertype, "", 0, 0)


def _port(data: bytes, offset: int, protocol: int) -> int:
    if protocol not in (socket.IPPROTO_TCP, socket.IPPROTO_UDP) or len(data) < offset + 4:
        return 0
    return int(struct.unpack_from("!H", data, offset + 2)[0])


def is_ipv6(packet: Packet) -> bool:
    return packet.ethertype == _IP6


def goes_to(address: str, port: int) -> Callable[[Packet], bool]:
    return lambda packet: (packet.destination, packet.port) == (address, port)


def is_lookup(packet: Packet) -> bool:
    return packet.port == 53


class Ends:
    """Makes the other ends; `stack` closes them all."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack

    def _socket(self, family: int, kind: int, address: Any, protocol: int = 0, inside: Inside | None = None) -> socket.socket:
        make = (socket.socket, family, kind | socket.SOCK_CLOEXEC, protocol)
        sock = self.stack.enter_context(inside.call(*make) if inside is not None else make[0](*make[1:]))
        sock.bind(address)
        return sock

    def listen(self, address: str, port: int = 0, *, scope: int = 0, inside: Inside | None = None) -> tuple[int, Ear]:
        """A TCP listener, in another namespace where one is given; its port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = self._socket(family, socket.SOCK_STREAM, (address, port, 0, scope) if ":" in address else (address, port), inside=inside)
        return int(sock.getsockname()[1]), Listener(sock)

    def receive(self, address: str, token: str, port: int = 0, *, group: str = "", inside: Inside | None = None) -> tuple[int, Ear]:
        """A UDP socket; with `group` one that is a member of it, on the link of `address` and on lo."""
        sock = self._socket(socket.AF_INET, socket.SOCK_DGRAM, ("" if group else address, port), inside=inside)
        for link in (address, "127.0.0.1") if group else ():
            sock.setsockopt(socket.SOL_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(group) + socket.inet_aton(link))
        return int(sock.getsockname()[1]), Datagrams(sock, token)

    def echoes(self, token: str) -> Ear:
        """Hears ICMP that comes to this host."""
        return Datagrams(self._socket(socket.AF_INET, socket.SOCK_RAW, ("", 0), socket.IPPROTO_ICMP), token)

    def wire(self, link: str) -> Wire:
        """What passes a link, or with "" any link of this host."""
        protocol = 0 if link else socket.htons(_ETH_P_ALL)
        sock = self.stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, protocol))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        if link:
            sock.bind((link, _ETH_P_ALL))
        return Wire(sock, outgoing=not link)

    def directory(self, parent: str) -> str:
        """A directory that every user may enter."""
        try:
            made = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError as error:
            raise CannotSeal(f"cannot make a directory in {parent}: {error.strerror}") from error
        self.stack.callback(shutil.rmtree, made, ignore_errors=True)
        os.chmod(made, 0o755)  # noqa: S103 - the payload is to see it
        return made

    def listen_path(self, path: str) -> Ear:
        """A Unix socket that everybody may connect to; an abstract one where the path begins with @."""
        sock = self._socket(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + path[1:] if path.startswith("@") else path)
        if not path.startswith("@"):
            os.chmod(path, 0o666)  # noqa: S103 - the seal is to refuse it, not the mode
        return Listener(sock)

    def victim(self, user: User) -> tuple[int, int]:
        """A process of the payload's user outside; its pid, and when it started."""
        argv = [process.tool("setpriv"), "--reuid", str(user.uid), "--regid", str(user.gid), "--clear-groups", process.tool("sleep"), "600"]
        started = subprocess.Popen(argv, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.stack.callback(started.wait)
        self.stack.callback(started.kill)
        deadline = time.monotonic() + 5.0
        while process.executable(started.pid) not in ("sleep", "coreutils", "busybox") and time.monotonic() < deadline:
            time.sleep(0.001)
        return started.pid, process.start_time(started.pid) or 0

    def broker(self, address: str, port: int) -> None:
        """Answers every GET with 200."""
        server = _Server((address, port), Broker)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        self.stack.callback(server.server_close)
        self.stack.callback(server.shutdown)


class _Server(http.server.ThreadingHTTPServer):
    def server_bind(self) -> None:
        # HTTPServer's own asks a resolver for its name.
        socketserver.TCPServer.server_bind(self)


class Broker(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


def refuse_taken(port: int) -> None:
    """UsageError where --lease-port is somebody else's: a broker that listens on every address, mostly."""
    with socket.socket() as tcp:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tcp.bind(("0.0.0.0", port))
            tcp.listen()
        except OSError as error:
            raise UsageError(
                f"cannot use --lease-port {port}: {error.strerror}", hint="name a port that is free: a broker is started at it"
            ) from error


def free_port() -> int:
    """A number that is free for TCP and for UDP."""
    while True:
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.bind(("0.0.0.0", 0))
            port = int(tcp.getsockname()[1])
            with contextlib.suppress(OSError):
                udp.bind(("0.0.0.0", port))
                return port
