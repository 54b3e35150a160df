"""A terminal of the run's own, and the relay between it and the caller's: the payload never holds the caller's terminal.

With that in hand a payload could read what is typed next, turn its echo off, or take the foreground, even from the background. So
whatever of its standard streams is a terminal becomes the other end of a pseudo-terminal, as `docker run -t` and sudo's use_pty do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import stat
import termios
import tty
from collections.abc import Iterator
from typing import Any

_CHUNK = 65536


class Terminal:
    """The run's pseudo-terminal. `slave` is for the payload until `spawned`; the relay is driven by `poll` and `serve`."""

    def __init__(self, streams: list[int], *, uid: int) -> None:
        self.streams = streams
        # Descriptors of our own for the caller's terminal: not blocking here must not change what its shell shares.
        self._out = _opened(1 if 1 in streams else streams[-1], os.O_WRONLY)
        self._in = _opened(0, os.O_RDONLY) if _typed(streams) else -1
        self._before: list[Any] | None = None
        self._pending = self._typed = b""
        self._ended = False
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        with contextlib.suppress(termios.error):
            modes = termios.tcgetattr(self._out)
            if 1 not in streams:
                # What is typed is then shown by the caller's terminal, which is left as it is.
                modes[3] &= ~termios.ECHO
            termios.tcsetattr(self.slave, termios.TCSANOW, modes)
        os.fchown(self.slave, uid, -1)
        os.fchmod(self.slave, 0o600)
        self.resize()

    @property
    def controlling(self) -> bool:
        """Whether the payload's standard input is the terminal, which makes it the payload's controlling one."""
        return 0 in self.streams

    @property
    def console(self) -> str:
        """The path of the payload's end, on the host."""
        return os.ttyname(self.slave)

    def spawned(self) -> None:
        """The payload has its end."""
        os.close(self.slave)
        self.slave = -1
        # From here on we write to the caller's terminal, also from the background (stty tostop).
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def close(self) -> None:
        self.restore()
        for fd in (self.master, self.slave, self._out, self._in):
            if fd >= 0:
                os.close(fd)
        self.master = self.slave = self._out = self._in = -1

    # The caller's terminal

    def is_ours(self) -> bool:
        """Whether our process group has the caller's terminal."""
        with contextlib.suppress(OSError):
            return os.tcgetpgrp(self._out) == os.getpgrp()
        return False

    def enter(self) -> None:
        """Hand every key on as it is typed, while the terminal is ours."""
        if self._in < 0 or self._before is not None or 1 not in self.streams or self._ended or not self.is_ours():
            return
        with contextlib.suppress(termios.error):
            self._before = termios.tcgetattr(self._in)
            tty.setraw(self._in, termios.TCSADRAIN)

    def restore(self) -> None:
        """The caller's terminal as it was."""
        if self._before is not None:
            with contextlib.suppress(termios.error):
                # What the terminal answered to the payload's last words must not be typed at the caller's next prompt.
                termios.tcsetattr(self._in, termios.TCSAFLUSH, self._before)
            self._before = None

    def resize(self) -> bool:
        """Give the run's terminal the caller's size; whether that was a change, of which the kernel tells the payload itself."""
        try:
            size = fcntl.ioctl(self._out, termios.TIOCGWINSZ, bytes(8))
            if size == fcntl.ioctl(self.master, termios.TIOCGWINSZ, bytes(8)):
                return False
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)
        except OSError:
            return False
        return True

    def foreground(self) -> int:
        """The process group in the foreground of the run's terminal, as we count; 0 when it tells none."""
        with contextlib.suppress(OSError):
            return os.tcgetpgrp(self.master)
        return 0

    def hung_up(self) -> bool:
        """Whether the caller's terminal is gone."""
        poller = select.poll()
        poller.register(self._out, 0)
        return any(event & (select.POLLHUP | select.POLLERR) for _fd, event in poller.poll(0))

    def hang_up(self) -> None:
        """Do to the payload what was done to us: the kernel sends SIGHUP to the session of a terminal whose other end is closed."""
        if self.master >= 0:
            os.close(self.master)
            self.master, self._ended = -1, True

    # The relay

    def poll(self) -> list[tuple[int, int]]:
        """(descriptor, events) to wait for."""
        wanted = [(self._out, select.POLLOUT if self._pending else 0)]
        events = (0 if self._pending else select.POLLIN) | (select.POLLOUT if self._typed else 0)
        if not self._ended and events:
            wanted.append((self.master, events))
        if self._in >= 0 and not self._ended and not self._typed and self.is_ours():
            wanted.append((self._in, select.POLLIN))
        return wanted

    def serve(self) -> bool:
        """Carry what there is in both directions, without waiting; whether a suspend key was among what was typed."""
        self._carry_out()
        if self._ended and not self._pending:
            # Nobody is there to read what is typed from now on: it is for whoever has the terminal next.
            self.restore()
        return self._carry_in()

    def drain(self) -> None:
        """What the payload wrote last."""
        deadline = 50
        while (self._pending or not self._ended) and deadline:
            if not self._carry_out():
                if not self._pending:
                    return
                select.select([], [self._out], [], 0.1)
                deadline -= 1

    def _carry_out(self) -> bool:
        if not self._pending and not self._ended:
            try:
                self._pending = os.read(self.master, _CHUNK)
            except BlockingIOError:
                return False
            except OSError:
                # EIO: the last of the payload's ends is closed.
                self._ended = True
        if self._pending:
            try:
                self._pending = self._pending[os.write(self._out, self._pending) :]
            except BlockingIOError:
                return False
            except OSError:
                self._pending = b""
            return True
        return False

    def _carry_in(self) -> bool:
        if self._in < 0 or self._ended:
            return False
        suspend = False
        if not self._typed and self.is_ours() and _has_input(self._in):
            try:
                self._typed = os.read(self._in, 1024) or _key(self.master, termios.VEOF)
            except OSError:
                return False
            # By the caller's own key: the payload chooses its terminal's.
            suspend = self._before is not None and self._before[6][termios.VSUSP] in self._typed
        if self._typed:
            try:
                self._typed = self._typed[os.write(self.master, self._typed) :]
            except BlockingIOError:
                return suspend
            except OSError:
                self._typed = b""
        return suspend


def _opened(fd: int, flags: int) -> int:
    """A description of our own of one of the caller's; where it is somebody else's terminal (su), his, which waits when it is full."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except PermissionError:
        return os.dup(fd)


def _has_input(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _typed(streams: list[int]) -> bool:
    """Whether to read the keyboard: not in a pipeline, whose other members may want it (a pager does)."""
    return 0 in streams and not stat.S_ISFIFO(os.fstat(1).st_mode)


def _key(fd: int, which: int) -> bytes:
    with contextlib.suppress(termios.error):
        key: bytes = termios.tcgetattr(fd)[6][which]
        return key
    return b"\x04" if which == termios.VEOF else b"\x1a"


def streams() -> list[int]:
    """Which of the standard streams are terminals."""
    return [fd for fd in (0, 1, 2) if _is_terminal(fd)]


def _is_terminal(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(fd)
    return False


@contextlib.contextmanager
def own(streams: list[int], *, uid: int) -> Iterator[Terminal | None]:
    """A terminal for the run where one is needed."""
    if not streams:
        yield None
        return
    terminal = Terminal(streams, uid=uid)
    try:
        yield terminal
    finally:
        terminal.close()
