"""Why there is no machine, or none any more."""

from __future__ import annotations


class NoMachine(Exception):
    """`message` reads `cannot <verb> <kind> <name>: <cause>`; `output` is the end of what the failed program or the console said."""

    exit_status = 125

    def __init__(self, message: str, *, hint: str | None = None, output: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.output = output


class NotHere(NoMachine):
    """The package archives of this machine do not have it."""


class TimedOut(NoMachine):
    """The machine did not power off in time."""

    exit_status = 124
