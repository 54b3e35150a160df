"""The worker's crew: processes that launch and end runs for it. One interpreter runs one thread at a time; many launches need more."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sealnet import reap
from sealnet.adopt import Adopted
from sealnet.ended import Ended
from sealnet.errors import CannotSeal, CannotTearDown, NoSuchRun, SealnetError
from sealnet.kernel import messages, process
from sealnet.kernel.host import Host
from sealnet.kernel.output import Sink
from sealnet.model.durable import is_api_run
from sealnet.model.version import VERSION
from sealnet.records import State
from sealnet.worker import handover
from sealnet.worker.first import First, Forked, ends_within
from sealnet.worker.handover import TAKEN, UNWANTED, Code, End, Gone, Launch, Refused

# How soon a launch that nobody wants any more is told so, and one of the crew that was halted (SIGSTOP) is made to go on.
_LOOK_MS, _HALTED_S = 20, 1.0
_BEGINS_S, _ENDS_S, _DIES_S = 30.0, 5.0, 0.2
# How long one waits for another member where there is one.
_ANOTHER_S = 2.0
_TRIES = 3
# Connections that are kept for the next orders: to open one, and start the thread at its other end, takes 0.5 ms.
_IDLE = 8


class _Failed(Exception):
    """The member that was asked has died, or the connection to it has ended. Nothing goes on of what was asked."""


class _Unsent(_Failed):
    """And nothing was asked."""


class _Member:
    def __init__(self, control: socket.socket, pid: int, pidfd: int) -> None:
        self.control, self.pid, self.pidfd = control, pid, pidfd
        self.idle: list[socket.socket] = []
        self.orders = 0
        """How many it is at."""
        self.is_lost = self.is_ended = False
        """It is given no more orders; and nothing of it is used any more."""

    @property
    def is_alive(self) -> bool:
        return not ends_within(self.pidfd, 0)

    def end(self) -> None:
        """One that is at nothing ends by itself, or is killed. Only once: by whoever has found that it `is_over`."""
        for connection in (*self.idle, self.control):
            connection.close()
        self.go_on()
        if not ends_within(self.pidfd, _ENDS_S):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            ends_within(self.pidfd, _ENDS_S)
        with contextlib.suppress(ChildProcessError):
            # One that was forked of this process: the pid of any other may be another child's by now.
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        os.close(self.pidfd)

    def go_on(self) -> None:
        """Whoever has halted it: all that others may do is wait for it."""
        # Nobody is kept from anything where that cannot be told, for want of a descriptor.
        with contextlib.suppress(OSError):
            if process.is_stopped(self.pid):
                signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)

    def is_over(self) -> bool:
        """Under the crew's lock: whether it is the caller who is to end it now."""
        if self.is_lost and not self.orders and not self.is_ended:
            self.is_ended = True
            return True
        return False


