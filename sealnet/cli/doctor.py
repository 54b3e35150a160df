"""`sealnet doctor`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from sealnet.cli import json_option, remote, wants_json
from sealnet.cli.table import aligned, clean
from sealnet.model.facts import ROOT_ONLY, WORKS, Row
from sealnet.probe import CanSeal


@click.command("doctor", short_help="Can this host seal? Each requirement, found, fix.")
@click.option("--lease-port", type=click.IntRange(1, 65535), metavar="PORT", help="Try this port, where a firewall lets in some only.")
@click.option(
    "--worker", "through_worker", is_flag=True, help="Have the worker look and try; who is not root has it anyway, if there is one."
)
@json_option
@click.pass_context
def command(ctx: click.Context, lease_port: int | None, through_worker: bool, as_json: bool) -> int:
    """Tell what this host has and lacks, what gets in the way and what sealnet does about it; then build a real seal, and take it away.

    Only root may do so. Anybody else sees what can be seen without, and has the worker build the seal. Exit 0 only if that worked.

    `fail` is what keeps a run from being sealed, `warn` what may, `note` what looks as if it did.
    """
    document = _examined(lease_port, through_worker=through_worker)
    can, rows = _probe(document["probe"]), tuple(Row(**row) for row in document["rows"])
    if wants_json(ctx, as_json):
        click.echo(json.dumps(document, indent=1))
    else:
        for line in (*_table(rows), "", *_verdict(can)):
            click.echo(line)
    return 0 if can else 1


def _examined(lease_port: int | None, *, through_worker: bool) -> dict[str, Any]:
    """The document of `sealnet doctor --json`; by the worker as far as we may not do it ourselves. Raises CannotSeal."""
    from sealnet import __version__, doctor
    from sealnet.records import State

    worker, tried = remote.needed() if through_worker else remote.for_user(), None
    if worker is not None:
        with worker:
            told = worker.ask("Doctor", lease_port=lease_port)
        if told["report"] is not None:
            report: dict[str, Any] = told["report"]
            return report
        tried = CanSeal(ok=told["can_seal"], **{name: told[name] for name in ("step", "reason", "hint", "took_ms", "at")})
    return doctor.examine(State(), lease_port=lease_port, tried=tried).to_json(__version__)


def _probe(told: dict[str, Any]) -> CanSeal:
    return CanSeal(**{**told, "steps": tuple((step["step"], step["took_ms"]) for step in told["steps"])})


def _table(rows: tuple[Row, ...]) -> Iterator[str]:
    """A line for each row, and below what is not ok what sealnet does and what to do. What works, or was not looked at, shares one."""
    shown = [row for row in rows if row.found not in (WORKS, ROOT_ONLY)]
    head, *lines = aligned(("", "WHAT", "FOUND"), [(row.status, row.name, row.found) for row in shown])
    indent = " " * head.index("FOUND")
    yield head
    for start, found in (("ok    kernel features", WORKS), ("note  not looked at", ROOT_ONLY)):
        names = ", ".join(row.name for row in rows if row.found == found)
        for number, line in enumerate(textwrap.wrap(names, 100)):
            yield (indent if number else start.ljust(len(indent))) + line
        if names and found == ROOT_ONLY:
            yield f"{indent}fix: sudo sealnet doctor"
    for row, line in zip(shown, lines, strict=True):
        yield line
        if row.status != "ok":
            yield from (f"{indent}{what}: {clean(text)}" for what, text in (("sealnet", row.does), ("fix", row.fix)) if text)


def _verdict(can: CanSeal) -> Iterator[str]:
    if can.steps:
        yield f"a throw-away seal, in ms: {', '.join(f'{step} {took_ms:.1f}' for step, took_ms in can.steps)}"
    if can:
        yield f"this host can seal: one was built, proved, run in and removed in {can.took_ms:.0f} ms"
        return
    yield f"this host CANNOT seal, at step {can.step}: {clean(can.reason or '')}"
    if can.hint:
        yield f"  hint: {clean(can.hint)}"
