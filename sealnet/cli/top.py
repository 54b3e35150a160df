"""`sealnet top`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from sealnet.cli import once, views, wants_json
from sealnet.cli.table import aligned, clean, duration
from sealnet.cli.views import View
from sealnet.errors import SealnetError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_HEAD = ("RUN", "STATE", "CONFINEMENT", "LEASE", "USER", "AGE", "CPU", "MEMORY", "EVENTS", "COMMAND")
# The biggest first, for these are what one looks for.
_BIGGEST = ("cpu", "memory", "events")
_DEFAULT, _INTERVAL_S = "cpu", 2.0
_LONGEST_COMMAND = 60
# The line above the table, the table's head, and one for those that have no room.
_OTHER_LINES = 3


class _Looks:
    """Looks at the runs, one after another: what share of a processor each has had since the look before, or since it began."""

    def __init__(self, key: str, *, reverse: bool) -> None:
        self._key, self._is_reversed = key, reverse != (key in _BIGGEST)
        self._before: dict[tuple[str, float], tuple[float, float]] = {}

    def look(self) -> list[dict[str, Any]]:
        """The views, in order, with `cpu` (1.0 is a whole processor) and `memory` (bytes), None where it cannot be seen, and `events`."""
        shown, now = [], time.time()
        before, self._before = self._before, {}
        for view in views.found():
            used_s, of = views.cpu_s(view), (view["run_id"], view["started"])
            cpu = None
            if used_s is not None:
                since, then_s = before.get(of, (view["started"], 0.0))
                cpu = max(0.0, used_s - then_s) / max(now - since, 0.001)
                self._before[of] = now, used_s
            shown.append({**view, "cpu": cpu, "memory": views.memory_bytes(view), "events": len(view.get("events") or ())})
        return sorted(shown, key=self._order, reverse=self._is_reversed)

    def _order(self, view: View) -> Any:
        return view[self._key] or 0 if self._key in _BIGGEST else views.KEYS[self._key](view)


@click.command("top", short_help="Watch the runs on this host.")
@once("--interval", type=click.FloatRange(0.2, 3600), metavar="SECONDS", help=f"How long between two looks; {_INTERVAL_S:g} without it.")
@click.option("--once", "only_once", is_flag=True, help="Look once, print it, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print one JSON document.")
@views.sort_options((*views.KEYS, *_BIGGEST), _DEFAULT)
@click.pass_context
def command(ctx: click.Context, interval: float | None, only_once: bool, key: str | None, reverse: bool, as_json: bool) -> int:
    """Show the runs on this host and go on doing so until ^C; who is not root sees its own runs of the worker's.

    CPU is of one processor, since the look before, or since the run began. MEMORY is known where the host counts it for each cgroup. EVENTS
    is how often somebody has changed the run's seal, see `sealnet inspect RUN`. Where standard output is no terminal, each look is printed
    below the one before.
    """
    looks, interval_s = _Looks(key or _DEFAULT, reverse=reverse), interval or _INTERVAL_S
    if wants_json(ctx, as_json):
        if not only_once:
            raise UsageError("cannot show that as JSON: it has no end", hint="sealnet top --once --json")
        click.echo(json.dumps(looks.look(), indent=1))
        return 0
    try:
        if only_once or not sys.stdout.isatty():
            _print(looks, None if only_once else interval_s)
        else:
            _watch(looks, interval_s)
    except KeyboardInterrupt:
        # That is how one leaves it.
        pass
    return 0


def _print(looks: _Looks, interval_s: float | None) -> None:
    while True:
        shown = looks.look()
        click.echo(_summary(shown))
        for line in aligned(_HEAD, [_row(view) for view in shown], last_width=_LONGEST_COMMAND):
            click.echo(line)
        if interval_s is None:
            return
        click.echo()
        time.sleep(interval_s)


def _watch(looks: _Looks, interval_s: float) -> None:
    # Imported here: no other command has a use for it.
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_dumb_terminal:
        _print(looks, interval_s)
        return
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(console, looks), refresh=True)
            time.sleep(interval_s)


def _end(signum: int, _frame: FrameType | None) -> None:
    """The terminal gets its own screen back."""
    raise SystemExit(128 + signum)


def _screen(console: Console, looks: _Looks) -> Text:
    """What has room on it. A look that fails is told; the next may do better (a worker that is restarted)."""
    from rich.text import Text

    def line(text: str, style: str = "") -> Text:
        # Text, not markup: what stands in it is a payload's to choose.
        return Text(clean(text), style)

    try:
        shown = looks.look()
    except SealnetError as error:
        return line(f"sealnet: {error.message}")
    room = max(1, console.height - _OTHER_LINES)
    head, *rows = aligned(_HEAD, [_row(view) for view in shown[:room]], width=console.width)
    styles = ["red" if view["state"] in ("orphaned", "unreadable") else "" for view in shown]
    lines = [line(_summary(shown)), line(head, "bold"), *map(line, rows, styles)]
    if len(shown) > room:
        lines.append(line(f"and {len(shown) - room} more"))
    # Cut by how wide a line is shown, which is not how long it is.
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


def _summary(shown: Sequence[View]) -> str:
    of = Counter(view["confinement"] for view in shown)
    told = ", ".join(f"{count} {clean(confinement)}" for confinement, count in sorted(of.items()))
    return f"{time.strftime('%H:%M:%S')}  {len(shown)} run{'' if len(shown) == 1 else 's'}" + (f": {told}" if told else "")


def _row(view: View) -> tuple[str, ...]:
    return (
        view["run_id"],
        view["state"],
        view["confinement"],
        views.lease(view),
        view["user"],
        duration(time.time() - view["started"]),
        "-" if view["cpu"] is None else f"{100 * view['cpu']:.0f}%",
        "-" if view["memory"] is None else _size(view["memory"]),
        str(view["events"] or "-"),
        view["command"],
    )


def _size(size_bytes: float) -> str:
    for unit in ("B", "K", "M"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f}{unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f}G"
