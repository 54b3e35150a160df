"""`sealnet wait`."""

from __future__ import annotations

import click

from sealnet.model import names


@click.command(
    "wait",
    short_help="Wait for a run of the worker's, and exit as it does.",
    epilog="""
    \b
    Example:
      id=$(sealnet run --detach --output build.log -- make) && sealnet wait $id
    """,
)
@click.argument("run_id", metavar="RUN")
def command(run_id: str) -> int:
    """Wait until nothing of RUN is left, and exit with its status. One that ended within the last hour is remembered.

    Being interrupted leaves the run alone."""
    from sealnet import client
    from sealnet.cli import remote

    with remote.needed() as connection:
        ended = client.ended(connection, names.known_run_id(run_id))
    remote.tell_end(run_id, ended)
    return int(ended["status"])
