"""Listens for callers, and answers each in a task of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from pathlib import Path

from sealnet.errors import CannotSeal
from sealnet.kernel import locks
from sealnet.model.calling import SOCKET
from sealnet.model.rates import Count, Rate
from sealnet.worker.connection import Connection, Gone, Loads, peer_of
from sealnet.worker.log import log
from sealnet.worker.service import Service

_BACKLOG = 1024
# Of all callers together, and of one: a connection for each run, some for what is asked meanwhile.
_MOST_CONNECTIONS = 16_384
# Of one user: bytes and descriptors of calls that wait, for each of its connections; bytes per second, and at once.
_BYTES_EACH, _FDS_EACH = 32_768, 4
_BYTES_PER_S, _BYTES_BURST = 4 << 20, 16 << 20
_MOST_RATES = 1000
_FULL_S = 0.1
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def bind(directory: Path, gid: int | None) -> socket.socket:
    """The worker's socket in the state directory. Raises CannotSeal where it cannot be had."""
    return listen_at(directory / SOCKET, gid)


def listen_at(path: Path, gid: int | None) -> socket.socket:
    """A socket for root, and for one group. It appears whole, with its mode, in place of a socket that is there, and of nothing else.

    Raises CannotSeal where it cannot be had.
    """
    fresh = path.with_name(f".{path.name}.new")
    if os.path.lexists(path) and not path.is_socket():
        raise CannotSeal(f"cannot listen at {path}: something else is there")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        fresh.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            sock.bind(str(fresh))
        finally:
            os.umask(before)
        if gid is not None:
            os.chown(fresh, 0, gid)
            os.chmod(fresh, 0o660)
        sock.listen(_BACKLOG)
        os.rename(fresh, path)
    except OSError as e:
        sock.close()
        raise CannotSeal(f"cannot listen at {path}: {e.strerror}") from e
    return sock


def only_one(directory: Path) -> int:
    """The lock that says that a worker serves this state directory. Raises CannotSeal where one does already."""
    lock = locks.take(directory / "worker.lock")
    if lock is None:
        raise CannotSeal(f"cannot start the worker: one runs already ({directory / SOCKET})", hint="systemctl status sealnet-worker")
    return lock


class Server:
    """Used in the event loop's thread."""

    def __init__(self, sock: socket.socket, service: Service, most_each: int) -> None:
        self._sock, self._service = sock, service
        self._held = Count(most_each)
        self._loads = Loads(Count(_BYTES_EACH * most_each), Count(_FDS_EACH * most_each), Rate(_BYTES_PER_S, _BYTES_BURST))
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self._loop = asyncio.get_running_loop()
        self._resting: asyncio.TimerHandle | None = None
        sock.setblocking(False)

    def start(self) -> None:
        self._resting = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    async def close(self) -> None:
        """Callers are told nothing: they come back to the next worker, whose runs go on."""
        self._loop.remove_reader(self._sock.fileno())
        if self._resting is not None:
            self._resting.cancel()
        self._sock.close()
        await self._service.settle()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if error.errno in _FULL:
                log("warning", "full", reason=error.strerror)
                self._loop.remove_reader(self._sock.fileno())
                self._resting = self._loop.call_later(_FULL_S, self.start)
            return
        peer = peer_of(sock)
        if len(self._tasks) >= _MOST_CONNECTIONS or (not peer.is_root and not self._held.take(peer.uid)):
            log("warning", "turned-away", uid=peer.uid, pid=peer.pid, reason="too many connections")
            sock.close()
            return
        if len(self._loads.bytes_rate) > _MOST_RATES:
            self._loads.bytes_rate.forget_full(time.monotonic())
        connection = Connection(sock, peer, None if peer.is_root else self._loads)
        task = self._loop.create_task(self._serve(connection))
        self._tasks[task] = connection
        task.add_done_callback(self._forget)

    async def _serve(self, connection: Connection) -> None:
        try:
            while True:
                await self._service.answer(connection, *await connection.next())
        except Gone:
            await connection.flush()
        finally:
            connection.drop(connection.fault)
            connection.lighten()

    def _forget(self, task: asyncio.Task[None]) -> None:
        connection = self._tasks.pop(task)
        if not connection.peer.is_root:
            self._held.give_back(connection.peer.uid)
        if connection.fault is not None:
            log("warning", "dropped", uid=connection.peer.uid, pid=connection.peer.pid, reason=connection.fault)
