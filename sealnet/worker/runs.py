"""The runs of one worker: launched, looked after and taken away in one process, whose loop only waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from sealnet import ended, reap
from sealnet.adopt import Adopted, adopt
from sealnet.doors import Door, Doorkeeper
from sealnet.ended import Ended, Kept
from sealnet.errors import CannotTearDown, Interrupted, NoSuchRun, RunExists, SealnetError
from sealnet.evidence import Evidence
from sealnet.guard import GLANCE_S
from sealnet.kernel import nft
from sealnet.kernel.nfthelper import Helper
from sealnet.kernel.output import Sink
from sealnet.model.config import Config
from sealnet.model.durable import LEASE_TTL_S, Durable, is_api_run, of
from sealnet.model.plan import Plan, User
from sealnet.model.record import Record
from sealnet.records import State
from sealnet.running import OWN, Run, Stdio, Streams, Ways
from sealnet.worker.closing import close_all
from sealnet.worker.crew import Crew
from sealnet.worker.doorways import Doors, Shared
from sealnet.worker.ending import finish
from sealnet.worker.first import Forked
from sealnet.worker.handover import Launch
from sealnet.worker.launching import start
from sealnet.worker.leftovers import Leftovers
from sealnet.worker.live import Live, Terms
from sealnet.worker.metrics import Metrics
from sealnet.worker.shared import SharedHost, SharedWatch

T = TypeVar("T")

# Most of a launch and of a teardown is waiting for the kernel (RCU), which waits for many at once.
_THREADS, _ENDERS, _LOOKERS = 16, 32, 4
_GLANCES_EACH_S, _SETTLES_S = 100, 2.0
_TOLD_S = 0.005
# A run has six.
_MOST_FDS = 65536
# One for each processor, while there is no more than 5 MB to spend on each.
_CREW = 4


def crew_size() -> int:
    return min(os.cpu_count() or 1, _CREW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A run whose payload runs."""

    run_id: str
    receipt: dict[str, Any]
    record: Record


