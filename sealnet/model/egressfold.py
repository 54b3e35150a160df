"""What the log of a run's proxy amounts to: what was let through, what was denied and which flag would allow it, whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sealnet.errors import UsageError
from sealnet.model import authority, destination
from sealnet.model.egress import ALLOW, DENY, SCHEMA

# A payload can make up as many names as it likes.
MOST_DENIALS = 1000
MOST_FAULTS = 5
_KINDS: Mapping[str, tuple[type, ...]] = {
    "seq": (int,), "run_id": (str,), "time": (int, float), "verdict": (str,), "method": (str,), "host": (str,), "port": (int, type(None)),
    "address": (str, type(None)), "reason": (str, type(None)), "bytes_up": (int, type(None)), "bytes_down": (int, type(None)),
    "duration_s": (int, float, type(None)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Denial:
    """One destination that was refused, and why. `flag` would allow it; None where nothing does."""

    host: str
    port: int | None
    reason: str
    count: int
    flag: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Egress:
    """What a log says. `faults` tell why it is not the whole story; `left_out` denied requests are in `denied` and in no `denials`."""

    records: int = 0
    allowed: int = 0
    denied: int = 0
    left_out: int = 0
    denials: tuple[Denial, ...] = ()
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def parse(line: bytes) -> dict[str, Any]:
    """One record. Raises ValueError."""
    if not (line.isascii() and line.removesuffix(b"\n").decode("ascii").isprintable()):
        # It is shown as it is. Who has taken a door over may write anything.
        raise ValueError("it has other characters than an egress record has")
    record = json.loads(line)
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError("it is no egress record")
    for name, kinds in _KINDS.items():
        if name not in record or not isinstance(record[name], kinds) or isinstance(record[name], bool):
            raise ValueError(f"its {name} is missing or of the wrong kind")
    if record["verdict"] not in (ALLOW, DENY):
        raise ValueError("its verdict is neither ALLOW nor DENY")
    return record


def flag(record: Mapping[str, Any]) -> str | None:
    """What would have to be declared for a denied request to pass; None where no declaration helps."""
    reason, host, port = str(record["reason"] or ""), record["host"], record["port"]
    if reason.startswith(("not declared", "port not declared")):
        options: tuple[str, ...] = ("--allow", "--allow-private")
    elif reason.startswith("private address") and _may_be_private(record["address"]):
        options = ("--allow-private",)
    else:
        return None
    for option in options:
        try:
            entry = authority.declared(f"{host}:{port}", option)
        except UsageError:
            continue
        return f"{option} {entry.host}:{entry.port}"
    return None


def _may_be_private(address: str | None) -> bool:
    try:
        return address is None or destination.refusal(destination.address(address), private=True, own=()) is None
    except ValueError:
        return False


@dataclass(slots=True)
class Tally:
    """Takes the lines of one run's log in order, each with its newline."""

    run_id: str
    records: int = 0
    allowed: int = 0
    denied: int = 0
    faults: list[str] = field(default_factory=list)
    _open: int = 0
    _left_out: int = 0
    _denials: dict[tuple[str, int | None, str], list[Any]] = field(default_factory=dict)

    def add(self, line: bytes) -> dict[str, Any] | None:
        """The record; None for what is none."""
        self.records += 1
        if not line.endswith(b"\n"):
            self._fault(f"line {self.records} was cut")
            return None
        try:
            record = parse(line)
        except (ValueError, RecursionError) as e:
            self._fault(f"line {self.records} cannot be read: {e}")
            return None
        if record["run_id"] != self.run_id:
            self._fault(f"line {self.records} is another run's")
        if record["seq"] != self.records:
            self._fault(f"line {self.records} has number {record['seq']}: records are missing")
        if record["verdict"] == ALLOW:
            self.allowed += 1
            self._open += record["bytes_up"] is None
        else:
            self.denied += 1
            self._deny(record)
        return record

    def _deny(self, record: Mapping[str, Any]) -> None:
        key = (record["host"], record["port"], record["reason"] or "")
        if key in self._denials:
            self._denials[key][0] += 1
        elif len(self._denials) < MOST_DENIALS:
            self._denials[key] = [1, flag(record)]
        else:
            self._left_out += 1

    def _fault(self, text: str) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(text)

    def egress(self, *, ended: bool) -> Egress:
        """What it comes to. Once the door has `ended`, a request without a count of its bytes was cut."""
        faults = list(self.faults)
        if ended and self._open:
            faults.append(f"{self._open} allowed requests have no end")
        found = [Denial(*key, count, option) for key, (count, option) in self._denials.items()]
        return Egress(
            records=self.records,
            allowed=self.allowed,
            denied=self.denied,
            left_out=self._left_out,
            denials=merged(found),
            faults=tuple(faults),
        )


def merged(denials: list[Denial]) -> tuple[Denial, ...]:
    """Those alike as one, the most frequent first."""
    counts: dict[tuple[str, int | None, str, str | None], int] = {}
    for one in denials:
        key = (one.host, one.port, one.reason, one.flag)
        counts[key] = counts.get(key, 0) + one.count
    found = [Denial(host, port, reason, count, option) for (host, port, reason, option), count in counts.items()]
    return tuple(sorted(found, key=lambda one: (-one.count, one.host, one.port or 0, one.reason)))
