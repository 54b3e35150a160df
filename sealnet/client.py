"""Talks to the worker: calls with descriptors, and a run that it supervises as if it were ours. Cheap to import."""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sealnet.errors import KINDS, CannotSeal, NoSuchRun, SealnetError, UsageError
from sealnet.model import varlink
from sealnet.model.calling import INTERFACE, SOCKET
from sealnet.model.varlink import Malformed, Reply

_DIRECTORY = "/run/sealnet"
# The worker is trusted; a listing of thousands of runs is long.
_MOST_BYTES = 256 << 20
_CHUNK = 1 << 18
_CONNECT_S, _ANSWERS_S = 10.0, 5.0
# A worker that was restarted is looked for, as long as its runs can do without one.
_RETRY_S, _GIVE_UP_S = 0.2, 600.0
# 0 is the kill that follows one that was not obeyed.
_ENDING = (0, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_LOOK_S = 0.1


def path(environ: Mapping[str, str]) -> str:
    """Where the worker's socket is, or would be."""
    return f"{environ.get('SEALNET_STATE_DIR') or _DIRECTORY}/{SOCKET}"


class Connection:
    """One connection to the worker. A call at a time."""

    def __init__(self, path: str) -> None:
        """Raises OSError where there is no worker, or none that lets us in."""
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._frames = varlink.Frames(_MOST_BYTES)
        try:
            # connect(2) waits where a worker that hangs has more callers than it takes.
            self._sock.settimeout(_CONNECT_S)
            self._sock.connect(path)
            self._sock.settimeout(None)
        except BaseException:
            self._sock.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, method: str, parameters: Mapping[str, Any], fds: Sequence[int] = (), *, more: bool = False) -> None:
        """Raises OSError; UsageError for a call that is too long."""
        data = varlink.render_call(f"{INTERFACE}.{method}", parameters, more=more)
        if len(data) > varlink.MOST_BYTES:
            raise UsageError(
                f"cannot ask the worker: arguments and environment have {len(data)} bytes, and a call at most {varlink.MOST_BYTES}",
                hint="pass them in a file",
            )
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        self._sock.sendall(data[sent:], socket.MSG_NOSIGNAL)

    def receive(self) -> list[Reply]:
        """The replies that the next bytes make whole, maybe none. Raises EOFError when the worker has gone."""
        try:
            data = self._sock.recv(_CHUNK)
            if not data:
                raise EOFError
            return [varlink.parse_reply(message) for message in self._frames.feed(data)]
        except ConnectionError as e:
            raise EOFError from e
        except Malformed as e:
            raise CannotSeal(f"cannot understand the worker: {e}", hint="are it and this command of one version?") from e

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One call with one answer. Raises what the worker has met."""
        return next(self.ask_more(method, more=False, **parameters))

    def answers_within(self, seconds: float) -> None:
        """From here on a worker that is silent for so long (it was halted) raises TimeoutError."""
        self._sock.settimeout(seconds)

    def ask_more(self, method: str, *, more: bool = True, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Every answer to one call."""
        try:
            self.send(method, parameters, more=more)
            while True:
                for reply in self.receive():
                    yield answer(reply)
                    if not reply.continues:
                        return
        except TimeoutError:
            raise
        except (EOFError, OSError) as e:
            raise CannotSeal("cannot go on: the worker has gone", hint="systemctl status sealnet-worker") from e

    def close(self) -> None:
        self._sock.close()


