"""Evidence that is gathered for callers, until they have fetched it or their run is forgotten."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from sealnet.errors import CannotSeal, UsageError
from sealnet.evidence import Evidence
from sealnet.model.plan import Plan
from sealnet.model.record import Record

_PART = 1 << 18
_NAME = re.compile(r"[a-z0-9-]{1,63}\.[0-9a-f]{16}", re.ASCII)
# Of all that is kept of ended runs: it lies on a tmpfs of the host's. One has 64 MiB at most, the log of a door.
_MOST_BYTES = 256 << 20


class Bundles:
    """Directories of root's own, by names that nobody has: a run id may be somebody else's next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # By run id: when that run began, and the name.
        self._of: dict[str, tuple[float, str]] = {}
        self._making: set[str] = set()
        # Of runs that have ended, the oldest first: whose, and how many bytes.
        self._ended: dict[str, tuple[int, int]] = {}

    def new_name(self, run_id: str) -> str:
        name = f"{run_id}.{os.urandom(8).hex()}"
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

    def keep(self, record: Record, name: object) -> None:
        """From now on a run has this one; none where it is no name of ours (a record is damaged): what it leads to would be removed."""
        self._of.pop(record.run_id, None)
        if isinstance(name, str) and _NAME.fullmatch(name):
            self._of[record.run_id] = record.started, name
            self._making.discard(name)

    def end(self, run_id: str, owner: int) -> None:
        """Its run has ended, so it is whole. Where all are too many, the oldest of whoever has most goes."""
        if run_id not in self._of:
            return
        _started, newest = self._of[run_id]
        directory = self._directory / newest
        self._ended[newest] = owner, sum(file.stat().st_size for file in directory.iterdir()) if directory.exists() else 0
        # Somebody may be reading the newest, so it stays; where it is too large by itself, nothing is won by dropping the others.
        while self._ended[newest][1] <= _MOST_BYTES < sum(size for _owner, size in self._ended.values()):
            sizes: Counter[int] = Counter()
            for uid, size in self._ended.values():
                sizes[uid] += size
            others = {name: uid for name, (uid, _size) in self._ended.items() if name != newest}
            most = max(others.values(), key=sizes.__getitem__)
            oldest = next(name for name, uid in others.items() if uid == most)
            self._of = {run: one for run, one in self._of.items() if one[1] != oldest}
            del self._ended[oldest]
            self.drop(oldest)

    def name_of(self, run_id: str, started: float) -> str | None:
        """None where nothing is gathered of that run, but maybe of another one that has had its id."""
        began, name = self._of.get(run_id, (None, None))
        return name if began == started else None

    def parts(self, name: str) -> Iterator[tuple[str, str]]:
        """(file, part) of what has been gathered, off our own tmpfs; less of it where it is dropped meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            for file in sorted((self._directory / name).iterdir()):
                with file.open(encoding="utf-8", errors="surrogateescape", newline="") as text:
                    yield file.name, text.read(_PART)
                    while part := text.read(_PART):
                        yield file.name, part

    def prune(self, is_known: Callable[[str], bool]) -> None:
        """Evidence goes with the memory of its run."""
        self._of = {run_id: one for run_id, one in self._of.items() if is_known(run_id)}
        kept = {*(name for _started, name in self._of.values()), *self._making}
        self._ended = {name: known for name, known in self._ended.items() if name in kept}
        for found in self._directory.iterdir() if self._directory.exists() else ():
            if found.name not in kept:
                shutil.rmtree(found, ignore_errors=True)
