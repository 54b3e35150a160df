"""`sealnet evidence`."""

from __future__ import annotations

import json

import click

from sealnet.cli import json_option, wants_json
from sealnet.cli.table import aligned, clean, denial_lines


@click.command(
    "evidence",
    short_help="Whether every one of many runs was enforced, by their bundles.",
    epilog="""
    \b
    Examples:
      sealnet evidence evidence
      sealnet evidence results/*/evidence --json | jq -r .wording
    """,
)
@click.argument("directories", nargs=-1, required=True, metavar="DIR...")
@json_option
@click.pass_context
def command(ctx: click.Context, directories: tuple[str, ...], as_json: bool) -> int:
    """Fold what `sealnet run --evidence DIR` has written of many runs: as confined as the least of them, enforced only if every one was.

    Every claim is derived anew from plan, receipt and log. A bundle that cannot be read, that does not bear out its own claims or whose
    log was cut is worth nothing, and neither is the whole then. Exit 0: every one was enforced and is complete; 1: not.
    """
    from sealnet.evidence import fold_evidence

    folded = fold_evidence(directories)
    if wants_json(ctx, as_json):
        click.echo(json.dumps(folded.to_json(), indent=1))
    else:
        rows = [
            (one.where, one.run_id or "-", one.verdict, str(one.allowed), str(one.denied), "; ".join(one.faults) or "-")
            for one in folded.bundles
        ]
        for line in aligned(("DIR", "RUN", "VERDICT", "ALLOWED", "DENIED", "FAULTS"), rows):
            click.echo(line)
        for line in denial_lines(folded.denials):
            click.echo(line)
        click.echo(f"together  {clean(folded.wording)}")
    return 0 if folded.egress_enforced and folded.complete else 1
