"""What could not be taken away of a run: tried again, less and less often, until it is gone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from sealnet.errors import SealnetError

_FIRST_S, _LONGEST_S = 1.0, 60.0


class Leftovers:
    """For the event loop's thread. `take_away` raises SealnetError or OSError where something of a run stays."""

    def __init__(self, take_away: Callable[[str], Awaitable[object]], *, first_s: float = _FIRST_S) -> None:
        self._take_away, self._first_s = take_away, first_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def see_to(self, run_id: str) -> None:
        if run_id not in self._tasks:
            task = self._tasks[run_id] = asyncio.get_running_loop().create_task(self._see_to(run_id))
            task.add_done_callback(lambda _task: self._tasks.pop(run_id))

    async def _see_to(self, run_id: str) -> None:
        for attempt in itertools.count():
            await asyncio.sleep(min(self._first_s * 2 ** min(attempt, 16), _LONGEST_S))
            try:
                await self._take_away(run_id)
            except (SealnetError, OSError):
                continue
            return

    async def close(self) -> None:
        """The next worker begins with what is left."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
