"""Stays with one run in the foreground: signals, terminal, lease, deadlines, the end. What `sealnet run` does while the payload lives."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from types import FrameType
from typing import Protocol

from sealnet.errors import Interrupted
from sealnet.kernel import process
from sealnet.terminal import Terminal

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
# These mean that the caller wants the end: a payload that does not end is ended after the grace time.
_ENDING = (signal.SIGHUP, signal.SIGTERM)
_HANGUP_GRACE_S = 2.0
_STOPS_WITHIN_S = 0.2
_TIMED_OUT = 124
# poll(2) counts milliseconds in an int.
_LONGEST_POLL_S = 86400.0


class Signals:
    """Holds the signals that belong to the payload; nothing interrupts what goes on. For the main thread."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        self._before: dict[int, object] = {}
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.fd = self._read

    def __enter__(self) -> Signals:
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for signum in (*FORWARDED, signal.SIGCONT):
            # One that the caller ignores (nohup) stays ignored, here and in the payload.
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)

    def _hold(self, signum: int, _frame: FrameType | None) -> None:
        self._pending.append(signum)

    def take(self) -> list[int]:
        """The signals held so far, oldest first."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 512):
                pass
        taken, self._pending = self._pending, []
        return taken

    def checkpoint(self, _step: str) -> None:
        """For the time before the payload: a signal that asks for the end stops the set-up."""
        for signum in self._pending:
            if signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
                raise Interrupted(signum)


class _Terms(Protocol):
    @property
    def timeout_s(self) -> float | None: ...

    @property
    def grace_s(self) -> float: ...


class _Upkeep(Protocol):
    @property
    def fds(self) -> Iterable[int]: ...

    def next_at(self) -> float: ...

    def serve(self) -> None: ...

    def renew(self) -> None: ...


class _Ended(Protocol):
    def poll(self) -> int | None: ...


class Supervised(Protocol):
    """A run that was started: one of this process's, or the worker's."""

    @property
    def plan(self) -> _Terms: ...

    @property
    def upkeep(self) -> _Upkeep: ...

    @property
    def spawned(self) -> _Ended: ...

    @property
    def pidfd(self) -> int: ...

    def release(self) -> None: ...

    def poll(self) -> int | None: ...

    def payload_pid(self) -> int | None: ...

    def send_signal(self, signum: int) -> bool: ...

    def freeze(self, *, frozen: bool) -> None: ...

    def kill(self) -> None: ...


class Supervisor:
    """One run, from its release to its end. `terminal` is the run's own, if it has one."""

    def __init__(self, run: Supervised, signals: Signals, terminal: Terminal | None) -> None:
        self._run, self._signals, self._terminal = run, signals, terminal
        self._kill_at: float | None = None
        self._suspend_until: float | None = None
        self._hung_up = self._timed_out = False

    def run(self) -> int:
        """Let the payload go and stay until it ends; the exit status."""
        terminal = self._terminal
        if terminal is not None:
            terminal.enter()
        try:
            self._run.release()
            status = self._loop()
            if terminal is not None:
                terminal.drain()
        finally:
            if terminal is not None:
                terminal.restore()
        return _TIMED_OUT if self._timed_out else status

    def _loop(self) -> int:
        run = self._run
        now = time.monotonic()
        timeout_at = None if run.plan.timeout_s is None else now + run.plan.timeout_s
        upkeep = run.upkeep
        while (status := run.poll()) is None:
            self._wait(min(at for at in (timeout_at, self._kill_at, upkeep.next_at(), self._suspend_until) if at is not None))
            for signum in self._signals.take():
                self._forward(signum)
            if self._terminal is not None:
                self._relay(self._terminal)
            if run.spawned.poll() is None:
                upkeep.serve()
            now = time.monotonic()
            if timeout_at is not None and now >= timeout_at:
                timeout_at, self._timed_out = None, True
                run.send_signal(signal.SIGTERM)
                self._end_within(run.plan.grace_s)
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                run.kill()
        return status

    def _wait(self, until: float) -> None:
        poller = select.poll()
        poller.register(self._run.pidfd, select.POLLIN)
        poller.register(self._signals.fd, select.POLLIN)
        for fd in self._run.upkeep.fds:
            poller.register(fd, select.POLLIN)
        pause_s = max(0.0, min(until - time.monotonic(), _LONGEST_POLL_S))
        if self._terminal is not None and not self._hung_up:
            for fd, events in self._terminal.poll():
                poller.register(fd, events)
            # Nobody tells when the foreground changes hands, so look now and then.
            pause_s = min(pause_s, 1.0)
        poller.poll(int(pause_s * 1000) + 1)

    def _relay(self, terminal: Terminal) -> None:
        if not self._hung_up and terminal.hung_up():
            # Nobody will see the payload again.
            self._hung_up = True
            terminal.hang_up()
            if not terminal.controlling:
                self._run.send_signal(signal.SIGHUP)
            self._end_within(_HANGUP_GRACE_S)
        terminal.enter()
        if terminal.serve():
            self._suspend_until = time.monotonic() + _STOPS_WITHIN_S
        if self._suspend_until is not None:
            pid = self._run.payload_pid()
            if pid is not None and process.is_stopped(pid):
                self._suspend(terminal, pid)
            elif time.monotonic() > self._suspend_until:
                self._suspend_until = None
                # The kernel stops no group whose session has no shell above it (setpgid(2): orphaned), so that is left to us; but not
                # where the payload, or a shell in it, deals with ^Z in its own way.
                if pid is not None and terminal.foreground() == pid and process.has_default(pid, signal.SIGTSTP):
                    self._suspend(terminal, pid)

    def _suspend(self, terminal: Terminal, pid: int) -> None:
        """^Z was typed and the payload has stopped: stop as well, as a shell's job does, and go on together.

        Everything of the run is halted meanwhile, so nothing of it outruns its timeout.
        """
        self._suspend_until = None
        if not process.has_shell():
            return
        self._run.freeze(frozen=True)
        terminal.drain()
        terminal.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        # Somebody has continued us.
        self._run.freeze(frozen=False)
        self._run.upkeep.renew()
        terminal.enter()
        terminal.resize()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(pid), signal.SIGCONT)

    def _forward(self, signum: int) -> None:
        if signum == signal.SIGCONT:
            return
        terminal = self._terminal
        if terminal is not None:
            if signum == signal.SIGWINCH and terminal.resize() and terminal.controlling:
                # The kernel has told the payload.
                return
            if signum == signal.SIGHUP and terminal.hung_up():
                # The relay sees it, too, and hangs the payload's terminal up.
                return
        self._run.send_signal(signum)
        if signum in _ENDING:
            self._end_within(_HANGUP_GRACE_S if signum == signal.SIGHUP else self._run.plan.grace_s)

    def _end_within(self, grace_s: float) -> None:
        at = time.monotonic() + grace_s
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
