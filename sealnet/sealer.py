"""The Python API: `run` for one command, `Sealer` for a program that runs many."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Unpack, get_args

from sealnet import asking, caller, probe, request
from sealnet.client import Connection
from sealnet.errors import CannotSeal, NoSuchRun, SealnetError, UsageError
from sealnet.interface import CompletedOptions, CompletedRun, LaunchOptions, Run, RunOptions, Stdio, Word, Worker
from sealnet.model import names
from sealnet.model.calling import SOCKET
from sealnet.model.config import Config
from sealnet.model.record import Record
from sealnet.probe import CanSeal
from sealnet.records import State
from sealnet.stay import Pipes, checkpoint, communicate

if TYPE_CHECKING:
    # Imported by what needs them: where a library is missing they cannot be, and `can_seal` is to say so.
    from sealnet.kernel.host import Host
    from sealnet.running import Run as OwnRun
    from sealnet.workerrun import WorkerRun

    Launched = OwnRun | WorkerRun

_STREAMS = ("stdin", "stdout", "stderr")
_SEVERAL = ("allow", "allow_private", "broker_env", "pass_env", "bind", "ro_bind", "tmpfs")
# A bool is no number here, whatever Python says.
_PLAIN: dict[str, tuple[type, ...]] = {
    "lease_port": (int,), "timeout_s": (int, float), "grace_s": (int, float), "bwrap_args": (bytes,), "allow_unenforced_egress": (bool,),
    "allow_userns": (bool,), "preflight": (bool,), "durable": (bool,), "capture_output": (bool,), "text": (bool,), "check": (bool,),
}  # fmt: skip
_TEXTS = ("run_id", "network", "broker", "chdir", "cwd", "user", "fallback", "on_tamper")


class Sealer:
    """Starts, finds and ends runs on this host. May be used from any thread; a Run belongs to one thread at a time.

    `state_dir` is $SEALNET_STATE_DIR or /run/sealnet, `config` what /etc/sealnet/config.toml says, when not given. `worker`: `auto` is to
    do it in this process as root and to ask the worker as anybody else; `always` and `never` to ask it. The seal is the same.
    """

    def __init__(self, *, state_dir: str | os.PathLike[str] | None = None, config: Config | None = None, worker: Worker = "auto") -> None:
        if worker not in get_args(Worker):
            raise UsageError(f"cannot use worker={worker!r}: it is one of {', '.join(get_args(Worker))}")
        self._state = State(state_dir)
        self._config = config
        self._is_configured = config is not None
        self._worker = worker
        self._prepared = threading.Lock()
        self._answers = probe.Answers(self._attempt)

    def _reach(self) -> Connection | None:
        """The worker, where it is to do it; None where we are. Raises UsageError or CannotSeal."""
        if self._worker == "never" or (self._worker == "auto" and os.geteuid() == 0):
            return None
        return asking.reach(
            str(self._state.path / SOCKET),
            always=self._worker == "always",
            is_configured=self._is_configured or bool(os.environ.get("SEALNET_CONFIG")),
        )

    def _ready(self, verb: str) -> tuple[State, Config]:
        caller.require_root(verb, "sealnet worker, or run this as root")
        with self._prepared:
            if self._config is None:
                self._config = request.config()
            self._state.prepare()
            return self._state, self._config

    @contextlib.contextmanager
    def _host(self, verb: str) -> Iterator[Host]:
        state, _config = self._ready(verb)
        from sealnet.kernel.host import Host

        host = Host(state.path, state.tag)
        try:
            yield host
        finally:
            host.close()

    def can_seal(self, *, lease_port: int | None = None, again: bool = False) -> CanSeal:
        """Whether this host can seal: a real seal is built around `true`, proved, taken away (50 ms). A host that cannot raises nothing.

        Callers of one Sealer share one attempt. A success is kept until a launch of this Sealer fails to be sealed, a failure for 60 s;
        `again` tries whatever is known (a worker keeps an answer of its own). `lease_port` is for a host whose firewall lets in some ports
        only.
        """
        if again:
            self._answers.forget()
        return self._answers.ask(lease_port)

    def _attempt(self, port: int | None) -> CanSeal:
        at, began = time.time(), time.perf_counter()
        try:
            connection = self._reach()
            if connection is None:
                return probe.attempt(lambda: self._ready("try a seal"), port)
            with connection:
                told = connection.ask("Doctor", lease_port=port)
        except SealnetError as error:
            told = {"can_seal": False, "step": "look", "reason": error.message, "hint": error.hint}
        took_ms = (time.perf_counter() - began) * 1e3
        return CanSeal(ok=told["can_seal"], step=told["step"], reason=told["reason"], hint=told["hint"], took_ms=took_ms, at=at)

    def launch(self, argv: Sequence[Word], **options: Unpack[LaunchOptions]) -> Run:
        """Start one sealed command and hand it back alive. `options` are those of `sealnet.run`; `receipt` is a file to write the proof to,
        `evidence` a directory for all that there is to say of the run: it is complete when the Run is closed.

        A payload never gets the caller's terminal: where a stream would be one, its input is empty and its output is copied there.
        `subprocess.PIPE` makes a pipe whose other end is the Run's `stdin`, `stdout` or `stderr`. `timeout_s` is for who waits to see to;
        a run of the worker's ends at it all the same.

        Raises a SealnetError when it cannot be sealed; then nothing of it ran and nothing is left. Close the Run (or use `with`).
        """
        return self.launch_unless(None, argv, **options)

    def launch_unless(self, stop: int | None, argv: Sequence[Word], **options: Unpack[LaunchOptions]) -> Launched:
        """`launch`, which is undone when the descriptor `stop` is readable meanwhile. Raises `sealnet.stay.Stopped` then."""
        words, given = _texts(argv, "argv"), _checked(options, LaunchOptions)
        durable = given.pop("durable", False)
        if durable and given.get("evidence") is not None:
            raise UsageError(
                "cannot keep evidence of a durable run: who writes it may be gone before its end", hint="leave one of the two out"
            )
        to_files = {name: None if (path := given.pop(name, None)) is None else os.fspath(path) for name in ("receipt", "evidence")}
        with contextlib.ExitStack() as lent, contextlib.ExitStack() as kept:
            streams, ours = _streams([given.pop(name, None) for name in _STREAMS], lent, kept)
            connection = self._reach()
            if stop is None:
                stop = os.eventfd(0, os.EFD_CLOEXEC)
                lent.callback(os.close, stop)
            run: Launched
            try:
                if connection is None:
                    run = self._launch_here(words, given, streams, checkpoint(stop), durable=durable, **to_files)
                else:
                    from sealnet import workerrun

                    fds = [inherited if stream is None else stream for inherited, stream in enumerate(streams)]
                    run = workerrun.launch(
                        connection, words, given, fds, durable=durable, stop=stop, checkpoint=checkpoint(stop), **to_files
                    )
            except CannotSeal:
                self._answers.doubt()
                raise
            run.stdin, run.stdout, run.stderr = ours
            run.close_pipes = kept.pop_all().close
            return run

    def _launch_here(
        self,
        argv: Sequence[str],
        given: dict[str, Any],
        streams: tuple[int | None, int | None, int | None],
        checkpoint: Callable[[str], None],
        *,
        durable: bool,
        receipt: str | None,
        evidence: str | None,
    ) -> OwnRun:
        plan = request.plan(argv, **given)
        if durable and (plan.broker is not None or plan.allow):
            raise UsageError(
                "cannot make a run with a door durable: its door is this process's", hint='a worker has doors of its own: worker="always"'
            )
        from sealnet.launch import to_hide

        to_hide(plan, self._state)
        state, config = self._ready("start a run")
        from sealnet.evidence import Evidence
        from sealnet.kernel.host import Host
        from sealnet.kernel.output import Output, Sink, Sinks
        from sealnet.launch import launch
        from sealnet.model.durable import API_NOTE, LEASE_TTL_S, Durable
        from sealnet.running import OWN, Streams, Ways

        lasting = None
        if durable:
            config = replace(config, lease_ttl_s=max(config.lease_ttl_s, LEASE_TTL_S))
            who = plan.user
            lasting = Durable(owner=os.getuid(), on_tamper=plan.on_tamper, grace_s=plan.grace_s, gid=who.gid, groups=who.groups)
        with contextlib.ExitStack() as kept:
            sinks: list[Sink] = []
            bundle = None
            if receipt is not None:
                output = Output(receipt, "receipt")
                kept.callback(output.close)
                sinks.append(output)
            if evidence is not None:
                bundle = kept.enter_context(Evidence(evidence, "evidence", plan))
                sinks.append(bundle)
            host = Host(state.path, state.tag)
            kept.callback(host.close)
            run = launch(
                plan,
                host=host,
                state=state,
                config=config,
                streams=Streams(*streams),
                durable=lasting,
                ways=OWN if lasting is None else Ways(note=API_NOTE),
                checkpoint=checkpoint,
                receipt_to=Sinks(*sinks),
            )
            if bundle is not None:
                run.before_end = bundle.finish
            run.at_end, run.is_waited_away = kept.pop_all().close, True
        try:
            checkpoint("started")
            run.release()
        except BaseException:
            run.close()
            raise
        return run

    def run(self, argv: Sequence[Word], **options: Unpack[CompletedOptions]) -> CompletedRun:
        """Run one sealed command to its end; see `sealnet.run`."""
        return self.run_unless(None, argv, **options)

    def run_unless(self, stop: int | None, argv: Sequence[Word], **options: Unpack[CompletedOptions]) -> CompletedRun:
        """`run`, which is ended at once when the descriptor `stop` is readable."""
        given = _checked(options, CompletedOptions)
        data, is_text, check = given.pop("input", None), given.pop("text", False), given.pop("check", False)
        if given.pop("capture_output", False):
            given["stdout"] = given["stderr"] = subprocess.PIPE
        if data is not None:
            given["stdin"] = subprocess.PIPE
        with self.launch_unless(stop, argv, **given) as run:
            pipes = Pipes(data.encode() if isinstance(data, str) else data or b"", stdin=run.stdin, stdout=run.stdout, stderr=run.stderr)
            status = communicate(run, pipes, stop=stop)
            tried, proof = tuple(run.tried()), run.receipt
            run.close(status)
        out, err = (None if told is None else told.decode(errors="replace") if is_text else told for told in pipes.told)
        completed = CompletedRun(
            run_id=run.run_id,
            args=tuple(map(os.fsdecode, argv)),
            returncode=status,
            stdout=out,
            stderr=err,
            tried=tried,
            events=run.events,
            receipt=proof,
        )
        if check:
            completed.check_returncode()
        return completed

    def runs(self) -> list[Record]:
        """The record of every run there is, oldest first; of the worker's the caller's own."""
        found = []
        if (connection := self._reach()) is not None:
            with connection:
                views = connection.ask("List")["runs"]
            for view in views:
                # One that cannot be read is listed by its id alone.
                with contextlib.suppress(ValueError):
                    found.append(Record.from_json(view))
            return found
        return self._records()

    def _records(self) -> list[Record]:
        """Oldest first."""
        found = []
        for run_id in self._state.run_ids():
            with contextlib.suppress(NoSuchRun):
                found.append(self._state.read(run_id))
        return sorted(found, key=lambda record: (record.started, record.run_id))

    def check(self, run_id: str) -> dict[str, Any]:
        """Prove a live run's seal again, whoever supervises it; see `Run.check`. Raises NoSuchRun."""
        names.known_run_id(run_id)
        if (connection := self._reach()) is not None:
            with connection:
                result: dict[str, Any] = connection.ask("Check", run_id=run_id)["result"]
                return result
        from sealnet import prove

        with self._host("check a run") as host:
            return prove.again(host, self._state, self._state.read(run_id))

    def reap(self, run_id: str) -> bool:
        """Take a run away, alive or dead; whether there was a record of it. Succeeds when there is nothing left to take."""
        names.known_run_id(run_id)
        if (connection := self._reach()) is not None:
            with connection:
                return bool(connection.ask("Reap", run_id=run_id)["existed"])
        with self._host("reap a run") as host:
            from sealnet import reap as reaping

            return reaping.teardown(host, self._state, run_id, everywhere=True)

    def adopt(self) -> list[Run]:
        """Take over what processes before this one have left: `durable` runs that live, oldest first. What has ended meanwhile, and what
        never began, is taken away; runs that somebody sees to, and a worker's, are left alone, as is one that cannot be looked at now.

        Through the worker, which takes them over itself: the caller's own detached runs, to wait for and to end. Raises CannotTearDown.
        """
        if (connection := self._reach()) is not None:
            from sealnet import workerrun

            with connection:
                return list(workerrun.adopt(connection))
        state, config = self._ready("take runs over")
        from sealnet import reap as reaping
        from sealnet.kernel.host import Host
        from sealnet.model.durable import LEASE_TTL_S, is_api_run

        config = replace(config, lease_ttl_s=max(config.lease_ttl_s, LEASE_TTL_S))
        found: list[OwnRun] = []
        for record in self._records():
            if is_api_run(record):
                host = Host(state.path, state.tag)
                run = None
                try:
                    run = self._take_over(host, state, config, record.run_id)
                finally:
                    if run is None:
                        host.close()
                if run is not None:
                    run.at_end, run.is_waited_away = host.close, True
                    found.append(run)
        try:
            with self._host("reap runs") as host:
                reaping.reap_orphans(host, state)
        except (SealnetError, OSError):
            # What was taken over is not lost for it: the next call tries again.
            if not found:
                raise
        return list(found)

    def _take_over(self, host: Host, state: State, config: Config, run_id: str) -> OwnRun | None:
        """None where somebody sees to it, or it does not live: then it is taken away."""
        from sealnet import adopt
        from sealnet import reap as reaping

        claim = state.take_over(run_id)
        if claim is None:
            return None
        try:
            run = adopt.adopt(host, state, config, claim, lambda _record, _durable: None)
        except (SealnetError, OSError):
            # It can be tried again: no descriptor is left, for example.
            claim.close()
            return None
        if run is not None:
            try:
                # Nobody has looked at it for as long as nobody saw to it.
                run.upkeep.renew()
            except (SealnetError, OSError):
                run.leave()
                return None
            return run
        claim.close()
        # One that lives, and could only not be looked at now, is left as it is.
        reaping.teardown(host, state, run_id, unless=lambda: reaping.is_kept(state, run_id))
        return None

    def reap_orphans(self) -> list[str]:
        """Take away every run whose supervisor is gone; their ids. Root only: the worker sees to its own."""
        with self._host("reap runs") as host:
            from sealnet import reap as reaping

            return reaping.reap_orphans(host, self._state, everywhere=True)