def answer(reply: Reply) -> dict[str, Any]:
    """What a reply tells; an error is raised as what it was on the other side."""
    if reply.error is None:
        return reply.parameters
    told = reply.parameters
    if reply.error != f"{INTERFACE}.Failed":
        word = reply.error.rpartition(".")[2]
        raise CannotSeal(f"cannot use the worker: {word} {told}", hint="are it and this command of one version?")
    error = KINDS.get(str(told.get("kind")), SealnetError)(str(told.get("message")), hint=told.get("hint"))
    for note in told.get("notes") or ():
        error.add_note(str(note))
    raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a supervisor has to know of the plan: the worker itself sees to the timeout."""

    grace_s: float
    timeout_s: float | None = None


class RemoteRun:
    """A run of the worker's, with what `sealnet.supervise` asks of a run: lost connections are made anew, and the run goes on meanwhile."""

    def __init__(self, path: str, run_id: str, *, grace_s: float, tied: bool) -> None:
        """`tied`: who goes away ends it."""
        self.run_id, self.plan = run_id, Terms(grace_s=grace_s)
        self.started: dict[str, Any] | None = None
        self.ended: dict[str, Any] | None = None
        self.files: dict[str, list[str]] = {}
        self.upkeep = _Upkeep(self)
        self._path, self._tied = path, tied
        self._connection: Connection | None = None
        self._unsent: list[int] = []
        self.retry_at = self._give_up_at = self._leave_at = float("inf")
        # Stands for the connection while there is none: never readable.
        self._never = os.eventfd(0, os.EFD_CLOEXEC)

    def start(
        self, connection: Connection, parameters: Mapping[str, Any], fds: Sequence[int], wake: int, checkpoint: Callable[[str], None]
    ) -> None:
        """Have it started, and return once it runs. `checkpoint` is asked when `wake` is readable, and raises to have it undone.

        Raises SealnetError: nothing of it ran. Where that comes too late, it runs, and what was raised is for its supervisor to see again.
        """
        stopped: SealnetError | None = None
        self._connection = connection
        try:
            connection.send("Run", parameters, fds, more=True)
        except OSError as e:
            raise CannotSeal(f"cannot ask the worker: {e.strerror}", hint="systemctl status sealnet-worker") from e
        try:
            while self.started is None and self.ended is None:
                poller = select.poll()
                for fd in (self.pidfd, *([wake] if stopped is None else [])):
                    poller.register(fd, select.POLLIN)
                poller.poll(None if self.looks_at == float("inf") else _RETRY_S * 1000)
                if stopped is None and (stopped := _refusal(checkpoint)) is not None:
                    try:
                        self._ask("Cancel")
                    except OSError:
                        self._leave_soon()
                    except SealnetError:
                        pass
                self.poll()
        except SealnetError as error:
            # Without a worker nobody knows what has become of it.
            if stopped is not None and self._connection is not None:
                raise stopped from error
            if isinstance(error, NoSuchRun):
                raise CannotSeal("cannot run: the worker has ended meanwhile, and nothing of the run is left", hint="try again") from error
            raise

    def attach(self) -> None:
        """Wait for one that was started by somebody else. Raises SealnetError."""
        try:
            self._join()
        except OSError as e:
            raise unreachable(self._path, e) from e

    def take_over(self) -> None:
        """As `attach`, of one that lives, and whose beginning somebody else was told. Raises SealnetError."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.attach()
        if self.started is None:
            self._catch_up()

    @property
    def pidfd(self) -> int:
        return self._never if self._connection is None else self._connection.fileno()

    @property
    def spawned(self) -> RemoteRun:
        return self

    def release(self) -> None:
        """It has been released by the worker."""

    def poll(self) -> int | None:
        """The exit status, when nothing of the run is left. Raises SealnetError where that cannot be told."""
        if self._connection is None and self.ended is None:
            self._join_again()
        if self._connection is not None and _is_readable(self._connection.fileno()):
            try:
                for reply in self._connection.receive():
                    self._take(answer(reply))
            except EOFError:
                self._lose()
        if self._connection is not None and self.ended is None and time.monotonic() > self._leave_at:
            self._lose()
            raise CannotSeal(
                f"cannot tell how run {self.run_id} ends: the worker does not answer",
                hint="is it halted? systemctl status sealnet-worker; once it goes on it ends the run",
            )
        return None if self.ended is None else int(self.ended["status"])

    @property
    def looks_at(self) -> float:
        """When to `poll` though nothing has come."""
        return min(self.retry_at, self._leave_at)

    def payload_pid(self) -> int | None:
        """As we count, None where the worker counts otherwise (another pid namespace)."""
        if self.started is None or self.started["pid_namespace"] != os.stat("/proc/self/ns/pid").st_ino:
            return None
        pid: int | None = self.started["pid"]
        return pid

    def send_signal(self, signum: int) -> bool:
        """False when the payload is gone. One that cannot be sent now is sent when the worker is back."""
        try:
            return bool(self._ask("Kill", signal=signum)["sent"])
        except NoSuchRun:
            return False
        except OSError:
            self._unsent.append(signum)
            if signum in _ENDING:
                self._leave_soon()
            return True

    def _leave_soon(self) -> None:
        """Nobody can end it now, and nobody is kept here for that."""
        self._leave_at = min(self._leave_at, time.monotonic() + self.plan.grace_s)

    def kill(self) -> None:
        """End every process of the run."""
        self.send_signal(0)

    def freeze(self, *, frozen: bool) -> None:
        with contextlib.suppress(OSError, NoSuchRun):
            self._ask("Freeze", frozen=frozen)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        os.close(self._never)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        with Connection(self._path) as connection:
            connection.answers_within(_ANSWERS_S)
            return connection.ask(method, run_id=self.run_id, **parameters)

    def _take(self, told: Mapping[str, Any]) -> None:
        if told.get("started") is not None:
            self.started = told["started"]
        elif told.get("file") is not None:
            self.files.setdefault(told["file"]["name"], []).append(told["file"]["part"])
        elif told.get("ended") is not None:
            self.ended = told["ended"]

    def _lose(self) -> None:
        """The worker has gone, and its runs have not."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        now = time.monotonic()
        self.retry_at, self._give_up_at = now + _RETRY_S, now + _GIVE_UP_S

    def _join(self) -> None:
        connection = Connection(self._path)
        try:
            connection.send("Wait", {"run_id": self.run_id, "tied": self._tied}, more=True)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self.files.clear()
        self.retry_at = self._leave_at = float("inf")

    def _join_again(self) -> None:
        now = time.monotonic()
        if now < self.retry_at:
            return
        try:
            self._join()
        except OSError as e:
            if now > min(self._give_up_at, self._leave_at):
                raise CannotSeal(
                    f"cannot tell how run {self.run_id} ends: the worker has gone, and no other has come",
                    hint=f"sealnet worker takes its runs over; sudo sealnet reap {self.run_id} ends it without",
                ) from e
            self.retry_at = now + _RETRY_S
            return
        if self.started is None:
            self._catch_up()
        unsent, self._unsent = self._unsent, []
        for signum in unsent:
            self.send_signal(signum)

    def _catch_up(self) -> None:
        """The worker had started it, and could not say so any more."""
        with contextlib.suppress(OSError, NoSuchRun):
            record = self._ask("Inspect")["run"]
            told = {"run_id": self.run_id, "pid": record["pid"], "pid_namespace": 0, "receipt": record["receipt"]}
            self.started = {**told, "severed": record["why_severed"], "cwd_is_shared": True}


