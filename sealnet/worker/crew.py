"""The worker's crew: processes that launch and end runs for it. One interpreter runs one thread at a time; many launches need more."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sealnet import reap
from sealnet.adopt import Adopted
from sealnet.ended import Ended
from sealnet.errors import CannotSeal, SealnetError
from sealnet.kernel import messages, process
from sealnet.kernel.host import Host
from sealnet.kernel.output import Sink
from sealnet.records import State
from sealnet.worker import handover
from sealnet.worker.handover import TAKEN, UNWANTED, Code, End, Gone, Launch, Refused

# How soon a launch that nobody wants any more is told so.
_LOOK_MS = 20
_BEGINS_S, _ENDS_S = 30.0, 5.0
# mallopt(3). With an arena for each thread a process that has launched many at once keeps 8 MB more.
_SMALL = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
_PROGRAM = (sys.executable, "-I", "-m", "sealnet.worker.member")


class _Died(Exception):
    """A member, at work."""


class _Member:
    def __init__(self, control: socket.socket, pidfd: int) -> None:
        self.control, self.pidfd = control, pidfd
        self.idle: list[socket.socket] = []
        self.orders = 0
        """How many it is at."""
        self.is_lost = False

    @property
    def is_alive(self) -> bool:
        return not _ends_within(self.pidfd, 0)

    def end(self) -> None:
        """One that is at nothing: it ends by itself, or is killed."""
        for connection in (*self.idle, self.control):
            connection.close()
        if not _ends_within(self.pidfd, _ENDS_S):
            self.kill()
        os.close(self.pidfd)

    def kill(self) -> None:
        """And wait until nothing of it is left: what it has locked is free, what it held is dead."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        _ends_within(self.pidfd, _ENDS_S)