def _checked(options: Mapping[str, Any], known: type[RunOptions]) -> dict[str, Any]:
    """The options that were given, whose texts are texts; several as a list. Raises TypeError, as a call does, or UsageError."""
    if unknown := options.keys() - known.__annotations__:
        raise TypeError(f"no option of a run: {', '.join(sorted(unknown))}")
    given = dict(options)
    for name, value in options.items():
        if name in _SEVERAL:
            given[name] = _texts(value, name)
        elif name == "set_env":
            pairs = value.items() if isinstance(value, Mapping) else value
            given[name] = [(_text(variable), _text(text)) for variable, text in pairs]
        elif name in _TEXTS and value is not None:
            given[name] = str(value) if type(value) is int else _text(value)
        elif name in _PLAIN and value is not None and type(value) not in _PLAIN[name]:
            raise TypeError(f"{name} is {' or '.join(kind.__name__ for kind in _PLAIN[name])}, and {value!r} is not")
    return given


def _texts(values: Any, name: str) -> list[str]:
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} is a list, and {values!r} is none")
    return [_text(value) for value in values]


def _text(value: str | bytes | os.PathLike[str]) -> str:
    text = os.fsdecode(value)
    if "\0" in text:
        raise UsageError(f"cannot run: {text!r} has a NUL byte")
    return text


