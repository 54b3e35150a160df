"""docs/benchmarks.md and the lines for a terminal, from what the subjects told; and which targets were met."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

_TITLES = {
    "setup": "Set-up and teardown beside other runs",
    "burst": "Bursts",
    "loopback": "Every packet of the host",
    "lease": "The way through a lease",
    "door": "The allowlist proxy, and others",
    "cli": "The command line, and other tools",
    "memory": "Memory",
    "parts": "Where the time goes",
    "leaks": "Left behind",
    "relays": "Left in a relay",
    "worker": "A thousand runs in one worker",
}


@dataclass(frozen=True, slots=True)
class Target:
    """`measured` is a number of `subject`, or None where it was not measured; `at_most` or else at least `limit`."""

    subject: str
    name: str
    limit: float
    measured: float | None
    unit: str = "x"
    at_most: bool = True

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "name": self.name,
            "limit": self.limit,
            "at_most": self.at_most,
            "unit": self.unit,
            "measured": self.measured,
            "met": self.met,
        }


def targets(subjects: dict[str, Any], asked: Container[str]) -> list[Target]:
    """Each target of the design that is of a subject in `asked`, with what was measured of it.

    Those that ask for more than was measured (1,000 runs) are not measured.
    """

    def median(subject: str, group: str, row: str) -> float | None:
        found = _row(subjects, subject, group, row)
        return None if found is None else float(found["median"])

    def over(one: float | None, other: float | None) -> float | None:
        return None if one is None or not other else one / other

    def ratio(subject: str, group: str, row: str) -> float | None:
        found = _row(subjects, subject, group, row)
        return None if found is None or found["ratio"] is None else float(found["ratio"]["value"])

    first, thousand, four = "the first run", "with 999 other runs alive", "with 3,999 other runs alive"
    packet = "one UDP packet over lo, sent and received by one thread"
    echo = ratio("lease", "ping-pong of one byte, median of a round", "lease")
    tunnel = "ping-pong of one byte through a tunnel, median of a round"
    through, direct = median("door", tunnel, "door"), median("door", tunnel, "direct")
    denied = "a denied CONNECT, from connect(2) to its answer"
    found = [
        Target(
            "cli",
            "`sealnet run -- true`, against the rootless tool",
            0.35,
            ratio("cli", "`true`, from the call to the end", "sealnet run, severed"),
        ),
        Target(
            "cli",
            "the same by a worker",
            0.25,
            ratio("cli", "`true`, from the call to the end", "sealnet run of a worker, severed"),
        ),
        Target(
            "setup",
            "run 1,000 set up (claim to held, sealed), against run 1",
            1.5,
            over(median("setup", thousand, "sealed: claim to held"), median("setup", first, "sealed: claim to held")),
        ),
        Target(
            "setup",
            "a loopback packet of the host with 4,000 runs, against an idle host",
            1.1,
            ratio("setup", four, "loopback packet of this host"),
        ),
        Target(
            "loopback",
            "the same, the gate with 4,000 leases against the gate with none",
            1.1,
            over(median("loopback", packet, "the gate, 4,000 leases"), median("loopback", packet, "the gate, no lease")),
        ),
        Target("lease", "the way through a lease, against a bare veth: ping-pong", 0.95, None if not echo else 1 / echo, at_most=False),
        Target(
            "lease", "the way through a lease, against a bare veth: up", 0.95, ratio("lease", "up, to the host", "lease"), at_most=False
        ),
        Target(
            "lease",
            "the way through a lease, against a bare veth: down",
            0.95,
            ratio("lease", "down, to the sandbox", "lease"),
            at_most=False,
        ),
        *[
            Target(
                "door",
                f"the allowlist proxy, against squid: {title}",
                1.0,
                over(median("door", title, "door"), median("door", title, "squid")),
                at_most=False,
            )
            for title in (
                "CONNECT, one after the other",
                "CONNECT, 32 clients",
                "CONNECT, 256 clients",
                "tunnel, up",
                "tunnel, down",
            )
        ],
        Target(
            "door",
            "what a tunnel adds to a ping-pong of one byte",
            60.0,
            None if through is None or direct is None else through - direct,
            "us",
        ),
        Target("door", "a denied request, from connect(2) to its answer", 1000.0, median("door", denied, "door"), "us"),
        *[
            Target(
                "burst",
                f"teardown of each of {size} sealed runs at once",
                5.0,
                median("burst", f"{size} at once", "sealed: teardown for each"),
                "ms",
            )
            for size in (64, 256)
        ],
        Target(
            "worker",
            "launch to exec of a worker's sealed run, against bwrap alone",
            1.5,
            ratio("worker", "from the call to the payload's exec, one after the other", "a sealed run of the worker"),
        ),
        Target(
            "worker",
            "64 launches of a worker at once: the 95th percentile, against one after the other",
            10.0,
            ratio("worker", "64 sealed runs at once", "95 of 100 have begun within"),
        ),
        Target(
            "worker",
            "teardown of each of 64 sealed runs of a worker at once",
            5.0,
            median("worker", "64 sealed runs at once", "to end them, for each"),
            "ms",
        ),
        Target(
            "worker",
            "the next launch of a worker with 1,000 live runs, against 10: CPU",
            1.5,
            ratio("worker", "the next sealed run, beside", "1000 others: CPU"),
        ),
        Target(
            "worker",
            "memory of a worker, each of 1,000 runs",
            50.0,
            median("worker", "memory of a worker and its crew (PSS)", "each of 1,000 runs that live"),
            "kB",
        ),
        Target(
            "worker",
            "memory of a worker that has launched many, without any of them",
            60000.0,
            median("worker", "memory of a worker and its crew (PSS)", "when 64 at once have come and gone"),
            "kB",
        ),
        Target(
            "memory",
            "memory of sealnet's own process for each sealed run, not of a worker",
            50.0,
            median("memory", "sealed: for each of 150 runs of one process", "sealnet's own process"),
            "kB",
        ),
        Target("leaks", "left behind by runs that were killed at random moments", 0.0, _sum(subjects), ""),
    ]
    return [target for target in found if target.subject in asked]


def _row(subjects: dict[str, Any], subject: str, title: str, name: str) -> dict[str, Any] | None:
    groups = subjects.get(subject, {}).get("groups", [])
    rows = (row for group in groups if group["title"] == title for row in group["rows"])
    found: dict[str, Any] | None = next((row for row in rows if row["name"] == name), None)
    return found


def _sum(subjects: dict[str, Any]) -> float | None:
    groups = subjects.get("leaks", {}).get("groups", [])
    return sum(float(row["median"]) for group in groups for row in group["rows"]) if groups else None


def figure(value: float, unit: str) -> str:
    """Three digits that count."""
    if unit == "":
        return f"{value:g}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def told_target(target: Target) -> tuple[str, str, str, str]:
    sign = "at most" if target.at_most else "at least"
    unit = f" {target.unit}" if target.unit not in ("", "x") else target.unit
    measured = "-" if target.measured is None else f"{figure(target.measured, target.unit)}{unit}"
    met = {None: "not measured", True: "met", False: "missed"}[target.met]
    return target.name, f"{sign} {target.limit:g}{unit}", measured, met


def rows_of(group: dict[str, Any]) -> list[tuple[str, ...]]:
    """A table's head and rows, without the columns that nothing is in."""
    single = all(row["count"] == 1 for row in group["rows"])
    compared = any(row["ratio"] for row in group["rows"])
    head = [
        "",
        *(["measured"] if single else ["median", "p95", "median's 95 % interval"]),
        *(["ratio", "its 95 % interval", "to"] if compared else []),
    ]
    table = [tuple(head)]
    for row in group["rows"]:
        unit = row["unit"]
        cells = [row["name"], f"{figure(row['median'], unit)} {unit}".rstrip()]
        if not single:
            cells += [figure(row["p95"], unit), f"{figure(row['low'], unit)} to {figure(row['high'], unit)}"]
        if compared and row["ratio"]:
            ratio = row["ratio"]
            cells += [figure(ratio["value"], "x"), f"{figure(ratio['low'], 'x')} to {figure(ratio['high'], 'x')}", row["control"]]
        elif compared:
            cells += ["", "", ""]
        table.append(tuple(cells))
    return table


