"""A worker's runs in a process of their own, told what to do by lines of JSON; it dies by SIGKILL where it is told to.

usage: worker.py '{"RUN": "POINT", ...}'    Requests: [number, "launch"|"wait"|"signal"|"kill"|"live"|"crew"|"close", ARGUMENT...]
With SEALNET_TESTS_CLOCK the time of day is another one, years before or after, whenever it is read.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sealnet import ended, reap, request, seal
from sealnet.errors import CannotTearDown, SealnetError
from sealnet.model.config import Config
from sealnet.records import State
from sealnet.running import Run, Streams
from sealnet.worker import first, launching
from sealnet.worker.live import Live
from sealnet.worker.runs import Runs

QUIET = Streams(subprocess.DEVNULL, subprocess.DEVNULL, subprocess.DEVNULL)


# Behind a point: one of the crew that comes to it dies there, and its worker does not.
ALONE = ", alone"
STAYS, ODD = "stays", "odd"
# Among the runs: how many members there can be.
NO_MORE = "no more than"


def pass_by(point: str, wanted: str | None, worker: int) -> None:
    """Die, or have the worker die, where that is wanted at this point."""
    if wanted == point or (wanted == point + ALONE and os.getpid() != worker):
        if wanted != point:
            # What has been let go by now is to be seen to run.
            time.sleep(0.3)
        os.kill(worker if wanted == point else os.getpid(), signal.SIGKILL)
        # Whoever is not that worker dies with it.
        time.sleep(60)


def plan_deaths(points: dict[str, str], worker: int) -> None:
    """In a process of the worker's, its crew's or its own: who comes to a point has the worker die there."""

    def after(owner: Any, name: str, point: str, run_id: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def done(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            pass_by(point, points.get(run_id(*arguments, **options)), worker)
            return result

        setattr(owner, name, done)

    launch = launching.launch

    def launched(plan: Any, *, checkpoint: Callable[[str], None], **options: Any) -> Run:
        pass_by("begun", points.get(plan.run_id), worker)

        def told(step: str) -> None:
            checkpoint(step)
            pass_by(step, points.get(plan.run_id), worker)

        return launch(plan, checkpoint=told, **options)

    launching.launch = launched  # type: ignore[assignment]
    of_run = lambda run, *_arguments, **_options: run.run_id  # noqa: E731
    after(Run, "_join", "in its cgroup", of_run)
    after(Run, "_announce", "announced", of_run)
    after(Run, "release", "released", of_run)
    after(Run, "wait_end", "seen to its end", of_run)
    after(ended, "keep", "its end kept", lambda _state, end: end.run_id)
    after(State, "release", "its subnet released", lambda _state, run_id, *_, **__: run_id)
    after(reap, "teardown", "torn down", lambda _host, _state, run_id, **_: run_id)
    after(Live, "_time_out", "timed out", lambda live: live.run.run_id)
    plan_failures(points)


def plan_failures(points: dict[str, str]) -> None:
    """What cannot be taken away at first: a run that STAYS, three times; one that is ODD once in each process, and nobody knows why."""
    real, failed = seal.teardown, Counter[str]()

    def teardown(kernel: Any, what: Any, **options: Any) -> None:
        wanted = points.get(what.run_id)
        if wanted in (STAYS, ODD):
            failed[what.run_id] += 1
            if wanted == STAYS and failed[what.run_id] <= 3:
                raise CannotTearDown(f"cannot tear down run {what.run_id}: it stays")
            if wanted == ODD and failed[what.run_id] == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(kernel, what, **options)

    seal.teardown = teardown


def unsettle_clock() -> None:
    real, years = time.time, itertools.cycle((3e8, -3e8, 6e8, -6e8))
    time.time = lambda: real() + next(years)


async def serve(runs: Runs) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()

    def say(*told: Any) -> None:
        print(json.dumps(told), flush=True)

    async def answer(number: int, deed: str, *arguments: Any) -> None:
        try:
            say(number, await act(deed, *arguments))
        except SealnetError as error:
            say(number, type(error).__name__)
        except BaseException as error:
            say(number, f"a bug: {error!r}")
            raise

    async def act(deed: str, *arguments: Any) -> Any:
        if deed == "launch":
            argv, options = arguments
            plan = request.plan(argv, cwd=os.getcwd(), **options)
            return (await runs.launch(plan, owner=1000, streams=QUIET)).run_id
        if deed == "wait":
            end = await runs.wait(arguments[0])
            return [end.status, end.fault, end.owner, bool(end.receipt)]
        if deed == "crew":
            return [runs.crew.pids, runs.crew.died, len(os.listdir("/proc/self/fd"))]
        if deed == "signal":
            return runs.signal(*arguments)
        if deed == "kill":
            return await runs.kill(*arguments)
        return sorted(record.run_id for record in runs.records())

    say(0, await runs.begin())
    while line := await reader.readline():
        number, deed, *arguments = json.loads(line)
        if deed == "close":
            await runs.close(end=arguments[0])
            say(number, None)
            return
        task = asyncio.create_task(answer(number, deed, *arguments))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def main() -> None:
    state = State()
    state.prepare()
    if "SEALNET_TESTS_CLOCK" in os.environ:
        unsettle_clock()
    plan_deaths(json.loads(sys.argv[1]), os.getpid())
    member = str(Path(__file__).with_name("crewmember.py"))
    first._PROGRAM = (sys.executable, "-I", member, sys.argv[1], str("SEALNET_TESTS_CLOCK" in os.environ))
    await serve(Runs(state, Config()))


if __name__ == "__main__":
    asyncio.run(main())
