"""`sealnet inspect`."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click

from sealnet.cli import json_option, remote, wants_json
from sealnet.cli.table import aligned, clean, denial_lines, duration, tried_lines
from sealnet.errors import NoSuchRun, UsageError
from sealnet.looking import inspect
from sealnet.model import names
from sealnet.model.egressfold import Denial
from sealnet.model.receipt import Receipt, fold
from sealnet.records import State

INSPECT_SCHEMA = "sealnet.inspect/1"


@click.command("inspect", short_help="Show one run, or all: record, proof, counters, what it tried to reach.")
@click.argument("run_id", metavar="RUN", required=False)
@click.option("--all", "everything", is_flag=True, help="Every run, and how confined they are together: as the least confined of them.")
@json_option
@click.pass_context
def command(ctx: click.Context, run_id: str | None, everything: bool, as_json: bool) -> int:
    """Show one live run: its record, what was proved before it started, its lease and counters, and every destination that it tried to
    reach and was refused, by its proxy or outside of it. With --all: every run, and what they amount to together. Who is not root sees its
    own runs of the worker's.

    \b
    Examples:
      sealnet inspect RUN
      sealnet inspect RUN --json | jq .receipt
      sealnet inspect --all --json | jq -r .fold.wording
    """
    if (run_id is None) != everything:
        raise UsageError("cannot inspect: name one run, or give --all", hint="sealnet ls lists them")
    if run_id is None:
        return _all(as_json=wants_json(ctx, as_json))
    worker, wanted = remote.for_user(), names.known_run_id(run_id)
    shown = inspect(State(), wanted) if worker is None else worker.ask("Inspect", run_id=wanted)["run"]
    if wants_json(ctx, as_json):
        click.echo(json.dumps(shown, indent=1))
    else:
        _print(shown)
    return 0


def _all(*, as_json: bool) -> int:
    state, found, skipped, worker = State(), [], [], remote.for_user()
    if worker is None and state.runs.exists() and not os.access(state.runs, os.R_OK):
        raise NoSuchRun(f"cannot inspect runs: only root may look into {state.runs}", hint="sudo sealnet inspect --all")
    for one in state.run_ids() if worker is None else [view["run_id"] for view in worker.ask("List")["runs"]]:
        try:
            found.append(inspect(state, one) if worker is None else worker.ask("Inspect", run_id=one)["run"])
        except NoSuchRun:
            # It ended meanwhile; or its record cannot be read, and then nothing may be said of all of them.
            if (state.directory(one) / "record.json").exists():
                skipped.append(one)
    folded = fold(shown["receipt"] or _unproved(shown) for shown in found)
    if as_json:
        click.echo(json.dumps({"schema": INSPECT_SCHEMA, "runs": found, "unreadable": skipped, "fold": folded.to_json()}, indent=1))
    else:
        rows = [(shown["run_id"], shown["state"], *_proved(shown)) for shown in found]
        for line in aligned(("RUN", "STATE", "VERDICT", "NETWORK"), rows, last_width=100):
            click.echo(line)
        click.echo(f"together  {folded.wording}" if found else "no runs")
        for one in skipped:
            click.echo(f"unreadable: the record of run {one}")
    return 1 if skipped else 0


def _proved(shown: dict[str, Any]) -> tuple[str, str]:
    receipt = shown["receipt"]
    return (receipt["verdict"], receipt["wording"]) if receipt else ("not yet", "network: not proved yet")


def _unproved(shown: dict[str, Any]) -> dict[str, Any]:
    """A run that has not come to its proof counts as unproved."""
    names_of = ("run_id", "started", "confinement", "asked", "user")
    return Receipt(**{name: shown[name] for name in names_of}, reason="it has not started yet").to_json()


def _print(shown: dict[str, Any]) -> None:
    # A run that is severed has a link's name and no link.
    shown = {**shown, "ifname": shown["ifname"] if shown["subnet"] is not None else None}
    for name in ("run_id", "state", "confinement", "user", "command", "pid", "subnet", "gateway", "sandbox", "ifname", "netns", "cgroup"):
        click.echo(f"{name:<12} {clean(str(shown[name])) if shown[name] is not None else '-'}")
    click.echo(f"{'age':<12} {duration(time.time() - shown['started'])}")
    if shown["why_severed"]:
        click.echo(f"{'severed':<12} {clean(shown['why_severed'])}")
    verdict, wording = _proved(shown)
    checks = len(shown["receipt"]["checks"]) if shown["receipt"] else 0
    click.echo(f"{'proof':<12} {verdict}, {checks} checks before it started")
    # What was proved then, which is not what stands now.
    then = "at its start: " if shown["receipt"] else ""
    click.echo(f"{'network':<12} {then}{wording.removeprefix('network: ')}")
    click.echo(f"{'lease':<12} {_lease(shown)}")
    for name, value in shown["counters"].items():
        click.echo(f"{name:<12} {value}")
    for event in shown["events"]:
        click.echo(f"{'event':<12} {event['event']}: {clean(event['detail'])}")
    click.echo()
    for line in tried_lines([tuple(row.values()) for row in shown["tried"]], shown["tally"]):
        click.echo(line)
    egress = shown["egress"]
    if egress is not None:
        for line in denial_lines([Denial(**one) for one in egress["denials"]]):
            click.echo(line)
        click.echo(f"{'proxy':<12} {egress['allowed']} allowed, {egress['denied']} denied")
        for fault in egress["faults"]:
            click.echo(f"{'proxy':<12} the log is not whole: {clean(fault)}")
    for row in shown["denied"]:
        click.echo(
            f"denied by the gate: {row['protocol']} {row['address']}:{row['port']} ({row['packets']} packets): the inside filter let it by"
        )


def _lease(shown: dict[str, Any]) -> str:
    if shown["leased"] is None:
        return "none"
    ports = " and ".join(str(port) for port in shown["lease_ports"])
    return f"tcp {shown['gateway']}:{ports}, {'granted' if shown['leased'] else 'NOT granted: nothing is reachable'}"
