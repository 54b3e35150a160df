"""`sealnet check`."""

from __future__ import annotations

import json
from typing import Any

import click

from sealnet.cli import json_option, remote, wants_json
from sealnet.model import names

SCHEMA = "sealnet.check/1"


@click.command("check", short_help="Prove a live run's seal again.")
@click.argument("run_id", metavar="RUN")
@json_option
@click.pass_context
def command(ctx: click.Context, run_id: str, as_json: bool) -> int:
    """Read the seal of a live run back from the kernel and compare it with what was planned.

    Exit 0: sealed or severed, proved; 1: not, and what is missing. An open run is never sealed. For who is not root the worker looks, at
    one of its own runs."""
    result = _check(names.known_run_id(run_id))
    if wants_json(ctx, as_json):
        click.echo(json.dumps({"schema": SCHEMA, **result}, indent=1))
    else:
        for fault in result["faults"]:
            click.echo(f"broken  {fault}")
        for unmade in result["inconclusive"]:
            click.echo(f"inconclusive  {unmade}")
        click.echo(f"{result['verdict']}  run {run_id}")
    return 0 if result["verdict"] == result["confinement"] != "open" else 1


def _check(run_id: str) -> dict[str, Any]:
    from sealnet import prove
    from sealnet.kernel.host import Host
    from sealnet.records import State

    if (worker := remote.for_user()) is not None:
        result: dict[str, Any] = worker.ask("Check", run_id=run_id)["result"]
        return result
    state = State()
    record = state.read(run_id)
    host = Host(state.path, state.tag)
    try:
        return prove.again(host, state, record)
    finally:
        host.close()
