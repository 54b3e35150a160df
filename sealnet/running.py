"""A run that was started: wait for it, signal it, look at it, take it away."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from sealnet import prove, reap
from sealnet.doors import Doorkeeper, Listening
from sealnet.errors import CannotSeal, NotSealed, SealnetError
from sealnet.guard import GLANCE_S, Ear, Guard, Upkeep
from sealnet.kernel import cgroup, identity, process
from sealnet.kernel.attempts import StandIn
from sealnet.kernel.host import Host
from sealnet.kernel.mounts import Stage
from sealnet.kernel.netns import Inside
from sealnet.kernel.output import Sink
from sealnet.kernel.ownthread import OwnThread, Pending
from sealnet.kernel.starter import GO, Starter, Unheld, limit
from sealnet.model import argv, buildargv
from sealnet.model.check import Check
from sealnet.model.config import Config
from sealnet.model.plan import Plan, Seal, User
from sealnet.model.policy import Confinement
from sealnet.model.receipt import Receipt
from sealnet.model.record import Record
from sealnet.model.tally import Attempts
from sealnet.records import Claim

_BWRAP = "0.8.0"
_BIRTH_S = 1.0
_UNHELD_S = 10.0

Stdio = int | IO[Any] | None
STREAMS = ("standard input", "standard output", "standard error")


@dataclass(frozen=True, slots=True)
class Streams:
    """The payload's standard streams, as subprocess takes them. None of them may be a terminal but one of the run's own."""

    stdin: Stdio = None
    stdout: Stdio = None
    stderr: Stdio = None
    controlling_terminal: bool = False
    console: str | None = None

    def descriptors(self) -> list[int | None]:
        """Of each, what the payload will have; None where that is made for it (DEVNULL, PIPE)."""
        given = (self.stdin, self.stdout, self.stderr)
        fds = [at if one is None else one if isinstance(one, int) else one.fileno() for at, one in enumerate(given)]
        return [None if fd < 0 else fd for fd in fds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What a payload has of a caller that is another process than this one.

    `limits`: RLIMIT_* numbers with (soft, hard). `note`: what its launcher wants to find in the record. `supervisor`: the pid of who is
    going to see to the run, where that is not this process.
    """

    umask: int | None = None
    supervisor: int | None = None
    limits: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)


OWN = Ways()


@dataclass(slots=True)
class Held:
    """Our ends of a bwrap whose payload has not been let go: `info` is its --info-fd, `go` its --block-fd."""

    info: int
    go: int


class Laid(NamedTuple):
    """What bwrap is started with: the payload's file system, its /dev, the programs, and the run's directory, as the thread sees them."""

    stage: Stage
    dev: str
    tools: argv.Tools | None
    records: str


class Spawned(NamedTuple):
    """bwrap: `pidfd` is readable when it has ended."""

    process: subprocess.Popen[bytes]
    pidfd: int


