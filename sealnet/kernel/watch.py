"""Tells when to look at a run again: the kernel's notifications of the host's namespace and of each run's own, behind one descriptor."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import select
import socket
import struct
from collections.abc import Callable, Sequence

from sealnet.kernel.netns import Inside
from sealnet.kernel.notices import EVERYTHING, Instruction, Watched, Watchlist, nft_filter
from sealnet.model.plan import Seal

_NETLINK_ROUTE, _NETLINK_NETFILTER = 0, 12
# RTNLGRP_ (linux/rtnetlink.h): LINK, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_IFINFO, IPV4_NETCONF. A run's link has no IPv6.
_HOST_GROUPS = (1, 5, 7, 8, 9, 12, 24)
# In the run's own namespace IPV6_ROUTE, IPV6_RULE and IPV6_NETCONF as well: nobody has anything to change there.
_INSIDE_GROUPS = (*_HOST_GROUPS, 11, 19, 25)
_NFNLGRP_NFTABLES = 7
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 26, 33
_QUEUE_BYTES = 1 << 20
_DATAGRAM_BYTES = 1 << 16
_MOST_DATAGRAMS = 4096
# libnftables can use no descriptor from here on, so these leave the lower ones to it.
_HIGH = 1024
# However many notifications come, they are read this often at most.
REST_S = 0.05


class Watch:
    """Notifications about any number of runs. For one thread at a time, always in the same network namespace: the host's.

    `fd` is readable when there is something for `take`. A notification that was lost (ENOBUFS) counts as one about every run.

    The kernel's filter lets pass what concerns the runs there are. To make it anew for each of a thousand costs more than their launches,
    so one that is for `many` is open from the first change on, until `settle`.
    """

    def __init__(self, *, many: bool = False) -> None:
        self._many = many
        self._sources = select.epoll()
        # While this one rests, what comes stays in the kernel's queues, and nobody wakes up.
        self._ready = select.epoll()
        self._ready.register(self._sources, select.EPOLLIN)
        self.fd = self._ready.fileno()
        self.rests_until: float | None = None
        """When `take` wants to be called without anything to read (time.monotonic)."""
        self._judges: dict[int, tuple[socket.socket, Callable[[bytes], frozenset[str]], Callable[[], frozenset[str]]]] = {}
        self._inside: dict[str, list[int]] = {}
        self._host: list[int] = []
        self._list = Watchlist()
        self._is_settled = False

    def add(self, seal: Seal, inside: Inside, ifindex: int | None) -> None:
        """Watch a run from now on; what happened before is for the caller to look at. Raises OSError."""
        only = frozenset([seal.run_id])
        sockets: list[socket.socket] = inside.call(_open_inside)
        self._inside[seal.run_id] = [self._listen(each, lambda _datagram: only, lambda: only) for each in sockets]
        if seal.subnet is not None and ifindex is not None:
            self._list.add(Watched.of(seal, ifindex))
            self._changed()

    def remove(self, run_id: str) -> None:
        """Watch it no longer. Succeeds if it is not watched."""
        for fd in self._inside.pop(run_id, []):
            self._forget(fd)
        if run_id in self._list:
            self._list.remove(run_id)
            self._changed()

    def close(self) -> None:
        for fd in list(self._judges):
            self._forget(fd)
        self._ready.close()
        self._sources.close()

    def take(self, now: float) -> frozenset[str]:
        """The runs that something was told about since the last time. Never blocks."""
        if self.rests_until is not None:
            if now < self.rests_until:
                return frozenset()
            self.rests_until = None
            self._ready.modify(self._sources, select.EPOLLIN)
        found: frozenset[str] = frozenset()
        ready = self._sources.poll(0)
        for fd, _events in ready:
            found |= self._drain(fd)
        if ready:
            self.rests_until = now + REST_S
            self._ready.modify(self._sources, 0)
        return found

    def _drain(self, fd: int) -> frozenset[str]:
        sock, judge, everyone = self._judges[fd]
        found: frozenset[str] = frozenset()
        for _ in range(_MOST_DATAGRAMS):
            try:
                datagram, _, flags, _ = sock.recvmsg(_DATAGRAM_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                found |= everyone()
                continue
            found |= everyone() if flags & socket.MSG_TRUNC else judge(datagram)
        return found

    def _changed(self) -> None:
        """Judge by the runs there are now, in the kernel's filter as well; without any there is nothing to hear of the host."""
        if not self._list.runs:
            for fd in self._host:
                self._forget(fd)
            self._host, self._is_settled = [], False
            return
        if not self._host:
            judges = (self._list.concerned_by_route, self._list.concerned_by_nft)
            opened = (_open(_NETLINK_ROUTE, _HOST_GROUPS, EVERYTHING if self._many else self._list.route_filter()), _open_nft(nft_filter()))
            self._host = [self._listen(sock, judge, lambda: self._list.all) for sock, judge in zip(opened, judges, strict=True)]
        elif not self._many:
            self._filter(self._list.route_filter())
        elif self._is_settled:
            self._filter(EVERYTHING)
            self._is_settled = False

    def settle(self) -> None:
        """Have the kernel drop what concerns none of the runs there are, once nothing has changed about them for a while."""
        if self._host and not self._is_settled:
            self._filter(self._list.route_filter())
            self._is_settled = True

    def _filter(self, program: Sequence[Instruction]) -> None:
        _attach(self._judges[self._host[0]][0], program)

    def _listen(self, sock: socket.socket, judge: Callable[[bytes], frozenset[str]], everyone: Callable[[], frozenset[str]]) -> int:
        fd = sock.fileno()
        self._judges[fd] = (sock, judge, everyone)
        self._sources.register(fd, select.EPOLLIN)
        return fd

    def _forget(self, fd: int) -> None:
        self._sources.unregister(fd)
        self._judges.pop(fd)[0].close()


def _open_inside() -> list[socket.socket]:
    """Called by a thread in the run's namespace."""
    return [_open(_NETLINK_ROUTE, _INSIDE_GROUPS), _open_nft()]


def _open_nft(program: Sequence[Instruction] = ()) -> socket.socket:
    return _open(_NETLINK_NETFILTER, (_NFNLGRP_NFTABLES,), program)


def _open(protocol: int, groups: Sequence[int], program: Sequence[Instruction] = ()) -> socket.socket:
    """A netlink socket that hears these groups, where there is a `program` only what that lets pass."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol) as low:
        if program:
            _attach(low, program)
            # In a container root may not have more than the host's limit.
            with contextlib.suppress(PermissionError):
                low.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _QUEUE_BYTES)
        low.bind((0, sum(1 << group - 1 for group in groups)))
        fd = low.fileno()
        # A process that may not have as many descriptors keeps the lower one.
        with contextlib.suppress(OSError):
            return socket.socket(fileno=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH))
        return socket.socket(fileno=low.detach())


def _attach(sock: socket.socket, program: Sequence[Instruction]) -> None:
    """SO_ATTACH_FILTER (socket(7)); it takes the place of the one before."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    # struct sock_fprog: the number of instructions and where they are.
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))
