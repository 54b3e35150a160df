"""Many runs at once: how long until each of them runs, and until all of them are gone."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from scripts.benchmarks.figures import in_turns, median, quantile
from scripts.benchmarks.lab import broker, python
from scripts.benchmarks.result import Effort, Result

_SIZES, _QUICK_SIZES = (16, 64, 256), (8,)
_ROUNDS = {16: 10, 64: 5, 256: 3}
# libnftables takes no descriptor from 1,024 on, and a run that is being built holds about a dozen.
_EACH = 32
_START_S = 0.05
_KINDS = ("bwrap", "severed", "sealed")


def measure(effort: Effort) -> Result:
    result = Result()
    with broker() as port, ExitStack() as stack:
        for size in _QUICK_SIZES if effort.quick else _SIZES:
            crews = []
            for _ in range(-(-size // _EACH)):
                crew = stack.enter_context(python("crew", str(min(size, _EACH)), str(port)))
                _line(crew)
                crews.append(crew)
            told = in_turns({kind: partial(_burst, kind, crews, size) for kind in _KINDS}, rounds=effort.rounds(_ROUNDS.get(size, 1), 2))
            group = result.group(f"{size} at once")
            for what in ("until half of them run", "until 95 of 100 run", "until all run", "teardown for each"):
                for kind in _KINDS:
                    name = "bwrap alone" if kind == "bwrap" else kind
                    control = None if kind == "bwrap" else f"bwrap alone: {what}"
                    group.add(f"{name}: {what}", told[f"{kind} {what}"], control=control)
    result.notes.append(f"Started from {_EACH} threads in each process; times count from the moment at which all are told to start.")
    return result


def _line(crew: Any) -> Any:
    line = crew.stdout.readline()
    if not line:
        raise RuntimeError(f"a crew has ended (status {crew.wait(10)})")
    return json.loads(line)


def _tell(crews: list[Any], word: str) -> tuple[float, list[float]]:
    """Give every crew the same moment to start at; that moment, and when each job of theirs was done."""
    at = time.monotonic() + _START_S
    for crew in crews:
        crew.stdin.write(f"{word} {at}\n")
    return at, [done for crew in crews for done in _line(crew)]


def _burst(kind: str, crews: list[Any], size: int) -> dict[str, float]:
    began, started = _tell(crews, kind)
    ending, ended = _tell(crews, "end")
    took = [(done - began) * 1e3 for done in started]
    return {
        f"{kind} until half of them run": median(took),
        f"{kind} until 95 of 100 run": quantile(took, 0.95),
        f"{kind} until all run": max(took),
        f"{kind} teardown for each": (max(ended) - ending) * 1e3 / size,
    }
