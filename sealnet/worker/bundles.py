"""Evidence that is gathered for callers, until they have fetched it or their run is forgotten."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sealnet.errors import CannotSeal, UsageError
from sealnet.evidence import Evidence
from sealnet.model.plan import Plan
from sealnet.model.record import Record

_PART = 1 << 18
# Of ended runs together: it lies in /run, where all that the next launch needs is written too.
_MOST_BYTES = 64 << 20


@dataclass(slots=True)
class _Bundle:
    """That of the run which began at `started`. Its size is known once that has ended."""

    name: str
    owner: int
    started: float
    size_bytes: int | None = None


class Bundles:
    """Directories of root's own, by names that nobody has: a run id may be somebody else's next."""

    def __init__(self, directory: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        self._directory, self._most_bytes = directory, most_bytes
        # The oldest first.
        self._of: dict[str, _Bundle] = {}
        self._making: set[str] = set()

    def new_name(self, run_id: str) -> str:
        name = f"{run_id}.{secrets.token_hex(8)}"
        self._making.add(name)
        return name

    def make(self, name: str, plan: Plan) -> Evidence:
        """Raises CannotSeal or OSError where it cannot be written."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        try:
            return Evidence(str(self._directory / name), "evidence", plan)
        except UsageError as error:
            # The caller has not chosen where.
            raise CannotSeal(f"cannot gather the evidence of run {plan.run_id}: {error.message}") from error

    def drop(self, name: str) -> None:
        """Nothing has come of it."""
        self._making.discard(name)
        shutil.rmtree(self._directory / name, ignore_errors=True)

    def keep(self, record: Record, owner: int, name: str | None) -> None:
        """From now on a run has this one, or none."""
        self._of.pop(record.run_id, None)
        if name is not None:
            self._of[record.run_id] = _Bundle(name, owner, record.started)
            self._making.discard(name)

    def name_of(self, run_id: str, started: float) -> str | None:
        """None where nothing is gathered of that run, but maybe of another one that has had its id."""
        found = self._of.get(run_id)
        return found.name if found is not None and found.started == started else None

    def parts(self, name: str) -> Iterator[tuple[str, str]]:
        """(file, part) of what has been gathered, off our own tmpfs; less of it where it is dropped meanwhile."""
        directory = self._directory / name
        try:
            for file in sorted(directory.iterdir()):
                with file.open(encoding="utf-8", errors="surrogateescape", newline="") as text:
                    yield file.name, text.read(_PART)
                    while part := text.read(_PART):
                        yield file.name, part
        except FileNotFoundError:
            return

    def prune(self, is_known: Callable[[str], bool], is_live: Callable[[str], bool]) -> None:
        """Evidence goes with the memory of its run; of too much of it, the oldest of whom most is of, but never his last."""
        self._of = {run_id: one for run_id, one in self._of.items() if is_known(run_id)}
        held: Counter[int] = Counter()
        for run_id, one in self._of.items():
            if one.size_bytes is None and not is_live(run_id):
                one.size_bytes = self._size(one.name)
            held[one.owner] += one.size_bytes or 0
        while held.total() > self._most_bytes:
            owner = max(held, key=held.__getitem__)
            ended = [run_id for run_id, one in self._of.items() if one.owner == owner and one.size_bytes]
            if len(ended) < 2:
                # Somebody may still be about to fetch it.
                break
            held[owner] -= self._of.pop(ended[0]).size_bytes or 0
        kept = {*(one.name for one in self._of.values()), *self._making}
        for found in self._directory.iterdir() if self._directory.exists() else ():
            if found.name not in kept:
                shutil.rmtree(found, ignore_errors=True)

    def _size(self, name: str) -> int:
        try:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(self._directory / name))
        except FileNotFoundError:
            return 0
