"""Evidence that is gathered for callers, until they have fetched it or their run is forgotten."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from sealnet.evidence import Evidence
from sealnet.model.plan import Plan

_PART = 1 << 18


class Bundles:
    """Directories of root's own, by names that nobody has: a run id may be somebody else's next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._of: dict[str, str] = {}
        self._making: set[str] = set()

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
        for found in self._directory.iterdir() if self._directory.exists() else ():
            if found.name not in kept:
                shutil.rmtree(found, ignore_errors=True)
