"""What each caller may have of the worker: runs, launches, threads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sealnet.errors import TooMany
from sealnet.model.calling import Peer
from sealnet.model.config import Config
from sealnet.model.rates import Count, Rate

T = TypeVar("T")

# Launches, and looks, of one caller at a time: the others' must not wait behind his.
_AT_ONCE = 4
_THREADS = 32
_MOST_RATES = 1000


class Shares:
    """For the event loop's thread. Root has no limit, and waits for nobody."""

    def __init__(self, config: Config) -> None:
        self._runs = Count(config.max_runs_per_user)
        self._rate = Rate(config.launch_rate, 10 * config.launch_rate)
        self._launches: dict[int, asyncio.Semaphore] = {}
        self._looks: dict[int, asyncio.Semaphore] = {}
        # What a caller names may lie on a file system that does not answer, so threads of our own wait for it, some for each.
        self._pool = ThreadPoolExecutor(_THREADS, "sealnet-service")

    def reload(self, config: Config) -> None:
        """Limits count from now on; who has more already keeps it."""
        self._runs.most = config.max_runs_per_user
        self._rate = Rate(config.launch_rate, 10 * config.launch_rate)

    def admit(self, peer: Peer) -> None:
        """One more launch. Raises TooMany."""
        now = time.monotonic()
        if len(self._rate) > _MOST_RATES:
            self._rate.forget_full(now)
        if not peer.is_root and not self._rate.take(peer.uid, now):
            raise TooMany("cannot start a run: too many were started in too short a time", hint="wait a second; launch_rate in config.toml")

    def take(self, peer: Peer) -> None:
        """One more run, from before its launch to after its end. Raises TooMany."""
        if not peer.is_root and not self._runs.take(peer.uid):
            raise TooMany(
                f"cannot start a run: {self._runs.of(peer.uid)} of yours are live, and max_runs_per_user is {self._runs.most}",
                hint="end one: sealnet reap RUN",
            )

    def adopt(self, uid: int) -> None:
        """One that is there already."""
        if uid:
            self._runs.add(uid)

    def give_back(self, uid: int) -> None:
        if uid:
            self._runs.give_back(uid)

    def launching(self, uid: int) -> contextlib.AbstractAsyncContextManager[object]:
        return _turn(self._launches, uid)

    async def prepare(self, function: Callable[..., T], *arguments: object) -> T:
        """In a thread, as part of a launch."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def look(self, uid: int, function: Callable[..., T], *arguments: object) -> T:
        """In a thread."""
        async with _turn(self._looks, uid):
            return await self.prepare(function, *arguments)

    def close(self) -> None:
        """A thread that waits for somebody's file system is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _turn(turns: dict[int, asyncio.Semaphore], uid: int) -> contextlib.AbstractAsyncContextManager[object]:
    return contextlib.nullcontext() if uid == 0 else turns.setdefault(uid, asyncio.Semaphore(_AT_ONCE))
