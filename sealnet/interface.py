"""What the Python API takes and gives, the same for a run of this process's and for one of the worker's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol, Self, TypedDict, runtime_checkable

from sealnet.model.receipt import Receipt
from sealnet.model.record import Record

Stdio = int | IO[Any] | None
Word = str | bytes | os.PathLike[str]
Worker = Literal["auto", "always", "never"]


class RunOptions(TypedDict, total=False):
    """What a run may be asked to be: those of `sealnet run`, under the same names; docs/python.md tells of each."""

    run_id: str | None
    network: str | None
    lease_port: int | None
    broker: str | None
    allow: Iterable[str]
    allow_private: Iterable[str]
    allow_unenforced_egress: bool
    broker_env: Iterable[str]
    pass_env: Iterable[str]
    set_env: Iterable[tuple[str, str]] | Mapping[str, str]
    environ: Mapping[str, str] | None
    bind: Iterable[str]
    ro_bind: Iterable[str]
    tmpfs: Iterable[str]
    chdir: str | os.PathLike[str] | None
    cwd: str | os.PathLike[str] | None
    bwrap_args: bytes
    user: str | int | None
    timeout_s: float | None
    grace_s: float
    fallback: str | None
    allow_userns: bool
    preflight: bool
    on_tamper: str


class LaunchOptions(RunOptions, total=False):
    """And its streams, as subprocess takes them, a file for its proof, and a directory for its evidence.

    `durable`: it outlives this process, and `Sealer.adopt` of the next one takes it over.
    """

    stdin: Stdio
    stdout: Stdio
    stderr: Stdio
    durable: bool
    receipt: str | os.PathLike[str] | None
    evidence: str | os.PathLike[str] | None


class CompletedOptions(LaunchOptions, total=False):
    """And what `subprocess.run` has beside them."""

    input: bytes | str | None
    capture_output: bool
    text: bool
    check: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRun:
    """A run that ended. `returncode` is the payload's own status, 128+n when signal n ended it, 124 at its timeout.

    `events`: what was done to its seal meanwhile, as `{time, event, detail}`.
    """

    run_id: str
    args: tuple[str, ...]
    returncode: int
    stdout: bytes | str | None = None
    stderr: bytes | str | None = None
    tried: tuple[tuple[str, str, int, int], ...] = ()
    receipt: Receipt
    """The proof that was made before the payload started; `sealnet.fold` takes many."""
    events: tuple[dict[str, Any], ...] = ()

    def check_returncode(self) -> None:
        """Raise subprocess.CalledProcessError unless it is 0."""
        if self.returncode:
            raise subprocess.CalledProcessError(self.returncode, list(self.args), self.stdout, self.stderr)


@runtime_checkable
class Run(Protocol):
    """A run that was started. Used by one thread at a time; `close` (or `with`) takes it away."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    @property
    def run_id(self) -> str: ...

    @property
    def receipt(self) -> Receipt:
        """The proof."""

    @property
    def record(self) -> Record:
        """What is written down of it."""

    @property
    def events(self) -> tuple[dict[str, Any], ...]:
        """What was done to its seal meanwhile, as `{time, event, detail}`."""

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status, when nothing of it is left; what its pipes hold can still be read. Raises TimeoutError; the run then goes on.

        Raises what `close` raises, once.
        """

    def poll(self) -> int | None:
        """Its exit status, when there is one."""

    def payload_pid(self) -> int | None:
        """Its first process, as we count; None before it is born, after it is gone, and where the worker counts otherwise."""

    def send_signal(self, signum: int) -> bool:
        """To the payload's first process; False when that is gone."""

    def kill(self) -> None:
        """End every process of the run at once."""

    def freeze(self, *, frozen: bool) -> None:
        """Halt every process of the run, or let them go on."""

    def tried(self) -> list[tuple[str, str, int, int]]:
        """(address, protocol, port, packets) of what the payload tried to reach beside its lease."""

    def check(self) -> dict[str, Any]:
        """Prove the seal again, now: `{run_id, confinement, verdict, faults, ...}`; a seal that holds has its confinement as verdict."""

    def close(self) -> None:
        """End it, and take it away. Raises CannotTearDown when something stayed, CannotSeal when a file of it cannot be written."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
