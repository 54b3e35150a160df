"""What is left after thousands of runs whose processes were killed at random moments: nothing must be."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.lab import SEALNET, broker
from scripts.benchmarks.result import Effort, Result
from sealnet.errors import NoSuchRun
from sealnet.kernel import cgroup
from sealnet.model import ruleset
from sealnet.records import State

_AT_ONCE = 4
_SEED = 7
# A run is up after 20 to 100 ms, its payload takes 50 more, and its teardown 30: all of it is hit.
_LATEST_S = 0.2
_SETTLED_S = 15.0
_STUCK_S = 60.0
# Every payload leaves a child behind that has a session of its own.
_PAYLOAD = ("/bin/sh", "-c", "setsid sleep 3600 & sleep 0.05")
_KEPT = {"alloc.lock", "gate", "gate.lock", "runs", "stage", "subnets", "versions.json"}


@dataclass(slots=True)
class _Child:
    pid: int
    run_id: str
    victim: str
    strike_at: float
    began: float


def measure(effort: Effort) -> Result:
    result = Result()
    count = min(effort.runs, 50) if effort.quick else effort.runs
    _import_all()
    chance = random.Random(_SEED)  # noqa: S311 - not for secrets
    state = State()
    struck = {"sealnet": 0, "bwrap": 0, "nobody": 0}
    with broker() as port:
        before = _left(state)
        children: list[_Child] = []
        started = 0
        while started < count or children:
            while started < count and len(children) < _AT_ONCE:
                victim = chance.choice(("sealnet", "sealnet", "bwrap", "nobody"))
                options = chance.choice(([], ["--lease-port", str(port)], ["--lease-port", str(port)]))
                run_id, now = f"leak-{started}", time.monotonic()
                pid = _fork(["run", "--run-id", run_id, *options, "--", *_PAYLOAD])
                children.append(_Child(pid, run_id, victim, now + chance.uniform(0, _LATEST_S), now))
                started += 1
            for child in list(children):
                _look_after(child, children, state, struck, chance)
            time.sleep(0.001)
        subprocess.run([SEALNET, "reap", "--orphans"], check=True, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _SETTLED_S
        while (left := _left(state)) != before and time.monotonic() < deadline:
            time.sleep(0.05)
    group = result.group(f"left after {count:,} runs")
    for what, entries in left.items():
        extra = sorted(set(entries) - set(before[what]))
        group.add(what, [float(len(extra))], unit="")
        if extra:
            result.notes.append(f"{what} left: {', '.join(extra[:5])}")
    result.notes.append(
        f"SIGKILL hit sealnet in {struck['sealnet']:,} runs and a process of bwrap or the payload in {struck['bwrap']:,}, at a random"
        f" moment of the first {_LATEST_S * 1e3:g} ms; {struck['nobody']:,} ran to their end. Then `sealnet reap --orphans`."
    )
    return result


def _import_all() -> None:
    """What `sealnet run` imports, so that each child is a fork that starts at once."""
    import sealnet.cli.run
    import sealnet.launch
    import sealnet.supervise
    import sealnet.terminal  # noqa: F401


def _fork(argv: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        sys.argv = ["sealnet", *argv]
        from sealnet.cli import main

        main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        os._exit(status)


def _look_after(child: _Child, children: list[_Child], state: State, struck: dict[str, int], chance: random.Random) -> None:
    now = time.monotonic()
    if os.waitpid(child.pid, os.WNOHANG)[0]:
        children.remove(child)
        struck["nobody"] += child.victim != "struck"
        return
    if now - child.began > _STUCK_S:
        raise RuntimeError(f"run {child.run_id} did not end within {_STUCK_S:g} s")
    if child.victim == "sealnet" and now >= child.strike_at:
        os.kill(child.pid, signal.SIGKILL)
        struck["sealnet"] += 1
        child.victim = "struck"
    elif child.victim == "bwrap" and now >= child.strike_at and _strike_within(child.run_id, state, chance):
        struck["bwrap"] += 1
        child.victim = "struck"


def _strike_within(run_id: str, state: State, chance: random.Random) -> bool:
    """Kill one process of the run's cgroup; False while there is none."""
    try:
        group = state.read(run_id).cgroup
    except NoSuchRun:
        return False
    if group is None or not (pids := cgroup.pids(Path(group))):
        return False
    pid = chance.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            # The pid may have been reused between the two looks.
            if pid not in cgroup.pids(Path(group)):
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return True
        finally:
            os.close(pidfd)
    return False


def _left(state: State) -> dict[str, list[str]]:
    own = cgroup.root() / Path("/proc/self/cgroup").read_text().split("0::/")[1].splitlines()[0]
    return {
        "links": [name for _index, name in socket.if_nameindex()],
        "netns names": os.listdir("/run/netns"),
        "nft elements": _elements(),
        "cgroups": [directory for directory, _below, _files in os.walk(own) if directory != str(own)],
        "records": _listed(state.runs),
        "reservations": _listed(state.subnets),
        "other files of the state directory": [name for name in _listed(state.path) if name not in _KEPT],
        "mounts": [line.split(" - ")[0] for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()],
        "processes": [str(pid) for pid in cgroup.pids(own) if pid != os.getpid()],
    }


def _listed(directory: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(directory)
    return []


def _elements() -> list[str]:
    told = subprocess.run(["nft", "-j", "list", "table", ruleset.FAMILY, ruleset.TABLE], capture_output=True, text=True, check=False)
    if told.returncode:
        return []
    entries: list[dict[str, Any]] = json.loads(told.stdout)["nftables"]
    return [f"{entry['set']['name']} {element}" for entry in entries if "set" in entry for element in entry["set"].get("elem", [])]
