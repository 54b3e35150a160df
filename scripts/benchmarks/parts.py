"""What the parts of a run cost: imports, steps of the launch, steps of the teardown."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from scripts.benchmarks.figures import in_turns, median
from scripts.benchmarks.lab import PACKAGED, Sealnet, broker
from scripts.benchmarks.result import Effort, Result

_STEPS = ("claimed", "allocated", "built", "proved", "started", "held", "exec")
_ENDING = ("join", "kill", "settle", "revoke", "remove_link", "remove_netns", "remove_cgroup")
_BUILDING = (
    "see_taken",
    "add_cgroup",
    "add_gate",
    "add_netns",
    "add_filter",
    "add_link",
    "bring_up",
    "see",
    "check_routes",
    "grant",
)
_SHOWN = 12


def measure(effort: Effort) -> Result:
    result = Result()
    with broker() as port:
        _stages(result, effort, port)
        _imports(result, effort, port)
    return result


def _stages(result: Result, effort: Effort, port: int) -> None:
    sealnet = Sealnet()
    spent: dict[str, float] = {}
    for name in (*_BUILDING, *_ENDING):
        setattr(sealnet.host, name, _timed(getattr(sealnet.host, name), name, spent))

    def cycle(kind: str, given: int | None) -> dict[str, float]:
        spent.clear()
        run = sealnet.start(port=given)
        told, before = {}, 0.0
        for step in _STEPS:
            if step in run.marks:
                told[f"{kind} {step}"] = run.marks[step] - before
                before = run.marks[step]
        told[f"{kind} teardown"] = run.end()
        return told | {f"{kind} {name}" + ("()" if name in _BUILDING else "(), ending"): took for name, took in spent.items()}

    told = in_turns({"severed": partial(cycle, "severed", None), "sealed": partial(cycle, "sealed", port)}, rounds=effort.rounds(40, 5))
    for kind in ("severed", "sealed"):
        rows = {name.removeprefix(f"{kind} "): values for name, values in told.items() if name.startswith(f"{kind} ")}
        group = result.group(f"{kind}: each step, since the one before")
        for name in (*_STEPS, "teardown"):
            if name in rows:
                group.add(f"to {name}" if name != "teardown" else name, rows[name])
        group = result.group(f"{kind}: calls to the kernel's side, within those steps")
        for name, values in sorted(rows.items(), key=lambda row: -median(row[1])):
            if name not in (*_STEPS, "teardown"):
                group.add(name, values)


def _timed(function: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent[name] = spent.get(name, 0.0) + (time.perf_counter() - began) * 1e3

    return call


def _imports(result: Result, effort: Effort, port: int) -> None:
    """Wall time of interpreters that import more and more; then which modules it goes to, by -X importtime."""

    def wall(name: str, *argv: str) -> dict[str, float]:
        began = time.perf_counter()
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return {name: (time.perf_counter() - began) * 1e3}

    interpreter, whole = PACKAGED[:2], [*PACKAGED, "run", "--lease-port", str(port), "--", "true"]
    # Begun and ended as sealnet itself is.
    found = f"import gc, os, sys; gc.set_threshold(50_000); sys.path += {[path for path in sys.path if path.startswith('/')]!r}; "
    measures = {
        "python, nothing imported": partial(wall, "python, nothing imported", *interpreter, "-c", "pass"),
        "and click": partial(wall, "and click", *interpreter, "-c", f"{found}import click; os._exit(0)"),
        "and all that a run imports": partial(
            wall,
            "and all that a run imports",
            *interpreter,
            "-c",
            f"{found}import sealnet.cli.run, sealnet.launch, sealnet.terminal, sealnet.supervise; os._exit(0)",
        ),
        "sealnet --version": partial(wall, "sealnet --version", *PACKAGED, "--version"),
        "sealnet run, sealed, whole": partial(wall, "sealnet run, sealed, whole", *whole),
    }
    group = result.group("start-up of the command line")
    for name, values in in_turns(measures, rounds=effort.rounds(20)).items():
        group.add(name, values, control="python, nothing imported" if name != "python, nothing imported" else None)

    own: dict[str, list[float]] = {}
    for _ in range(effort.rounds(7, 1)):
        said = subprocess.run(
            [PACKAGED[0], "-X", "importtime", *whole[1:]], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
        ).stderr
        for name, took_ms in parse_importtime(said).items():
            own.setdefault(name, []).append(took_ms)
    group = result.group("imports that cost most by themselves, with what instrumentation adds")
    for name, values in sorted(own.items(), key=lambda row: -median(row[1]))[:_SHOWN]:
        group.add(name, values)
    group.add(f"all {len(own)} modules", [sum(median(values) for values in own.values())])


def parse_importtime(text: str) -> dict[str, float]:
    """Milliseconds that each module took by itself, from what -X importtime prints: `import time: SELF | CUMULATIVE | NAME`."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        head, _, rest = line.partition("import time:")
        fields = rest.split("|")
        if not head and len(fields) == 3 and fields[0].strip().isdigit():
            found[fields[2].strip()] = int(fields[0]) / 1e3
    return found
