"""`sealnet attach`."""

from __future__ import annotations

import click

from sealnet.model import names


@click.command(
    "attach",
    short_help="Follow a run that was started with --detach.",
    epilog="""
    \b
    Example:
      sealnet run --detach --output build.log --run-id build -- make
      sealnet attach build
    """,
)
@click.argument("run_id", metavar="RUN")
def command(run_id: str) -> int:
    """Print what RUN has written to its --output file and goes on to write, hand on signals (^C is one), and exit with its status.

    Several may be attached; when one is killed, the run goes on. Of one that has ended only the status is known: read the file."""
    from sealnet import client
    from sealnet.cli import remote
    from sealnet.errors import NoSuchRun

    wanted = names.known_run_id(run_id)
    with remote.needed() as connection:
        try:
            record = connection.ask("Inspect", run_id=wanted)["run"]
        except NoSuchRun:
            # It may just have ended; where its output went has ended with it.
            ended = client.ended(connection, wanted)
            remote.tell_end(wanted, ended)
            return int(ended["status"])
    return remote.follow(wanted, record["note"].get("output"), owner=(record["durable"] or {}).get("owner", 0))
