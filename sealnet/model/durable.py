"""What stands in the record of a run that outlives its supervisor: all that the next worker needs to take it over."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from sealnet.model.record import Record

# It keeps its lease for so long while nobody sees to it.
LEASE_TTL_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """`owner` is the uid of the caller. `ends_at` is in seconds since boot (CLOCK_BOOTTIME); once that has come it `is_late`.

    A pid goes with when its process started, in clock ticks since boot: together they name one process for good.
    """

    owner: int
    on_tamper: str
    grace_s: float
    gid: int
    groups: tuple[int, ...]
    ends_at: float | None = None
    is_late: bool = False
    bwrap_pid: int | None = None
    bwrap_start: int | None = None
    init_start: int | None = None
    door: Doorway | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Raises KeyError, TypeError or ValueError when `data` is none."""
        values = _known(cls, data)
        values["groups"] = tuple(map(_whole, values["groups"]))
        if values.get("door") is not None:
            values["door"] = Doorway.from_json(values["door"])
        for name in ("owner", "gid", "bwrap_pid", "bwrap_start", "init_start"):
            if values.get(name) is not None:
                _whole(values[name])
        for name in ("grace_s", "ends_at"):
            if not isinstance(values.get(name) or 0, int | float):
                raise ValueError(f"{name} is no number")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doorway:
    """The door process that serves the run: the name of the socket where it is taken over, its ports, and where its Unix broker listens."""

    name: str
    pid: int
    start: int
    ports: tuple[int, ...]
    broker: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        values = _known(cls, data)
        values["ports"] = tuple(map(_whole, values["ports"]))
        _whole(values["pid"]), _whole(values["start"])
        if not isinstance(values["name"], str) or "/" in values["name"]:
            raise ValueError("name is none")
        return cls(**values)


# In the note of a run that a program has started by the Python API: it is that program's next process that takes it over, and no worker.
API_NOTE = {"keeper": "api"}


def is_api_run(record: Record) -> bool:
    return record.durable is not None and record.note.get("keeper") == API_NOTE["keeper"]


def of(record: Record) -> Durable | None:
    """None where the run is not durable, or its record does not tell all of it."""
    try:
        return None if record.durable is None else Durable.from_json(record.durable)
    except (KeyError, TypeError, ValueError):
        return None


def _known(cls: type[Any], data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError("not an object")
    return {item.name: data[item.name] for item in fields(cls) if item.name in data}


def _whole(number: object) -> int:
    if type(number) is not int:
        raise ValueError("a number is none")
    return number
