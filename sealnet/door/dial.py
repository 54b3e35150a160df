"""Connecting to the first of several addresses that answers (RFC 8305, "happy eyeballs")."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence

from sealnet.model.destination import Address

DIAL_S = 10.0
_STAGGER_S = 0.25
_UNDER_WAY = (errno.EINPROGRESS, errno.EALREADY)


class DialFailed(Exception):
    """No address answered. The text is the last one's."""

    def __init__(self, text: str, *, in_time: bool = True) -> None:
        super().__init__(text)
        self.in_time = in_time


def _begin(asked: Address, port: int) -> tuple[socket.socket, bool]:
    """A socket, and whether it is connected already. Raises OSError."""
    sock = socket.socket(socket.AF_INET if asked.version == 4 else socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        target = (str(asked), port)
        code = sock.connect_ex(target)
        if code == errno.EINPROGRESS:
            # A peer on this machine has answered by now.
            code = sock.connect_ex(target)
        if code not in (0, errno.EISCONN, *_UNDER_WAY):
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock, code not in _UNDER_WAY


async def _finish(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Wait until it is connected. Raises OSError."""
    future: asyncio.Future[None] = loop.create_future()
    fd = sock.fileno()
    loop.add_writer(fd, _tell, future)
    try:
        await future
    finally:
        loop.remove_writer(fd)
    if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))


def _tell(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _attempt(loop: asyncio.AbstractEventLoop, asked: Address, port: int) -> socket.socket:
    sock, connected = _begin(asked, port)
    if not connected:
        try:
            await _finish(loop, sock)
        except BaseException:
            sock.close()
            raise
    return sock


def interleaved(addresses: Sequence[Address]) -> list[Address]:
    """The families in turn, the first one's first (RFC 8305 4)."""
    first = [each for each in addresses if each.version == addresses[0].version]
    others = [each for each in addresses if each.version != addresses[0].version]
    mixed = []
    for index in range(max(len(first), len(others))):
        mixed += first[index : index + 1] + others[index : index + 1]
    return mixed


async def dial(loop: asyncio.AbstractEventLoop, addresses: Sequence[Address], port: int) -> tuple[socket.socket, Address]:
    """Raises DialFailed. How long it may take is the caller's to say: it ends cleanly when it is cancelled."""
    if len(addresses) == 1:
        try:
            return await _attempt(loop, addresses[0], port), addresses[0]
        except OSError as e:
            raise DialFailed(_text(e), in_time=e.errno != errno.ETIMEDOUT) from None

    waiting = interleaved(addresses)
    attempts: dict[asyncio.Task[socket.socket], Address] = {}
    failure = DialFailed("there is no address")
    try:
        while waiting or attempts:
            if waiting:
                asked = waiting.pop(0)
                attempts[loop.create_task(_attempt(loop, asked, port))] = asked
            done, _ = await asyncio.wait(attempts, timeout=_STAGGER_S if waiting else None, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                asked = attempts.pop(task)
                try:
                    return task.result(), asked
                except OSError as e:
                    failure = DialFailed(_text(e), in_time=e.errno != errno.ETIMEDOUT)
        raise failure
    finally:
        for task in attempts:
            task.cancel()
            # One that was connected in the same moment is not wanted.
            task.add_done_callback(_discard)


def _discard(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _text(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else type(error).__name__
