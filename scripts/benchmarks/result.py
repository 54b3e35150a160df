"""What a subject is asked for, and what it tells: rows of values in groups, and what it could not measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks import figures

# Where other tools are installed.
CACHE = "/var/cache/sealnet-bench"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. `runs` is for the leak counts, of runs or of connections."""

    quick: bool = False
    runs: int = 10_000
    cache: str = CACHE

    def rounds(self, full: int, quick: int = 3) -> int:
        return quick if self.quick else full


@dataclass(slots=True)
class Row:
    """Values of one thing. `control` names the row of the same group that it is compared with."""

    name: str
    values: list[float]
    unit: str = "ms"
    control: str | None = None


@dataclass(slots=True)
class Group:
    """Rows that belong in one table."""

    title: str
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, values: list[float], *, unit: str = "ms", control: str | None = None) -> None:
        self.rows.append(Row(name, values, unit, control))


@dataclass(slots=True)
class Result:
    """`missing` says of each thing that was not measured why; `notes` are sentences for the reader."""

    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def group(self, title: str) -> Group:
        made = Group(title)
        self.groups.append(made)
        return made

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": [{"title": group.title, "rows": [_row(row, group) for row in group.rows]} for group in self.groups],
            "notes": self.notes,
            "missing": self.missing,
        }


def _row(row: Row, group: Group) -> dict[str, Any]:
    middle = figures.median_interval(row.values)
    told: dict[str, Any] = {
        "name": row.name,
        "unit": row.unit,
        "count": len(row.values),
        "median": middle.value,
        "low": middle.low,
        "high": middle.high,
        "p95": figures.quantile(row.values, 0.95),
        "control": row.control,
        "ratio": None,
        "values": row.values,
    }
    control = next((other for other in group.rows if other.name == row.control), None)
    if control is not None and figures.median(control.values) > 0:
        compared = figures.ratio(row.values, control.values)
        told["ratio"] = {"value": compared.value, "low": compared.low, "high": compared.high}
    return told