def _streams(
    asked: Sequence[Stdio], lent: contextlib.ExitStack, kept: contextlib.ExitStack
) -> tuple[tuple[int | None, int | None, int | None], list[IO[bytes] | None]]:
    """The payload's three streams (None: the caller's), and our ends of those that are pipes. What is `lent` to it is not needed after."""
    streams: list[int | None] = []
    ours: list[IO[bytes] | None] = [None, None, None]
    for at, stream in enumerate(asked):
        if stream == subprocess.PIPE:
            read, write = os.pipe2(os.O_CLOEXEC)
            theirs, own = (read, write) if at == 0 else (write, read)
            lent.callback(os.close, theirs)
            ours[at] = kept.enter_context(os.fdopen(own, "wb" if at == 0 else "rb", buffering=0 if at == 0 else -1))
            streams.append(theirs)
        elif stream == subprocess.STDOUT and at == 2:
            streams.append(1 if streams[1] is None else streams[1])
        elif stream == subprocess.DEVNULL or (at == 0 and _is_terminal(stream, at)):
            streams.append(null := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
            lent.callback(os.close, null)
        elif _is_terminal(stream, at):
            streams.append(_copied(at if stream is None else _fileno(stream), lent))
        else:
            streams.append(None if stream is None else _fileno(stream))
    return (streams[0], streams[1], streams[2]), ours


def _fileno(stream: int | IO[Any]) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


def _is_terminal(stream: Stdio, inherited: int) -> bool:
    fd = inherited if stream is None else _fileno(stream)
    return fd >= 0 and os.isatty(fd)


def _copied(fd: int, lent: contextlib.ExitStack) -> int:
    """A pipe whose other end is copied to the terminal `fd` until the last writer has gone."""
    target = os.dup(fd)
    read, write = os.pipe2(os.O_CLOEXEC)
    lent.callback(os.close, write)

    def copy() -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(read, 65536):
                os.write(target, chunk)
        os.close(read)
        os.close(target)

    threading.Thread(target=copy, daemon=True, name="sealnet-copy").start()
    return write


def run(argv: Sequence[Word], *, worker: Worker = "auto", **options: Unpack[CompletedOptions]) -> CompletedRun:
    """Run one command sealed, wait for it, take everything away; like `subprocess.run`.

    Options, all by keyword: `lease_port` (int: a broker that listens on this host; sealed), `network`, `run_id`, `user`, `pass_env`
    (globs), `set_env` (pairs), `broker_env` (names), `bind`, `ro_bind` (`SRC` or `SRC:DEST`), `tmpfs`, `chdir`, `cwd`, `timeout_s`,
    `grace_s`, `fallback`, `allow_userns`, `preflight`, `receipt` (a file to write the proof to), `evidence` (a directory for plan, proof
    and log), `on_tamper` (`"restore"`; or `"kill"`: a payload whose seal others change is ended, status 137); and `input`,
    `capture_output`, `text`, `check`, `stdin`, `stdout`, `stderr` as in subprocess. Without a broker the run is severed.
    `worker`: see `Sealer`.

    Raises UsageError, CannotSeal or another SealnetError; then nothing of the payload ran.
    """
    return Sealer(worker=worker).run(argv, **options)


__all__ = ["CanSeal", "CompletedRun", "Sealer", "SealnetError", "run"]
