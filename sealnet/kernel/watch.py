"""Tells when to look at a run again: the kernel's notifications of the host's namespace and of each run's own, behind one descriptor."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Callable, Mapping, Sequence

from sealnet.kernel import listeners
from sealnet.kernel.listeners import Ancillary, Everywhere
from sealnet.kernel.netns import Inside
from sealnet.kernel.notices import EVERYTHING, Instruction, Watched, Watchlist, nft_filter
from sealnet.model.plan import Seal

_Judge = Callable[[bytes, Ancillary], frozenset[str]]

_DATAGRAM_BYTES = 1 << 16
_MOST_DATAGRAMS = 4096
# However many notifications come, they are read this often at most.
REST_S = 0.05


class Watch:
    """Notifications about any number of runs. For one thread at a time, always in the same network namespace: the host's.

    `fd` is readable when there is something for `take`. A notification that was lost (ENOBUFS) counts as one about every run.

    The kernel's filter lets pass what concerns the runs there are. To make it anew for each of a thousand costs more than their launches,
    so one that is for `many` is open from the first change on, until `settle`; and it hears of the runs' own namespaces by two sockets for
    all of them.
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
        self._judges: dict[int, tuple[socket.socket, _Judge, Callable[[], frozenset[str]]]] = {}
        self._inside: dict[str, list[int]] = {}
        self._everywhere: Everywhere | None = None
        self._is_shared = many
        self._host: list[int] = []
        self._list = Watchlist()
        self._is_settled = False

    def add(self, seal: Seal, inside: Inside, ifindex: int | None) -> None:
        """Watch a run from now on; what happened before is for the caller to look at. Raises OSError, and then it is not watched."""
        try:
            everywhere = self._listen_everywhere()
            if everywhere is not None:
                everywhere.add(seal.run_id, inside.fd)
            else:
                only = frozenset([seal.run_id])
                sockets: list[socket.socket] = inside.call(listeners.listen_inside)
                self._inside[seal.run_id] = self._listen(dict.fromkeys(sockets, lambda _datagram, _ancillary: only), lambda: only)
            if seal.subnet is not None and ifindex is not None:
                self._list.add(Watched.of(seal, ifindex))
                self._changed()
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(seal.run_id)
            raise

    def remove(self, run_id: str) -> None:
        """Watch it no longer. Succeeds if it is not watched."""
        for fd in self._inside.pop(run_id, []):
            self._forget(fd)
        if self._everywhere is not None:
            self._everywhere.remove(run_id)
        if run_id in self._list:
            self._list.remove(run_id)
            self._changed()

    def close(self) -> None:
        for fd in list(self._judges):
            self._forget(fd)
        if self._everywhere is not None:
            self._everywhere.close()
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
                datagram, ancillary, flags, _ = sock.recvmsg(_DATAGRAM_BYTES, listeners.ANCILLARY_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                found |= everyone()
                continue
            found |= everyone() if flags & socket.MSG_TRUNC else judge(datagram, ancillary)
        return found

    def _changed(self) -> None:
        """Judge by the runs there are now, in the kernel's filter as well; without any there is nothing to hear of the host."""
        if not self._list.runs:
            for fd in self._host:
                self._forget(fd)
            self._host, self._is_settled = [], False
            return
        if not self._host:
            program = EVERYTHING if self._many else self._list.route_filter()
            route, nft = listeners.listen(listeners.ROUTE, listeners.HOST_GROUPS, program), listeners.listen_nft(nft_filter())
            judged = {
                route: lambda datagram, _: self._list.concerned_by_route(datagram),
                nft: lambda datagram, _: self._list.concerned_by_nft(datagram),
            }
            self._host = self._listen(judged, lambda: self._list.all)
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
        listeners.attach(self._judges[self._host[0]][0], program)

    def _listen_everywhere(self) -> Everywhere | None:
        if self._everywhere is None and self._is_shared:
            try:
                made = Everywhere()
            except OSError as error:
                # EPERM: a service that was given no CAP_NET_BROADCAST. Whatever else it is, there may be room for two in the run's own.
                self._is_shared = error.errno != errno.EPERM
                return None
            try:
                self._listen(dict.fromkeys(made.sockets, lambda _, ancillary: made.concerned(ancillary)), lambda: made.all)
            except BaseException:
                made.close()
                raise
            self._everywhere = made
        return self._everywhere

    def _listen(self, judged: Mapping[socket.socket, _Judge], everyone: Callable[[], frozenset[str]]) -> list[int]:
        """To all of these sockets; or to none, and then they are closed."""
        fds: list[int] = []
        try:
            for sock, judge in judged.items():
                fd = sock.fileno()
                self._sources.register(fd, select.EPOLLIN)
                self._judges[fd] = (sock, judge, everyone)
                fds.append(fd)
        except BaseException:
            for fd in fds:
                self._forget(fd)
            for sock in judged:
                sock.close()
            raise
        return fds

    def _forget(self, fd: int) -> None:
        self._sources.unregister(fd)
        self._judges.pop(fd)[0].close()
