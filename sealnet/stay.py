"""Stays with a run, this process's or the worker's, without a terminal: its upkeep, its pipes, its timeout, its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from sealnet.errors import SealnetError

if TYPE_CHECKING:
    from sealnet.supervise import Supervised

_CHUNK = 1 << 16
_TIMED_OUT = 124
_LONGEST_POLL_S = 86400.0


class Pipes:
    """Feeds and drains a payload's pipes as far as that goes without waiting."""

    def __init__(self, data: bytes = b"", *, stdin: IO[bytes] | None, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        self._data, self._stdin = memoryview(data), stdin
        self._told = {stream.fileno(): bytearray() for stream in (stdout, stderr) if stream is not None}
        self._order = [None if stream is None else stream.fileno() for stream in (stdout, stderr)]
        self._open = set(self._told)
        for stream in (stdin, stdout, stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
        self.serve()

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """What poll(2) is to be asked."""
        feeding = [(self._stdin.fileno(), select.POLLOUT)] if self._stdin is not None else []
        return [*((fd, select.POLLIN) for fd in self._open), *feeding]

    def serve(self) -> None:
        for fd in tuple(self._open):
            with contextlib.suppress(BlockingIOError):
                while chunk := os.read(fd, _CHUNK):
                    self._told[fd] += chunk
                self._open.discard(fd)
        if self._stdin is not None:
            with contextlib.suppress(BlockingIOError):
                try:
                    while self._data:
                        self._data = self._data[os.write(self._stdin.fileno(), self._data[:_CHUNK]) :]
                except BrokenPipeError:
                    # It does not read on; that is its own affair.
                    pass
                self._stdin.close()
                self._stdin = None

    def drain(self) -> None:
        """To the end: nobody is left who writes."""
        while self._open:
            poller = select.poll()
            for fd in self._open:
                poller.register(fd, select.POLLIN)
            poller.poll()
            self.serve()

    @property
    def told(self) -> tuple[bytes | None, bytes | None]:
        """What came over stdout and stderr; None of one that is no pipe."""
        out, err = (None if fd is None else bytes(self._told[fd]) for fd in self._order)
        return out, err


def until_end(run: Supervised, *, until: float | None = None, stop: int | None = None, pipes: Pipes | None = None) -> int | None:
    """The exit status; None when the time `until` (of time.monotonic) has come, or when `stop` is readable."""
    upkeep = run.upkeep
    while (status := run.poll()) is None:
        now = time.monotonic()
        if until is not None and now >= until:
            return None
        poller = select.poll()
        for fd in (run.pidfd, *upkeep.fds, *([] if stop is None else [stop])):
            poller.register(fd, select.POLLIN)
        for fd, events in () if pipes is None else pipes.wanted:
            poller.register(fd, events)
        wait_s = min(upkeep.next_at(), now + _LONGEST_POLL_S if until is None else until) - now
        ready = {fd for fd, _events in poller.poll(int(min(max(wait_s, 0.0), _LONGEST_POLL_S) * 1000) + 1)}
        if pipes is not None:
            pipes.serve()
        if stop in ready:
            return None
        if run.spawned.poll() is None:
            upkeep.serve()
    return status


def communicate(run: Supervised, pipes: Pipes, *, stop: int | None = None) -> int:
    """Feed, drain and wait for the exit status, which is 124 where it had to be ended at its timeout. When `stop` is readable it is ended.

    What the payload has left behind is ended with it, so that the pipes end.
    """
    timeout_s, is_late = run.plan.timeout_s, False
    status = until_end(run, until=None if timeout_s is None else time.monotonic() + timeout_s, stop=stop, pipes=pipes)
    if status is None and not (stop is not None and is_readable(stop)):
        is_late = True
        run.send_signal(signal.SIGTERM)
        until_end(run, until=time.monotonic() + run.plan.grace_s, stop=stop, pipes=pipes)
    run.kill()
    while (status := until_end(run, pipes=pipes)) is None:
        pass
    pipes.drain()
    return _TIMED_OUT if is_late else status


class Stopped(SealnetError):
    """Whoever asked for the run has given it up."""


def checkpoint(stop: int) -> Callable[[str], None]:
    """For the time before the payload: raises Stopped when `stop` is readable."""

    def look(_step: str) -> None:
        if is_readable(stop):
            raise Stopped("cannot run: whoever asked for it has given it up")

    return look


def is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
