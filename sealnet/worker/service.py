"""What a caller may ask of the worker, and the answers: one method of this for each of the interface's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sealnet import doctor, looking, probe, prove, reap
from sealnet.doors import LOG
from sealnet.ended import Ended
from sealnet.errors import CannotSeal, CannotTearDown, NoSuchRun, SealnetError, TooMany, UsageError
from sealnet.kernel.planted import open_plain
from sealnet.model import calling, idl, names, policy, tally
from sealnet.model.config import Config
from sealnet.model.egressfold import Tally
from sealnet.model.evidence import RECEIPT
from sealnet.model.idl import Interface
from sealnet.model.record import Record
from sealnet.model.varlink import Call
from sealnet.model.version import VERSION
from sealnet.records import State
from sealnet.worker.asked import SERVICE, Asked
from sealnet.worker.bundles import Bundles
from sealnet.worker.closing import close_all
from sealnet.worker.connection import Connection, Gone
from sealnet.worker.feed import Feed
from sealnet.worker.log import log
from sealnet.worker.prepare import Prepared, prepare
from sealnet.worker.runs import Runs, Started
from sealnet.worker.scarcity import scarcity
from sealnet.worker.shares import Shares

_URL = "https://varlink.org/"
# How long a run whose caller lost the connection (a worker was restarted) waits for him to come back.
COMES_BACK_S = 30.0
_LOOK_S = 0.1
# Less than systemd waits for us (TimeoutStopSec).
_SETTLES_S = 30.0
_LINES = 1 << 18
_TRIED = ("address", "protocol", "port", "packets")
# What is listed of one run at the end, so that it fits into a message.
_MOST_TRIED = 2000

Answer = Callable[[Asked, list[int]], Awaitable[None]]


class Service:
    """Used in the event loop's thread. `runs` has begun."""

    def __init__(self, state: State, config: Config, runs: Runs) -> None:
        self._state, self._runs = state, runs
        self._interfaces = {name: _interface(name) for name in (SERVICE, calling.INTERFACE)}
        self._shares, self._feed = Shares(config), Feed()
        self._bundles = Bundles(state.path / "evidence")
        # Launches by who has asked for which; runs whose caller may come back; whatever waits for something.
        self._stops: dict[tuple[int, str], asyncio.Event] = {}
        self._starting: set[asyncio.Event] = set()
        self._is_settling = False
        self._tied: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._answers = probe.Answers(lambda port: probe.attempt(lambda: (state, config), port))
        self._methods: dict[str, Answer] = {
            f"{known.name}.{name}": getattr(self, f"_{name.lower()}") for known in self._interfaces.values() for name in known.methods
        }

    def reload(self, config: Config) -> None:
        self._shares.reload(config)

    def adopted(self, run_ids: list[str]) -> None:
        """Runs of a worker before us. Those whose caller was to be there to the end wait for him a while."""
        for run_id in run_ids:
            owner, record = self._runs.owner(run_id), self._runs.record(run_id)
            note = record.note
            log("info", "adopted", run=run_id, uid=owner)
            self._shares.adopt(owner)
            self._bundles.keep(record, note.get("evidence"))
            self._start(self._see_end(run_id, owner, self._runs.wait(run_id)))
            if note.get("tied"):
                self._tied[run_id] = self._start(self._end_untied(run_id))
        self._prune()

    async def settle(self) -> None:
        """Start no more, and let those that are being started come to a run or to nothing: what has begun to run is not ended for us."""
        self._is_settling = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLES_S):
                while self._starting:
                    await asyncio.sleep(_LOOK_S / 10)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._shares.close()

    # Answers

    async def answer(self, connection: Connection, call: Call, fds: list[int]) -> None:
        """Answer one call, whatever it is. Raises Gone."""
        asked = Asked(connection, call)
        try:
            await self._answer(asked, fds)
        except SealnetError as error:
            await asked.fail(error)
        except (Gone, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - one caller's call is not to end the worker; it is told, and written down
            if (scarce := scarcity(error)) is not None:
                await asked.fail(scarce)
                return
            log("error", "bug", method=call.method, uid=asked.peer.uid, error=repr(error), trace=traceback.format_exc()[-380:])
            await asked.fail(SealnetError("cannot answer: the worker has met an error of its own; its log has it"))
        finally:
            close_all(asked.peer.uid, fds)

    async def _answer(self, asked: Asked, fds: list[int]) -> None:
        method = self._methods.get(asked.call.method)
        interface, _, member = asked.call.method.rpartition(".")
        if asked.call.upgrade:
            await asked.refuse("MethodNotImplemented", method=asked.call.method)
        elif method is None and interface in self._interfaces:
            await asked.refuse("MethodNotFound", method=asked.call.method)
        elif method is None:
            await asked.refuse("InterfaceNotFound", interface=interface)
        else:
            known = self._interfaces[interface]
            try:
                known.check(known.methods[member][0], asked.parameters, "parameters")
                if fds and member != "Run":
                    raise ValueError("descriptors")
            except ValueError as wrong:
                await asked.refuse("InvalidParameter", parameter=str(wrong))
                return
            await method(asked, fds)

    async def _getinfo(self, asked: Asked, _fds: list[int]) -> None:
        told = {"vendor": "sealnet", "product": "sealnet worker", "version": VERSION, "url": _URL}
        await asked.tell({**told, "interfaces": list(self._interfaces)})

    async def _getinterfacedescription(self, asked: Asked, _fds: list[int]) -> None:
        known = self._interfaces.get(asked.parameters["interface"])
        if known is None:
            await asked.refuse("InterfaceNotFound", interface=asked.parameters["interface"])
        else:
            await asked.tell({"description": known.text})

    # Runs

    async def _run(self, asked: Asked, fds: list[int]) -> None:
        detach = bool(asked.parameters.get("detach"))
        if not asked.call.more and not detach:
            await asked.refuse("ExpectedMore")
            return
        try:
            prepared, started = await self._begin(asked, fds)
        except SealnetError as error:
            self._runs.metrics.refuse(error)
            raise
        close_all(asked.peer.uid, fds)
        # A run may live for long. What is gathered of one has all that was asked, so that goes on to count.
        if not asked.parameters.get("evidence"):
            asked.connection.lighten()
        asked.parameters.clear()
        cwd_is_shared = prepared.plan.cwd_is_shared
        del prepared
        told = {
            "run_id": started.run_id,
            "pid": started.record.pid,
            "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
            "receipt": started.receipt,
            "severed": started.record.why_severed,
            "cwd_is_shared": cwd_is_shared,
        }
        try:
            await asked.tell({"started": told}, continues=not detach)
        except Gone:
            if not detach:
                await self._end_for_gone(started.run_id)
            raise
        if not detach:
            await self._tell_end(asked, started.run_id, tied=True)

    async def _begin(self, asked: Asked, fds: list[int]) -> tuple[Prepared, Started]:
        """Start what is asked for, in its caller's turn. Raises SealnetError."""
        if asked.parameters.get("detach") and asked.parameters.get("evidence"):
            raise UsageError("cannot gather evidence of a run that is detached from: nobody is there to write it", hint="leave one out")
        if self._is_settling:
            raise CannotSeal("cannot start a run: the worker is about to end", hint="try again")
        self._shares.admit(asked.peer)
        with self._stoppable(asked) as stop:
            async with self._shares.launching(asked.peer.uid):
                self._shares.take(asked.peer)
                began = time.monotonic()
                try:
                    prepared = await self._shares.prepare(prepare, asked.peer, asked.parameters, fds)
                    started = await self._launch(asked, prepared, stop)
                except BaseException:
                    self._shares.give_back(asked.peer.uid)
                    raise
                self._runs.metrics.launch(started.record.confinement, time.monotonic() - began)
                self._start(self._see_end(started.run_id, asked.peer.uid, self._runs.wait(started.run_id)))
                return prepared, started

    @contextlib.contextmanager
    def _stoppable(self, asked: Asked) -> Iterator[asyncio.Event]:
        """Set when a launch is to be undone: its caller has gone, or says so."""
        stop, key = asyncio.Event(), (asked.peer.uid, asked.parameters["options"].get("run_id") or "")
        watch = self._start(_set_when(asked.connection.gone, stop))
        self._stops[key] = stop
        self._starting.add(stop)
        try:
            yield stop
        finally:
            watch.cancel()
            self._starting.discard(stop)
            if self._stops.get(key) is stop:
                del self._stops[key]

    async def _cancel(self, asked: Asked, _fds: list[int]) -> None:
        stop = self._stops.get((asked.peer.uid, asked.parameters["run_id"]))
        if stop is not None:
            stop.set()
        await asked.tell({"found": stop is not None})

    async def _launch(self, asked: Asked, prepared: Prepared, stop: asyncio.Event) -> Started:
        peer, plan, wanted = asked.peer, prepared.plan, asked.parameters
        bundle, refusal = self._bundles.new_name(plan.run_id) if wanted.get("evidence") else None, _Refusal()
        note = {"tied": not wanted.get("detach"), "output": wanted.get("output"), "grace_s": plan.grace_s, "evidence": bundle}
        try:
            started = await self._runs.launch(
                plan,
                owner=peer.uid,
                streams=prepared.streams,
                rights=prepared.rights,
                stop=stop,
                ways=replace(prepared.ways, note=note),
                evidence=await self._shares.look(peer.uid, self._bundles.make, bundle, plan) if bundle is not None else None,
                refused_to=refusal,
            )
        except BaseException as error:
            try:
                if isinstance(error, SealnetError) and asked.call.more:
                    files = refusal.parts() if bundle is None else self._bundles.parts(bundle)
                    await self._tell_files(asked, files)
            finally:
                if bundle is not None:
                    self._bundles.drop(bundle)
            raise
        self._bundles.keep(started.record, bundle)
        log("info", "started", run=plan.run_id, uid=peer.uid, pid=peer.pid, confinement=started.record.confinement, command=plan.command)
        self._feed.tell(peer.uid, "started", plan.run_id, started.record.confinement)
        return started

    async def _see_end(self, run_id: str, owner: int, end: Awaitable[Ended]) -> None:
        """Whoever waits for it, or nobody."""
        try:
            ended = await end
        finally:
            self._shares.give_back(owner)
        if (waiting := self._tied.pop(run_id, None)) is not None:
            waiting.cancel()
        level = "info" if ended.fault is None else "error"
        log(level, "ended", run=run_id, uid=owner, status=ended.status, killed=ended.killed, fault=ended.fault)
        self._feed.tell(owner, "ended", run_id, str(ended.status))
        self._bundles.end(run_id, owner)
        self._prune()

    async def _tell_end(self, asked: Asked, run_id: str, *, tied: bool) -> None:
        """Stay with a run to its end. A caller that goes away ends one that is `tied` to him."""
        # Before anything is waited for: the id may be another's afterwards.
        waiting = self._runs.wait(run_id)
        gone = asyncio.ensure_future(asked.connection.gone.wait())
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                if tied:
                    await self._end_for_gone(run_id)
                raise Gone
            ended = waiting.result()
        finally:
            for task in (waiting, gone):
                task.cancel()
        bundle = self._bundles.name_of(run_id, ended.started)
        if asked.call.more and bundle is not None:
            await self._tell_files(asked, self._bundles.parts(bundle))
        await asked.tell({"ended": _document(ended)})

    async def _tell_files(self, asked: Asked, parts: Iterable[tuple[str, str]]) -> None:
        for name, part in parts:
            await asked.tell({"file": {"name": name, "part": part}}, continues=True)

    def _prune(self) -> None:
        def is_known(run_id: str) -> bool:
            try:
                self._runs.owner(run_id)
            except NoSuchRun:
                return False
            return True

        self._bundles.prune(is_known)

    async def _end_for_gone(self, run_id: str) -> None:
        """TERM, the grace time, then KILL: what `sealnet run` would do at a hang-up."""
        log("info", "client-gone", run=run_id)
        with contextlib.suppress(NoSuchRun):
            grace_s = self._runs.record(run_id).note["grace_s"]
            self._runs.signal(run_id, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._runs.wait(run_id), grace_s)
                return
            await self._runs.kill(run_id)

    async def _end_untied(self, run_id: str) -> None:
        await asyncio.sleep(COMES_BACK_S)
        # From now on it is this that ends it, whoever comes.
        self._tied.pop(run_id, None)
        log("warning", "client-lost", run=run_id, after_s=COMES_BACK_S)
        await self._end_for_gone(run_id)

    async def _wait(self, asked: Asked, _fds: list[int]) -> None:
        run_id = self._own(asked)
        tied = bool(asked.parameters.get("tied"))
        if tied and (waiting := self._tied.pop(run_id, None)) is not None:
            waiting.cancel()
            log("info", "client-back", run=run_id)
        await self._tell_end(asked, run_id, tied=tied)

    async def _list(self, asked: Asked, _fds: list[int]) -> None:
        if asked.peer.is_root:
            found = await self._shares.look(asked.peer.uid, looking.views, self._state)
        else:
            own = [record for record in self._runs.records() if self._runs.owner(record.run_id) == asked.peer.uid]
            found = await self._shares.look(asked.peer.uid, lambda: [looking.view(self._state, record) for record in own])
        await asked.tell({"runs": found})

    async def _inspect(self, asked: Asked, _fds: list[int]) -> None:
        record = self._recorded(asked)
        shown = await self._shares.look(asked.peer.uid, looking.inspect, self._state, record.run_id)
        self._require_still(asked, record)
        await asked.tell({"run": shown})

    async def _check(self, asked: Asked, _fds: list[int]) -> None:
        record = self._recorded(asked)
        result = await self._shares.look(asked.peer.uid, prove.again, self._runs.host, self._state, record)
        self._require_still(asked, record)
        await asked.tell({"result": result})

    async def _kill(self, asked: Asked, _fds: list[int]) -> None:
        run_id, signum = self._own_live(asked), asked.parameters["signal"]
        if not 0 <= signum <= signal.SIGRTMAX:
            raise UsageError(f"cannot send signal {signum}: it is 1 to {int(signal.SIGRTMAX)}")
        if signum:
            sent = self._runs.signal(run_id, signum)
        else:
            await self._runs.kill(run_id)
            sent = True
        await asked.tell({"sent": sent})

    async def _freeze(self, asked: Asked, _fds: list[int]) -> None:
        run_id = self._own_live(asked)
        await self._runs.freeze(run_id, frozen=asked.parameters["frozen"])
        await asked.tell({})

    async def _reap(self, asked: Asked, _fds: list[int]) -> None:
        run_id = names.known_run_id(asked.parameters["run_id"])
        try:
            self._recorded(asked)
            live = self._runs.has(run_id)
        except NoSuchRun:
            # For who may not know of it there is none, and reap succeeds when there is nothing to take.
            await asked.tell({"existed": False})
            return
        if live:
            await self._runs.kill(run_id)
            ended = await self._runs.wait(run_id)
            if ended.fault is not None:
                raise CannotTearDown(f"cannot take run {run_id} away: {ended.fault}", hint=f"try again: sealnet reap {run_id}")
            existed = True
        else:
            # A live one that is not ours is root's alone to end, and may have taken this name just now.
            spared = (lambda: False) if asked.peer.is_root else partial(self._state.is_held, run_id)
            taking = partial(reap.teardown, self._runs.host, self._state, run_id, everywhere=True, unless=spared)
            existed = await self._shares.look(asked.peer.uid, taking)
        await asked.tell({"existed": existed})

    async def _log(self, asked: Asked, _fds: list[int]) -> None:
        follow = bool(asked.parameters.get("follow"))
        if not asked.call.more:
            await asked.refuse("ExpectedMore")
            return
        record = self._recorded(asked)
        run_id = record.run_id
        try:
            file = open_plain(self._state.directory(run_id) / LOG)
        except FileNotFoundError:
            raise NoSuchRun(f"cannot read the log of run {run_id}: it has none, for a {record.confinement} run has no proxy") from None
        tally, part = Tally(run_id), b""
        with file:
            self._require_still(asked, record)
            while True:
                # Asked before the look: what has been written by its end is then seen by this look.
                lives = self._state.directory(run_id).joinpath("record.json").exists()
                for line in await self._shares.look(asked.peer.uid, file.readlines, _LINES):
                    part += line
                    if not part.endswith(b"\n"):
                        continue
                    known, part = tally.add(part), b""
                    if known is not None:
                        await asked.tell({"record": known}, continues=True)
                if not follow or not lives:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asked.connection.gone.wait(), _LOOK_S)
                    raise Gone
        if part:
            tally.add(part)
        await asked.tell({"faults": list(tally.egress(ended=False).faults)})

    async def _events(self, asked: Asked, _fds: list[int]) -> None:
        if not asked.call.more:
            await asked.refuse("ExpectedMore")
            return
        heard = self._feed.listen()
        gone = asyncio.ensure_future(asked.connection.gone.wait())
        try:
            await asked.tell({}, continues=True)
            while self._feed.has(heard):
                got = asyncio.ensure_future(heard.get())
                await asyncio.wait((got, gone), return_when=asyncio.FIRST_COMPLETED)
                if not got.done():
                    got.cancel()
                    raise Gone
                owner, event = got.result()
                if asked.peer.may_touch(owner):
                    await asked.tell({"event": event}, continues=True)
            raise TooMany("cannot tell events: more have happened than were read")
        finally:
            gone.cancel()
            self._feed.leave(heard)

    async def _doctor(self, asked: Asked, _fds: list[int]) -> None:
        port, document = asked.parameters.get("lease_port"), None
        if port is not None:
            policy.port(port, "lease_port")
        if asked.peer.is_root:
            report = await self._shares.look(asked.peer.uid, partial(doctor.examine, self._state, lease_port=port))
            can, document = report.can, report.to_json(VERSION)
        else:
            if port is not None:
                # There are many ports, and each may be another attempt.
                self._shares.admit(asked.peer)
            can = await self._shares.look(asked.peer.uid, self._answers.ask, port)
        told = {name: getattr(can, name) for name in ("step", "reason", "hint", "at", "took_ms")}
        await asked.tell({"can_seal": can.ok, **told, "report": document})

    def _own(self, asked: Asked) -> str:
        """The run id of a call, when it is one of the caller's to see. Raises NoSuchRun, the same for another's as for none at all."""
        run_id = names.known_run_id(asked.parameters["run_id"])
        try:
            owner = self._runs.owner(run_id)
        except NoSuchRun:
            if asked.peer.is_root and self._state.directory(run_id).exists():
                return run_id
            raise
        if not asked.peer.may_touch(owner):
            raise _no_such(run_id)
        return run_id

    def _recorded(self, asked: Asked) -> Record:
        """The record of a run that there is, when it is one of the caller's to see: by what stands in that, for it may be of another run of
        the same name than the one that we know. Raises NoSuchRun.
        """
        run_id = names.known_run_id(asked.parameters["run_id"])
        if asked.peer.is_root:
            return self._state.read(run_id)
        try:
            record = self._state.read(run_id)
        except NoSuchRun:
            raise _no_such(run_id) from None
        if record.durable is None or not asked.peer.may_touch(record.durable["owner"]):
            raise _no_such(run_id)
        return record

    def _require_still(self, asked: Asked, record: Record) -> None:
        """What was just seen of a run is that one's only where it is there still: much is found by its name. Raises NoSuchRun."""
        if self._recorded(asked).started != record.started:
            raise _no_such(record.run_id)

    def _own_live(self, asked: Asked) -> str:
        """The same, of a run that is ours to signal. Raises UsageError for one of a plain `sealnet run`."""
        run_id = self._own(asked)
        if not self._runs.has(run_id) and asked.peer.is_root and self._state.is_held(run_id):
            raise UsageError(
                f"cannot do that to run {run_id}: it is not the worker's",
                hint=f"its own sealnet run is process {self._state.read(run_id).supervisor}",
            )
        return run_id

    def _start(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Refusal:
    """Takes the receipt of a run that is refused."""

    path = "the caller's receipt"

    def __init__(self) -> None:
        self._receipt = b""

    def write(self, data: bytes) -> None:
        self._receipt = data

    def is_there(self) -> bool:
        return True

    def parts(self) -> Iterator[tuple[str, str]]:
        if self._receipt:
            yield RECEIPT, self._receipt.decode()


def _document(ended: Ended) -> dict[str, Any]:
    return {
        **{name: getattr(ended, name) for name in ("status", "receipt", "killed", "fault")},
        "tried": [dict(zip(_TRIED, row, strict=True)) for row in ended.tried[:_MOST_TRIED]],
        "tally": tally.told(ended.counted, ended.events, is_cut_short=len(ended.tried) > _MOST_TRIED),
        "events": list(ended.events),
    }


def _no_such(run_id: str) -> NoSuchRun:
    return NoSuchRun(f"cannot find run {run_id}: there is no record of it", hint="see the runs there are: sealnet ls")


async def _set_when(event: asyncio.Event, other: asyncio.Event) -> None:
    await event.wait()
    other.set()


def _interface(name: str) -> Interface:
    return idl.parse(Path(__file__).with_name(f"{name}.varlink").read_text(encoding="utf-8"))
