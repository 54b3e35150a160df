"""Tells the worker's metrics to who asks over HTTP, at a Unix socket of root's or a loopback port.

What is understood of a request is its first line, and by one regular expression: whoever may connect to a loopback port talks to root here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import socket
from pathlib import Path

from sealnet.errors import CannotSeal, KernelRefused
from sealnet.kernel import sockets
from sealnet.model.endpoint import Endpoint
from sealnet.records import State
from sealnet.worker.metrics import CONTENT_TYPE, Now
from sealnet.worker.runs import Runs
from sealnet.worker.server import listen_at

# Of all who ask together; Prometheus asks once in 15 s or so. Where more come, who has been there longest has to go.
_MOST = 8
# One is taken, and then there is a rest, however many wait: what anybody of this host may ask for is to cost the worker little, and who was
# taken has the time that _MOST others take.
_REST_S = 0.01
# Whoever comes last of so many is taken within a second, and Prometheus waits for ten.
_BACKLOG = 100
# A head that is longer, or takes longer, is none; and who does not read what it asked for does not get all of it.
_HEAD_BYTES, _WITHIN_S = 4096, 5.0
_REQUEST = re.compile(rb"(GET|HEAD) (/\S*) HTTP/1\.[01]\r?\n", re.ASCII)
_PATHS = (b"/", b"/metrics")


def listen(at: Endpoint) -> socket.socket:
    """Raises CannotSeal: others have it, or it cannot be made."""
    if at.path is not None:
        return listen_at(Path(at.path), None)
    sock = socket.socket(socket.AF_INET6 if ":" in at.address else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # A worker that follows another takes its place at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((at.address, at.port))
        sock.listen(_BACKLOG)
    except OSError as e:
        sock.close()
        raise CannotSeal(f"cannot listen at {at}: {e.strerror}") from e
    return sock


class Scrapes:
    """For the event loop's thread. `shut_out` is the uid of doors: what a payload asks through its relay is not answered."""

    def __init__(self, sock: socket.socket, runs: Runs, state: State, *, most: int, shut_out: int) -> None:
        self._sock, self._runs, self._state = sock, runs, state
        self._most, self._shut_out = most, shut_out
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.get_running_loop()
        self._resting: asyncio.TimerHandle | None = None
        sock.setblocking(False)

    def start(self) -> None:
        self._resting = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Whoever is being answered is left with a part: the worker does not wait for it."""
        self._loop.remove_reader(self._sock.fileno())
        if self._resting is not None:
            self._resting.cancel()
        self._sock.close()
        for task in self._open:
            task.cancel()

    def _accept(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._resting = self._loop.call_later(_REST_S, self.start)
        try:
            sock, _ = self._sock.accept()
        except OSError:
            # It has gone, or there is no descriptor for it now.
            return
        sock.setblocking(False)
        if len(self._open) >= _MOST:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._serve(sock))
        self._open[task] = None
        task.add_done_callback(lambda task: self._open.pop(task, None))

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=_HEAD_BYTES)
        # drain() is to wait until the kernel has all of it.
        writer.transport.set_write_buffer_limits(0)
        try:
            # Who says too much, or takes too long, or has gone: there is nobody to tell.
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_WITHIN_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(head, writer))
                    await writer.drain()
        finally:
            writer.transport.abort()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> bytes:
        asked = _REQUEST.match(head)
        if asked is None:
            return _response("400 Bad Request")
        if asked[2].partition(b"?")[0] not in _PATHS:
            return _response("404 Not Found")
        if not self._is_for(writer):
            return _response("403 Forbidden")
        text = self._runs.metrics.render(await self._now()).encode()
        return _response("200 OK", text, is_head=asked[1] == b"HEAD")

    def _is_for(self, writer: asyncio.StreamWriter) -> bool:
        """Whether it is not a door's connection: a relay may lead to any port of this host (`--broker tcp:127.0.0.1:PORT`)."""
        if self._sock.family == socket.AF_UNIX:
            return True
        local, remote = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
        if local is None or remote is None:
            # It was reset before it was taken; what it has asked can be read all the same.
            return False
        try:
            uid = sockets.owner(remote[:2], local[:2])
        except (KernelRefused, OSError):
            uid = None
        return uid is not None and uid != self._shut_out

    async def _now(self) -> Now:
        reserved, open_fds, resident_bytes = await asyncio.get_running_loop().run_in_executor(None, self._look)
        runs = self._runs
        return Now(
            records=runs.records(),
            launching=runs.launching,
            helper_starts=runs.helper_starts,
            crew_died=runs.crew.died,
            reserved=reserved,
            most=self._most,
            open_fds=open_fds,
            resident_bytes=resident_bytes,
        )

    def _look(self) -> tuple[int, int, int]:
        """In another thread: subnets, descriptors and memory in use."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return len(self._state.reserved()), len(os.listdir("/proc/self/fd")), pages * resource.getpagesize()


def _response(status: str, body: bytes = b"", *, is_head: bool = False) -> bytes:
    body = body if body or status.startswith("200") else f"{status}\n".encode()
    kind = CONTENT_TYPE if status.startswith("200") else "text/plain"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if is_head else body)
