"""Holds a payload at its own execve(2), before its first instruction: what it is by then is what it will be.

ptrace(2). bwrap's hold comes before the payload's user, capabilities and system call filter are set, so it shows nothing of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from sealnet.errors import CannotSeal
from sealnet.kernel import libc, process

_SEIZE, _CONT, _DETACH = 0x4206, 7, 17
_TRACE_FORK, _TRACE_VFORK, _TRACE_CLONE, _TRACE_EXEC, _EXIT_KILL = 0x2, 0x4, 0x8, 0x10, 0x100000
_EVENT_EXEC = 4
_BIRTHS = (1, 2, 3)
_WALL = 0x40000000
_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005


class FirstStep:
    """Follows a process to its first child, and that one to its last execve. For one thread; if that dies, what it follows is killed."""

    def __init__(self, init_pid: int) -> None:
        """Raises OSError where it may not be followed: somebody else traces it already (strace -f), or the host forbids it (Yama)."""
        options = _TRACE_FORK | _TRACE_VFORK | _TRACE_CLONE | _TRACE_EXEC | _EXIT_KILL
        libc.ptrace(_SEIZE, init_pid, options)
        self._pid: int | None = init_pid
        self._is_users = False
        self.is_given_up = False
        """Set by another thread: nobody waits for it any more."""

    def until(self, execs: int, born: Callable[[int], None] = lambda _pid: None) -> int | None:
        """Wait until the first child has executed so many programs; its pid, held. None when it, or its parent, ended before that.

        `born` is told its pid before it has done anything.
        """
        try:
            return self._until(execs, born)
        except ChildProcessError:
            # Somebody else has waited for its end.
            self._pid = None
            return None

    def further(self, execs: int) -> int | None:
        """Let what is held go on until it has executed so many programs more; its pid, held, or None as `until`.

        It becomes a user's meanwhile, whose other processes may write into it. So None is not to be believed: a thread that was put into
        it takes its pid over by an execve(2), and it is gone for who traces it. Raises CannotSeal where it starts another process.
        """
        if self._pid is None:
            return None
        self._is_users = True
        try:
            self._go_on()
            return self._until_executed(execs)
        except ChildProcessError:
            self._pid = None
            return None

    def _until(self, execs: int, born: Callable[[int], None]) -> int | None:
        child = self._until_birth()
        if child is None:
            return None
        # The parent goes on by itself.
        parent, self._pid = self._held(), child
        try:
            libc.ptrace(_DETACH, parent)
        except ProcessLookupError:
            # It has been killed, and all of its pid namespace with it: itself it ends when nothing of that is left.
            self.kill()
            _await_end(parent)
            return None
        born(child)
        return self._until_executed(execs)

    def _until_executed(self, execs: int) -> int | None:
        while (event := self._next()) is not None:
            if event in _BIRTHS:
                newborn = libc.ptrace_event_message(self._held())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(newborn, signal.SIGKILL)
                _await_end(newborn)
                raise CannotSeal("cannot hold a payload at its start: it has started another process before that")
            execs -= event == _EVENT_EXEC
            if execs <= 0:
                return self._pid
            self._go_on()
        return None

    def _held(self) -> int:
        if self._pid is None:
            raise RuntimeError("nothing is followed")
        return self._pid

    def _until_birth(self) -> int | None:
        while (event := self._next()) is not None:
            if event in _BIRTHS:
                try:
                    return libc.ptrace_event_message(self._held())
                except ProcessLookupError:
                    # Killed as well; its child is held by us already, and keeps it from ending.
                    for child in process.children(self._held()):
                        _await_end(child)
            else:
                self._go_on()
        return None

    def _next(self) -> int | None:
        """The event that it has stopped for; None when it has ended. A signal on its way is handed on."""
        pid = self._held()
        while True:
            status = self._wait(pid)
            if not os.WIFSTOPPED(status):
                self._pid = None
                return None
            event = status >> 16
            if event:
                return event
            self._go_on(os.WSTOPSIG(status))

    def _wait(self, pid: int) -> int:
        """Raises ChildProcessError when it is not ours any more. Who sleeps in waitpid(2) is not told of that, so a user's is asked for."""
        if not self._is_users:
            return os.waitpid(pid, _WALL)[1]
        pause_s = _PAUSE_S
        while not self.is_given_up:
            found, status = os.waitpid(pid, _WALL | os.WNOHANG)
            if found:
                return status
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LONGEST_PAUSE_S)
        raise ChildProcessError

    def _go_on(self, signum: int = 0) -> None:
        # One that is killed where it stands is gone for ptrace(2) at once; that it has ended is still to be waited for.
        with contextlib.suppress(ProcessLookupError):
            libc.ptrace(_CONT, self._held(), signum)

    def let_go(self) -> None:
        """The held process goes on, and nobody follows it any more."""
        if self._pid is not None:
            try:
                libc.ptrace(_DETACH, self._pid)
            except ProcessLookupError:
                # Killed where it stood: its parent is told of it when we have waited.
                _await_end(self._pid)
            self._pid = None

    def _signal(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def kill(self) -> None:
        """End what is followed. Its end is waited for: an unwaited one would keep its pid namespace from going away."""
        if self._pid is not None:
            self._signal()
            _await_end(self._pid)
            self._pid = None


def _await_end(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.WIFSTOPPED(os.waitpid(pid, _WALL)[1]):
            pass
