"""The control: what the kernel itself needs for a namespace with one addressed link, and for taking it away. It checks nothing.

Every request of one side goes out in one sendmsg, and no library stands between: whoever builds the same thing cannot be faster.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from ipaddress import IPv4Address

from sealnet.kernel import libc

# linux/netlink.h, linux/rtnetlink.h, linux/if_link.h
_REQUEST, _ACK, _NEW = 0x1, 0x4, 0x600
_NEWLINK, _DELLINK, _NEWADDR, _GETROUTE = 16, 17, 20, 26
_IFNAME, _LINKINFO, _NET_NS_FD = 3, 18, 28
_NESTED, _UP = 0x8000, 1
_ERROR = 2
# TEST-NET-2 is a /24, so the floor takes its addresses where sealnet's pool ends.
_FIRST = int(IPv4Address("198.19.255.0"))


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | flags, 1, 0) + body


def _link(index: int, flags: int = 0) -> bytes:
    return struct.pack("=BxHiII", 0, 0, index, flags, flags)


def _veth(name: str, index: int, netns: int) -> bytes:
    peer = _link(2) + _attribute(_IFNAME, b"eth0\0") + _attribute(_NET_NS_FD, struct.pack("=i", netns))
    kind = _attribute(1, b"veth") + _attribute(2 | _NESTED, _attribute(1 | _NESTED, peer))
    return _message(
        _NEWLINK, _ACK | _NEW, _link(index) + _attribute(_IFNAME, name.encode() + b"\0") + _attribute(_LINKINFO | _NESTED, kind)
    )


def _address(index: int, address: int) -> bytes:
    packed = address.to_bytes(4, "big")
    body = struct.pack("=BBBBI", socket.AF_INET, 30, 0, 0, index) + _attribute(2, packed) + _attribute(1, packed)
    return _message(_NEWADDR, _ACK | _NEW, body)


def _up(index: int) -> bytes:
    return _message(_NEWLINK, _ACK, _link(index, _UP))


def _exchange(sock: socket.socket, *messages: bytes) -> None:
    sock.send(b"".join(messages))
    waiting = len(messages)
    while waiting:
        data, offset = sock.recv(65536), 0
        while offset < len(data):
            length, kind = struct.unpack_from("=IH", data, offset)
            if kind == _ERROR:
                code = -struct.unpack_from("=i", data, offset + 16)[0]
                if code:
                    raise OSError(code, os.strerror(code))
                waiting -= 1
            offset += (length + 3) & ~3


def _rtnetlink() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)


class Floor:
    """Builds one namespace after the other from the calling thread's."""

    def __init__(self) -> None:
        self._host = _rtnetlink()

    def measure(self) -> dict[str, float]:
        """One namespace up and down again, in milliseconds."""
        index = 1 << 24
        began = time.perf_counter()
        fd, inside = _new_netns()
        gateway, sandbox = _FIRST + 1, _FIRST + 2
        _exchange(self._host, _veth("floor", index, fd), _address(index, gateway), _up(index))
        _exchange(inside, _address(2, sandbox), _up(2), _up(1))
        source = _attribute(1, sandbox.to_bytes(4, "big")) + _attribute(2, gateway.to_bytes(4, "big"))
        self._host.send(_message(_GETROUTE, 0, struct.pack("=BBBBBBBBI", socket.AF_INET, 32, 32, 0, 0, 0, 0, 0, 0) + source))
        self._host.recv(65536)
        up = time.perf_counter()
        _exchange(self._host, _message(_DELLINK, _ACK, _link(index)))
        inside.close()
        os.close(fd)
        return {"floor up": (up - began) * 1e3, "floor down": (time.perf_counter() - up) * 1e3}


def _new_netns() -> tuple[int, socket.socket]:
    made: list[tuple[int, socket.socket]] = []

    def live() -> None:
        libc.unshare(libc.CLONE_NEWNET)
        made.append((os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC), _rtnetlink()))

    thread = threading.Thread(target=live)
    thread.start()
    thread.join()
    return made[0]
