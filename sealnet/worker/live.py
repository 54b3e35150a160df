"""One run of the worker, from its release to its end: seen to when there is reason, ended at its time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from sealnet.ended import TIMED_OUT, Ended, now
from sealnet.errors import SealnetError
from sealnet.running import Run

T = TypeVar("T")

# The clock of deadlines goes on while the machine sleeps and the loop's does not, so a loop must not sleep for long.
_LONGEST_PAUSE_S = 30.0


class Work(Protocol):
    """Has a function run in another thread."""

    def __call__(self, function: Callable[..., T], /, *arguments: object) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Whose run it is, and how long it may take. `ends_at` is in seconds since boot."""

    owner: int
    durable: bool
    ends_at: float | None
    grace_s: float


class Live:
    """For the loop's thread. What takes its time is done in other threads, by one of them at a time."""

    def __init__(self, run: Run, terms: Terms, *, look: Work, work: Work, finish: Callable[[Run, Ended], Ended]) -> None:
        """`look` is for what is done now and then, `work` for what takes long.

        `finish` takes away a run that has ended so, in another thread, and tells the whole of it.
        """
        self._loop = asyncio.get_running_loop()
        self.run, self.terms = run, terms
        self.ended: asyncio.Future[Ended] = self._loop.create_future()
        self._look, self._work, self._finish = look, work, finish
        self._one = asyncio.Lock()
        self._woken = asyncio.Event()
        self._is_told = self._is_over = self._is_left = self._is_late = self._is_gone = False
        self.took_s = 0.0
        """How long taking it away took."""
        self._ends_at, self._kill_at = terms.ends_at, float("inf")
        self._loop.add_reader(run.pidfd, self._over)
        self.task = self._loop.create_task(self._see_through(), name=f"run {run.run_id}")

    @property
    def is_gone(self) -> bool:
        """Whether it is being taken away, or left."""
        return self._is_gone

    # Told from outside

    def tell(self) -> None:
        """There is something to look at."""
        self._is_told = True
        self._woken.set()

    def signal(self, signum: int) -> bool:
        """To the payload's first process; False when it is gone."""
        # By then its pids may be a stranger's.
        return not (self._is_over or self._is_gone) and self.run.send_signal(signum, wait_s=0)

    async def kill(self) -> None:
        """End every process of it; that it has ended is told by `ended`."""
        async with self._one:
            # Once it is gone, the number of its namespace may be another's.
            if not self._is_gone:
                await self._work(self._kill)

    def _kill(self) -> None:
        self.run.kill(own=True)
        if not self.run.has_ended:
            # Somebody has moved bwrap elsewhere. Whoever is in its namespace beside it is ended by the teardown.
            self.run.kill()

    async def freeze(self, *, frozen: bool) -> None:
        """Halt every process of it, or let them go on."""
        async with self._one:
            # Once it is gone, the name of its cgroup may be another's.
            if not self._is_gone:
                await self._look(partial(self.run.freeze, frozen=frozen))

    async def leave(self) -> None:
        """Let the run go on, for another worker. One that is about to end is seen to its end."""
        self._is_left = True
        self._woken.set()
        await self.task

    # Seeing it through

    def _over(self) -> None:
        self._is_over = True
        self._loop.remove_reader(self.run.pidfd)
        self._woken.set()

    async def _do(self, how: Work, function: Callable[..., T], *arguments: object) -> T:
        async with self._one:
            return await how(function, *arguments)

    async def _see_through(self) -> None:
        fault = None
        try:
            while not self._is_over and not self._is_left:
                await self._pause()
                if not self._is_over and not self._is_left:
                    await self._serve()
        except Exception as error:  # noqa: BLE001 - whatever it is, a run that nobody sees to must not go on
            self._loop.call_exception_handler({"message": f"run {self.run.run_id} is ended", "exception": error})
            fault = f"ended, because the worker failed to see to it: {type(error).__name__}"
        self._loop.remove_reader(self.run.pidfd)
        if self._is_left and not self._is_over and fault is None:
            async with self._one:
                self._is_gone = True
                await self._look(self.run.leave)
            self.ended.cancel()
            return
        try:
            async with self._one:
                self._is_gone = True
                began = time.monotonic()
                end = await self._work(self._end, fault)
                self.took_s = time.monotonic() - began
            self.ended.set_result(end)
        except BaseException as error:
            # Nobody waits for good.
            self.ended.set_exception(error)
            raise

    async def _pause(self) -> None:
        """Until there is something to do."""
        due_s = min(self.run.upkeep.next_at() - time.monotonic(), self._kill_at - now(), _LONGEST_PAUSE_S)
        if self._ends_at is not None:
            due_s = min(due_s, self._ends_at - now())
        with contextlib.suppress(TimeoutError):
            # Not wait_for(), which makes a task of its own each time: a thousand runs have a thousand.
            async with asyncio.timeout(max(due_s, 0)):
                await self._woken.wait()
        self._woken.clear()

    async def _serve(self) -> None:
        upkeep = self.run.upkeep
        if self._is_told or upkeep.next_at() <= time.monotonic():
            self._is_told = False
            await self._do(self._look, upkeep.serve)
        at = now()
        if self._ends_at is not None and at >= self._ends_at:
            self._ends_at, self._is_late, self._kill_at = None, True, at + self.terms.grace_s
            await self._do(self._look, self._time_out)
        if at >= self._kill_at:
            self._kill_at = float("inf")
            await self.kill()

    def _time_out(self) -> None:
        if self.run.record.durable is not None:
            # Should we die now, it has ended by this and not by a signal all the same.
            with contextlib.suppress(SealnetError):
                self.run.claim.update(durable={**self.run.record.durable, "is_late": True})
        self.signal(signal.SIGTERM)

    def _end(self, fault: str | None) -> Ended:
        """In another thread: how it has ended, and everything of it taken away."""
        run = self.run
        with contextlib.suppress(SealnetError):
            # What is still there of it; if it cannot be, the teardown says so. That also looks for who else is in its namespace, among all
            # processes of the host: once is enough. But bwrap, which is waited for, has to end, also where somebody has moved it elsewhere.
            run.kill(own=self._is_over)
        try:
            status = TIMED_OUT if self._is_late else run.wait_end()
        except SealnetError as error:
            status, fault = error.exit_status, fault or error.message
        ended = Ended(
            run_id=run.run_id,
            owner=self.terms.owner,
            started=run.record.started,
            status=status,
            at_s=now(),
            receipt=run.record.receipt,
            events=run.record.events,
            killed=run.killed,
            fault=fault,
        )
        return self._finish(run, ended)
