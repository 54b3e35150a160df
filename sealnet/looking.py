"""What can be seen of a run from outside: its record, and what only the present can tell."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from sealnet import reap
from sealnet.doors import LOG
from sealnet.errors import NoSuchRun
from sealnet.kernel import process
from sealnet.kernel.host import Host
from sealnet.kernel.planted import open_plain
from sealnet.model import tally
from sealnet.model.egressfold import Tally
from sealnet.model.record import Record, seal_of
from sealnet.records import State

# Of a run whose record cannot be read: the same keys, so that whoever reads a listing need not ask for each.
_NOTHING: dict[str, Any] = {
    "schema": None,
    **dict.fromkeys(item.name for item in fields(Record)),
    "confinement": "-",
    "user": "-",
    "command": "-",
    "started": 0.0,
    "lease_ports": [],
    "events": [],
}


def view(state: State, record: Record) -> dict[str, Any]:
    """The record with the payload's pid as it is now, and `orphaned` where nobody sees to it, and it is not waiting for a worker."""
    shown = record.to_json()
    if record.init_pid is not None and record.state == "running":
        shown["pid"] = next(iter(process.children(record.init_pid)), None)
    if not reap.is_kept(state, record.run_id):
        shown["state"] = "orphaned"
    return shown


def views(state: State) -> list[dict[str, Any]]:
    """Every run there is, oldest first. Raises NoSuchRun where one may not look."""
    found = []
    if state.runs.exists() and not os.access(state.runs, os.R_OK):
        raise NoSuchRun(f"cannot list runs: only root may look into {state.runs}", hint="sudo sealnet ls")
    for run_id in state.run_ids():
        try:
            found.append(view(state, state.read(run_id)))
        except NoSuchRun:
            # It ended between the listing and the look, or its record cannot be read.
            if (state.directory(run_id) / "record.json").exists():
                found.append({**_NOTHING, "run_id": run_id, "state": "unreadable"})
    return sorted(found, key=lambda shown: (shown["started"], shown["run_id"]))


def inspect(state: State, run_id: str) -> dict[str, Any]:
    """The record, what was proved, what is counted, what the payload tried. Raises NoSuchRun."""
    record = state.read(run_id)
    shown = view(state, record)
    host = Host(state.path, state.tag)
    shown["egress"] = _egress(state, run_id)
    seal = seal_of(record)
    keys = ("address", "protocol", "port", "packets")
    inside = host.join(run_id, record.netns_inode) if record.confinement != "open" else None
    try:
        shown["counters"] = host.counters(seal)
        shown["leased"] = host.has_lease(seal) if seal.subnet is not None else None
        found = host.tried(inside, state.probed(run_id)) if inside is not None else None
        shown["tried"] = [dict(zip(keys, row, strict=True)) for row in (found.rows if found is not None else ())]
        shown["tally"] = tally.told(tally.counted(record.confinement, found), record.events)
        shown["denied"] = [dict(zip(keys, row, strict=True)) for row in (host.denied(seal) if seal.subnet is not None else [])]
    finally:
        if inside is not None:
            inside.close()
        host.close()
    return shown


def _egress(state: State, run_id: str) -> dict[str, Any] | None:
    """What its proxy let through and denied; None for a run without."""
    try:
        file = open_plain(state.directory(run_id) / LOG)
    except OSError:
        return None
    tally, ended = Tally(run_id), not state.is_held(run_id)
    with file:
        for line in file:
            # The last one may just be written.
            if ended or line.endswith(b"\n"):
                tally.add(line)
    return tally.egress(ended=ended).to_json()
