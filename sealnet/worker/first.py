"""Where the processes of the worker's crew come from: of the worker itself as it begins, whose memory they share then; and where one of
these has died, of a program that does nothing but fork others, so that each begins with everything loaded.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any, NamedTuple, Self

from sealnet.kernel import identity, messages, owncode, process
from sealnet.records import State
from sealnet.worker import member

_ENDS_S = 5.0
_GARBAGE = 700
_ENVIRONMENT = {"PATH": ":".join(process.TOOL_PATH), "LANG": "C.UTF-8"}
# mallopt(3). With an arena for each thread a process that has launched many at once keeps 8 MB more.
_SMALL = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
_PROGRAM = owncode.program("sealnet.worker.member")


class Forked(NamedTuple):
    """A member that was forked of this process, and that nobody else waits for. `control` is by what it is told."""

    pid: int
    control: socket.socket

    @property
    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def go_on(self) -> None:
        """Whoever has halted it."""
        with contextlib.suppress(OSError):
            if process.is_stopped(self.pid):
                os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """At once. What it was told before is not told any more."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def fork(state: State, count: int) -> list[Forked]:
    """Members, forked of this process while it has one thread; they end with that. Fewer, where there can be no more; none where this
    process reads names of files as something else than UTF-8, which they would do as well.
    """
    if sys.getfilesystemencoding() != "utf-8":
        return []
    # What is not looked at for garbage is not written to, and so is shared.
    gc.collect()
    gc.freeze()
    worker, made = os.getpid(), list[Forked]()
    for _ in range(count):
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            break
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                break
            if pid == 0:
                _be_member(state, theirs, worker)
        made.append(Forked(pid, ours))
    return made


class First:
    """The program, as who asks it sees it. It is a child of this process's, and ends with the thread that has started it."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid, self._control = pid, control
        self._pidfd = os.pidfd_open(pid)

    @classmethod
    def start(cls, state: State) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                started = subprocess.Popen(
                    [*_PROGRAM, str(theirs.fileno()), str(os.getpid()), str(state.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                    env={**_ENVIRONMENT, **_SMALL},
                    start_new_session=True,
                )
            made = cls(started.pid, ours)
        except BaseException:
            ours.close()
            raise
        # It is waited for here, and not by subprocess.
        started.returncode = 0
        return made

    @property
    def lives(self) -> bool:
        return not ends_within(self._pidfd, 0)

    def ends_within(self, seconds: float) -> bool:
        return ends_within(self._pidfd, seconds)

    def fork_another(self, connection: socket.socket) -> None:
        """Ask for a member that has the `connection`. Raises OSError where nobody is there."""
        messages.send(self._control, b"", [connection.fileno()])

    def go_on(self) -> None:
        """Whoever has halted it."""
        with contextlib.suppress(OSError):
            if process.is_stopped(self.pid):
                signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    def end(self) -> None:
        """It ends by itself, or is killed. What it has forked ends with it. Only once."""
        self._control.close()
        self.go_on()
        if not ends_within(self._pidfd, _ENDS_S):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._pidfd)


def ends_within(pidfd: int, seconds: float) -> bool:
    """Whether a process ends in time, or has."""
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(int(seconds * 1000)))


def _be_member(state: State, control: socket.socket, worker: int) -> Any:
    """In what was forked of the worker; it does not come back."""
    try:
        identity.die_with(worker)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        # The worker's lock and its sockets, among others. Nothing here uses what stands for them any more.
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd != control.fileno():
                with contextlib.suppress(OSError):
                    # The listing's own is closed already.
                    os.close(fd)
        os.chdir("/")
        os.environ.clear()
        os.environ.update(_ENVIRONMENT)
        # As in the program: a launch leaves little garbage, and a worker's own threshold would let it lie.
        gc.set_threshold(_GARBAGE)
        identity.call_itself(member.NAME)
        member.Member(state, control).serve()
    except BaseException as error:  # noqa: BLE001 - nothing of the worker's own may go on in here
        member.complain(error)
        os._exit(1)
    os._exit(0)
