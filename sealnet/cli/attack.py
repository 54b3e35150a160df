"""`sealnet attack`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from sealnet.cli import json_option, wants_json
from sealnet.cli.table import aligned
from sealnet.errors import UsageError

if TYPE_CHECKING:
    from sealnet.attack.kit import Report
    from sealnet.model.attack import Row


@click.command("attack", short_help="Try every way out of a seal, on this kernel.")
@click.option("--user", metavar="NAME", help="The payload's user; root too. Default: who called sudo, nobody for root itself.")
@click.option("--unsealed", is_flag=True, help="The control: the same ways from plain bwrap --share-net, as root unless --user is given.")
@click.option("--lab", is_flag=True, help="In a throw-away host with a neighbour, forwarding, DNAT and loose sysctls.")
@click.option(
    "--without",
    metavar="LAYER",
    type=click.Choice(["gate", "filter"]),
    multiple=True,
    help="With --lab: take this layer of the seal away before the payload starts (gate, filter). One must be enough.",
)
@click.option(
    "--lease-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="The brokers' port, which must be free; for a host whose firewall lets in some only.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context, user: str | None, unsealed: bool, lab: bool, without: tuple[str, ...], lease_port: int | None, as_json: bool
) -> int:
    """Seal a payload that tries every way out there is, each of which something of this host listens at, or which root could do.

    \b
    BLOCKED         refused, and the other end was seen to be there
    REACHED         the seal is broken
    INCONCLUSIVE    refused, but the other end was not seen, so the refusal means nothing
    NOT-APPLICABLE  this host has no such thing; the reason is told

    Exit 0: sealed (no row is REACHED or INCONCLUSIVE); 1: not. With --unsealed, exit 0 means that the control holds: every row that plain
    bwrap reaches was REACHED (or is NOT-APPLICABLE), so that BLOCKED is the seal's doing.

    Nothing of this host is changed. Listeners are on ports of their own and gone at the end; what changes a network is done from outside
    only in a namespace that is thrown away; files of the kernel's are opened and never written. --lab adds what needs other rules and
    sysctls.
    """
    from sealnet import caller
    from sealnet.model import attack

    if without and (unsealed or not lab):
        raise UsageError(
            "cannot use --without here: it robs the seal of a run in a throw-away host", hint="sealnet attack --lab --without gate"
        )
    caller.require_root("attack a seal", "sealnet attack")
    with contextlib.ExitStack() as stack:
        report = _attack(stack, user, unsealed, lab, frozenset(without), lease_port)
        broker = report.broker is not None and report.broker.code == attack.OK
        shown = attack.document(report.rows, kernel=os.uname().release, sealed=not unsealed, broker=broker)
    if wants_json(ctx, as_json):
        click.echo(json.dumps(shown, indent=1))
    else:
        _print(report.rows, shown, without)
    return 0 if shown["verdict"] in ("sealed", "reaches") else 1


def _attack(
    stack: contextlib.ExitStack, user: str | None, unsealed: bool, lab: bool, without: frozenset[str], lease_port: int | None
) -> Report:
    from sealnet import caller, reap, request
    from sealnet.attack import lab as labs
    from sealnet.attack.kit import Kit
    from sealnet.kernel import process
    from sealnet.kernel.host import Host
    from sealnet.records import State

    # Before anything is looked at: what follows is in there.
    thrown_away = labs.enter(stack) if lab else None
    state, config = State(), request.config()
    state.prepare()
    host = Host(state.path, state.tag)
    reap.reap_orphans(host, state)
    host.close()
    who = None if unsealed and user is None else process.user(user or caller.unprivileged_user(os.environ))
    return Kit(state, config, who, sealed=not unsealed, lab=thrown_away, without=without, lease_port=lease_port).attack()


def _print(rows: list[Row], shown: dict[str, Any], without: tuple[str, ...]) -> None:
    """One table, a group after the other, and the counts."""
    cells: list[tuple[str, ...]] = []
    for group in dict.fromkeys(row.group for row in rows):
        cells.append((f"{group}:", "", "", "", ""))
        cells += [(str(row.verdict), row.tried, row.found, f"{row.ms:.2f} ms", row.oracle) for row in rows if row.group == group]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in aligned(("VERDICT", "TRIED", "FOUND", "AFTER", "ORACLE"), cells, width=width):
        click.echo(line)
    click.echo()
    counted = ", ".join(f"{count} {verdict}" for verdict, count in shown["counts"].items())
    answered = "its broker answered" if shown["broker"] else "its broker did NOT answer"
    robbed = f"without the {' and the '.join(dict.fromkeys(without))}: " if without else ""
    click.echo(f"{robbed}{shown['verdict']}: {counted}; {answered}; Linux {shown['kernel']}")
    if not shown["sealed"]:
        missed = [row.name for row in rows if row.must_reach and row.verdict not in ("REACHED", "NOT-APPLICABLE")]
        if missed:
            click.echo(f"plain bwrap should have reached: {', '.join(missed)}", err=True)
        if shown["verdict"] == "reaches":
            click.echo(
                "the control holds: what plain bwrap must reach was REACHED; INCONCLUSIVE and BLOCKED are what this user may not do anyway"
            )
