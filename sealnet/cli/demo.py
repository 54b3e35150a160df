"""`sealnet demo`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import click

from sealnet.cli import json_option, wants_json
from sealnet.cli.table import aligned

SCHEMA = "sealnet.demo/1"


@click.command("demo", short_help="Show a sealed run and the ways out of it that fail.")
@click.option(
    "--lease-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="The brokers' port, which must be free; for a host whose firewall lets in some only.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, lease_port: int | None, as_json: bool) -> int:
    """Start a broker, seal a payload to it, and let that try a score of other ways out, each of which something listens at.

    Exit 0 only if the broker answered and nothing else did.
    """
    from sealnet import caller, demo, reap, request
    from sealnet.kernel.host import Host
    from sealnet.records import State

    caller.require_root("run the demo", "sealnet demo")
    state, config = State(), request.config()
    state.prepare()
    host = Host(state.path, state.tag)
    reap.reap_orphans(host, state)
    host.close()
    rows, took_ms = demo.demonstrate(state=state, config=config, user=caller.unprivileged_user(os.environ), lease_port=lease_port)
    sealed = all(row.ok for row in rows)
    if wants_json(ctx, as_json):
        told = [{**asdict(row), "ms": round(row.ms, 3)} for row in rows]
        click.echo(json.dumps({"schema": SCHEMA, "sealed": sealed, "seal_ms": round(took_ms, 3), "rows": told}, indent=1))
        return 0 if sealed else 1
    cells = [("ok" if row.ok else "OPEN", row.tried, row.got, f"{row.ms:.2f} ms", row.control) for row in rows]
    for line in aligned(("", "TRIED", "WHAT CAME BACK", "AFTER", "CONTROL"), cells):
        click.echo(line)
    shut = sum(row.ok for row in rows[1:])
    click.echo()
    if sealed:
        click.echo(f"sealed: the broker answered, {shut} other ways were shut; the seal took {took_ms:.0f} ms, and nothing of it is left")
    else:
        click.echo(f"NOT sealed: {len(rows) - 1 - shut} of {len(rows) - 1} ways are open or could not be judged, see OPEN above")
    return 0 if sealed else 1
