"""What stays of a run is taken away later, by the worker itself."""

from __future__ import annotations

import asyncio

from sealnet.errors import CannotTearDown
from sealnet.worker.leftovers import Leftovers
from tests.lab import PATIENCE


def test_it_is_tried_again_until_it_is_gone_and_by_one_at_a_time() -> None:
    tried: list[str] = []
    failures: list[Exception] = [CannotTearDown("cannot"), OSError("cannot"), CannotTearDown("cannot")]

    async def take_away(run_id: str) -> None:
        tried.append(run_id)
        await asyncio.sleep(0)
        if failures:
            raise failures.pop()

    async def story() -> None:
        left = Leftovers(take_away, first_s=0.001)
        for _ in range(3):
            left.see_to("run-1")
        while len(tried) < 4:
            await asyncio.sleep(0.001)
        # It is gone now, and may be left another time.
        while not (await asyncio.sleep(0.001) or left.see_to("run-1") or len(tried) > 4):
            pass
        left.see_to("run-2")
        await left.close()

    asyncio.run(asyncio.wait_for(story(), 10 * PATIENCE))

    assert tried == ["run-1"] * 5
