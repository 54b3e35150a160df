"""Evidence that is gathered for callers, until they have fetched it or their run is forgotten."""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from sealnet.evidence import Evidence
from sealnet.model.plan import Plan

_PART = 1 << 18
# Of all that is kept of ended runs: it lies on a tmpfs of the host's. One has 64 MiB at most, the log of a door.
_MOST_BYTES = 256 << 20


class Bundles:
    """Directories of root's own, by names that nobody has: a run id may be somebody else's next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._of: dict[str, str] = {}
        self._making: set[str] = set()
        # Of runs that have ended, the oldest first: whose, and how many bytes.
        self._ended: dict[str, tuple[int, int]] = {}

    def new_name(self, run_id: str) -> str:
        name = f"{run_id}.{secrets.token_hex(8)}"
        self._making.add(name)
        return name

    def make(self, name: str, plan: Plan) -> Evidence:
        """Raises UsageError where it cannot be written."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        return Evidence(str(self._directory / name), "evidence", plan)

    def drop(self, name: str) -> None:
        """Nothing has come of it."""
        self._making.discard(name)
        shutil.rmtree(self._directory / name, ignore_errors=True)

    def keep(self, run_id: str, name: str | None) -> None:
        """From now on a run has this one, or none."""
        self._of.pop(run_id, None)
        if name is not None:
            self._of[run_id] = name
            self._making.discard(name)

    def end(self, run_id: str, owner: int) -> None:
        """Its run has ended, so it is whole. Where all are too many, the oldest of whoever has most goes."""
        newest = self._of.get(run_id)
        if newest is None:
            return
        directory = self._directory / newest
        self._ended[newest] = owner, sum(file.stat().st_size for file in directory.iterdir()) if directory.exists() else 0
        while sum(size for _owner, size in self._ended.values()) > _MOST_BYTES:
            sizes: Counter[int] = Counter()
            for uid, size in self._ended.values():
                sizes[uid] += size
            most = sizes.most_common(1)[0][0]
            oldest = next(name for name, (uid, _size) in self._ended.items() if uid == most)
            if oldest == newest:
                # Somebody may be reading it, and there is no more than one of such a size.
                return
            self._of = {run: name for run, name in self._of.items() if name != oldest}
            del self._ended[oldest]
            self.drop(oldest)

    def name_of(self, run_id: str) -> str | None:
        """None where nothing is gathered of the run that has that id now."""
        return self._of.get(run_id)

    def parts(self, name: str) -> Iterator[tuple[str, str]]:
        """(file, part) of what has been gathered, off our own tmpfs."""
        directory = self._directory / name
        for file in sorted(directory.iterdir()) if directory.exists() else ():
            with file.open(encoding="utf-8", errors="surrogateescape", newline="") as text:
                yield file.name, text.read(_PART)
                while part := text.read(_PART):
                    yield file.name, part

    def prune(self, is_known: Callable[[str], bool]) -> None:
        """Evidence goes with the memory of its run."""
        self._of = {run_id: name for run_id, name in self._of.items() if is_known(run_id)}
        kept = {*self._of.values(), *self._making}
        self._ended = {name: known for name, known in self._ended.items() if name in kept}
        for found in self._directory.iterdir() if self._directory.exists() else ():
            if found.name not in kept:
                shutil.rmtree(found, ignore_errors=True)
