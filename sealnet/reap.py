"""Takes runs away by run id, whatever is left of them, and finds those that nobody else will take away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from sealnet import seal
from sealnet.errors import CannotTearDown, NoSuchRun, SealnetError
from sealnet.kernel import process
from sealnet.kernel.host import Host
from sealnet.model import names
from sealnet.model.plan import Seal
from sealnet.model.record import Record, seal_of
from sealnet.records import ALIVE, State


def teardown(
    host: Host,
    state: State,
    run_id: str,
    *,
    inside: Any | None = None,
    everywhere: bool = False,
    unless: Callable[[], bool] = lambda: False,
    end_is_kept: bool = False,
) -> bool:
    """Take everything of a run away, its record last. Whether there was a record of it or, where `everywhere` is looked, anything else.

    Needs the run id alone: what the record would tell is looked for where it is missing. Succeeds when there is nothing.
    `unless` is asked once nobody else can take the run away or claim its id any more; when it says yes, nothing is done.
    `end_is_kept`: how a durable run has ended is known to whoever asks, and need not be found out.
    """
    with state.teardown_lock(run_id) as recorded:
        if unless():
            state.forget_leftovers(run_id)
            return False
        record = None
        with contextlib.suppress(NoSuchRun):
            record = state.read(run_id)
        if record is not None and record.durable is not None and not end_is_kept:
            _keep_end(state, record)
        if inside is None and (record is None or record.confinement != "open"):
            inside = host.join(run_id, record.netns_inode if record else None)
        what = seal_of(record) if record is not None else Seal(run_id=run_id)
        # Without a record there may be anything, and who asks is told whether there was.
        traced = not recorded and everywhere and run_id in host.traces()
        seal.teardown(host, what, inside=inside, release=partial(state.release, subnet=what.subnet), everywhere=everywhere)
        if record is not None and record.durable is not None:
            _stop_door(state, record)
        state.forget(run_id)
        if not recorded and everywhere and not traced and (strange := host.stranger(run_id)) is not None:
            raise CannotTearDown(
                f"cannot reap run {run_id}: link {strange} has its name and the mark of another state directory, which may be alive",
                hint=f"SEALNET_STATE_DIR=DIR sealnet reap {run_id}; where that directory is gone for good: ip link delete {strange}",
            )
        return recorded or traced


def _keep_end(state: State, record: Record) -> None:
    """Of a durable run: how it has ended is to be known when nothing of it is left."""
    # Plain runs have none.
    from sealnet import ended

    if not state.is_held(record.run_id, ALIVE):
        # Its payload has ended, and bwrap is about to write that down.
        ended.await_bwrap(record)
    ended.keep_unseen(state, record, state.status(record.run_id))


def _stop_door(state: State, record: Record) -> None:
    """Of a durable run: its door may have nobody who tells it that the run is gone."""
    from sealnet import doors
    from sealnet.model import durable

    found = durable.of(record)
    if found is not None and found.door is not None:
        doors.stop_left(state.path / "doors" / found.door.name, record.run_id)


def goes_on(state: State, run_id: str) -> bool:
    """Whether a run is to go on without its supervisor, until a worker takes it over: it was released, in this boot, and lives."""
    try:
        record = state.read(run_id)
    except NoSuchRun:
        return False
    was_released = record.durable is not None and record.state == "running" and record.boot_id == process.boot_id()
    return was_released and state.is_held(run_id, ALIVE)


def is_kept(state: State, run_id: str) -> bool:
    """Whether somebody sees to a run, or it can do without for now: it is no orphan."""
    return state.is_held(run_id) or goes_on(state, run_id)


def orphans(host: Host, state: State) -> list[str]:
    """Runs whose supervisor is gone and that cannot do without, and things that carry this state directory's mark without any record."""
    found = set(host.traces()) | set(state.run_ids()) | set(state.reservations().values())
    return sorted(run_id for run_id in found if names.is_run_id(run_id) and not is_kept(state, run_id))


def reap_orphans(host: Host, state: State, *, everywhere: bool = False) -> list[str]:
    """Take every orphan away; the run ids. What could not be taken away is raised at the end, as one CannotTearDown."""
    reaped, failures = [], []
    for run_id in orphans(host, state):
        try:
            teardown(host, state, run_id, everywhere=everywhere, unless=partial(is_kept, state, run_id))
            reaped.append(run_id)
        except SealnetError as error:
            failures.append(error)
    state.sweep()
    if failures:
        raise CannotTearDown("; ".join(map(str, failures)), hint="try again: sealnet reap --orphans")
    return reaped