class Runs:
    """Every method is called in the thread of one event loop, `begin` first."""

    def __init__(self, state: State, config: Config, *, crew: int | None = None, members: Sequence[Forked] = ()) -> None:
        """`state` is prepared. `crew` is how many processes launch and end runs for this one; 0: it does so itself. `members` are those
        that there are already (`sealnet.worker.first.fork`)."""
        self._state, self._config = state, config
        self.metrics = Metrics()
        self._durably = replace(config, lease_ttl_s=max(config.lease_ttl_s, LEASE_TTL_S))
        self._host = SharedHost(state.path, state.tag)
        self._watch = SharedWatch(self._tell)
        self._resting: asyncio.TimerHandle | None = None
        self._pool = ThreadPoolExecutor(_THREADS, "sealnet-runs")
        # Launches may wait long for somebody's broker; what ends does not wait behind them.
        self._enders = ThreadPoolExecutor(_ENDERS, "sealnet-ends")
        # A burst of launches must not keep those that live from being looked at.
        self._lookers = ThreadPoolExecutor(_LOOKERS, "sealnet-looks")
        self._live: dict[str, Live] = {}
        self._kept = Kept(state)
        self._left = Leftovers(self._take_away)
        most = crew_size() if crew is None else crew
        self._crew = Crew(self._host, state, most, is_ours=self.has, left=self._lose, members=members)
        # Launches that nobody knows the end of.
        self._lost: set[str] = set()
        self._doors = Doors(state, self._mind)
        self._door_fds: set[int] = set()
        # libnftables cannot live with as many descriptors as a thousand runs have, and a payload is not to inherit what they need.
        self._nft = Helper()
        self._fd_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._launching: set[asyncio.Task[Started]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def launching(self) -> int:
        """How many are being set up."""
        return len(self._launching)

    @property
    def helper_starts(self) -> int:
        """Of the process that talks to nftables."""
        return self._nft.starts

    @property
    def crew(self) -> Crew:
        """The processes that launch and end runs."""
        return self._crew

    @property
    def host(self) -> SharedHost:
        """For whoever looks at a run in a thread of its own."""
        return self._host

    # Begin and end

    async def begin(self) -> list[str]:
        """Take over what another worker has left and lives, and take away what has ended or never began; the ids of what lives."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._watch.fd, self._hear)
        self._settling = self._loop.call_later(_SETTLES_S, self._settle)
        self._crew.begin()
        nft.run_by(self._nft)
        _raise_fd_limit(*self._fd_limit)
        found = await asyncio.gather(*(self._work(self._take_over, run_id) for run_id in self._state.run_ids()))
        for run in found:
            if run is not None and (durable := of(run.record)) is not None:
                self._see_to(run, Terms(owner=durable.owner, durable=True, ends_at=durable.ends_at, grace_s=durable.grace_s))
        await self._work(self._doors.sweep)
        try:
            await self._work(reap.reap_orphans, self._host, self._state)
        except CannotTearDown:
            # Leftovers of others must not keep a worker from working.
            for run_id in await self._work(reap.orphans, self._host, self._state):
                self._left.see_to(run_id)
        self._kept.read()
        return sorted(self._live)

    def _take_over(self, run_id: str) -> Run | None:
        with contextlib.suppress(NoSuchRun):
            if is_api_run(self._state.read(run_id)):
                return None
        claim = self._state.take_over(run_id)
        if claim is None:
            return None
        try:
            run = adopt(self._host, self._state, self._durably, claim, self._doors.take_over)
            if run is not None:
                run.ear, run.glance_s = self._watch.ear, self._glance_s
                # At once: nobody has looked at it for as long as there was no worker.
                run.upkeep.renew()
                return run
        except Exception as error:  # noqa: BLE001 - one run must not keep a worker from the others, and nobody would see to it
            told = {"message": f"run {run_id} cannot be taken over, and is ended", "exception": error}
            self._loop.call_soon_threadsafe(self._loop.call_exception_handler, told)
        claim.close()
        with contextlib.suppress(CannotTearDown):
            reap.teardown(self._host, self._state, run_id, unless=partial(self._state.is_held, run_id))
        return None

    async def close(self, *, end: bool) -> None:
        """Leave durable runs to the next worker, or `end` them all; the others end with us."""
        while begun := self._launching | self._ending:
            await asyncio.wait(begun)
        live = list(self._live.values())
        await asyncio.gather(*(one.kill() if end or not one.terms.durable else one.leave() for one in live), return_exceptions=True)
        await asyncio.gather(*(one.task for one in live), return_exceptions=True)
        self._loop.remove_reader(self._watch.fd)
        self._settling.cancel()
        if self._resting is not None:
            self._resting.cancel()
        await self._left.close()
        for pool in (self._pool, self._enders, self._lookers):
            await self._loop.run_in_executor(None, pool.shutdown)
        await self._loop.shutdown_default_executor()
        for fd in list(self._door_fds):
            self._unmind(fd)
        self._crew.close()
        self._doors.close()
        self._watch.close()
        self._host.close()
        nft.run_by(None)
        self._nft.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._fd_limit)

    # Runs

    async def launch(
        self,
        plan: Plan,
        *,
        owner: int,
        streams: Streams,
        durable: bool = True,
        rights: User | None = None,
        stop: asyncio.Event | None = None,
        ways: Ways = OWN,
        evidence: Evidence | None = None,
        refused_to: Sink | None = None,
    ) -> Started:
        """Start what a plan says; returned once its payload runs. Raises SealnetError: nothing of it ran and nothing is left.

        `owner` is the uid of the caller; what the plan binds is opened with its `rights`, where it is not root, so that nobody has us bind
        what they could not reach. `streams` are the caller's to close once this returns. `stop` that is set meanwhile, and being cancelled,
        undo the launch. `evidence` is completed at the end of the run, and closed. `refused_to` has the receipt of a run that is refused.
        """
        own, unwanted = _Own(streams, owner), threading.Event()
        begin = partial(self._start, rights=rights, ways=ways, evidence=evidence, refused_to=refused_to)

        def is_unwanted() -> bool:
            return unwanted.is_set() or (stop is not None and stop.is_set())

        task = self._loop.create_task(self._launch(begin, plan, owner, own, durable, is_unwanted))
        self._launching.add(task)
        task.add_done_callback(self._launching.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # A thread cannot be stopped: it stops itself at its next step, or what it has started is ended.
            unwanted.set()
            task.add_done_callback(self._end_unwanted)
            raise

    async def _launch(
        self, begin: Callable[..., Run], plan: Plan, owner: int, own: _Own, durable: bool, is_unwanted: Callable[[], bool]
    ) -> Started:
        try:
            run = await self._work(begin, plan, own.streams, _durable(plan, owner) if durable else None, is_unwanted)
        except BaseException:
            self._see_to_rest(plan.run_id)
            raise
        finally:
            own.close()
        begun = of(run.record)
        ends_at = None if plan.timeout_s is None else ended.now() + plan.timeout_s if begun is None else begun.ends_at
        self._see_to(run, Terms(owner=owner, durable=durable, ends_at=ends_at, grace_s=plan.grace_s))
        return Started(run_id=run.run_id, receipt=run.record.receipt or {}, record=run.record)

    def _start(
        self,
        plan: Plan,
        streams: Streams,
        durable: Durable | None,
        is_unwanted: Callable[[], bool],
        *,
        rights: User | None,
        ways: Ways,
        evidence: Evidence | None,
        refused_to: Sink | None,
    ) -> Run:
        try:
            self._require_free(plan.run_id)
        except BaseException as error:
            if evidence is not None:
                evidence.__exit__(None, error, None)
            raise
        ways = replace(ways, limits={resource.RLIMIT_NOFILE: self._fd_limit, **ways.limits}, supervisor=os.getpid())
        if durable is not None and evidence is None and not plan.has_door and self._crew.most:
            run: Run = self._crew.launch(
                _order(plan, self._durably, streams, durable, ways, rights),
                [fd for fd in streams.descriptors() if fd is not None],
                is_unwanted=is_unwanted,
                refused_to=refused_to,
            )
        else:
            run = start(
                plan,
                host=self._host,
                state=self._state,
                config=self._config if durable is None else self._durably,
                streams=streams,
                durable=durable,
                checkpoint=partial(_require_wanted, is_unwanted),
                rights=rights,
                ways=ways,
                door=_own_door if durable is None else self._doors.place,
                evidence=evidence,
                refused_to=refused_to,
            )
        run.ear, run.glance_s = self._watch.ear, self._glance_s
        return run

    def _require_free(self, run_id: str) -> None:
        """In another thread. An id of ours is free once those who wait know how its run has ended: not as soon as its record is gone.

        Raises RunExists.
        """
        while (before := self._live.get(run_id)) is not None:
            if not before.is_gone:
                raise RunExists(
                    f"cannot claim run {run_id}: a run of that id exists", hint=f"choose another id, or end it: sealnet reap {run_id}"
                )
            time.sleep(_TOLD_S)

    def _see_to(self, run: Run, terms: Terms) -> None:
        live = Live(run, terms, look=self._look, work=self._end, finish=self._finish)
        self._live[run.run_id] = live
        live.task.add_done_callback(partial(self._forget, live))

    def _end_unwanted(self, task: asyncio.Task[Started]) -> None:
        if not task.cancelled() and task.exception() is None:
            ending = self._loop.create_task(self._end_started(task.result().run_id))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end_started(self, run_id: str) -> None:
        # What does not end is told by the teardown.
        with contextlib.suppress(SealnetError):
            await self.kill(run_id)

    def wait(self, run_id: str) -> asyncio.Future[Ended]:
        """Done once nothing of the run is left, also of one that ended a while ago. Raises NoSuchRun.

        It is of the run that has that id now, and not when it is awaited: by then it may be another's.
        """
        live = self._live.get(run_id)
        if live is not None:
            return asyncio.shield(live.ended)
        known = self._kept.of(run_id)
        if known is None:
            raise _no_such(run_id)
        told: asyncio.Future[Ended] = self._loop.create_future()
        told.set_result(known)
        return told

    def signal(self, run_id: str, signum: int) -> bool:
        """To the payload's first process; False when it is gone. Raises NoSuchRun."""
        return self._of(run_id).signal(signum)

    async def kill(self, run_id: str) -> None:
        """End every process of the run. Raises NoSuchRun; CannotTearDown when they do not end."""
        await self._of(run_id).kill()

    async def freeze(self, run_id: str, *, frozen: bool) -> None:
        """Halt every process of the run, or let them go on. Raises NoSuchRun."""
        await self._of(run_id).freeze(frozen=frozen)

    def owner(self, run_id: str) -> int:
        """Raises NoSuchRun."""
        known = None if run_id in self._live else self._kept.owner(run_id)
        return self._of(run_id).terms.owner if known is None else known

    def has(self, run_id: str) -> bool:
        """Whether it lives."""
        return run_id in self._live

    def record(self, run_id: str) -> Record:
        """Of a run that lives. Raises NoSuchRun."""
        return self._of(run_id).run.record

    def records(self) -> list[Record]:
        """Of the runs that live, the oldest first."""
        return sorted((live.run.record for live in self._live.values()), key=lambda record: (record.started, record.run_id))

    def _of(self, run_id: str) -> Live:
        live = self._live.get(run_id)
        if live is None:
            raise _no_such(run_id)
        return live

    def _keep(self, end: Ended) -> None:
        # Not a durable one's alone: whoever asks later is to be told. A full /run keeps nobody from being told now.
        with contextlib.suppress(OSError):
            ended.keep(self._state, end)

    def _finish(self, run: Run, ended: Ended) -> Ended:
        """In another thread: take away a run that has ended so, and whose processes have."""
        if isinstance(run, Adopted) and run.door is None and self._crew.most:
            told = self._crew.end(run, ended)
            if told is not None:
                run.leave()
                return told
        try:
            return finish(run, ended, self._keep)
        finally:
            # Whatever has happened, it is no longer held: what is left of it can be found, and taken away.
            run.let_go()

    def _forget(self, live: Live, _task: asyncio.Task[None]) -> None:
        del self._live[live.run.run_id]
        if not live.ended.cancelled():
            if live.ended.exception() is None:
                end, counted = live.ended.result(), live.run.counted or {}
                self._kept.add(end)
                denied, is_left = counted.get("denied", 0), end.fault is not None
                self.metrics.end(live.run.record, tried=end.tried, denied=denied, took_s=live.took_s, is_left=is_left)
            self._see_to_rest(live.run.run_id)

    def _see_to_rest(self, run_id: str) -> None:
        """Whatever is left of a run has its record, which goes last."""
        if self._state.directory(run_id).exists() and not reap.is_kept(self._state, run_id):
            self._left.see_to(run_id)

    def _lose(self, run_id: str) -> None:
        """In another thread: a launch has failed, and what there is of it could not be taken away yet."""
        self._lost.add(run_id)
        self._loop.call_soon_threadsafe(self._left.see_to, run_id)

    def _find(self, run_id: str) -> bool:
        """In another thread. Raises CannotTearDown while that is not to be done yet."""
        self._crew.clean_up(run_id)
        self._lost.discard(run_id)
        return True

    def _take_away(self, run_id: str) -> Awaitable[bool]:
        if run_id in self._lost:
            return self._end(self._find, run_id)
        return self._end(partial(reap.teardown, self._host, self._state, run_id, unless=partial(reap.is_kept, self._state, run_id)))

    # Threads and notifications

    def _work(self, function: Callable[..., T], /, *arguments: object) -> Awaitable[T]:
        return self._loop.run_in_executor(self._pool, function, *arguments)

    def _end(self, function: Callable[..., T], /, *arguments: object) -> Awaitable[T]:
        return self._loop.run_in_executor(self._enders, function, *arguments)

    def _look(self, function: Callable[..., T], /, *arguments: object) -> Awaitable[T]:
        return self._loop.run_in_executor(self._lookers, function, *arguments)

    def _mind(self, door: Shared) -> None:
        """Called by the thread that needs a door: it is to be seen when that one dies."""
        if door.pidfd >= 0:
            self._loop.call_soon_threadsafe(self._mind_fd, os.dup(door.pidfd), door)

    def _mind_fd(self, fd: int, door: Shared) -> None:
        self._door_fds.add(fd)
        self._loop.add_reader(fd, self._door_ended, fd, door)

    def _unmind(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._door_fds.discard(fd)
        os.close(fd)

    def _door_ended(self, fd: int, door: Shared) -> None:
        self._unmind(fd)
        self.metrics.doors_lost += bool(door.runs)
        for run_id in tuple(door.runs):
            self._tell(run_id)

    def _glance_s(self) -> float:
        """The settings of all runs are read so often that it costs a few per cent of a processor, however many there are."""
        return max(GLANCE_S, len(self._live) / _GLANCES_EACH_S)

    def _settle(self) -> None:
        self._watch.settle()
        self._settling = self._loop.call_later(_SETTLES_S, self._settle)

    def _hear(self) -> None:
        at = time.monotonic()
        self._watch.take(at)
        rests_until = self._watch.rests_until
        if rests_until is not None and self._resting is None:
            self._resting = self._loop.call_later(max(0.0, rests_until - at), self._rested)

    def _rested(self) -> None:
        self._resting = None
        self._hear()

    def _tell(self, run_id: str) -> None:
        if live := self._live.get(run_id):
            live.tell()


class _Own:
    """The caller's streams, by descriptors of our own: the caller may close its at any time."""

    def __init__(self, streams: Streams, owner: int) -> None:
        self._owner = owner
        self._fds: list[int] = []
        try:
            given = (streams.stdin, streams.stdout, streams.stderr)
            stdin, stdout, stderr = map(self._dup, given)
            self.streams = replace(streams, stdin=stdin, stdout=stdout, stderr=stderr)
        except BaseException:
            self.close()
            raise

    def _dup(self, stream: Stdio) -> Stdio:
        if stream is None or (isinstance(stream, int) and stream < 0):
            return stream
        self._fds.append(os.dup(stream if isinstance(stream, int) else stream.fileno()))
        return self._fds[-1]

    def close(self) -> None:
        close_all(self._owner, self._fds)


def _order(plan: Plan, config: Config, streams: Streams, durable: Durable, ways: Ways, rights: User | None) -> Launch:
    given, count = [], 0
    for fd in streams.descriptors():
        given.append(None if fd is None else count)
        count += fd is not None
    return Launch(
        plan=plan,
        config=config,
        durable=durable,
        ways=ways,
        rights=rights,
        streams=tuple(given),
        controlling_terminal=streams.controlling_terminal,
        console=streams.console,
    )


def _require_wanted(is_unwanted: Callable[[], bool], _step: str) -> None:
    if is_unwanted():
        raise Interrupted(signal.SIGTERM)


def _own_door(user: User, _plan: Plan) -> Doorkeeper:
    return Door(user)


def _raise_fd_limit(soft: int, hard: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _MOST_FDS), max(hard, _MOST_FDS)))
    except (OSError, ValueError):
        # In a container root may have no right to more than it was given (CAP_SYS_RESOURCE).
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _durable(plan: Plan, owner: int) -> Durable:
    user = plan.user
    return Durable(owner=owner, on_tamper=plan.on_tamper, grace_s=plan.grace_s, gid=user.gid, groups=user.groups)


def _no_such(run_id: str) -> NoSuchRun:
    return NoSuchRun(f"cannot find run {run_id}: there is no record of it", hint="see the runs there are: sealnet ls")