class Crew:
    """For any number of threads. Members are started as they are needed, and stay: each is given what those before it are too busy for."""

    def __init__(
        self,
        host: Host,
        state: State,
        most: int,
        *,
        is_ours: Callable[[str], bool],
        left: Callable[[str], None],
        members: Sequence[Forked] = (),
    ) -> None:
        """`is_ours` tells of a run whether it lives here. `left` is told of what could not be cleaned up yet, in any thread: it is for
        `clean_up`, later. `members` are those that there are already.
        """
        self._host, self._state, self.most = host, state, most
        self._is_ours, self._left = is_ours, left
        self._lock, self._recruiting = threading.Lock(), threading.Lock()
        self._first: First | None = None
        # They have not been asked for anything, and perhaps not said who they are.
        self._forked = list(members)
        self._members: list[_Member] = []
        self.died = 0
        """How many members have died at work."""

    def begin(self) -> None:
        """Start the first process where there is no other, so that nobody waits for it later. To be called by a thread that lives as long
        as this: what it starts dies with it.
        """
        with self._recruiting:
            if self.most and not self._forked:
                self._first = First.start(self._state)

    @property
    def pids(self) -> list[int]:
        """Of all its processes, First's before those of the members."""
        first = self._first
        with self._lock:
            members = [*(one.pid for one in self._forked), *(one.pid for one in self._members)]
        return members if first is None else [first.pid, *(set(members) | set(process.children(first.pid)))]

    # Orders

    def launch(self, order: Launch, fds: Sequence[int], *, is_unwanted: Callable[[], bool], refused_to: Sink | None) -> Adopted:
        """Have a run launched. Raises SealnetError: nothing of it ran and nothing is left, but what its notes say."""
        # One that had died before is not asked again.
        for _ in range(_TRIES):
            with contextlib.suppress(_Unsent):
                return self._launch(order, fds, is_unwanted, refused_to)
        raise CannotSeal(f"cannot start run {order.plan.run_id}: the processes that launch runs do not live", hint="is there memory left?")

    def _launch(self, order: Launch, fds: Sequence[int], is_unwanted: Callable[[], bool], refused_to: Sink | None) -> Adopted:
        run_id = order.plan.run_id
        try:
            with self._member() as (member, connection):
                _send(connection, order, fds)
                is_told_so = _await(member, connection, is_unwanted)
                try:
                    answer, given = self._answer(connection)
                    if not isinstance(answer, Refused):
                        return self._take(member, connection, order, answer.record, given)
                except OSError as error:
                    # No descriptor is left, most often. Who has launched it sees that it is not taken, and takes it away.
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)
                    _drain(connection)
                    raise _Failed from error
                if is_told_so:
                    # It may not have read that.
                    connection.close()
        except _Unsent:
            raise
        except _Failed as failed:
            told = failed.__cause__
            lost = CannotSeal(f"cannot start run {run_id}: {_why(told)}", hint="try again")
            try:
                self.clean_up(run_id)
            except (SealnetError, OSError) as left:
                lost.add_note(str(left))
                self._left(run_id)
            raise lost from failed
        if refused_to is not None and answer.receipt is not None:
            refused_to.write(answer.receipt)
        raise answer.error

    def _take(self, member: _Member, connection: socket.socket, order: Launch, record: Any, fds: Sequence[int]) -> Adopted:
        run = handover.take(self._host, self._state, order.config, record, fds)
        run.ask_code = partial(self._code, member, (record.durable or {}).get("bwrap_pid") or 0)
        # It runs, whatever becomes of the member.
        with contextlib.suppress(OSError):
            connection.sendall(TAKEN)
        return run

    def clean_up(self, run_id: str) -> None:
        """A launch of ours has failed, and nobody knows how far it came: what there is of it is taken away, also a payload that was let go.

        Raises CannotTearDown, and then it is to be tried again.
        """
        # Its caller is told that it has not run: it has no end.
        reap.teardown(self._host, self._state, run_id, unless=partial(self._is_anothers, run_id), end_is_kept=True)
        self._state.sweep()

    def _is_anothers(self, run_id: str) -> bool:
        """Whether there is a run of that id that never was the one that we were to launch, or that somebody has by now."""
        try:
            record, pid = self._state.read(run_id), os.getpid()
        except NoSuchRun as unread:
            if (self._state.directory(run_id) / "record.json").exists():
                raise CannotTearDown(f"cannot take run {run_id} away: {unread.message}") from unread
            return self._state.is_held(run_id)
        if is_api_run(record) or (record.supervisor, record.supervisor_start) != (pid, process.start_time(pid)):
            return True
        if self._state.is_held(run_id) and not self._is_ours(run_id):
            raise CannotTearDown(f"cannot take run {run_id} away: who was launching it has not let go of it yet")
        return self._state.is_held(run_id)

    def end(self, run: Adopted, ended: Ended) -> Ended | None:
        """Have a run taken away that has ended so; None: it could not be, and is still to be. What is open of it stays the caller's."""
        order = End(record=run.record, config=run.config, ended=ended)
        answer = self._ask(order, handover.descriptors(run))
        return replace(ended, tried=answer.tried, counted=answer.counted, fault=answer.fault) if isinstance(answer, Gone) else None

    def _code(self, member: _Member, pid: int) -> int | None:
        """What wait(2) told of a bwrap that this member has started."""
        answer = self._ask(Code(pid=pid), wanted=member)
        return answer if isinstance(answer, int) else None

    def _ask(self, order: object, fds: Sequence[int] = (), wanted: _Member | None = None) -> Any:
        """What a member answers; None where none can be had."""
        try:
            with self._member(wanted) as (member, connection):
                _send(connection, order, fds)
                _await(member, connection)
                return self._answer(connection)[0]
        except Exception:  # noqa: BLE001 - whatever it is, the worker does it itself
            return None

    @staticmethod
    def _answer(connection: socket.socket) -> tuple[Any, list[int]]:
        data, fds = messages.receive(connection)
        # From a process of our own: nobody else has the other end.
        return pickle.loads(data), fds  # noqa: S301

    # Members

    @contextlib.contextmanager
    def _member(self, wanted: _Member | None = None) -> Iterator[tuple[_Member, socket.socket]]:
        """A member, and a connection that nobody else uses. Raises _Failed: nothing goes on there; CannotSeal where none can be had."""
        member = self._choose() if wanted is None else wanted
        with self._lock:
            if member.is_lost:
                raise _Unsent
            member.orders += 1
            connection = member.idle.pop() if member.idle else None
        try:
            if connection is None:
                connection = _connect(member.control)
            yield member, connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            has_failed = isinstance(error, _Failed) or _is_end(error)
            if _is_end(error.__cause__ if isinstance(error, _Failed) and error.__cause__ is not None else error):
                # It is dead; or something is wrong with it, and it ends when it has done what it is at.
                self._lose(member)
            self._give_back(member, None)
            if has_failed:
                raise (type(error) if isinstance(error, _Failed) else _Failed) from (error.__cause__ or error)
            if isinstance(error, OSError):
                raise CannotSeal(f"cannot launch or end a run: {error.strerror}") from error
            raise
        self._give_back(member, connection)

    def _give_back(self, member: _Member, connection: socket.socket | None) -> None:
        with self._lock:
            member.orders -= 1
            if connection is not None and connection.fileno() >= 0 and len(member.idle) < _IDLE:
                member.idle.append(connection)
                connection = None
            is_over = member.is_over()
        if connection is not None:
            # With it goes the thread at its other end, and what that has of the host.
            connection.close()
        if is_over:
            member.end()

    def _lose(self, member: _Member) -> None:
        """It is given nothing any more. It may be about to die: what it holds is free when it has."""
        is_dead = ends_within(member.pidfd, _HALTED_S)
        with self._lock:
            self.died += is_dead and not member.is_lost
            self._strike(member)

    def _strike(self, member: _Member) -> None:
        """Under the lock."""
        if not member.is_lost:
            self._members.remove(member)
            member.is_lost = True

    def _choose(self) -> _Member:
        """The one with the least to do, or a new one. Raises CannotSeal where there is none, and none can be had."""
        least, is_enough = self._least()
        # Who waits for the first one waits; nobody waits for another while there is one.
        if not is_enough and self._recruiting.acquire(blocking=least is None):
            try:
                least, is_enough = self._least()
                if not is_enough:
                    return self._recruit(_BEGINS_S if least is None else _ANOTHER_S)
            except (OSError, EOFError, CannotSeal) as error:
                if least is None:
                    why = error.strerror if isinstance(error, OSError) else str(error) or "it has ended"
                    raise CannotSeal(
                        f"cannot start a process that launches runs: {why}", hint="try again, or restart the worker"
                    ) from error
            finally:
                self._recruiting.release()
        if least is None:
            raise RuntimeError("who waits for the first one has it, or is told why not")
        return least

    def _least(self) -> tuple[_Member | None, bool]:
        """The one with the least to do, and whether that is enough: it does nothing, or there may be no more of them."""
        with self._lock:
            for ended in [one for one in self._forked if one.has_ended]:
                self._forked.remove(ended)
                ended.end()
                self.died += 1
            for dead in [one for one in self._members if not one.is_alive]:
                self._strike(dead)
                self.died += 1
                if dead.is_over():
                    # It waits for nothing.
                    dead.end()
            least = min(self._members, key=lambda one: one.orders, default=None)
            return least, least is not None and (not least.orders or len(self._members) >= self.most)

    def _recruit(self, within_s: float) -> _Member:
        """By whoever recruits: one that was forked, while there is any, or another of First's."""
        while (forked := self._next_forked()) is not None:
            forked.go_on()
            try:
                return self._meet(forked.control, within_s)
            except (OSError, EOFError, CannotSeal):
                # It has died, or does not come to say anything.
                forked.end()
                with self._lock:
                    self.died += 1
        try:
            return self._from_first(within_s)
        except (OSError, EOFError) as error:
            # It was about to die, and nobody was asked for anything; or it lives, and can fork no more.
            if not _is_end(error) or self._first is None or not self._first.ends_within(_DIES_S):
                raise
            return self._from_first(within_s)

    def _next_forked(self) -> Forked | None:
        with self._lock:
            return self._forked.pop(0) if self._forked else None

    def _from_first(self, within_s: float) -> _Member:
        first = self._first
        if first is None or not first.lives:
            self._stop()
            self._first = first = First.start(self._state)
        first.go_on()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                first.fork_another(theirs)
        except BaseException:
            ours.close()
            raise
        return self._meet(ours, within_s)

    def _meet(self, control: socket.socket, within_s: float) -> _Member:
        """Once it has said who it is."""
        try:
            control.settimeout(within_s)
            data, (pidfd,) = messages.receive(control)
            version, pid = pickle.loads(data)  # noqa: S301 - from a process of our own, as all that it says
            if version != VERSION:
                os.close(pidfd)
                raise CannotSeal(f"sealnet has been upgraded to {version}, and this worker is {VERSION}", hint="restart the worker")
            control.settimeout(None)
        except BaseException:
            control.close()
            raise
        member = _Member(control, pid, pidfd)
        with self._lock:
            self._members.append(member)
        return member

    def _stop(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.end()

    def close(self) -> None:
        """Nothing is being launched or ended any more."""
        with self._recruiting:
            for forked in self._forked:
                forked.end()
            self._forked.clear()
            for member in self._members:
                member.end()
            self._members.clear()
            self._stop()


def _connect(control: socket.socket) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with theirs:
            messages.send(control, b"", [theirs.fileno()])
    except OSError as error:
        ours.close()
        if _is_end(error):
            raise _Unsent from error
        raise
    return ours


def _send(connection: socket.socket, order: object, fds: Sequence[int]) -> None:
    try:
        messages.send(connection, pickle.dumps(order), fds)
    except OSError as error:
        if _is_end(error):
            # What has come of it at the other end is not the whole of it.
            raise _Unsent from error
        raise


def _await(member: _Member, connection: socket.socket, is_unwanted: Callable[[], bool] | None = None) -> bool:
    """Until there is an answer. A launch that is not wanted any more is told so, and stops at its next step; whether that was done."""
    poller, is_told_so = select.poll(), False
    poller.register(connection, select.POLLIN)
    looks_at = time.monotonic() + _HALTED_S
    while True:
        # First: a launch takes no longer than the wait for the next look.
        if is_unwanted is not None and not is_told_so and is_unwanted():
            connection.sendall(UNWANTED)
            is_told_so = True
        if poller.poll(int(_HALTED_S * 1000) if is_unwanted is None or is_told_so else _LOOK_MS):
            return is_told_so
        if time.monotonic() >= looks_at:
            looks_at += _HALTED_S
            member.go_on()


def _drain(connection: socket.socket) -> None:
    """Until its other end is closed."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    deadline = time.monotonic() + _BEGINS_S
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline and (not poller.poll(_LOOK_MS) or connection.recv(1 << 16)):
            pass


def _is_end(error: BaseException) -> bool:
    """Whether it tells that nobody is at the other end."""
    return isinstance(error, EOFError | BrokenPipeError | ConnectionResetError)


def _why(error: BaseException | None) -> str:
    if isinstance(error, OSError) and not _is_end(error) and error.strerror:
        return error.strerror
    return "the process that was launching it has ended"
