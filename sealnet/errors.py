"""Every error sealnet raises on purpose: one class per reaction of the caller."""

from __future__ import annotations

from typing import Any


class SealnetError(Exception):
    """Base of all. `message` reads `cannot <verb> <kind> <name>: <cause>`; `hint` is one command or one setting."""

    exit_status = 125

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # Whatever its class takes to be made, another process of ours is told it as it is.
        return _as_it_is, (type(self), self.args), self.__dict__


def _as_it_is(kind: type[SealnetError], arguments: tuple[Any, ...]) -> SealnetError:
    return kind.__new__(kind, *arguments)


class UsageError(SealnetError):
    """The request itself is wrong; nothing was touched. Correct the request."""

    exit_status = 2


class CannotSeal(SealnetError):
    """This host, as it is now, cannot give the seal asked for; nothing is left behind. Change the host or the request."""


class PoolExhausted(CannotSeal):
    """No free /30. The text says whether the host's routes or live runs took the pool."""


class KernelRefused(CannotSeal):
    """The kernel refused one request. `errno` is its answer."""

    def __init__(self, message: str, *, errno: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


class NotSealed(CannotSeal):
    """What was built does not read back as what was planned, so the payload was not started."""


class NoBroker(SealnetError):
    """Nothing answers at the run's lease, so the payload was not started. Start the broker, or let it in."""


class RunExists(SealnetError):
    """The run id is in use by a live run. Choose another or reap it."""


class NoSuchRun(SealnetError):
    """No record of that run id. Nothing to do."""


class NotPermitted(SealnetError):
    """The caller may not ask that of the worker. Ask root, or ask for less."""


class TooMany(SealnetError):
    """The caller has as much of the worker as one may have. Wait, or end something."""


class CannotTearDown(SealnetError):
    """Something of a run is still there; its record stays, so that reap can be tried again."""


class Interrupted(SealnetError):
    """A signal ended sealnet before the payload ran. `signum` is the signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by signal {signum}")
        self.signum = signum
        self.exit_status = 128 + signum


KINDS: dict[str, type[SealnetError]] = {
    "usage": UsageError,
    "cannot_seal": CannotSeal,
    "no_broker": NoBroker,
    "run_exists": RunExists,
    "no_such_run": NoSuchRun,
    "not_permitted": NotPermitted,
    "too_many": TooMany,
    "cannot_tear_down": CannotTearDown,
}
"""What each is called over the worker's socket; a subclass is told as what it is a kind of, anything else as `failed`."""