class Run:
    """A run that was started. Used by one thread at a time; `close` (or `with`) takes it away."""

    def __init__(self, host: Host, claim: Claim, plan: Plan, seal: Seal, config: Config, tools: dict[str, str]) -> None:
        self.host, self.claim, self.plan, self.seal, self.config, self.tools = host, claim, plan, seal, config, tools
        self.before_end: Callable[[Run, int | None], None] = lambda _run, _status: None
        self.at_end: Callable[[], None] = lambda: None
        self.close_pipes: Callable[[], None] = lambda: None
        """Of our ends, which may still be read when the run is gone."""
        self.end_is_kept = False
        """Whether it is known how it has ended, should it be durable."""
        self.is_waited_away = False
        """Whether `wait` leaves nothing of it: for callers of the Python API."""
        self._final: int | None = None
        self._tried: Attempts | None = None
        """As it was read at the end."""
        self.receipt_to: Sink | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        """Our ends of the payload's pipes, where its launcher has made any."""
        self.rights: User | None = None
        """Of whoever asked for the run, where that is not root: what it binds is opened with these."""
        self.ways = OWN
        self.hidden: tuple[str, ...] = ()
        """Where the payload sees an empty directory: what stands there is not its own to see."""
        self.versions: dict[str, str] = {}
        self.listening: list[Listening] = []
        self.door: Doorkeeper | None = None
        self.log: int | None = None
        self.counted: dict[str, Any] | None = None
        """What its door has recorded, told when it stopped; None without a proxy, or when the door is dead."""
        self.stand_in: StandIn | None = None
        self.neighbours: list[str] = []
        self.proof_ms = 0.0
        self.inside: Inside | None = None
        self.checks: list[Check] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.init_pid = 0
        self.path: str | None = None
        self.pidfd = -1
        """Readable when bwrap has ended."""
        self.starter: Starter | None = None
        """What has spawned bwrap. One that is not durable lives as long as this does."""
        self.held: Held | None = None
        self.staging: Pending[Stage] | None = None
        self.laying: Pending[Laid] | None = None
        """The payload's file system is being put together."""
        self.spawning: Pending[Spawned] | None = None
        """bwrap is being spawned; until it is waited for (`settle`) there is no `process`."""
        self.mover: OwnThread | None = None
        self.joining: Pending[None] | None = None
        """bwrap is being moved to the run's cgroup."""
        self.ear: Callable[[], Ear] | None = None
        self.glance_s: Callable[[], float] = lambda: GLANCE_S
        self.guard: Guard | None = None
        self._upkeep: Upkeep | None = None
        self._reason: str | None = None
        self._is_told = False
        self._closed = False

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def run_id(self) -> str:
        return self.plan.run_id

    @property
    def record(self) -> Record:
        return self.claim.record

    @property
    def events(self) -> tuple[dict[str, Any], ...]:
        """What was done to its seal meanwhile, as `{time, event, detail}`."""
        return self.record.events

    @property
    def spawned(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError("the run was not started")
        return self.process

    def settle(self) -> None:
        """Wait for bwrap to be spawned. Raises CannotSeal where it cannot be."""
        if self.process is not None or self.spawning is None or self.starter is None:
            return
        if not self.starter.is_following:
            # Whoever asked for it was interrupted, and perhaps before he did. What was asked before this has been done after it.
            self.starter.call(lambda: None)
            if not self.spawning.is_done:
                return
        try:
            self.process, self.pidfd = self.spawning.wait()
        except OSError as error:
            raise CannotSeal(f"cannot start bwrap for run {self.run_id}: {os.strerror(error.errno or 0)}") from error

    # The life of the payload

    def payload_pid(self) -> int | None:
        """The payload's first process, in our pid namespace; None before it is born and after it is gone."""
        if self._closed:
            return None
        return next(iter(process.children(self.init_pid)), None)

    def release(self) -> None:
        """Let the payload start, once it has been seen to be what it must be; the receipt is complete by then.

        Raises NotSealed: nothing of the payload has run, and it is dead. Raises CannotSeal when the receipt cannot be written.
        """
        if self.held is None or self.starter is None:
            return
        try:
            if not self.starter.is_started:
                self.begin()
            pid = self.starter.first_step()
            self._let_go(self.held)
            if pid is not None:
                self._require_joined(pid)
                last = self.starter.further(self._executions - argv.AS_ROOT)
                if last is None and process.lives(pid):
                    raise NotSealed(f"cannot start the payload of run {self.run_id}: it is not held, and has not ended")
                self._require_alone(pid)
                pid = last
            self._meet(pid, "it ended before its first instruction")
        except Unheld as unheld:
            self._release_unheld(str(unheld))
            return
        except BaseException:
            self.starter.kill()
            self.kill()
            raise
        self.starter.let_go()
        # They have the table of mounts.
        self.staging = self.laying = None
        if self.inside is not None:
            # A program has room for a thousand runs, and each of these is asked again only now and then.
            self._let_inside_rest(self.inside)

    def _let_inside_rest(self, inside: Inside) -> None:
        inside.let_go()
        with contextlib.suppress(OSError):
            # In this order: a signal's handler may raise at any time.
            self.inside = inside.resting()
            inside.close()

    @property
    def _executions(self) -> int:
        return buildargv.EXECUTIONS if self.plan.build else argv.executions(self.plan)

    def _join(self, own: set[int]) -> None:
        """Have bwrap, its init and its child, which is held, in the run's cgroup: what they start is born there.

        None of these pids can be another's: bwrap has not been waited for, nor what we hold, and an init does not end before that.
        """
        if self.joining is not None and self.record.cgroup is not None:
            group = Path(self.record.cgroup)
            for one in own - set(cgroup.pids(group)):
                cgroup.join(group, one)

    def _require_joined(self, pid: int | None) -> None:
        """They are all there, and nobody else is there or theirs. Raises NotSealed."""
        if self.joining is not None:
            self._await_joining()
            if self.mover is not None:
                self.mover.end()
            self._join(self._own(pid))
            self._require_alone(pid)

    def _own(self, pid: int | None) -> set[int]:
        return {self.spawned.pid, self.init_pid, *([pid] if pid is not None else [])}

    def _require_alone(self, pid: int | None) -> None:
        if self.record.cgroup is None:
            return
        group, own = Path(self.record.cgroup), self._own(pid)
        children = [process.children(one) for one in own]
        # One that has ended is not waited for at once.
        others = {one for one in {*cgroup.pids(group)}.union(*children) - own if process.lives(one)}
        if others:
            raise NotSealed(f"cannot start the payload of run {self.run_id}: process {min(others)} is beside it in its cgroup")

    def _await_joining(self) -> None:
        if self.joining is not None and not self.joining.is_done:
            self.joining.wait()

    def begin(self) -> None:
        """Let bwrap go on until its child is about to be setpriv(1), which is root's still."""
        if self.held is not None and self.starter is not None:
            self.starter.start(self.held.go, argv.AS_ROOT, self.ways.limits, held=self._join)

    def _release_unheld(self, why: str) -> None:
        """Somebody traces us (strace -f), or the host forbids ptrace: the payload is looked at as soon as it stands."""
        if self.held is not None:
            if self.starter is not None and self.starter.init_lives:
                self._require_joined(None)
                self._go(self.held)
            else:
                # bwrap has died of a mount that it could not make; its status tells.
                self._let_go(self.held)
        began, chain = time.monotonic(), buildargv.CHAIN if self.plan.build else argv.CHAIN
        try:
            while self.spawned.poll() is None:
                pid, waited_s = self.payload_pid(), time.monotonic() - began
                # The name may be the payload's own: `sealnet run -- env`.
                if pid is not None and (process.executable(pid) not in chain or waited_s > _BIRTH_S):
                    break
                if waited_s > _UNHELD_S:
                    raise NotSealed(f"cannot start the payload of run {self.run_id}: {why}, and it was not seen within {_UNHELD_S:g} s")
                time.sleep(0.0005)
            self._meet(self.payload_pid(), f"{why}, and it ended before it was looked at", f" (seen after its start: {why})")
        except BaseException:
            self.kill()
            raise

    def _go(self, held: Held) -> None:
        # Its init is root's still, and hands them on. Earlier, bwrap itself would fail by a caller's limits, or could not say how it ends.
        limit(self.init_pid, self.ways.limits)
        os.write(held.go, GO)
        self._let_go(held)

    def _meet(self, pid: int | None, otherwise: str, remark: str = "") -> None:
        """Look at the payload, complete the receipt, write down that it runs. `otherwise` is why there is nothing to look at."""
        if self.seal_stands and self.inside is not None:
            found, began = None, time.perf_counter()
            with contextlib.suppress(OSError):
                found = identity.read(pid) if pid is not None else None
            if self.plan.build:
                self.checks.append(prove.builder(found, self.inside.inode, otherwise, remark))
            else:
                self.checks += prove.held(found, self.plan.user, self.inside.inode, otherwise, remark)
            self.proof_ms += (time.perf_counter() - began) * 1e3
        if pid is None and self.seal_stands:
            self._reason = f"nothing of the payload ran: {otherwise}"
        receipt = self.receipt
        if any(one.ok is False for one in self.checks):
            wrong = next(one for one in self.checks if one.ok is False)
            error = NotSealed(f"cannot start the payload of run {self.run_id}: {wrong}")
            self.refuse(error)
            raise error
        self._announce(pid, receipt)
        if self.receipt_to is not None:
            self.receipt_to.write(receipt.render())
            self._is_told = True

    def _announce(self, pid: int | None, receipt: Receipt) -> None:
        if self.record.durable is None:
            self._write(state="running", pid=pid, receipt=receipt.to_json())
            return
        # Nobody could take over a run whose record does not say that it runs, so that must be written. Its time begins now.
        ends_at = None if self.plan.timeout_s is None else time.clock_gettime(time.CLOCK_BOOTTIME) + self.plan.timeout_s
        self.claim.update(state="running", pid=pid, receipt=receipt.to_json(), durable={**self.record.durable, "ends_at": ends_at})

    @property
    def receipt(self) -> Receipt:
        """What has been observed of the seal so far; complete when the payload starts."""
        record, sealed = self.record, self.seal.subnet is not None
        return Receipt(
            run_id=record.run_id,
            started=record.started,
            confinement=record.confinement,
            asked=record.asked,
            user=record.user,
            checks=tuple(self.checks),
            gateway=record.gateway,
            sandbox=record.sandbox,
            lease_ports=record.lease_ports,
            hosts=record.hosts,
            subnet=record.subnet,
            ifname=record.ifname if sealed else None,
            ifindex=record.ifindex,
            mac=record.mac,
            netns_inode=record.netns_inode if self.seal_stands else None,
            rulesets=record.rulesets,
            versions=self.versions,
            preflight=self.plan.preflight,
            proof_ms=self.proof_ms,
            why_severed=record.why_severed,
            reason=self._reason,
        )

    def _write_again(self) -> None:
        """The payload is gone: whatever it has made of the receipt's file, the receipt stands there. Raises CannotSeal."""
        if self.receipt_to is not None and self._is_told:
            self.receipt_to.write(self.receipt.render())
            if not self.receipt_to.is_there():
                raise CannotSeal(f"cannot find the receipt of run {self.run_id} at {self.receipt_to.path}: its directory has been moved")

    def refuse(self, error: SealnetError) -> None:
        """Leave a receipt that says why the run was refused, where one was asked for."""
        if self.receipt_to is not None:
            try:
                self.receipt_to.write(replace(self.receipt, reason=error.message).render())
            except CannotSeal as unwritten:
                error.add_note(unwritten.message)

    def _end_held(self, held: Held) -> None:
        """bwrap, its init and whatever that has started: dead, whatever becomes of `kill`."""
        with contextlib.suppress(Exception):
            # Where it could not be spawned, who was to start it was told.
            self.settle()
        if self.process is not None:
            self.process.kill()
            if self.starter is not None:
                # Whoever waits for it to be held sees that it is dead.
                self.starter.signal()
            with contextlib.suppress(SealnetError):
                # Until it has been waited for its pid is nobody else's.
                self._await_joining()
            self.process.wait()
        if self.starter is not None:
            self.starter.kill()
        with contextlib.suppress(SealnetError):
            self.kill()
        self._let_go(held)

    def _let_go(self, held: Held) -> None:
        # Once, whoever is interrupted.
        self.held = None
        for fd in (held.info, held.go):
            os.close(fd)

    def send_signal(self, signum: int, *, wait_s: float = _BIRTH_S) -> bool:
        """Send a signal to the payload's first process, once; False when it is gone.

        Waits a moment for one that is still to be born: a child of bwrap's that dies before it has executed anything has no status.
        """
        if self._closed:
            return False
        deadline = time.monotonic() + wait_s
        while (pid := self.payload_pid()) is None or process.executable(pid) == "bwrap":
            if time.monotonic() >= deadline or self._code() is not None:
                break
            time.sleep(0.001)
        if pid is None:
            return False
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            # The pid may have been reused between the two looks; the descriptor names one process for good.
            if pid not in process.children(self.init_pid):
                return False
            signal.pidfd_send_signal(pidfd, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True

    def freeze(self, *, frozen: bool) -> None:
        """Halt every process of the run, or let them go on."""
        if self.record.cgroup is not None and not self._closed:
            cgroup.freeze(Path(self.record.cgroup), frozen=frozen)

    def kill(self, *, own: bool = False) -> None:
        """End every process of the run at once; its `own` alone, or whoever else is in its namespace as well."""
        # The id of a run that is gone may be another's.
        if self._final is not None:
            return
        self.host.kill(self.run_id, self.inside if self.seal_stands and not own else None)

    @property
    def seal_stands(self) -> bool:
        """Whether the run has a namespace of its own (an open one has not)."""
        return self.plan.confinement is not Confinement.OPEN

    @property
    def upkeep(self) -> Upkeep:
        """What the run needs while it lives, for whoever waits for it in a loop of its own."""
        if self._upkeep is None:
            if self.seal_stands and self.inside is not None:
                # Nothing in it refers to this run: who lets go of a run lets go of its descriptors, without a garbage collection.
                self.guard = Guard(
                    self.host,
                    self.claim,
                    self.seal,
                    self.inside,
                    ttl_s=self.config.lease_ttl_s,
                    on_tamper=self.plan.on_tamper,
                )
            self._upkeep = Upkeep(self.guard, refresh_s=self.config.refresh_s, door=self.door, ear=self.ear, glance_s=self.glance_s)
        return self._upkeep

    @property
    def killed(self) -> str | None:
        """What others had changed about the seal when the payload was ended for it (`on_tamper="kill"`)."""
        return None if self.guard is None else self.guard.killed

    def _write(self, **changes: Any) -> None:
        # A payload that runs is not ended because its record cannot be written (a full /run): what the record was made for stands in it.
        with contextlib.suppress(CannotSeal):
            self.claim.update(**changes)

    def poll(self) -> int | None:
        """The exit status, when there is one: the payload's own, 128+n, or 125 when bwrap failed before it."""
        if self._final is not None:
            return self._final
        code = self._code()
        return None if code is None else self._status(code)

    def _code(self) -> int | None:
        """What wait(2) tells of bwrap, once it has ended; -SIGKILL where that is nobody's to know."""
        return self.spawned.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end, seeing to lease and seal meanwhile. Raises TimeoutError; the run then goes on.

        Of a run of the Python API nothing is left then. Raises what `close` raises; the status is told the next time.
        """
        status = self._await(timeout_s)
        if self.is_waited_away:
            self.conclude(status)
        return status

    def conclude(self, status: int) -> None:
        """It has ended with this status: take it away, but for our ends of its pipes. What it tried is told still."""
        if self._closed:
            return
        try:
            # Somebody may have taken it away meanwhile, and its id be another's.
            if self.claim.stands():
                self.kill()
            self._tried = self._read_tried()
        finally:
            self._final = status
            self._end(None)

    def _await(self, timeout_s: float | None) -> int:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        upkeep = self.upkeep
        while (status := self.poll()) is None:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"run {self.run_id} goes on after {timeout_s:g} s")
            poller = select.poll()
            for fd in (self.pidfd, *upkeep.fds):
                poller.register(fd, select.POLLIN)
            until = min(upkeep.next_at(), float("inf") if deadline is None else deadline)
            poller.poll(None if until == float("inf") else max(0, int((until - now) * 1000) + 1))
            if self._code() is None:
                upkeep.serve()
        return status

    def _status(self, code: int) -> int:
        reported = self.claim.status()
        if reported is not None:
            return reported
        if code < 0:
            return 128 - code
        if self.record.state != "running":
            return 125
        raise no_bwrap(self, f"bwrap failed with status {code}")

    # Looking

    def tried(self) -> list[tuple[str, str, int, int]]:
        """(address, protocol, port, packets) of what the payload tried to reach beside its lease."""
        found = self.counted_attempts()
        return [] if found is None else list(found.rows)

    def counted_attempts(self) -> Attempts | None:
        """The same with how much of it that is; None where nothing is counted, or nothing can be read."""
        return self._read_tried() if self._tried is None else self._tried

    def _read_tried(self) -> Attempts | None:
        if self.inside is None or not self.seal_stands:
            return None
        return self.host.tried(self.inside, self.claim.state.probed(self.run_id))

    def check(self) -> dict[str, Any]:
        """Prove the seal again, now: `{run_id, confinement, verdict, faults, checks}`; a seal that holds has its confinement as verdict."""
        return prove.again(self.host, self.claim.state, self.record)

    # The end

    def end_doors(self) -> None:
        """End every process of the run, then its tunnels and its door; what it has recorded is whole by then. Once is enough."""
        for listening in self.listening:
            listening.socket.close()
        if self.door is not None:
            with contextlib.suppress(SealnetError):
                self.kill()
            if self.log is not None:
                self.counted = self.door.stop(self.run_id)
            self.door.close()
            self.door = None
        if self.log is not None:
            os.close(self.log)
            self.log = None

    def close(self, status: int | None = None) -> None:
        """Take the run away. Raises CannotTearDown when something stayed; the record stays with it. Raises CannotSeal when the receipt
        is not where it was to be, or the evidence cannot be written.

        `status` is how the run has ended, where that is not the payload's own (at its timeout).
        """
        try:
            if not self._closed:
                self._end(status)
        finally:
            self.close_pipes()

    def _end(self, status: int | None) -> None:
        self._closed = True
        try:
            self.before_end(self, status)
        finally:
            self._take_away()

    @property
    def has_ended(self) -> bool:
        """Whether bwrap has: without waiting for it, so by any thread."""
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        return bool(ended.poll(0))

    def wait_end(self) -> int:
        """The exit status of a run whose processes have ended, or are about to; nothing else is seen to meanwhile."""
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        while (code := self._code()) is None:
            ended.poll()
        return self._status(code)

    def leave(self) -> None:
        """Let go of a run that goes on without us: whoever takes it over finds it by its record."""
        self._closed = True
        if self._upkeep is not None:
            self._upkeep.close()
        if self.log is not None:
            os.close(self.log)
            self.log = None
        self._let_go_of_it()

    def _take_away(self) -> None:
        if self.stand_in is not None:
            self.stand_in.close()
        if self._upkeep is not None:
            self._upkeep.close()
        if self.held is not None:
            self._end_held(self.held)
        if self.record.state in ("started", "running"):
            self._write(state="exited")
        self.end_doors()
        try:
            inside = self.inside if self.seal_stands else None
            reap.teardown(
                self.host,
                self.claim.state,
                self.run_id,
                inside=inside,
                unless=lambda: not self.claim.stands(),
                end_is_kept=self.end_is_kept,
            )
        finally:
            try:
                self._write_again()
            finally:
                if self.process is not None:
                    with contextlib.suppress(SealnetError):
                        # Until it has been waited for its pid is nobody else's.
                        self._await_joining()
                    self.process.wait()
                self._let_go_of_it()

    def let_go(self) -> None:
        """What is open of it is closed, wherever that has not been done: it is somebody else's to see to."""
        if not self._closed:
            self.leave()

    def _let_go_of_it(self) -> None:
        if self.starter is not None:
            self.starter.close()
        if self.inside is not None:
            self.inside.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        if self.mover is not None:
            self.mover.end()
        self.claim.close()
        self.at_end()


def no_bwrap(run: Run, what: str) -> CannotSeal:
    old = process.too_old("bwrap", _BWRAP)
    message = f"cannot start the payload of run {run.run_id}: {what}"
    if old:
        return CannotSeal(f"{message}: {old}", hint="install a newer bubblewrap")
    return CannotSeal(message, hint="what bwrap said stands above")
