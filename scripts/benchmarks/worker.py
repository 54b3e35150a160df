"""What a worker spends on runs: to launch one, 64 at once, the next beside a thousand; to keep, look at and take away them all."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

from scripts.benchmarks import figures, kept
from scripts.benchmarks.lab import BWRAP, PAYLOAD, SILENT, as_a_runs, broker, start_bwrap
from scripts.benchmarks.result import Effort, Result
from sealnet import request
from sealnet.model.config import Config
from sealnet.records import State
from sealnet.worker.runs import Runs

_SIZES, _QUICK_SIZES = (10, 100, 500, 1000), (4, 8)
_MEASURED, _WIDTH = 20, 16
_TURNS, _BURST, _QUICK_BURST, _BURSTS = 30, 64, 4, 3
_SLEEP = ("sleep", "3600")
_IDLE_S, _QUICK_IDLE_S = 20.0, 2.0


def measure(effort: Effort) -> Result:
    result = Result()
    with broker() as port:
        kept.measure(effort, result, port)
        asyncio.run(_measure(effort, result, port))
    result.notes.append(
        "CPU and memory are those of the worker and its crew together; programs that they start, and the kernel on their behalf, are not"
        " in them. Memory is that of `sealnet worker`, all else of a worker within the program that measures. Runs are launched"
        f" {_WIDTH} at a time, the measured ones one after another. A policy rule concerns every run, so each is looked at: `CPU of a look`"
        " is for each."
    )
    return result


async def _measure(effort: Effort, result: Result, port: int) -> None:
    state = State()
    state.prepare()
    runs = Runs(state, Config())
    await runs.begin()
    number = 0
    some = asyncio.Semaphore(_WIDTH)

    async def launch() -> float:
        nonlocal number
        number += 1
        began = time.perf_counter()
        plan = request.plan(_SLEEP, run_id=f"bench-{number}", lease_port=port, cwd="/", user="0")
        await runs.launch(plan, owner=0, streams=SILENT)
        return (time.perf_counter() - began) * 1e3

    async def launch_some() -> None:
        async with some:
            await launch()

    async def end(first: int, last: int) -> None:
        async def one(run_id: str) -> None:
            ended = runs.wait(run_id)
            await runs.kill(run_id)
            await ended

        await asyncio.gather(*(one(f"bench-{which}") for which in range(first, last + 1)))

    alone: list[float] = []
    as_a_run: list[float] = []
    turns: list[float] = []
    for _ in range(effort.rounds(_TURNS)):
        for told, command in ((alone, [*BWRAP, *PAYLOAD]), (as_a_run, as_a_runs())):
            started = await asyncio.to_thread(start_bwrap, command)
            told.append(started.marks["exec"])
            await asyncio.to_thread(started.end)
        turns.append(await launch())
    single = result.group("from the call to the payload's exec, one after the other")
    single.add("bwrap alone", alone)
    single.add("bwrap with a run's options, and the programs before its payload", as_a_run, control="bwrap alone")
    single.add("a sealed run of the worker", turns, control="bwrap alone")
    at_once = _QUICK_BURST if effort.quick else _BURST
    each: list[float] = []
    ends: list[float] = []
    for _ in range(effort.rounds(_BURSTS, 1)):
        each += await asyncio.gather(*(launch() for _ in range(at_once)))
        began = time.perf_counter()
        await end(number - at_once + 1, number)
        ends.append((time.perf_counter() - began) * 1e3 / at_once)
    burst = result.group(f"{at_once} sealed runs at once")
    burst.add("one after the other", turns)
    burst.add("each of those at once", each, control="one after the other")
    burst.add("95 of 100 have begun within", [figures.quantile(each, 0.95)], control="one after the other")
    burst.add("to end them, for each", ends)
    await end(1, len(turns))
    others = number

    launches = result.group("the next sealed run, beside")
    await asyncio.gather(*(launch_some() for _ in range(_WIDTH)))
    sizes = _QUICK_SIZES if effort.quick else _SIZES
    for size in sizes:
        await asyncio.gather(*(launch_some() for _ in range(size - (number - others))))
        cpu, took = _cpu_ms(runs), [await launch() for _ in range(effort.rounds(_MEASURED))]
        control = None if size == sizes[0] else f"{sizes[0]} others"
        launches.add(f"{size} others", took, control=control)
        launches.add(f"{size} others: CPU", [(_cpu_ms(runs) - cpu) / len(took)], control=None if control is None else f"{control}: CPU")

    live = number - others
    each_run = result.group(f"each of {live} runs that live")
    each_run.add("descriptors", [len(os.listdir("/proc/self/fd")) / live], unit="")
    each_run.add("threads of the worker, all together", [len(os.listdir("/proc/self/task"))], unit="")
    pause_s = _QUICK_IDLE_S if effort.quick else _IDLE_S
    cpu = _cpu_ms(runs)
    await asyncio.sleep(pause_s)
    each_run.add("CPU in each second, all together", [(_cpu_ms(runs) - cpu) / pause_s])
    cpu = _cpu_ms(runs)
    for verb in ("add", "del"):
        subprocess.run(["/usr/sbin/ip", "rule", verb, "pref", "30000", "to", "203.0.113.0/24", "table", "77"], check=True)
        # Each has been looked at when nothing is spent any more.
        before = -1.0
        while _cpu_ms(runs) - before > 100:
            before = _cpu_ms(runs)
            await asyncio.sleep(0.5)
    each_run.add("CPU of a look", [(_cpu_ms(runs) - cpu) / 2 / live])

    began, cpu = time.perf_counter(), _cpu_ms(runs)
    await asyncio.gather(*(runs.kill(record.run_id) for record in runs.records()))
    while runs.records():
        await asyncio.sleep(0.01)
    at_end = result.group(f"{live} runs that end together")
    at_end.add("for each", [(time.perf_counter() - began) * 1e3 / live])
    at_end.add("for each: CPU", [(_cpu_ms(runs) - cpu) / live])
    await runs.close(end=True)


def _cpu_ms(runs: Runs) -> float:
    ticks = 0
    for pid in (os.getpid(), *runs.crew.pids):
        # Its name, in brackets, may have spaces: utime and stime are the 12th and 13th words behind it (proc_pid_stat(5)).
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks * 1e3 / os.sysconf("SC_CLK_TCK")
