"""`sealnet log`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import IO, Any

import click

from sealnet.cli import remote, wants_json
from sealnet.cli.table import target
from sealnet.client import Connection
from sealnet.doors import LOG
from sealnet.errors import NoSuchRun, SealnetError
from sealnet.kernel.planted import open_plain
from sealnet.model import names
from sealnet.model.egressfold import Tally
from sealnet.records import State

_LOOK_S = 0.1
# A line is written in one call; a reader may see half of it, but not for long.
_WHOLE_WITHIN_S = 0.5
_MOST_LINE = 1 << 16


@click.command(
    "log",
    short_help="What a run's proxy let through and what it denied.",
    epilog="""
    \b
    Examples:
      sealnet log RUN | sort | uniq -c | sort -rn
      sealnet log RUN -f
      sealnet log RUN --json | jq -r '.[] | select(.verdict == "DENY") | .host'
    """,
)
@click.argument("run_id", metavar="RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print the records: a JSON array; with -f, which has no end, one document a line.")
@click.pass_context
def command(ctx: click.Context, run_id: str, follow: bool, as_json: bool) -> int:
    """Print the decisions of a live run's allowlist proxy, one line each: `ALLOW HOST:PORT METHOD` or `DENY HOST:PORT METHOD REASON`.

    Exit 1 where the log is not whole, with the reason on stderr. What is left of a run that has ended is in its evidence (--evidence).
    """
    if (worker := remote.for_user()) is not None:
        return _remote(worker, names.known_run_id(run_id), follow=follow, raw=wants_json(ctx, as_json))
    state = State()
    record = state.read(names.known_run_id(run_id))
    try:
        file = open_plain(state.directory(record.run_id) / LOG)
    except FileNotFoundError:
        if record.confinement == "allowlist":
            raise NoSuchRun(f"cannot read the log of run {run_id}: there is none") from None
        raise NoSuchRun(
            f"cannot read the log of run {run_id}: it has none, for a {record.confinement} run has no proxy",
            hint=f"what it tried: sealnet inspect {run_id}",
        ) from None
    except OSError as e:
        raise SealnetError(f"cannot read the log of run {run_id}: {e.strerror}") from e
    tally = Tally(record.run_id)
    # Its door has gone with its supervisor. Who follows has seen requests that had not ended yet.
    ended = not follow and not state.is_held(record.run_id)
    with file:
        shown = _Shown(raw=wants_json(ctx, as_json), follow=follow)
        _print(file, tally, state if follow else None, shown)
        shown.close()
    return _told(run_id, tally.egress(ended=ended).faults)


def _remote(worker: Connection, run_id: str, *, follow: bool, raw: bool) -> int:
    """The same, of a run of the caller's that the worker has."""
    faults: list[str] = []
    show = _Shown(raw=raw, follow=follow)
    for told in worker.ask_more("Log", run_id=run_id, follow=follow):
        if (record := told.get("record")) is not None:
            show.add(record)
        faults += told.get("faults") or []
    show.close()
    return _told(run_id, faults)


class _Shown:
    """Records on their way out: a line each, or as JSON a document each where somebody follows, and one array of them where nobody does."""

    def __init__(self, *, raw: bool, follow: bool) -> None:
        self._raw, self._is_array, self._count = raw, raw and not follow, 0

    def add(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record) if self._raw else line_of(record)
        click.echo(("[" if self._count == 0 else ",\n") + text if self._is_array else text, nl=not self._is_array)
        self._count += 1

    def close(self) -> None:
        if self._is_array:
            click.echo("]" if self._count else "[]")


def _told(run_id: str, faults: Iterable[str]) -> int:
    faults = list(faults)
    for fault in faults:
        click.echo(f"sealnet: the log of run {run_id} is not whole: {fault}", err=True)
    return 1 if faults else 0


def _print(file: IO[bytes], tally: Tally, follow: State | None, shown: _Shown) -> None:
    """Each record once, as it is when it is first seen: the counts of an allowed one are filled in later, on their spot."""
    part, whole_by = b"", 0.0
    while True:
        # Asked before the look: what has been written by its end is then seen by this look.
        lives = follow is not None and _lives(follow, tally.run_id)
        while line := file.readline(_MOST_LINE):
            part += line
            if not part.endswith(b"\n"):
                whole_by = whole_by or time.monotonic() + _WHOLE_WITHIN_S
                break
            record = tally.add(part)
            if record is not None:
                shown.add(record)
            part, whole_by = b"", 0.0
        if part and time.monotonic() < whole_by:
            time.sleep(_LOOK_S / 10)
        elif part:
            tally.add(part)
            return
        elif lives:
            time.sleep(_LOOK_S)
        else:
            return


def _lives(state: State, run_id: str) -> bool:
    """Whether the record of the run is still there: it goes last."""
    return os.path.exists(state.directory(run_id) / "record.json")


def line_of(record: Mapping[str, Any]) -> str:
    """Made for `sort | uniq -c`: nothing that differs between two alike, and no more blanks than there are fields."""
    what = [record["verdict"], target(_word(record["host"]), record["port"]), _word(record["method"])]
    reason = [" ".join(map(_word, record["reason"].split()))] if record["verdict"] == "DENY" and record["reason"] else []
    return " ".join([*what, *reason])


def _word(text: str) -> str:
    return "".join(char if char.isprintable() and not char.isspace() else "?" for char in text) or "-"
