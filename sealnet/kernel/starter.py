"""The thread that spawns bwrap, and follows what that starts as far as it may go: a part of the way while the seal is still being built."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from resource import prlimit

from sealnet.errors import CannotSeal
from sealnet.kernel import process
from sealnet.kernel.firststep import FirstStep
from sealnet.kernel.ownthread import OwnThread, Pending

_START_S = _WITHIN_S = 30.0
_AGAIN_S = 0.01
_LOOK_S = 0.1
_WALL = 0x40000000
# bwrap's --block-fd waits for a byte.
GO = b"\n"


class Unheld(Exception):
    """The payload may not be held, for the reason that it says: somebody traces it already (strace -f), or the host forbids ptrace."""


class Starter(OwnThread):
    """What it has spawned may be tied to its life, and what it holds is killed if it dies.

    Told by one thread. bwrap and its child take their 10 ms beside what that one does.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._pidfd, self._init_pid = -1, 0
        self._step: FirstStep | None = None
        self._init: Pending[int] | None = None
        self._first: Pending[int | None] | None = None

    def follow(self, info: int) -> None:
        """Have the pid of bwrap's init read from `info`, bwrap's --info-fd."""
        self._init = self.begin(self._read_init, info)

    def start(
        self, go: int, executions: int, limits: Mapping[int, tuple[int, int]], held: Callable[[set[int]], None] = lambda _pids: None
    ) -> None:
        """Have bwrap start its child, who is held when it has executed so many programs. It has the `limits` from its birth on: bwrap
        itself could fail by them. `held` is told the pids of init and child then, in this thread.
        """
        self._first = self.begin(self._to_first_step, go, executions, dict(limits), held)

    @property
    def is_following(self) -> bool:
        """Whether what was to be spawned was asked for."""
        return self._init is not None

    @property
    def is_started(self) -> bool:
        return self._first is not None

    def init_pid(self) -> int:
        """The pid of bwrap's init, once bwrap has told it. Raises ValueError and TimeoutError: it did not."""
        if self._init is None:
            raise RuntimeError("nothing was spawned")
        return self._init.wait()

    def first_step(self) -> int | None:
        """The child's pid, held; None when it ended before that. Raises Unheld: it waits to be started.

        Raises CannotSeal where it took too long, and then it is dead.
        """
        if self._first is None:
            raise RuntimeError("nothing was started")
        return self._wait(self._first)

    def further(self, executions: int) -> int | None:
        """Let what is held go on until it has executed so many programs more; its pid, and errors, as of `first_step`."""
        return None if self._step is None else self._wait(self.begin(self._step.further, executions))

    def _wait(self, held: Pending[int | None]) -> int | None:
        deadline = time.monotonic() + _WITHIN_S
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                return held.wait(min(left_s, _LOOK_S))
            # Killed as it gave birth, and who follows it is not told of that before nobody else is left.
            if process.is_ending(self._init_pid):
                self._wait_for_newborn()
        self.kill()
        raise CannotSeal(
            f"cannot hold a payload at its start: it did not come there within {_WITHIN_S:g} s",
            hint="does its file system answer? does another part of this program wait for every child, waitpid(-1)?",
        )

    @property
    def init_lives(self) -> bool:
        """Whether bwrap's init does: its pid may be another's otherwise."""
        if self._pidfd < 0:
            return False
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return not ended.poll(0)

    def let_go(self) -> None:
        """What is held goes on, and nobody follows it any more."""
        if self._step is not None:
            self.call(self._step.let_go)
            self._step = None
        self._forget_init()

    def _forget_init(self) -> None:
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def kill(self) -> None:
        """End what is followed, and wait until it has ended. bwrap has been killed, or has told its init."""
        if self._step is not None:
            self._step.is_given_up = True
        # Behind whatever the thread waits for: unwaited, what it holds would keep its pid namespace.
        ended, deadline = self.begin(self._end), time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline:
            self.signal()
            with contextlib.suppress(TimeoutError):
                ended.wait(_AGAIN_S)
                return
            self._wait_for_newborn()

    def _wait_for_newborn(self) -> None:
        """One that was born as its init was killed is ours to wait for, and its init, which we wait for, does not end before that."""
        for pid in process.children(self._init_pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, _WALL | os.WNOHANG)

    def signal(self) -> None:
        """Kill bwrap's init, and all of its pid namespace with it, where it is known."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """End the thread, and what is tied to its life; once is enough. Nothing is held any more."""
        self.end(within_s=_WITHIN_S)
        self._forget_init()

    # In the thread

    def _read_init(self, info: int) -> int:
        pid = _child_pid(info)
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)
        self._init_pid = pid
        return pid

    def _to_first_step(self, go: int, executions: int, limits: dict[int, tuple[int, int]], held: Callable[[set[int]], None]) -> int | None:
        if self._pidfd < 0:
            return None
        try:
            self._step = FirstStep(self._init_pid)
        except OSError as error:
            raise Unheld(f"it could not be held: {error.strerror}") from error
        os.write(go, GO)
        pid = self._step.until(executions, born=lambda pid: limit(pid, limits))
        if pid is not None:
            held({self._init_pid, pid})
        return pid

    def _end(self) -> None:
        if self._step is not None:
            self._step.kill()
            self._step = None


def limit(pid: int, limits: Mapping[int, tuple[int, int]]) -> None:
    """Give a process its limits, where it is still there. Raises CannotSeal."""
    try:
        for number, values in limits.items():
            prlimit(pid, number, values)
    except ProcessLookupError:
        return
    except (OSError, ValueError) as error:
        raise CannotSeal(f"cannot give the payload its caller's limits: {error}") from error


def _child_pid(fd: int) -> int:
    """The pid of bwrap's init, from --info-fd."""
    deadline, text = time.monotonic() + _START_S, b""
    # Not select(2): a process with a thousand runs has descriptors that it cannot name.
    told = select.poll()
    told.register(fd, select.POLLIN)
    while True:
        if not told.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            raise TimeoutError("bwrap told nothing")
        chunk = os.read(fd, 4096)
        text += chunk
        with contextlib.suppress(ValueError):
            return int(json.loads(text)["child-pid"])
        if not chunk:
            raise ValueError("bwrap told nothing")
