"""Bytes between two sockets, both ways: copied while they are few, spliced while they are many, and each end as the other one ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Callable
from time import monotonic

from sealnet.door.ready import ENDED, FAILED, READ_WRITE, WRITABLE, Ready, reset

# Without a byte in either direction.
IDLE_S = 600.0
_BUFFER_BYTES = 64 * 1024
_PIPE_BYTES = 256 * 1024
_SPARE_PIPES = 32
# One tunnel at full speed leaves the others their turn.
_ROUNDS = 4
_SPLICE = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK

# Of all tunnels: nothing stays in it from one call to the next.
_BUFFER = bytearray(_BUFFER_BYTES)
_VIEW = memoryview(_BUFFER)
_pipes: list[tuple[int, int]] = []


def _take_pipe() -> tuple[int, int] | None:
    if _pipes:
        return _pipes.pop()
    try:
        pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # Without one the bytes are copied.
        return None
    # Refused beyond what one user may have in pipes; a small one does, too.
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return pipe


def _give_pipe(pipe: tuple[int, int], *, is_empty: bool) -> None:
    if is_empty and len(_pipes) < _SPARE_PIPES:
        _pipes.append(pipe)
    else:
        for fd in pipe:
            os.close(fd)


class Way:
    """One direction of a tunnel. What was read is written before more is read."""

    __slots__ = (
        "_held",
        "_is_ended",
        "_pipe",
        "_piped",
        "_source",
        "_target",
        "_tunnel",
        "bytes",
        "has_end",
        "is_blocked",
        "is_done",
        "look",
    )

    def __init__(self, tunnel: Tunnel, source: socket.socket, target: socket.socket) -> None:
        self._tunnel = tunnel
        self._source = source
        self._target = target
        self._held: bytes | memoryview = b""
        self._pipe: tuple[int, int] | None = None
        self._piped = 0
        self._is_ended = False
        self.bytes = 0
        # Sees all that is read until it is None: gives what of it may go on.
        self.look: Callable[[bytes, bool], bytes] | None = None
        # The source's end may be right behind what there is to read, and would not be told of again.
        self.has_end = False
        # The target takes no more: nothing is read until it does.
        self.is_blocked = False
        self.is_done = False

    def start(self, early: bytes, *, is_dry: bool) -> None:
        """`early` was read from the source already. `is_dry`: there was no more, and what comes is told of."""
        # Else nobody knows yet whether it is.
        self.has_end = not is_dry
        try:
            self._pass(self.look(early, False) if self.look and early else early)
        except OSError:
            self._tunnel.cut()
        if not is_dry and not self._tunnel.is_over:
            self.read_on()

    def read_on(self) -> None:
        """All that there is, as long as the target takes it."""
        if self.is_blocked or self.is_done:
            return
        try:
            for _ in range(_ROUNDS):
                if not (self._copy() if self._pipe is None else self._splice(self._pipe)):
                    return
        except (BlockingIOError, InterruptedError):
            self.has_end = False
            if self._pipe is not None and not self._piped:
                _give_pipe(self._pipe, is_empty=True)
                self._pipe = None
        except OSError:
            self._tunnel.cut()
        else:
            self._tunnel.loop.call_soon(self._read_on_later)

    def _read_on_later(self) -> None:
        if not self._tunnel.is_over:
            self.read_on()

    def _copy(self) -> bool:
        """Whether there may be more at once."""
        count = self._source.recv_into(_BUFFER)
        if not count:
            self._is_ended = True
        if self.look is None:
            data: bytes | memoryview = _VIEW[:count]
        else:
            data = self.look(bytes(_VIEW[:count]), not count)
            if self._tunnel.is_over:
                return False
        if not self._pass(data):
            return False
        if self._is_ended:
            self._end()
            return False
        if count < _BUFFER_BYTES:
            return self.has_end
        if self.look is None:
            self._pipe = _take_pipe()
        return True

    def _pass(self, data: bytes | memoryview) -> bool:
        """Whether the target has taken all of it."""
        if not data:
            return True
        sent = self._send(data)
        if sent == len(data):
            return True
        self._held = bytes(data[sent:])
        self._block()
        return False

    def _splice(self, pipe: tuple[int, int]) -> bool:
        count = os.splice(self._source.fileno(), pipe[1], _PIPE_BYTES, flags=_SPLICE)
        if not count:
            self._end()
            return False
        self._piped = count
        if not self._drain(pipe):
            self._block()
            return False
        return True

    def _send(self, data: bytes | memoryview) -> int:
        try:
            sent = self._target.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        self.bytes += sent
        return sent

    def _drain(self, pipe: tuple[int, int]) -> bool:
        """Whether the pipe is empty."""
        try:
            while self._piped:
                count = os.splice(pipe[0], self._target.fileno(), self._piped, flags=_SPLICE)
                self._piped -= count
                self.bytes += count
        except (BlockingIOError, InterruptedError):
            return False
        return True

    def _block(self) -> None:
        """The target takes no more: read on when it has taken what there is."""
        self.is_blocked = True
        self._tunnel.ready.rearm(self._target, READ_WRITE)

    def write_on(self) -> None:
        """The target takes more."""
        try:
            while self._held:
                sent = self._send(self._held)
                if not sent:
                    return
                self._held = self._held[sent:]
            if self._pipe is not None and self._piped and not self._drain(self._pipe):
                return
        except OSError:
            self._tunnel.cut()
            return
        self.is_blocked = False
        if self._is_ended:
            self._end()
        else:
            self.read_on()

    def _end(self) -> None:
        """The source has sent its last byte, and it has been passed on."""
        self._is_ended = self.is_done = True
        tunnel = self._tunnel
        if tunnel.up.is_done and tunnel.down.is_done:
            # Nothing is unread, so this says the same as a shutdown.
            tunnel.end()
            return
        try:
            self._target.shutdown(socket.SHUT_WR)
        except OSError:
            tunnel.cut()
            return
        self.release()

    def release(self) -> None:
        if self._pipe is not None:
            _give_pipe(self._pipe, is_empty=not self._piped)
            self._pipe = None


class Tunnel:
    """Owns both sockets from now on. `ended` is called once, when both are closed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, ready: Ready, client: socket.socket, server: socket.socket, ended: Callable[[], None]
    ) -> None:
        self.loop = loop
        self.ready = ready
        self.is_over = False
        self._used = monotonic()
        self._client = client
        self._server = server
        self._ended = ended
        self.up = Way(self, client, server)
        self.down = Way(self, server, client)

    def start(self, early: bytes = b"", *, is_dry: bool = False, is_shared: bool = False) -> None:
        """`early` came from the client already. `is_dry`: that was all, and nothing was told of it since. `is_shared` is the server's."""
        self.ready.hand_over(self._client, self._client_ready)
        self.ready.watch(self._server, self._server_ready, is_shared=is_shared)
        self.up.start(early, is_dry=is_dry)

    def _client_ready(self, events: int) -> None:
        self._passes(events, self.up, self.down)

    def _server_ready(self, events: int) -> None:
        self._passes(events, self.down, self.up)

    def _passes(self, events: int, from_it: Way, to_it: Way) -> None:
        """Something has happened to one of the sockets."""
        if events & FAILED:
            self.cut()
            return
        self._used = monotonic()
        if events & ENDED:
            from_it.has_end = True
        if events & WRITABLE and to_it.is_blocked:
            to_it.write_on()
            if self.is_over:
                return
        if events & ~WRITABLE:
            from_it.read_on()

    def idle_until(self) -> float:
        return self._used + IDLE_S

    def end(self) -> None:
        """Both have said their last."""
        self._close(is_reset=False)

    def cut(self) -> None:
        """Reset both ends: neither may take what it has got for all."""
        self._close(is_reset=True)

    def _close(self, *, is_reset: bool) -> None:
        if self.is_over:
            return
        self.is_over = True
        for sock in (self._client, self._server):
            self.ready.forget(sock)
            if is_reset:
                reset(sock)
            else:
                sock.close()
        self.up.release()
        self.down.release()
        self._ended()
