"""`sealnet plan`."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from sealnet.cli import once, wants_json
from sealnet.cli.options import plan_options, request
from sealnet.errors import UsageError

_FILE = "plan.lock.json"
# What `run` takes as well, and no plan fixes.
_OF_ONE_RUN = ("run_id", "receipt", "evidence")


@click.command(
    "plan",
    short_help="Freeze what a run may do, for a reviewer to read.",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [--]",
    epilog="""
    \b
    Examples:
      sealnet plan --lease-port 8080 --timeout 600 -- ./agent
      sealnet plan --output - --allow pypi.org -- ./agent | jq .plan.allow
      sudo sealnet run --plan plan.lock.json --evidence evidence
    """,
)
@plan_options
@once("--run-id", metavar="ID", help="Of one run, so not in the plan; as are --receipt and --evidence.")
@once("--receipt", metavar="FILE", hidden=True)
@once("--evidence", metavar="DIR", hidden=True)
@once("--output", metavar="FILE", help=f"Where it is written. Default: {_FILE}, here; '-' for standard output alone.")
@click.option("--json", "as_json", is_flag=True, help="Print it, and write no file but that of --output.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARG]...")
@click.pass_context
def command(ctx: click.Context, /, argv: tuple[str, ...], as_json: bool, output: str | None, **options: Any) -> int:
    """Write plan.lock.json, and print it: what `sealnet run` would do with the same options. The same bytes for the same plan, with the
    hash of what it fixes. Nothing else is touched, and root is not needed. `sealnet run --plan FILE` takes everything from it and refuses
    whatever differs.

    Variables stand in it by name alone: a plan holds no values. That of a --setenv is given to `run` again.
    """
    from sealnet.kernel.output import Output
    from sealnet.model import lock, names
    from sealnet.request import plan

    if options["run_id"] is not None:
        names.known_run_id(options["run_id"])
    path = output if output is not None else "-" if wants_json(ctx, as_json) else _FILE
    frozen = lock.freeze(plan(argv, **request(options))).render()
    if path != "-":
        try:
            with contextlib.closing(Output(path, "--output")) as file:
                file.write(frozen)
        except UsageError as error:
            raise UsageError(error.message, hint=error.hint or "--output FILE, or --output - to print it alone") from error
    click.echo(frozen, nl=False)
    for name in _OF_ONE_RUN:
        if options[name] is not None:
            click.echo(f"sealnet: --{name.replace('_', '-')} is of one run, and not in the plan: give it to sealnet run", err=True)
    return 0
