"""One run of the worker, seen to its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sealnet.ended import Ended
from sealnet.worker.live import Live, Terms
from tests.lab import PATIENCE
from tests.model.build import a_record


class Payload:
    """A run whose bwrap is no longer in its cgroup, so that only who looks into the namespace ends it."""

    run_id, killed = "run-1", None
    record = a_record(durable=None)

    def __init__(self, *, fails: bool) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.pidfd = os.pidfd_open(self.process.pid)
        self.kills: list[bool] = []
        self.upkeep = SimpleNamespace(next_at=lambda: time.monotonic() if fails else float("inf"), serve=self.serve)

    def serve(self) -> None:
        raise ValueError("a bug")

    def kill(self, *, own: bool = False) -> None:
        self.kills.append(own)
        if not own:
            self.process.kill()

    def wait_end(self) -> int:
        return 128 - self.process.wait(60 * PATIENCE)

    def close(self) -> None:
        os.close(self.pidfd)


def ending(run: Any, ended: Ended) -> Ended:
    run.close()
    return ended


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_ended_is_ended_wherever_it_was_moved_and_what_has_ended_is_looked_for_once(fails: bool) -> None:
    payload = Payload(fails=fails)

    def work(function: Callable[..., Any], /, *arguments: object) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(None, function, *arguments)

    async def story() -> tuple[int, str | None]:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        terms = Terms(owner=1, durable=False, ends_at=None, grace_s=1)
        live = Live(payload, terms, look=work, work=work, finish=ending)  # type: ignore[arg-type]
        if not fails:
            payload.process.kill()
        end = await live.ended
        return end.status, end.fault

    try:
        status, fault = asyncio.run(asyncio.wait_for(story(), 100 * PATIENCE))
    finally:
        payload.process.kill()
        payload.process.wait()

    assert status == 137
    assert payload.kills == [not fails]
    assert (fault is not None) == fails
