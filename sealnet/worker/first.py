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
from pathlib import Path
from typing import Any, Self

from sealnet.kernel import identity, messages, process
from sealnet.records import State
from sealnet.worker import member

_ENDS_S = 5.0
_GARBAGE = 700
_ENVIRONMENT = {"PATH": ":".join(process.TOOL_PATH), "LANG": "C.UTF-8"}
# mallopt(3). With an arena for each thread a process that has launched many at once keeps 8 MB more.
_SMALL = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
_PROGRAM = (sys.executable, "-I", "-m", "sealnet.worker.member")


def fork(state: State, count: int) -> list[socket.socket]:
    """Members, forked of this process while it has one thread; the ends by which each is told. They end with that thread."""
    # What is not looked at for garbage is not written to, and so is shared.
    gc.collect()
    gc.freeze()
    worker, made = os.getpid(), []
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if os.fork() == 0:
            _be_member(state, theirs, worker)
        theirs.close()
        made.append(ours)
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
        return not _ends_within(self._pidfd, 0)

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
        if not _ends_within(self._pidfd, _ENDS_S):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._pidfd)


def _ends_within(pidfd: int, seconds: float) -> bool:
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
        kept = control.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        os.chdir("/")
        os.environ.clear()
        os.environ.update(_ENVIRONMENT)
        # As in the program: a launch leaves little garbage, and a worker's own threshold would let it lie.
        gc.set_threshold(_GARBAGE)
        Path("/proc/self/comm").write_text(member.NAME, encoding="ascii")
        member.Member(state, control).serve()
    except BaseException as error:  # noqa: BLE001 - nothing of the worker's own may go on in here
        member.complain(error)
        os._exit(1)
    os._exit(0)
