"""What a live run keeps: memory of sealnet's own process, of its bwrap and payload, and of the kernel."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from scripts.benchmarks.lab import BWRAP, SEALNET, SILENT, Sealnet, broker, meminfo, spawned
from scripts.benchmarks.result import Effort, Group, Result
from sealnet.errors import NoSuchRun
from sealnet.kernel import cgroup
from sealnet.records import State
from sealnet.running import Run

_RUNS, _QUICK_RUNS = 150, 10
_WARM_UP = 10
_COMMAND_LINES = 8
_SLEEP = ("sleep", "3600")
# Of /proc/meminfo, what the kernel keeps for itself.
_KERNEL = ("Slab", "KernelStack", "PageTables", "Percpu")


def measure(effort: Effort) -> Result:
    result, count = Result(), effort.rounds(_RUNS, _QUICK_RUNS)
    with broker() as port:
        _bwrap_alone(result, count)
        for kind, given in (("severed", None), ("sealed", port)):
            _through_api(result, kind, given, count)
        _command_line(result, port)
    result.notes.append(
        "PSS is what a process would free if it ended: memory shared with others counts in parts. The whole machine's difference"
        " in MemAvailable holds everything, and what else happened meanwhile."
    )
    return result


def _through_api(result: Result, kind: str, port: int | None, count: int) -> None:
    sealnet = Sealnet()
    runs: list[Run] = []

    def start() -> None:
        run = sealnet.launch(_SLEEP, port=port, streams=SILENT)
        run.release()
        runs.append(run)

    # What is there once for all runs comes with the first of them.
    for _ in range(_WARM_UP):
        start()
    own, before = _pss("self"), _kernel()
    for _ in range(count):
        start()
    after = _kernel()
    group = result.group(f"{kind}: for each of {count} runs of one process")
    group.add("sealnet's own process", [(_pss("self") - own) / count / 1024], unit="kB")
    group.add("bwrap and payload", [_pss_of_group(run) / 1024 for run in runs], unit="kB")
    _kernel_rows(group, before, after, count)
    for run in runs:
        run.close()


def _bwrap_alone(result: Result, count: int) -> None:
    with ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            return stack.enter_context(spawned([*BWRAP, *_SLEEP], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))

        start()
        before = _kernel()
        for _ in range(count):
            start()
        # They say nothing, so they are given time to get where they stay.
        time.sleep(1.0)
        group = result.group(f"bwrap alone: for each of {count}")
        _kernel_rows(group, before, _kernel(), count)


def _command_line(result: Result, port: int) -> None:
    with ExitStack() as stack:
        sealnet = Sealnet()
        processes = [
            stack.enter_context(
                spawned([SEALNET, "run", "--run-id", f"cli-{number}", "--lease-port", str(port), "--", *_SLEEP], stdin=subprocess.DEVNULL)
            )
            for number in range(_COMMAND_LINES)
        ]
        deadline = time.monotonic() + 30
        while _running(sealnet.state) < _COMMAND_LINES:
            if time.monotonic() > deadline:
                raise RuntimeError("runs of the command line did not start")
            time.sleep(0.02)
        group = result.group(f"`sealnet run`, {_COMMAND_LINES} at once: one process stays with each run")
        group.add("sealnet's process: PSS", [_pss(str(process.pid)) / 1024 for process in processes], unit="kB")
        for process in processes:
            process.terminate()
            process.wait()


def _running(state: State) -> int:
    count = 0
    for run_id in state.run_ids():
        # A run that only tries whether there can be any has gone meanwhile.
        with suppress(NoSuchRun):
            count += state.read(run_id).state == "running"
    return count


def _kernel() -> dict[str, int]:
    # What is freed by the way is freed a grace period later.
    time.sleep(0.5)
    return meminfo()


def _kernel_rows(group: Group, before: dict[str, int], after: dict[str, int], count: int) -> None:
    for name, keys in (("kernel: slab, stacks, page tables, per-CPU", _KERNEL), *((f"kernel: of it {key}", (key,)) for key in _KERNEL)):
        group.add(name, [sum(after[key] - before[key] for key in keys) / count / 1024], unit="kB")
    group.add("whole machine: MemAvailable", [(before["MemAvailable"] - after["MemAvailable"]) / count / 1024], unit="kB")


def _pss(pid: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel tells no PSS of process {pid}")


def _pss_of_group(run: Run) -> int:
    return sum(_pss(str(pid)) for pid in cgroup.pids(Path(run.record.cgroup or "")))
