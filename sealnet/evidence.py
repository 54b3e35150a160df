"""The evidence of a run as a directory of files: begun before anything of the run is made, completed when it has ended; and many folded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import IO, Any

from sealnet.doors import LOG
from sealnet.errors import CannotSeal, SealnetError, UsageError
from sealnet.kernel.output import Directory
from sealnet.kernel.planted import open_plain, read_plain
from sealnet.model import evidence, lock, names
from sealnet.model import tally as tallies
from sealnet.model.egressfold import Tally
from sealnet.model.evidence import ENVIRONMENT, LOG_SUFFIX, PLAN, RECEIPT, Bundle, EvidenceFold, Log, Told
from sealnet.model.plan import Plan
from sealnet.model.policy import Confinement
from sealnet.model.receipt import Receipt
from sealnet.running import Run

_DIES_WITHIN_S = 5.0
_MOST_BYTES = 16 << 20
# A line that is longer than any record: what follows is no log.
_MOST_LINE = 1 << 16
_TRIED = ("address", "protocol", "port", "packets")


class Evidence:
    """One run's bundle. Whatever becomes of this program, what lies there claims no more than has been seen by then.

    It is a sink for the run's receipt. Used by the thread that the run belongs to.
    """

    def __init__(self, path: str, option: str, plan: Plan) -> None:
        """Raises UsageError where it cannot be written. An earlier bundle there is replaced, all of it."""
        self.path = path
        self._frozen, self._run_id = lock.freeze(plan), plan.run_id
        self._began = time.monotonic()
        self._told = Told()
        self._log: Log | None = None
        self._finished = False
        self._proof = self._unproved("it has not started")
        self._directory = Directory(path, option)
        try:
            for name in self._directory.names():
                if name == ENVIRONMENT or (name.endswith(LOG_SUFFIX) and names.is_run_id(name.removesuffix(LOG_SUFFIX))):
                    self._directory.remove(name)
            self._write()
        except (CannotSeal, OSError) as e:
            self.close()
            raise UsageError(f"cannot use {option} {path}: {e.message if isinstance(e, CannotSeal) else e.strerror}") from e

    def __enter__(self) -> Evidence:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """A refusal on the way is written down."""
        if isinstance(error, SealnetError):
            self.refused(error)
        self.close()

    def write(self, data: bytes) -> None:
        """The run's receipt, when there is one and when it changes. Raises CannotSeal."""
        self._proof = data
        self._write()

    def finish(self, run: Run, status: int | None) -> None:
        """End what is left of the run, gather what it leaves, write all of it. Raises CannotSeal; then what lies there is incomplete.

        For the time between the payload's end and the run's teardown. `status` where it is not the payload's own.
        """
        self._finished = True
        never = run.held is not None or run.process is None
        if not never:
            # What is left could write over what is written here.
            with contextlib.suppress(SealnetError, subprocess.TimeoutExpired):
                run.kill()
                run.spawned.wait(_DIES_WITHIN_S)
            run.end_doors()
        if status is None:
            status = CannotSeal.exit_status
            if not never and run.record.state == "running":
                with contextlib.suppress(SealnetError):
                    status = run.poll()
        found = None
        with contextlib.suppress(SealnetError, OSError):
            found = run.counted_attempts()
        tally = tallies.told(tallies.counted(run.record.confinement, found), run.record.events)
        tried = None if found is None or tally == "none" else [dict(zip(_TRIED, row, strict=True)) for row in found.rows]
        try:
            self._log = self._copy_log(run)
            if self._log is None and run.record.confinement != str(Confinement.ALLOWLIST):
                self._log = self._no_log()
            counted = run.counted or {}
            self._complete(
                status,
                recorded=counted.get("records"),
                unrecorded=counted.get("failed"),
                tried=tried,
                tally=tally,
                events=run.record.events,
            )
        except OSError as e:
            raise CannotSeal(f"cannot read the log of run {run.run_id}: {e.strerror}") from e

    def refused(self, error: SealnetError) -> None:
        """The run was refused before there was one: nothing ran. What cannot be written is told in a note of the error's."""
        if self._finished:
            return
        self._finished = True
        # The last receipt tells more than one made here, where it is of this refusal.
        if json.loads(self._proof)["reason"] != error.message:
            self._proof = self._unproved(error.message)
        try:
            self._log = self._no_log()
            self._complete(error.exit_status)
        except CannotSeal as unwritten:
            error.add_note(unwritten.message)

    def is_there(self) -> bool:
        """Whether the path still leads to what was written."""
        return self._directory.is_there()

    def close(self) -> None:
        self._directory.close()

    def _unproved(self, reason: str) -> bytes:
        asked = self._frozen.confinement
        user = self._frozen.user["name"]
        return Receipt(run_id=self._run_id, started=time.time(), confinement=asked, asked=asked, user=user, reason=reason).render()

    def _complete(self, status: int | None, **told: Any) -> None:
        self._told = Told(ended=True, exit_status=status, duration_s=round(time.monotonic() - self._began, 6), **told)
        self._write()

    def _write(self) -> None:
        """All but the log; last the document that the others are measured by."""
        told = evidence.document(self._frozen, self._proof, self._log, self._told)
        for name, data in ((PLAN, self._frozen.render()), (RECEIPT, self._proof), (ENVIRONMENT, evidence.render(told))):
            self._directory.write(name, [data])

    def _copy_log(self, run: Run) -> Log | None:
        try:
            file = open_plain(LOG, run.claim.fd)
        except FileNotFoundError:
            return None
        with file:
            reading = _Reading(file, self._run_id)
            self._directory.write(evidence.log_name(self._run_id), reading)
            return reading.log(ended=True)

    def _no_log(self) -> Log:
        """An empty one: nobody has decided anything. Of a run with a proxy that would be a claim, once it has run."""
        self._directory.write(evidence.log_name(self._run_id), [])
        return Log(egress=Tally(self._run_id).egress(ended=True), sha256=evidence.digest(b""))


