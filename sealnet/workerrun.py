"""A run of the worker's, as `Sealer.launch` hands it out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Self

from sealnet import asking, client
from sealnet.asking import Files
from sealnet.client import Connection, RemoteRun
from sealnet.errors import CannotTearDown, NoSuchRun, SealnetError
from sealnet.model.plan import GRACE_S
from sealnet.model.receipt import Receipt, parse
from sealnet.model.record import Record
from sealnet.stay import until_end

_TRIED = ("address", "protocol", "port", "packets")


class WorkerRun(RemoteRun):
    """Used by one thread at a time. What is asked of it while it lives is asked of the worker."""

    def __init__(self, path: str, run_id: str, *, grace_s: float, files: Files, tied: bool = True) -> None:
        super().__init__(path, run_id, grace_s=grace_s, tied=tied)
        self.close_pipes: Callable[[], None] = lambda: None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._files = files
        self._record: Record | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status, when nothing of it is left. Raises TimeoutError; the run then goes on."""
        status = until_end(self, until=None if timeout_s is None else time.monotonic() + timeout_s)
        if status is None:
            raise TimeoutError(f"run {self.run_id} goes on after {timeout_s:g} s")
        return status

    def conclude(self, _status: int) -> None:
        """Nothing of it is left once its status is known."""

    @property
    def receipt(self) -> Receipt:
        told = (self.ended or {}).get("receipt") or (self.started or {})["receipt"]
        return parse(told)

    @property
    def record(self) -> Record:
        """As it was when it was last looked at: there is none of a run that has ended. Raises NoSuchRun where nobody has."""
        with contextlib.suppress(NoSuchRun):
            if self.ended is None:
                self._record = Record.from_json(self.asked("Inspect")["run"])
        if self._record is None:
            raise NoSuchRun(f"cannot find run {self.run_id}: it has ended")
        return self._record if self.ended is None else self._record.with_(state="exited", events=self.events)

    @property
    def events(self) -> tuple[dict[str, Any], ...]:
        """What was done to the seal; whole when the run has ended."""
        return self.record.events if self.ended is None else tuple(self.ended["events"])

    def tried(self) -> list[tuple[str, str, int, int]]:
        """(address, protocol, port, packets) of what the payload tried to reach beside its lease; whole when the run has ended."""
        rows: Sequence[Mapping[str, Any]] | None = None
        if self.ended is None:
            with contextlib.suppress(NoSuchRun):
                rows = self.asked("Inspect")["run"]["tried"]
        if rows is None:
            self.wait()
            rows = (self.ended or {})["tried"]
        return [tuple(row[name] for name in _TRIED) for row in rows]

    def send_signal(self, signum: int) -> bool:
        """To the payload's first process, 0 to all of them; False when it is gone."""
        return self.ended is None and super().send_signal(signum)

    def check(self) -> dict[str, Any]:
        """Prove the seal again, now. Raises NoSuchRun when it has ended."""
        result: dict[str, Any] = self.asked("Check")["result"]
        return result

    def asked(self, method: str) -> dict[str, Any]:
        """What the worker says of this run. Raises CannotSeal when it is away."""
        try:
            return self._ask(method)
        except OSError as e:
            raise client.unreachable(self._path, e) from e

    def close(self, _status: int | None = None) -> None:
        """End it, and return when nothing of it is left. Raises CannotTearDown or CannotSeal, as `sealnet.running.Run` does."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self.started is not None and self.poll() is None:
                self.kill()
                until_end(self)
            if self.ended is not None:
                self._files.ended(self)
                if (fault := self.ended["fault"]) is not None:
                    raise CannotTearDown(fault, hint=f"sealnet reap {self.run_id}")
        finally:
            super().close()
            self._files.close()
            self.close_pipes()


def launch(
    connection: Connection,
    argv: Sequence[str],
    given: dict[str, Any],
    streams: Sequence[int],
    *,
    receipt: str | None,
    evidence: str | None,
    durable: bool,
    stop: int,
    checkpoint: Callable[[str], None],
) -> WorkerRun:
    """Have the worker start it; the run owns `connection`. `given` are options of `sealnet.request.plan`.

    `checkpoint` is asked when `stop` is readable, and raises to have it undone. Raises SealnetError: nothing of it ran or is left.
    """
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as held:
        undo.callback(connection.close)
        uid, parameters = asking.parameters(argv, given, evidence=evidence is not None, detach=durable)
        files = Files(receipt, evidence)
        undo.callback(files.close)
        fds = [asking.opened_stream(fd, held) for fd in streams] + held.enter_context(asking.opened_paths(given))
        grace_s = given.get("grace_s")
        run = WorkerRun(connection.path, given["run_id"], grace_s=GRACE_S if grace_s is None else grace_s, files=files, tied=not durable)
        undo.callback(run.close)
        try:
            run.start(connection, parameters, fds, stop, checkpoint)
            files.started(run)
            checkpoint("started")
            if durable:
                run.take_over()
        except SealnetError as error:
            if run.started is None:
                files.refused(run, given, uid, error)
            raise
        undo.pop_all()
        return run


def adopt(connection: Connection) -> list[WorkerRun]:
    """The caller's own detached runs, oldest first: those that nobody's going away ends."""
    found = []
    for view in connection.ask("List")["runs"]:
        durable, note = view.get("durable") or {}, view.get("note") or {}
        if view.get("state") != "running" or durable.get("owner") != os.getuid() or note.get("tied") is not False:
            continue
        run = WorkerRun(connection.path, view["run_id"], grace_s=GRACE_S, files=Files(None, None), tied=False)
        try:
            run.take_over()
        except SealnetError:
            # It has just ended.
            run.started = None
            run.close()
            continue
        found.append(run)
    return found
