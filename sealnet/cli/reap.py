"""`sealnet reap`."""

from __future__ import annotations

import json
from functools import partial

import click

from sealnet.cli import complain, json_option, remote, wants_json
from sealnet.client import Connection
from sealnet.errors import SealnetError, UsageError
from sealnet.model import names


@click.command("reap", short_help="Take runs away.")
@click.argument("run_ids", nargs=-1, metavar="[RUN]...")
@click.option("--orphans", is_flag=True, help="Every run whose supervisor is gone.")
@click.option("--all", "everything", is_flag=True, help="Every run, live ones too.")
@json_option
@click.pass_context
def command(ctx: click.Context, run_ids: tuple[str, ...], orphans: bool, everything: bool, as_json: bool) -> int:
    """End runs and take away whatever they left: processes, link, namespace, lease, reservation, record. A run that is gone is no error.

    For who is not root the worker does it, for its own runs."""
    if sum((bool(run_ids), orphans, everything)) != 1:
        raise UsageError("cannot reap: name one or more runs, or give --orphans, or --all", hint="see the runs there are: sealnet ls")
    wanted = [names.known_run_id(run_id) for run_id in run_ids]
    if not orphans and (worker := remote.for_user()) is not None:
        reaped, status = _remote(worker, wanted, everything=everything)
    else:
        reaped, status = _reap(wanted, orphans=orphans, everything=everything)
    if wants_json(ctx, as_json):
        click.echo(json.dumps({"reaped": reaped}))
    elif reaped:
        click.echo("reaped  " + "  ".join(reaped))
    return status


def _remote(worker: Connection, wanted: list[str], *, everything: bool) -> tuple[list[str], int]:
    """Of the caller's runs that the worker has."""
    reaped, status = [], 0
    for run_id in [view["run_id"] for view in worker.ask("List")["runs"]] if everything else wanted:
        try:
            if worker.ask("Reap", run_id=run_id)["existed"] or everything:
                reaped.append(run_id)
        except SealnetError as error:
            status = complain(error)
    return reaped, status


def _reap(wanted: list[str], *, orphans: bool, everything: bool) -> tuple[list[str], int]:
    from sealnet import caller
    from sealnet.kernel.host import Host
    from sealnet.reap import is_kept, teardown
    from sealnet.reap import orphans as find_orphans
    from sealnet.records import State

    caller.require_root("reap", "sealnet reap ...")
    state = State()
    state.prepare()
    host = Host(state.path, state.tag)
    if orphans or everything:
        wanted = find_orphans(host, state)
    if everything:
        wanted = sorted({*wanted, *state.run_ids()})
    reaped, status = [], 0
    for run_id in wanted:
        try:
            spared = partial(is_kept, state, run_id) if orphans else (lambda: False)
            if teardown(host, state, run_id, everywhere=True, unless=spared) or orphans or everything:
                reaped.append(run_id)
        except SealnetError as error:
            status = complain(error)
    state.sweep()
    return reaped, status