class _Reading:
    """The lines of a log, counted as they pass."""

    def __init__(self, file: IO[bytes], run_id: str) -> None:
        self._file, self._tally, self._hash = file, Tally(run_id), hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        while line := self._file.readline(_MOST_LINE):
            self._tally.add(line)
            self._hash.update(line)
            yield line

    def log(self, *, ended: bool) -> Log:
        return Log(egress=self._tally.egress(ended=ended), sha256=self._hash.hexdigest())


def fold_evidence(directories: Iterable[str | os.PathLike[str]]) -> EvidenceFold:
    """Many bundles as one: `egress_enforced` only if every run was enforced and every bundle is whole and consistent with itself.

    Raises UsageError where none is named, or two are of one run. What cannot be read is no error: it is what the answer is about.
    """
    return evidence.fold([_read(os.fspath(directory)) for directory in directories])


def _read(path: str) -> Bundle:
    try:
        at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        return Bundle(where=path, unread=f"it cannot be read: {e.strerror}")
    try:
        found = {name: _part(name, at) for name in (PLAN, RECEIPT, ENVIRONMENT)}
        return Bundle(
            where=path, plan=found[PLAN], proof=found[RECEIPT], environment=found[ENVIRONMENT], log=_log(_run_id(found[ENVIRONMENT]), at)
        )
    except OSError as e:
        return Bundle(where=path, unread=f"{e.filename} cannot be read: {e.strerror}")
    finally:
        os.close(at)


def _part(name: str, directory: int) -> bytes | None:
    try:
        return read_plain(name, directory, most=_MOST_BYTES)
    except FileNotFoundError:
        return None


def _run_id(environment: bytes | None) -> str | None:
    """Whose log to look for."""
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(environment or b"")
        run_id = told.get("run_id") if isinstance(told, dict) else None
        return run_id if isinstance(run_id, str) and names.is_run_id(run_id) else None
    return None


def _log(run_id: str | None, directory: int) -> Log | None:
    if run_id is None:
        return None
    try:
        file = open_plain(evidence.log_name(run_id), directory)
    except FileNotFoundError:
        return None
    with file:
        reading = _Reading(file, run_id)
        deque(reading, maxlen=0)
        return reading.log(ended=True)
