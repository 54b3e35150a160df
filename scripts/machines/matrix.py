"""The smoke suite on every machine of the matrix, and the page that tells of it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree as Xml

from scripts.machines import images, qemu
from scripts.machines.definitions import MATRIX, Cell
from scripts.machines.failure import NoMachine, NotHere
from scripts.machines.furnish import CHECKOUT

PAGE = CHECKOUT / "docs" / "compatibility.md"
# An emulated processor is several times slower than what the tests' own limit is made for.
_TESTS = (
    "env", "SEALNET_TESTS_STRICT=1", "pytest", "-q", "--tb=short", "--durations=10", "-o", "timeout=900",
    "-p", "no:cacheprovider",
)  # fmt: skip
_FOLDERS = ("tests/kernel", "e2e")
# So many failures can be tests that came late; more cannot.
_FEW = 3
_FACTS = Path(__file__).with_name("facts.toml")
_COLUMNS = ("machine", "kernel", "nft", "bwrap", "iproute2", "python", "systemd", "passed", "failed", "skipped", "result")
_VERSION = re.compile(r"\d+(?:\.\d+)+|\b\d{3}\b")
_INTRODUCTION = """# Compatibility

<!-- Written by `scripts/vm matrix`; what is said of single machines stands in scripts/machines/facts.toml. -->

Each row is one machine: a Debian userland and a kernel, booted with systemd and cgroup v2 alone, in which the smoke suite ran: the tests
that `tests/smoke.py` names, on throw-away hosts, and those of `e2e/hosts/test_machine.py` on the machine itself.
The versions are what the machine said.
[vm](vm.md) tells how to run it.
"""


@dataclass(frozen=True)
class Counts:
    """What a JUnit report says; `failures` are pytest's ids of the tests, errors included."""

    passed: int
    skipped: int
    failures: tuple[str, ...]

    def after(self, again: Counts) -> Counts:
        """What stands when the failures were run again."""
        return Counts(self.passed + again.passed, self.skipped + again.skipped, again.failures)


@dataclass(frozen=True)
class Row:
    """One machine of the table; without counts, why there are none."""

    cell: Cell
    versions: dict[str, str]
    counts: Counts | None
    problem: str = ""
    # This machine's archives do not have it: no fault of sealnet's.
    is_absent: bool = False

    @property
    def is_green(self) -> bool:
        return not self.problem and self.counts is not None and not self.counts.failures

    def told(self) -> tuple[str, ...]:
        shown = [short(self.versions.get(name, "")) for name in _COLUMNS[1:7]]
        shown[0] = self.versions.get("kernel", "")
        counted = [str(self.counts.passed), str(len(self.counts.failures)), str(self.counts.skipped)] if self.counts else ["", "", ""]
        return (f"{self.cell.host}, {self.cell.kernel}", *shown, *counted, "ok" if self.is_green else self.problem or "failed")


def short(said: str) -> str:
    """The version in what a program says of itself."""
    found = _VERSION.search(said)
    return found[0] if found else said


def read_junit(text: str) -> Counts:
    passed, skipped, failures = 0, 0, []
    for case in Xml.fromstring(text).iter("testcase"):  # noqa: S314  # our own pytest's
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('file')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    # A test that passes and whose teardown fails is two cases of one name.
    return Counts(passed, skipped, tuple(dict.fromkeys(failures)))


def run(cells: Sequence[Cell], *, mark: str, timeout_s: float, again: bool = False) -> list[Row]:
    """Run the tests of that mark (tests/smoke.py) in each machine, one after the other.

    With `again`, the few tests that failed are run once more, in a machine that has just booted.
    """
    rows = []
    for cell in cells:
        print(f"vm: {cell.host} on {cell.kernel}", flush=True)
        rows.append(_run(cell, ("-m", mark, *_FOLDERS), timeout_s))
        counts = rows[-1].counts
        if again and counts is not None and 0 < len(counts.failures) <= _FEW:
            print("vm: what failed, once more", flush=True)
            repeated = _run(cell, counts.failures, timeout_s)
            if repeated.counts is not None:
                rows[-1] = replace(repeated, counts=counts.after(repeated.counts))
        print(f"vm: {'  '.join(rows[-1].told())}", flush=True)
    return rows


def _run(cell: Cell, tests: Sequence[str], timeout_s: float) -> Row:
    machine = images.Machine(cell.host, cell.kernel)
    results = CHECKOUT / "build" / "vm" / machine.name
    try:
        ended = qemu.run(images.kernel(cell.kernel), images.root_disk(machine), (*_TESTS, *tests), results=results, timeout_s=timeout_s)
    except NotHere as error:
        return Row(cell, {}, None, f"not available here: {error.message}", is_absent=True)
    except NoMachine as error:
        if error.output:
            print(error.output)
        return Row(cell, {}, None, error.message)
    junit = results / "junit.xml"
    if not junit.is_file():
        print((results / "output.log").read_text(encoding="utf-8", errors="replace"))
        return Row(cell, ended.versions, None, f"pytest ended with status {ended.status} and no report")
    counts = read_junit(junit.read_text(encoding="utf-8"))
    if counts.failures:
        # Results are written over by the next try.
        print((results / "output.log").read_text(encoding="utf-8", errors="replace"))
    lost = ended.status != 0 and not counts.failures
    return Row(cell, ended.versions, counts, f"pytest ended with status {ended.status}" if lost else "")


def aligned(rows: Sequence[Row]) -> str:
    table = [_COLUMNS, *(row.told() for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in table)


def render(rows: Sequence[Row], facts: Sequence[dict[str, str]]) -> str:
    """The page. A row that is not green and of which no fact tells is named as unexplained."""
    lines = [_INTRODUCTION, f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(row.told())} |" for row in rows]
    said = []
    for row in rows:
        name = f"{row.cell.host}, {row.cell.kernel}"
        known = [
            fact
            for fact in facts
            if fact.get("host", row.cell.host) == row.cell.host and fact.get("kernel", row.cell.kernel) == row.cell.kernel
        ]
        said += [f"* {name}: {fact['text']}" for fact in known]
        for failure in row.counts.failures if row.counts else ():
            if not any(fact.get("test", "") in failure for fact in known if "test" in fact):
                said.append(f"* {name}: `{failure}` failed, and nobody has said why.")
    return "\n".join([*lines, *(["", *said] if said else []), ""])


def facts() -> list[dict[str, str]]:
    return list(tomllib.loads(_FACTS.read_text(encoding="utf-8")).get("fact", []))


def cells_named(names: Sequence[str]) -> list[Cell]:
    """The cells of names like `bookworm-6.1`; all without any."""
    known = {f"{cell.host}-{cell.kernel}": cell for cell in MATRIX}
    if unknown := [name for name in names if name not in known]:
        raise NoMachine(f"cannot run machine {unknown[0]}: it is not in the matrix", hint=f"one of {' '.join(known)}")
    return [known[name] for name in names] or list(MATRIX)