class Crew:
    """For any number of threads. Members are started as they are needed, and stay: each is given what those before it are too busy for."""

    def __init__(self, host: Host, state: State, most: int) -> None:
        self._host, self._state, self.most = host, state, most
        self._lock = threading.Lock()
        self._first: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._members: list[_Member] = []
        self.died = 0
        """How many members have died at work."""

    def begin(self) -> None:
        """Start the first process, so that nobody waits for it later. To be called by a thread that lives as long as this: what it starts
        dies with it.
        """
        with self._lock:
            if self.most:
                self._start()

    @property
    def pids(self) -> list[int]:
        """Of all its processes, the first of all first."""
        with self._lock:
            pids = [] if self._first is None else [self._first.pid]
            return pids + (process.children(pids[0]) if pids else [])

    def launch(self, order: Launch, fds: Sequence[int], *, is_unwanted: Callable[[], bool], refused_to: Sink | None) -> Adopted:
        """Have a run launched. Raises SealnetError: nothing of it ran and nothing is left."""
        try:
            with self._member() as (member, connection):
                messages.send(connection, pickle.dumps(order), fds)
                is_told_so = _await(connection, is_unwanted)
                answer, given = self._answer(connection)
                if not isinstance(answer, Refused):
                    run = handover.take(self._host, self._state, order.config, answer.record, given)
                    run.ask_code = partial(self._code, member, (run.record.durable or {}).get("bwrap_pid") or 0)
                    # It runs, whatever becomes of the member.
                    with contextlib.suppress(OSError):
                        connection.sendall(TAKEN)
                    return run
                if is_told_so:
                    # It may not have read that.
                    connection.close()
        except _Died as died:
            raise self._clean_up(order.plan.run_id) from died
        if refused_to is not None and answer.receipt is not None:
            refused_to.write(answer.receipt)
        raise answer.error

    def _clean_up(self, run_id: str) -> CannotSeal:
        """A member died while it launched a run: what there is of that is taken away, also a payload that was let go."""
        error = CannotSeal(f"cannot start run {run_id}: the process that was launching it has ended", hint="try again")
        try:
            reap.teardown(self._host, self._state, run_id, unless=partial(self._state.is_held, run_id))
        except SealnetError as left:
            error.add_note(str(left))
        return error

    def end(self, run: Adopted, ended: Ended) -> Ended | None:
        """Have a run taken away that has ended so; None: it could not be, and is still to be. What is open of it stays the caller's."""
        order = End(record=run.record, config=run.config, ended=ended)
        try:
            with self._member() as (_member, connection):
                messages.send(connection, pickle.dumps(order), handover.descriptors(run))
                answer, _fds = self._answer(connection)
        except (_Died, CannotSeal):
            return None
        return replace(ended, tried=answer.tried, fault=answer.fault) if isinstance(answer, Gone) else None

    def _code(self, member: _Member, pid: int) -> int | None:
        """What wait(2) told of a bwrap that this member has started."""
        try:
            with self._member(member) as (_member, connection):
                messages.send(connection, pickle.dumps(Code(pid=pid)))
                answer, _fds = self._answer(connection)
        except (_Died, CannotSeal):
            return None
        return answer if isinstance(answer, int) else None

    @staticmethod
    def _answer(connection: socket.socket) -> tuple[Any, list[int]]:
        data, fds = messages.receive(connection)
        # From a process of our own: nobody else has the other end.
        return pickle.loads(data), fds  # noqa: S301

    # Members

    @contextlib.contextmanager
    def _member(self, wanted: _Member | None = None) -> Iterator[tuple[_Member, socket.socket]]:
        """A member, and a connection to it that nobody else uses. Raises _Died: it is dead by then; CannotSeal where none can be had."""
        with self._lock:
            member = self._choose() if wanted is None else wanted
            if member not in self._members:
                raise _Died
            member.orders += 1
            connection = member.idle.pop() if member.idle else None
        try:
            if connection is None:
                connection = _connect(member.control)
            yield member, connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            is_lost = isinstance(error, EOFError | BrokenPipeError | ConnectionResetError)
            if is_lost:
                self._lose(member)
            self._give_back(member, None)
            if is_lost:
                raise _Died from error
            if isinstance(error, OSError):
                raise CannotSeal(f"cannot launch or end a run: {error.strerror}") from error
            raise
        self._give_back(member, connection)

    def _give_back(self, member: _Member, connection: socket.socket | None) -> None:
        with self._lock:
            member.orders -= 1
            if connection is not None and connection.fileno() >= 0:
                member.idle.append(connection)
            if member.is_lost and not member.orders:
                member.end()

    def _lose(self, member: _Member) -> None:
        """It has died; or only the one connection has ended, and what it was doing there is nobody's. It is dead when this returns."""
        with self._lock:
            if member in self._members:
                self._members.remove(member)
                self.died += 1
                member.is_lost = True
        member.kill()

    def _choose(self) -> _Member:
        """The one with the least to do, or a new one."""
        for dead in [one for one in self._members if not one.orders and not one.is_alive]:
            self._members.remove(dead)
            self.died += 1
            dead.end()
        least = min(self._members, key=lambda one: one.orders, default=None)
        if least is None or (least.orders and len(self._members) < self.most):
            try:
                least = self._recruit()
            except (OSError, EOFError) as error:
                if least is None:
                    raise CannotSeal(f"cannot start a process that launches runs: {error or 'it has ended'}") from error
        return least

    def _recruit(self) -> _Member:
        if self._first is None or self._first.poll() is not None:
            self._start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                if self._control is not None:
                    messages.send(self._control, b"", [theirs.fileno()])
            ours.settimeout(_BEGINS_S)
            _data, (pidfd,) = messages.receive(ours)
            ours.settimeout(None)
        except BaseException:
            ours.close()
            raise
        self._members.append(_Member(ours, pidfd))
        return self._members[-1]

    def _start(self) -> None:
        self._stop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            words = (str(theirs.fileno()), str(os.getpid()), str(self._state.path))
            self._first = subprocess.Popen(
                [*_PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={"PATH": ":".join(process.TOOL_PATH), "LANG": "C.UTF-8", **_SMALL},
                start_new_session=True,
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._first is not None:
            try:
                self._first.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                self._first.kill()
                self._first.wait()
            self._first = None

    def close(self) -> None:
        """Nothing is being launched or ended any more."""
        with self._lock:
            for member in self._members:
                member.end()
            self._members.clear()
            self._stop()


def _connect(control: socket.socket) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with theirs:
            messages.send(control, b"", [theirs.fileno()])
    except OSError:
        ours.close()
        raise
    return ours


def _await(connection: socket.socket, is_unwanted: Callable[[], bool]) -> bool:
    """Until there is an answer. A launch that is not wanted any more is told so, and stops at its next step; whether that was done."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while not poller.poll(_LOOK_MS):
        if is_unwanted():
            connection.sendall(UNWANTED)
            poller.poll()
            return True
    return False


def _ends_within(pidfd: int, seconds: float) -> bool:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(int(seconds * 1000)))
