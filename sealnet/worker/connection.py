"""One caller's connection: calls with their descriptors in, replies out, and nothing of it without a limit."""

from __future__ import annotations

import array
import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass

from sealnet.model import varlink
from sealnet.model.calling import MOST_FDS, Peer
from sealnet.model.rates import Count, Rate
from sealnet.model.varlink import Call, Malformed
from sealnet.worker import closing

_CHUNK = 65536
# A caller that sends calls without reading answers.
_MOST_WAITING = 8
# What a caller does not read; whoever waits for it gives up after a while.
_MOST_UNSENT = 1 << 18
_UNREAD_S = 30.0
_IDLE_S = 60.0
# What a call costs beside its bytes, and how long who has none left is not listened to.
_CALL_BYTES = 4096
_PAUSE_S = 0.25


class Gone(Exception):
    """The caller's end of the connection is closed, or was closed for what it did."""


@dataclass(frozen=True, slots=True)
class Loads:
    """What all connections of a user together may put on the worker: bytes and descriptors of calls that wait, bytes per second."""

    held_bytes: Count
    held_fds: Count
    bytes_rate: Rate


def peer_of(sock: socket.socket) -> Peer:
    """struct ucred: who had connected, whoever holds the socket by now."""
    pid, uid, gid = struct.unpack("=iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(uid=uid, gid=gid, pid=pid)


class Connection:
    """Used in the event loop's thread. `gone` is set when the caller has gone, also while one of its calls is answered.

    `loads` are shared by those of all callers, and None for root.
    """

    def __init__(self, sock: socket.socket, peer: Peer, loads: Loads | None = None) -> None:
        self.peer = peer
        self.gone = asyncio.Event()
        self.fault: str | None = None
        """What it was closed for, where that was the caller's doing."""
        self._loads = loads
        # Bytes and descriptors: of the call that is being answered, and of all that is kept for the caller.
        self._taken = self._weight = (0, 0)
        self._resting: asyncio.TimerHandle | None = None
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._frames = varlink.Frames()
        self._fds: list[int] = []
        self._waiting: deque[tuple[Call, list[int], int]] = deque()
        self._arrived, self._sent = asyncio.Event(), asyncio.Event()
        self._unsent = bytearray()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._read)

    async def next(self) -> tuple[Call, list[int]]:
        """The next call, with descriptors that are the taker's to close. The one before has been answered. Raises Gone."""
        self.lighten()
        try:
            async with asyncio.timeout(_IDLE_S):
                while not self._waiting:
                    if self.gone.is_set():
                        raise Gone
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            self.drop("it has asked for nothing")
            raise Gone from None
        call, fds, size = self._waiting.popleft()
        self._taken = (size, len(fds))
        return call, fds

    def lighten(self) -> None:
        """Nothing is kept any more of the call that was taken last."""
        self._taken = (0, 0)
        self._weigh()

    def _weigh(self) -> bool:
        """Whether its user may have that much waiting, with what its other connections have."""
        waiting = [(size, len(fds)) for _call, fds, size in self._waiting]
        parts = [self._taken, (self._frames.size_bytes, len(self._fds)), *waiting]
        weight = (sum(size for size, _fds in parts), sum(fds for _size, fds in parts))
        if self._loads is None:
            return True
        counts = (self._loads.held_bytes, self._loads.held_fds)
        for count, before in zip(counts, self._weight, strict=True):
            count.give_back(self.peer.uid, before)
        self._weight = (0, 0)
        if not all(count.of(self.peer.uid) + one <= count.most for count, one in zip(counts, weight, strict=True)):
            return False
        for count, one in zip(counts, weight, strict=True):
            count.take(self.peer.uid, one)
        self._weight = weight
        return True

    async def send(self, data: bytes) -> None:
        """Raises Gone, also where the caller reads nothing for long."""
        self._require()
        self._unsent += data
        self._write()
        try:
            async with asyncio.timeout(_UNREAD_S):
                while len(self._unsent) > _MOST_UNSENT:
                    self._require()
                    self._sent.clear()
                    await self._sent.wait()
        except TimeoutError:
            self.drop("it reads nothing")
            raise Gone from None

    async def flush(self) -> None:
        """Before it is closed: what was said last is read, or given up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_UNREAD_S):
                while self._unsent and self._sock.fileno() >= 0:
                    self._sent.clear()
                    await self._sent.wait()

    def drop(self, fault: str | None = None) -> None:
        """Close it. Once is enough."""
        if self._sock.fileno() < 0:
            return
        self.fault = fault
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        # He is told at once. What is in its queue may keep whoever closes it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._close([self._sock.detach()])
        self._close(self._fds)
        for _call, fds, _size in self._waiting:
            self._close(fds)
        self._waiting.clear()
        self._frames = varlink.Frames()
        self._unsent.clear()
        self._weigh()
        for event in (self.gone, self._arrived, self._sent):
            event.set()

    def _close(self, fds: list[int]) -> None:
        closing.close_all(self.peer.uid, fds)

    def _require(self) -> None:
        if self._sock.fileno() < 0:
            raise Gone

    def _listen(self) -> None:
        self._resting = None
        self._loop.add_reader(self._sock.fileno(), self._read)

    def _read(self) -> None:
        if not self._spend(0):
            # The others are to be heard as well.
            self._loop.remove_reader(self._sock.fileno())
            self._resting = self._loop.call_later(_PAUSE_S, self._listen)
            return
        if closing.waiting(self.peer.uid) > closing.MOST:
            self.drop("what its user passes is not to be closed")
            return
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(_CHUNK, socket.CMSG_SPACE(4 * MOST_FDS), socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._hang_up()
            return
        fds = _descriptors(ancillary)
        if flags & socket.MSG_CTRUNC or len(self._fds) + len(fds) > MOST_FDS:
            self._close(fds)
            self.drop("it passes too many descriptors")
        elif not data:
            self._close(fds)
            self._hang_up()
        else:
            self._take(data, fds)

    def _spend(self, size_bytes: int) -> bool:
        return self._loads is None or self._loads.bytes_rate.take(self.peer.uid, time.monotonic(), size_bytes)

    def _take(self, data: bytes, fds: list[int]) -> None:
        """The kernel ends a read behind the bytes that descriptors came with (unix(7)), so they belong to whose byte is the last."""
        try:
            calls = [(varlink.parse_call(message), len(message)) for message in self._frames.feed(data)]
        except Malformed as fault:
            self._close(fds)
            self.drop(str(fault))
            return
        self._spend(len(data) + _CALL_BYTES * len(calls))
        for at, (call, size) in enumerate(calls):
            belonging, self._fds = self._fds, []
            if at == len(calls) - 1 and self._frames.size_bytes == 0:
                belonging, fds = belonging + fds, []
            self._waiting.append((call, belonging, size))
        self._fds += fds
        if len(self._waiting) > _MOST_WAITING:
            self.drop("it waits for no answer")
        elif not self._weigh():
            self.drop("it and its user's others say more at once than may wait")
        self._arrived.set()

    def _hang_up(self) -> None:
        """The caller sends no more, which ends what it has asked for; what it is told of that it may still read."""
        self._loop.remove_reader(self._sock.fileno())
        self.gone.set()
        self._arrived.set()

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent, socket.MSG_NOSIGNAL)]
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._sock.fileno(), self._write)
            return
        except OSError:
            self.drop()
            return
        finally:
            self._sent.set()
        self._loop.remove_writer(self._sock.fileno())


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
