"""What the host uses of IPv4, known from one reading on by the kernel's notifications: a thousand runs have 4,000 routes and addresses."""

from __future__ import annotations

import errno
import socket
import time

from sealnet.kernel import listeners, netlink, routes
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.notices import EVERYTHING
from sealnet.model.subnets import Occupant

# RTNLGRP_IPV4_IFADDR and RTNLGRP_IPV4_ROUTE (linux/rtnetlink.h).
_GROUPS = (5, 7)
_DATAGRAM_BYTES = 1 << 16
# Routes that go with their link are not told of (fib_sync_down_dev() in net/ipv4/fib_semantics.c). They count for so long, and no longer.
_TRUSTED_S = 60.0


class Taken:
    """For whoever holds the lock under which subnets are reserved, always in the host's namespace.

    Only what could make the answer larger or smaller has everything read anew: routes and addresses of runs' own links do not, wherever
    they lie within a /30 that is reserved. A notification that was lost does.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._known: list[Occupant] = []
        self._ranges: frozenset[tuple[int, int]] = frozenset()
        self._until = 0.0

    def see(self, nl: Netlink, blocks: frozenset[int], *, anew: bool = False) -> list[Occupant]:
        """As `sealnet.kernel.routes.see_taken`; `anew`, or else perhaps with what has gone since."""
        if self._socket is None:
            self._socket = listeners.listen(listeners.ROUTE, _GROUPS, EVERYTHING)
        # What is heard is not heard again: should anything fail from here on, everything is read anew the next time.
        until, self._until = self._until, 0.0
        # Before the reading: what comes during it is heard the next time.
        changed = self._has_changed(self._socket, blocks)
        if anew or changed or time.monotonic() >= until:
            self._known = routes.see_others(nl, blocks)
            self._ranges = frozenset((one.first, one.last) for one in self._known)
            until = time.monotonic() + _TRUSTED_S
        self._until = until
        return [*self._known, *routes.see_resolvers()]

    def _has_changed(self, sock: socket.socket, blocks: frozenset[int]) -> bool:
        changed = False
        while True:
            try:
                datagram, _, flags, _ = sock.recvmsg(_DATAGRAM_BYTES)
            except BlockingIOError:
                return changed
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                changed = True
                continue
            changed = changed or bool(flags & socket.MSG_TRUNC)
            for kind, _flags, _sequence, body in netlink.messages(datagram):
                changed = changed or routes.has_changed(kind, body, blocks, self._ranges)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
