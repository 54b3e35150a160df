"""`sealnet worker`."""

from __future__ import annotations

import click

from sealnet.cli import once


@click.command(
    "worker",
    short_help="Run sealed commands for callers that are not root.",
    epilog="""
    \b
    Who may call: root, and the group `group` of config.toml (default: sealnet), through /run/sealnet/worker.sock. Membership lets a user
    start runs as itself, and see and end its own. See docs/worker.md; systemd units are in scripts/systemd.

    \b
    Signals: TERM ends the worker and leaves its runs alone, the next worker takes them over; HUP reads config.toml again (limits of users).
    """,
)
@once("--metrics", metavar="unix:/PATH|127.0.0.1:PORT", help="Tell Prometheus how it goes, to this host alone; `metrics` in config.toml.")
def command(metrics: str | None) -> int:
    """Serve callers over a Unix socket, in the foreground, until TERM. Says what happens on stderr, one line an event."""
    from sealnet.model import endpoint
    from sealnet.records import State
    from sealnet.worker.daemon import serve

    return serve(State(), metrics=None if metrics is None else endpoint.parse(metrics, "--metrics"))
