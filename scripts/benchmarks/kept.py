"""What a worker keeps in memory: `sealnet worker` itself, its crew included, asked over its socket as by anybody."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.benchmarks.lab import SEALNET, a_worker
from scripts.benchmarks.result import Effort, Result
from sealnet import asking, client

_SLEEP = ("sleep", "3600")
_RUNS, _QUICK_RUNS = 1000, 8
_BURST, _QUICK_BURST, _WIDTH = 64, 4, 16
_RESTS_S = 2.0


def measure(effort: Effort, result: Result, port: int) -> None:
    count, burst = (_QUICK_RUNS, _QUICK_BURST) if effort.quick else (_RUNS, _BURST)
    group = result.group("memory of a worker and its crew (PSS)")
    with a_worker() as worker:
        path = client.path(os.environ)

        def launch(number: int) -> None:
            given = {"run_id": f"kept-{number}", "lease_port": port, "cwd": "/", "environ": {"PATH": "/usr/bin:/bin"}}
            null = os.open(os.devnull, os.O_RDWR)
            try:
                _uid, parameters = asking.parameters(_SLEEP, given, detach=True)
                with client.Connection(path) as connection, asking.opened_paths(given) as opened:
                    connection.send("Run", parameters, [null, null, null, *opened])
                    while not (replies := connection.receive()):
                        pass
                    client.answer(replies[0])
            finally:
                os.close(null)

        def pss() -> int:
            time.sleep(_RESTS_S)
            return sum(map(_pss, _below(worker.pid)))

        group.add("before it has launched any", [pss() / 1024], unit="kB")
        with ThreadPoolExecutor(burst) as pool:
            list(pool.map(launch, range(burst)))
        _reap_all()
        alone = pss()
        group.add(f"when {burst} at once have come and gone", [alone / 1024], unit="kB")
        with ThreadPoolExecutor(_WIDTH) as pool:
            list(pool.map(launch, range(burst, burst + count)))
        group.add(f"each of {count:,} runs that live", [(pss() - alone) / count / 1024], unit="kB")
        _reap_all()


def _reap_all() -> None:
    subprocess.run([SEALNET, "reap", "--all"], check=True, stdout=subprocess.DEVNULL)


def _below(pid: int) -> list[int]:
    """The worker and its own processes: what it has started is bwrap's or a door's by another program."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                if os.path.basename(os.readlink(f"/proc/{child}/exe")).startswith("python"):
                    found.append(child)
    return found


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel tells no PSS of process {pid}")
