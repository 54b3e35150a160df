"""What the worker and its crew tell each other, and how a run goes from one process to the other: by its record and what is open of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from sealnet.adopt import Adopted, taken
from sealnet.ended import Ended
from sealnet.errors import SealnetError
from sealnet.kernel.host import Host
from sealnet.kernel.netns import Visit
from sealnet.model.config import Config
from sealnet.model.durable import Durable
from sealnet.model.plan import Plan, User
from sealnet.model.record import Record
from sealnet.records import Claim, State
from sealnet.running import Run, Ways

# A run has been taken; a launch is not wanted any more.
TAKEN, UNWANTED = b"t", b"u"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Answered with Launched, or Refused. `streams`: which of the descriptors beside it each stream is, None for /dev/null."""

    plan: Plan
    config: Config
    durable: Durable
    ways: Ways
    rights: User | None
    streams: tuple[int | None, ...]
    controlling_terminal: bool
    console: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The payload runs; beside it are the run's `descriptors`. Whoever has sent it keeps them until it reads TAKEN."""

    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nothing of it ran, and nothing is left but what the notes of the error say. `receipt`: why, where there was any."""

    error: Exception
    receipt: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Take away a run, whose `descriptors` are beside it, and which has ended so; answered with Gone."""

    record: Record
    config: Config
    ended: Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """What is to be added to how a run has ended. `fault`: something of it stays."""

    tried: tuple[tuple[str, str, int, int], ...]
    counted: str
    fault: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What wait(2) told of a bwrap; answered with a number, or None."""

    pid: int


def descriptors(run: Run) -> list[int]:
    """They stay the run's."""
    return [run.claim.lock, run.claim.fd, run.pidfd, *([run.inside.fd] if run.inside is not None else [])]


def take(host: Host, state: State, config: Config, record: Record, fds: Sequence[int]) -> Adopted:
    """The run that these are of; they are its own from now on, or are closed."""
    with contextlib.ExitStack() as undo:
        for fd in fds:
            undo.callback(os.close, fd)
        lock, directory, pidfd, *namespace = fds
        inside = Visit(namespace[0]) if namespace else None
        if inside is not None:
            undo.callback(inside.close)
        run = taken(host, Claim(state, record, lock, directory), config, inside=inside, pidfd=pidfd)
        undo.pop_all()
        for fd in namespace:
            os.close(fd)
    return run


def told(error: Exception) -> Exception:
    """As it can be told in another process: what is no error of ours is known by its words."""
    return error if isinstance(error, SealnetError | OSError) else RuntimeError(repr(error))
