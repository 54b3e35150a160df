"""How durable runs have ended: written before their record goes, kept for a while for those who ask later."""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
import zlib
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from sealnet.kernel import process
from sealnet.model import names
from sealnet.model.durable import of
from sealnet.model.record import Record
from sealnet.records import State, write

SCHEMA = "sealnet.ended/1"
MOST, MOST_BYTES, FOR_S = 4096, 64 << 20, 3600.0
TIMED_OUT, _KILLED = 124, 137


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run of which nothing is left. `status` is the payload's own, 128+n when signal n ended it, 124 at its timeout.

    `tried`: (address, protocol, port, packets) of what it tried to reach beside its lease, `counted` how much of it that is, as
    `sealnet.model.tally.counted` tells it: `none` where nobody has looked. `killed`: what others had changed about its seal
    when it was ended for that. `fault`: what could not be taken away, and stays until it is reaped. `at_s`: seconds since boot.
    """

    run_id: str
    owner: int
    started: float
    status: int
    at_s: float
    receipt: dict[str, Any] | None = None
    tried: tuple[tuple[str, str, int, int], ...] = ()
    counted: str = "none"
    events: tuple[dict[str, Any], ...] = ()
    killed: str | None = None
    fault: str | None = None

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Raises ValueError when `data` is none."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError("not the end of a run")
        values = {item.name: data[item.name] for item in fields(cls) if item.name in data}
        try:
            values["tried"] = tuple(map(tuple, values["tried"]))
            values["events"] = tuple(values["events"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the end of a run: {error}") from error

    def render(self) -> bytes:
        return json.dumps({"schema": SCHEMA, **{item.name: getattr(self, item.name) for item in fields(self)}}).encode() + b"\n"


def now() -> float:
    """Seconds since boot, by the one clock that nobody sets and that goes on in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def keep(state: State, ended: Ended) -> None:
    """Raises OSError. Of two ends of one id the last is kept."""
    directory = _directory(state)
    directory.mkdir(mode=0o700, exist_ok=True)
    write(directory / f"{ended.run_id}.json", ended.render())


def keep_unseen(state: State, record: Record, status: int | None) -> None:
    """The end of a durable run that no worker saw to: what its record and bwrap tell of it. One that is known already stays as it is."""
    durable = of(record)
    if durable is None or record.receipt is None:
        # What was never released has not ended either.
        return
    known = read(state, record.run_id)
    if known is None or known.started != record.started:
        end = Ended(
            run_id=record.run_id,
            owner=durable.owner,
            started=record.started,
            status=TIMED_OUT if durable.is_late else _KILLED if status is None else status,
            at_s=now(),
            receipt=record.receipt,
            events=record.events,
        )
        # Its teardown goes on all the same: a full /run keeps nobody's namespace.
        with contextlib.suppress(OSError):
            keep(state, end)


def await_bwrap(record: Record, *, within_s: float = 2.0) -> None:
    """Until bwrap has written how its payload ended, and is gone: it does so as soon as that has happened."""
    durable = of(record)
    pidfd = None if durable is None else process.open_exactly(durable.bwrap_pid, durable.bwrap_start)
    if pidfd is not None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(int(within_s * 1000))
        os.close(pidfd)


def read(state: State, run_id: str) -> Ended | None:
    """None where there is none, or none that can be read."""
    try:
        return Ended.from_json(json.loads((_directory(state) / f"{run_id}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def forget(state: State, run_id: str) -> None:
    (_directory(state) / f"{run_id}.json").unlink(missing_ok=True)


def _directory(state: State) -> Path:
    return state.path / "ended"


def _names(state: State) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(_directory(state)) if names.is_run_id(name.removesuffix(".json"))]
    return []


@dataclass(frozen=True, slots=True)
class _Packed:
    """An end as a worker keeps it: a receipt that is unpacked takes ten times as much memory, and mostly nobody asks."""

    owner: int
    at_s: float
    size_bytes: int
    data: bytes

    @classmethod
    def of(cls, end: Ended) -> Self:
        data = end.render()
        return cls(end.owner, end.at_s, len(data), zlib.compress(data, 1))

    @property
    def end(self) -> Ended:
        return Ended.from_json(json.loads(zlib.decompress(self.data)))


class Kept:
    """The ends that one worker knows of, bounded: the last `MOST`, of `MOST_BYTES` together, for `FOR_S`.

    Whoever has most loses his oldest. For one thread; what writes is for any.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._known: dict[str, _Packed] = {}
        self._of: Counter[int] = Counter()

    def read(self) -> None:
        """What others have left."""
        # One by one: unpacked, all of them together are larger than all else that a worker has.
        found = [(end.run_id, _Packed.of(end)) for name in _names(self._state) if (end := read(self._state, name.removesuffix(".json")))]
        for run_id, known in sorted(found, key=lambda one: one[1].at_s):
            self._put(run_id, known)
        self._prune()

    def of(self, run_id: str) -> Ended | None:
        return None if self.owner(run_id) is None else self._known[run_id].end

    def owner(self, run_id: str) -> int | None:
        """Whose run it was."""
        known = self._known.get(run_id)
        return known.owner if known is not None and now() - known.at_s <= FOR_S else None

    def add(self, end: Ended) -> None:
        self._drop(end.run_id)
        self._put(end.run_id, _Packed.of(end))
        self._prune()

    def _put(self, run_id: str, known: _Packed) -> None:
        self._known[run_id] = known
        self._of[known.owner] += known.size_bytes

    def _drop(self, run_id: str) -> None:
        if (known := self._known.pop(run_id, None)) is not None:
            self._of[known.owner] -= known.size_bytes

    def _prune(self) -> None:
        while self._known and now() - next(iter(self._known.values())).at_s > FOR_S:
            self._forget(next(iter(self._known)))
        while len(self._known) > MOST or self._of.total() > MOST_BYTES:
            # Else a user who starts thousands would have the worker forget the others'.
            owner = max(self._of, key=self._of.__getitem__)
            self._forget(next(run_id for run_id, known in self._known.items() if known.owner == owner))

    def _forget(self, run_id: str) -> None:
        self._drop(run_id)
        with contextlib.suppress(OSError):
            forget(self._state, run_id)


def with_fault(end: Ended, fault: str) -> Ended:
    return replace(end, fault=f"{end.fault}; {fault}" if end.fault else fault)
