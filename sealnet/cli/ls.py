"""`sealnet ls`."""

from __future__ import annotations

import json
import time

import click

from sealnet.cli import json_option, remote, wants_json
from sealnet.cli.table import aligned, duration
from sealnet.looking import views
from sealnet.records import State


@click.command("ls", short_help="List the runs on this host.")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> int:
    """List the runs on this host, oldest first; for who is not root, its own runs of the worker's.

    `orphaned` is one whose supervisor is gone: `sealnet reap --orphans` takes it away."""
    worker = remote.for_user()
    found = views(State()) if worker is None else worker.ask("List")["runs"]
    if wants_json(ctx, as_json):
        click.echo(json.dumps(found, indent=1))
        return 0
    now = time.time()
    rows = [
        (
            view["run_id"],
            view["state"],
            view["confinement"],
            f"{view['gateway']}:{view['lease_ports'][0]}" if view["gateway"] else "-",
            view["user"],
            str(view["pid"] or "-"),
            duration(now - view["started"]),
            view["command"],
        )
        for view in found
    ]
    for line in aligned(("RUN", "STATE", "CONFINEMENT", "LEASE", "USER", "PID", "AGE", "COMMAND"), rows, last_width=60):
        click.echo(line)
    return 0
