"""`sealnet ls`."""

from __future__ import annotations

import json
import time

import click

from sealnet.cli import json_option, views, wants_json
from sealnet.cli.table import aligned, duration

_DEFAULT = "started"


@click.command("ls", short_help="List the runs on this host.")
@views.sort_options(tuple(views.KEYS), _DEFAULT)
@json_option
@click.pass_context
def command(ctx: click.Context, key: str | None, reverse: bool, as_json: bool) -> int:
    """List the runs on this host, oldest first; for who is not root, its own runs of the worker's.

    `orphaned` is one whose supervisor is gone: `sealnet reap --orphans` takes it away. One whose record cannot be read is `unreadable`, and
    in JSON most of it is null.

    \b
    Examples:
      sealnet ls --sort user
      sealnet ls --json | jq -r '.[] | select(.confinement == "open") | .run_id'
    """
    found = sorted(views.found(), key=views.KEYS[key or _DEFAULT], reverse=reverse)
    if wants_json(ctx, as_json):
        click.echo(json.dumps(found, indent=1))
        return 0
    now = time.time()
    rows = [
        (
            view["run_id"],
            view["state"],
            view["confinement"],
            views.lease(view),
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