def render(told: dict[str, Any]) -> str:
    """The page."""
    return "\n".join(_lines(told)) + "\n"


def _lines(told: dict[str, Any]) -> Iterator[str]:
    machine = told["machine"]
    yield "# Benchmarks"
    yield ""
    yield "Written by `scripts/bench`; see [development](development.md#measuring). Everything was measured in one run on one machine, with"
    yield "a control beside it: what counts is the ratio, and the machine says how much the numbers themselves mean."
    yield ""
    yield "What is compared is measured in turns (A B A B), after a warm-up that is thrown away. Intervals are of the median, by bootstrap."
    yield ""
    yield from _table([("", "")] + [(name, str(value)) for name, value in machine.items()])
    yield ""
    if told["targets"]:
        yield "## Targets"
        yield ""
        yield from _table([("", "target", "measured", ""), *(told_target(read_target(one)) for one in told["targets"])])
    for name, subject in told["subjects"].items():
        yield ""
        yield f"## {_TITLES[name]}"
        if "failed" in subject:
            yield ""
            yield f"Not measured: {subject['failed']}."
            continue
        for group in subject["groups"]:
            yield ""
            count = max((row["count"] for row in group["rows"]), default=0)
            yield f"**{group['title'][:1].upper()}{group['title'][1:]}**" + (f" ({count} rounds)" if count > 1 else "")
            yield ""
            yield from _table(rows_of(group))
        for missing, why in subject["missing"].items():
            yield ""
            yield f"Missing: {missing}: {why}."
        for note in subject["notes"]:
            yield ""
            yield note


def read_target(told: dict[str, Any]) -> Target:
    return Target(told["subject"], told["name"], told["limit"], told["measured"], told["unit"], told["at_most"])


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    head, *body = rows
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" + "---:|" * (len(head) - 1)
    for row in body:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def lines_of(name: str, subject: dict[str, Any]) -> Iterator[str]:
    """One subject for a terminal."""
    yield ""
    yield f"== {_TITLES[name]} ({subject['took_s']:.0f} s)"
    if "failed" in subject:
        yield f"   not measured: {subject['failed']}"
        return
    for group in subject["groups"]:
        yield f"-- {group['title']}"
        yield from aligned(rows_of(group))
    yield from (f"missing: {missing}: {why}" for missing, why in subject["missing"].items())
    yield from (f"note: {note}" for note in subject["notes"])


def aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "   " + "  ".join(cells).rstrip()
