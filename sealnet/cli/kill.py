"""`sealnet kill`."""

from __future__ import annotations

import signal

import click

from sealnet.cli import once
from sealnet.errors import NoSuchRun, UsageError
from sealnet.model import names


@click.command("kill", short_help="Send a signal to a run of the worker's.")
@once("-s", "--signal", "signal_name", metavar="SIG", help="Name or number. Default: TERM.")
@click.argument("run_id", metavar="RUN")
def command(run_id: str, signal_name: str | None) -> int:
    """Send a signal to the first process of RUN. `sealnet reap RUN` ends it whatever it does, and waits for that."""
    from sealnet.cli import remote

    signum, wanted = _number(signal_name or "TERM"), names.known_run_id(run_id)
    with remote.needed() as connection:
        if not connection.ask("Kill", run_id=wanted, signal=signum)["sent"]:
            raise NoSuchRun(f"cannot signal run {wanted}: it has just ended", hint=f"sealnet wait {wanted}")
    return 0


def _number(text: str) -> int:
    word = text.upper().removeprefix("SIG")
    known = {one.name.removeprefix("SIG"): int(one) for one in signal.Signals}
    number = int(word) if word.isascii() and word.isdigit() and len(word) < 4 else known.get(word, 0)
    if not 1 <= number <= signal.SIGRTMAX:
        raise UsageError(f"cannot send signal {text}: there is none of that name or number", hint="kill -l lists them")
    return number