class _Upkeep:
    """The worker sees to lease and seal; what is left is to look for it when it has gone, and to `follow` what the run writes."""

    fds: tuple[int, ...] = ()

    def __init__(self, run: RemoteRun) -> None:
        self._run = run
        self.follow: Callable[[], None] | None = None

    def next_at(self) -> float:
        return self._run.looks_at if self.follow is None else min(self._run.looks_at, time.monotonic() + _LOOK_S)

    def serve(self) -> None:
        if self.follow is not None:
            self.follow()

    def renew(self) -> None:
        """The lease is the worker's to renew."""


def ended(connection: Connection, run_id: str) -> dict[str, Any]:
    """How a run has ended, once it has. Raises SealnetError."""
    run = RemoteRun(connection.path, run_id, grace_s=0.0, tied=False)
    try:
        run.attach()
        while run.poll() is None:
            poller = select.poll()
            poller.register(run.pidfd, select.POLLIN)
            poller.poll(None if run.retry_at == float("inf") else _RETRY_S * 1000)
        return run.ended or {}
    finally:
        run.close()


def _refusal(checkpoint: Callable[[str], None]) -> SealnetError | None:
    try:
        checkpoint("started")
    except SealnetError as error:
        return error
    return None


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def unreachable(where: str, error: OSError) -> CannotSeal:
    """What to tell of a worker that is needed and not there."""
    hint = "sudo systemctl start sealnet-worker.socket; without systemd: sudo sealnet worker"
    if isinstance(error, PermissionError):
        hint = "its group is `group` in config.toml (sealnet): sudo adduser USER sealnet, and log in again"
    return CannotSeal(f"cannot reach the worker at {where}: {error.strerror or error}", hint=hint)
