"""`sealnet plan`."""

from __future__ import annotations

from typing import Any

import click

from sealnet.cli.options import plan_options, request


@click.command(
    "plan",
    short_help="Freeze what a run may do, for a reviewer to read.",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [--]",
    epilog="""
    \b
    Examples:
      sealnet plan --lease-port 8080 --timeout 600 -- ./agent > plan.lock.json
      sudo sealnet run --plan plan.lock.json --evidence evidence
    """,
)
@plan_options
@click.option("--json", is_flag=True, expose_value=False, help="It is JSON in any case.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARG]...")
def command(argv: tuple[str, ...], **options: Any) -> int:
    """Print, as plan.lock.json, what `sealnet run` would do with the same options: the same bytes for the same plan, with the hash of what
    it fixes. Nothing is touched, and root is not needed. `sealnet run --plan FILE` takes everything from it and refuses whatever differs.

    Variables stand in it by name alone: a plan holds no values. That of a --setenv is given to `run` again.
    """
    from sealnet.model import lock
    from sealnet.request import plan

    click.echo(lock.freeze(plan(argv, **request(options))).render(), nl=False)
    return 0
