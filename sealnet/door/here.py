"""What the host itself says of an address, at this moment: its own, another run's, or somewhere out there."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from functools import lru_cache

from sealnet.kernel.netlink import GETROUTE, NEWROUTE, attribute, attributes
from sealnet.model.destination import Address
from sealnet.model.names import LINK_PREFIX

_IFREQ = struct.Struct("=16si20x")
_SIOCGIFNAME = 0x8910
_HEADER = struct.Struct("=IHHII")
_RTMSG = struct.Struct("=8BI")
_INT = struct.Struct("=i")
_REQUEST = 1
_DST, _OIF, _GATEWAY, _VIA = 1, 4, 5, 18
# rtnetlink(7), rtm_type.
_UNICAST = 1
# No route, or one that discards: unreachable, prohibit, blackhole, throw (ip-route(8)).
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL, errno.EAGAIN)
_WORDS = {2: "the host's own", 3: "broadcast", 4: "the host's own", 5: "multicast"}


class Here:
    """Asks the kernel for its own route, once for each dial: one request, one answer that is there when the request has been sent."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._sequence = 0

    def refusal(self, asked: Address) -> str | None:
        """None also for what has no route: that fails by itself. Raises OSError."""
        self._sequence = self._sequence % 0xFFFF_FFFF + 1
        family = socket.AF_INET if asked.version == 4 else socket.AF_INET6
        body = _RTMSG.pack(family, asked.max_prefixlen, *[0] * 7) + attribute(_DST, asked.packed)
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), GETROUTE, _REQUEST, self._sequence, 0) + body)
        while True:
            reply = self._socket.recv(8192)
            _length, kind, _flags, sequence, _port = _HEADER.unpack_from(reply)
            if sequence == self._sequence:
                body = reply[_HEADER.size :]
                return self._judge(body) if kind == NEWROUTE else None if -_INT.unpack_from(body)[0] in _NO_ROUTE else "unreachable"

    def _judge(self, route: bytes) -> str | None:
        kind, link = _read(route)
        if kind != _UNICAST:
            return _WORDS.get(kind, "unreachable")
        if link is None:
            return None
        try:
            # As if_indextoname(3), which makes a socket for it.
            named = fcntl.ioctl(self._socket, _SIOCGIFNAME, _IFREQ.pack(b"", link))
        except OSError:
            return None
        name = named[:16].rstrip(b"\0").decode("ascii", "replace")
        return "another run's" if name.startswith(LINK_PREFIX) else "the host's own" if name == "lo" else None


@lru_cache(64)  # The kernel says the same of one address most of the time.
def _read(route: bytes) -> tuple[int, int | None]:
    """Its type, and the link that it leads to directly. A run is on a link of its own, and never behind a gateway."""
    found = attributes(route, _RTMSG.size)
    is_direct = _OIF in found and _GATEWAY not in found and _VIA not in found
    return _RTMSG.unpack_from(route)[7], _INT.unpack(found[_OIF])[0] if is_direct else None
