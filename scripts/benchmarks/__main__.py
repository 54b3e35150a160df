"""`scripts/bench`: measures each subject in a process and on a throw-away host of its own, and tells."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.benchmarks import lab, peers, report
from scripts.benchmarks.result import CACHE, Effort
from sealnet import __version__
from sealnet.errors import SealnetError

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "benchmarks.md"
# In the order in which they run; the leak counts only when they are asked for.
_DEFAULT = ("parts", "setup", "burst", "loopback", "lease", "door", "cli", "memory")
_LONG = ("leaks", "relays", "worker")
_SUBJECTS = (*_DEFAULT, *_LONG)
_SUBJECT_S, _LONG_S = 900, 7200
_SCHEMA = "sealnet.bench/1"
_PACKAGES = ("bubblewrap", "nftables", "iproute2", "python3")


def main() -> int:
    arguments = _arguments()
    effort = Effort(quick=arguments.quick, runs=arguments.runs, cache=arguments.cache)
    if os.geteuid() != 0:
        print("bench: cannot measure: only root may build a seal\n  hint: sudo scripts/bench", file=sys.stderr)
        return 125
    if arguments.inside:
        return _measure_inside(arguments.inside, effort)
    # So that a pen is emptied on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    subjects = arguments.subjects or [*_DEFAULT, *(_LONG if arguments.long else ())]
    if "cli" in subjects:
        try:
            peers.install_srt(Path(effort.cache))
        except peers.Missing as error:
            print(f"bench: cannot install the rootless peer: {error}", file=sys.stderr)
    told: dict[str, Any] = {"schema": _SCHEMA, "machine": _machine(arguments.date), "quick": effort.quick, "subjects": {}, "targets": []}
    for name in subjects:
        told["subjects"][name] = _measure(name, effort)
        print("\n".join(report.lines_of(name, told["subjects"][name])), flush=True)
    whole = set(_DEFAULT) <= set(subjects)
    # A page of everything says of the leak count, too, that it was not measured.
    told["targets"] = [target.to_json() for target in report.targets(told["subjects"], _SUBJECTS if whole else subjects)]
    if told["targets"]:
        _show_targets(told)
    _write(told, arguments, whole=whole and not effort.quick)
    return 1 if any("failed" in subject for subject in told["subjects"].values()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measure sealnet, each time beside a control. About 15 minutes, as root."
    )
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"one of {', '.join(_SUBJECTS)}; default: all but {' and '.join(_LONG)}"
    )
    parser.add_argument("--quick", action="store_true", help="small counts: whether it works, not how fast")
    parser.add_argument("--long", action="store_true", help="count as well what many killed runs, and many connections, leave behind")
    parser.add_argument("--runs", type=int, default=10_000, metavar="N", help="how many runs, and connections, that takes (10000)")
    parser.add_argument("--json", metavar="FILE", help="write every value there")
    parser.add_argument("--output", metavar="FILE", help="write the page there; default: docs/benchmarks.md, when everything was measured")
    parser.add_argument("--date", help="named on the page; without it there is none")
    parser.add_argument("--cache", default=CACHE, metavar="DIR", help=f"where other tools are installed ({CACHE})")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.subjects if name not in _SUBJECTS]:
        parser.error(f"cannot measure {unknown[0]}: it is none of {', '.join(_SUBJECTS)}")
    return arguments


def _measure(name: str, effort: Effort) -> dict[str, Any]:
    """One subject in a process of its own; when that fails, why. Whatever it started has ended afterwards."""
    print(f"bench: measuring {name}", file=sys.stderr, flush=True)
    command = [sys.executable, "-I", "-m", "scripts.benchmarks", "--inside", name, "--runs", str(effort.runs), "--cache", effort.cache]
    command += ["--quick"] if effort.quick else []
    began = time.monotonic()
    with lab.pen() as group:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: lab.join(group))
        try:
            output, _ = process.communicate(timeout=_LONG_S if name in _LONG else _SUBJECT_S)
            told: dict[str, Any] = (
                json.loads(output) if process.returncode == 0 else {"failed": f"it ended with status {process.returncode}"}
            )
        except subprocess.TimeoutExpired:
            told = {"failed": "it did not end in time"}
        finally:
            process.kill()
            process.communicate()
    return {**told, "took_s": time.monotonic() - began}


def _measure_inside(name: str, effort: Effort) -> int:
    # What a subject's children print is not the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(answer, False)
    lab.enter()
    module = importlib.import_module(f"scripts.benchmarks.{name}")
    try:
        told = module.measure(effort).to_json()
    except SealnetError as error:
        told = {"failed": error.message}
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(told, file)
    file.close()
    # Thousands of runs need not be taken down one by one: the host goes away whole.
    os._exit(0)


def _machine(date: str | None) -> dict[str, Any]:
    versions = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${Package} ${Version}\n", *_PACKAGES], capture_output=True, text=True, check=False
    ).stdout
    distribution = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return {
        "sealnet": __version__,
        "kernel": platform.release().split("-")[0],
        "CPUs": os.cpu_count(),
        "memory": f"{lab.meminfo()['MemTotal'] / 2**30:.0f} GiB",
        "distribution": distribution,
        "Python": platform.python_version(),
        **dict(line.split(" ", 1) for line in versions.splitlines() if not line.startswith("python3 ")),
        **({"date": date} if date else {}),
    }


def _show_targets(told: dict[str, Any]) -> None:
    rows: list[tuple[str, ...]] = [
        ("", "target", "measured", ""),
        *(report.told_target(report.read_target(one)) for one in told["targets"]),
    ]
    print("\n== Targets")
    print("\n".join(report.aligned(rows)), flush=True)


def _write(told: dict[str, Any], arguments: argparse.Namespace, *, whole: bool) -> None:
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    page = Path(arguments.output) if arguments.output else _PAGE if whole else None
    if page is not None:
        page.write_text(report.render(told), encoding="utf-8")
        print(f"\nwritten: {os.path.relpath(page)}")


sys.exit(main())
