"""Launches one run: claim, allocate, seal, prove, start bwrap held. On any failure nothing is left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from sealnet import builder, doors, prove, spawn
from sealnet import seal as sealing
from sealnet.doors import Door, Doorkeeper
from sealnet.errors import CannotSeal, NoBroker, NotSealed, PoolExhausted, SealnetError, UsageError
from sealnet.kernel import cgroup, nft, owncode, process, sysctl, versions
from sealnet.kernel.attempts import StandIn
from sealnet.kernel.host import Host
from sealnet.kernel.mounts import beneath
from sealnet.kernel.netns import NAMES, Inside
from sealnet.kernel.output import Sink
from sealnet.kernel.ownthread import OwnThread
from sealnet.kernel.streams import leads_further
from sealnet.model import names
from sealnet.model.check import Check
from sealnet.model.config import Config
from sealnet.model.plan import Plan, Seal, User
from sealnet.model.policy import Confinement
from sealnet.model.record import Record
from sealnet.model.subnets import first_free
from sealnet.model.view import cwd_is_bound
from sealnet.records import State
from sealnet.running import OWN, STREAMS, Run, Streams, Ways

if TYPE_CHECKING:
    from sealnet.model.durable import Durable

_TOOLS = ("sh", "bwrap", "setsid", "setpriv", "env")
# The checks of what the run may reach.
_DOORS = ("broker", "proxy")
_PREFLIGHT_S = 2.0
_ASKED_ANYWAY_S = 0.3


def launch(
    plan: Plan,
    *,
    host: Host,
    state: State,
    config: Config,
    streams: Streams,
    durable: Durable | None = None,
    checkpoint: Callable[[str], None] = lambda _step: None,
    receipt_to: Sink | None = None,
    rights: User | None = None,
    ways: Ways = OWN,
    door: Callable[[User, Plan], Doorkeeper] = lambda user, _plan: Door(user),
) -> Run:
    """Build, prove and start one run; it is held until `Run.release`. On any failure nothing is left.

    `checkpoint` is told each step that was done, and may raise to stop there. `receipt_to` is written when the payload is about to start,
    and when the run is refused. One that is `durable` goes on without us; any other dies with the thread that is in its namespace.
    Sources of binds and the working directory are opened with the `rights` of who asked, where that is not root. `door`
    makes the run's door, where it needs one, of a user.
    """
    wanted = _Launch(
        plan=plan,
        host=host,
        state=state,
        config=config,
        streams=streams,
        durable=durable,
        checkpoint=checkpoint,
        receipt_to=receipt_to,
        rights=rights,
        ways=ways,
        door=door,
        asked=plan.confinement,
    )
    try:
        return wanted.start()
    except CannotSeal as error:
        if plan.fallback != "sever" or not plan.is_leased:
            raise
        return replace(wanted, plan=sever(plan), why_severed=error.message).start()


def sever(plan: Plan) -> Plan:
    """The same run with nothing reachable."""
    return replace(plan, confinement=Confinement.SEVERED, lease_port=None, broker=None, allow=(), broker_env=(), fallback=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """One attempt: what is to run, by what means, and who is told of it. `asked` is what the caller wanted it to be."""

    plan: Plan
    host: Host
    state: State
    config: Config
    streams: Streams
    durable: Durable | None
    checkpoint: Callable[[str], None]
    receipt_to: Sink | None
    rights: User | None
    ways: Ways
    door: Callable[[User, Plan], Doorkeeper]
    asked: Confinement
    why_severed: str | None = None

    def start(self) -> Run:
        plan = self.plan
        hidden = to_hide(plan, self.state)
        _refuse_ways_out(self.streams)
        # Whatever is missing is said before anything is touched.
        paths = {name: process.tool(name) for name in (builder.TOOLS if plan.build else _TOOLS)}
        nft.require()
        door_user = doors.account(self.config.door_user, plan.user) if plan.has_door else None
        claim = self.state.claim(self._record())
        run = Run(self.host, claim, plan, Seal(run_id=plan.run_id), self.config, paths)
        run.receipt_to, run.rights, run.ways, run.hidden = self.receipt_to, self.rights, self.ways, hidden
        try:
            self._build(run, door_user)
        except BaseException as error:
            _undo(run, error)
            raise
        return run

    def _record(self) -> Record:
        plan, supervisor = self.plan, self.ways.supervisor or os.getpid()
        return Record(
            run_id=plan.run_id,
            confinement=str(plan.confinement),
            asked=str(self.asked),
            user=plan.user.name,
            uid=plan.user.uid,
            allow_userns=plan.allow_userns,
            command=plan.command,
            kind="build" if plan.build else "run",
            started=time.time(),
            boot_id=process.boot_id(),
            supervisor=supervisor,
            supervisor_start=process.start_time(supervisor) or 0,
            ifname=names.ifname(plan.run_id),
            netns=names.netns(plan.run_id),
            why_severed=self.why_severed,
            durable=None if self.durable is None else self.durable.to_json(),
            note=dict(self.ways.note),
        )

    def _build(self, run: Run, door_user: User | None) -> None:
        spawn.prepare(run)
        run.versions = versions.see(self.state.path)
        self.checkpoint("claimed")
        if self.plan.is_leased:
            run.seal, run.neighbours = _allocate(run)
            self.checkpoint("allocated")
        _seal(run, self.streams, None if door_user is None else partial(self.door, door_user, self.plan))
        self.checkpoint("built")
        _prove(run)
        self.checkpoint("proved")
        spawn.start(run)
        self.checkpoint("started")


def to_hide(plan: Plan, state: State) -> tuple[str, ...]:
    """Where an empty directory is put over the records of the runs, which a payload may not write, nor what root runs next.

    That holds for records right below what is shared: it cannot be renamed then, nor what is in between. Raises UsageError otherwise.
    """
    shared = [(bind.source, bind.dest) for bind in plan.binds if bind.writable]
    shared += [(plan.cwd, plan.cwd)] if cwd_is_bound(plan.cwd, is_shared=plan.cwd_is_shared) else []
    records = os.path.realpath(state.path)
    hidden = []
    for path, dest in shared:
        if beneath(path, str(NAMES)) or beneath(str(NAMES), path):
            raise UsageError(
                f"cannot make {path} writable in a run: the names of this host's network namespaces are in it",
                hint="work in another directory",
            )
        if os.path.dirname(records) == path:
            hidden.append(os.path.join(dest, os.path.basename(records)))
        elif beneath(path, records) or beneath(records, path):
            raise UsageError(
                f"cannot make {path} writable in a run: the records of the runs are in {state.path}",
                hint="work in another directory, or move them: SEALNET_STATE_DIR",
            )
    owncode.require_not_in([path for path, _dest in shared])
    if hidden and plan.bwrap_args:
        raise UsageError(
            f"cannot use --bwrap-args here: the records of the runs are in {state.path}, which it could show",
            hint="work in another directory, or move them: SEALNET_STATE_DIR",
        )
    return tuple(hidden)


def _refuse_ways_out(streams: Streams) -> None:
    """A socket of the host's network, as inetd passes it, is as good as that network, and a directory as its files."""
    for name, fd in zip(STREAMS, streams.descriptors(), strict=True):
        wrong = None
        with contextlib.suppress(OSError):
            # One that is closed leads nowhere.
            wrong = None if fd is None else leads_further(fd)
        if wrong is not None:
            raise UsageError(f"cannot use the {name}: it is {wrong}", hint="put cat in between: cat | sealnet run ... | cat")


def _undo(run: Run, error: BaseException) -> None:
    """Take away what there is of a run that could not be started, and leave a receipt that says why."""
    try:
        run.close()
    except SealnetError as left:
        error.add_note(str(left))
    if isinstance(error, OSError):
        # No descriptor, memory or process left, most often.
        where = f" ({error.filename})" if error.filename else ""
        told = CannotSeal(f"cannot start run {run.run_id}: {error.strerror or error}{where}")
        run.refuse(told)
        raise told from error
    if isinstance(error, SealnetError):
        run.refuse(error)


def _allocate(run: Run) -> tuple[Seal, list[str]]:
    """Reserve the first /30 that nothing on this host uses; and the gateways of other runs. Looking and reserving happen under one lock."""
    state, plan, config = run.claim.state, run.plan, run.config
    with state.allocating():
        reserved = state.reserved()
        runs = frozenset([first >> 2 for first in reserved])
        try:
            subnet = first_free(config.pool, run.host.see_taken(runs), runs, max_runs=config.max_runs)
        except PoolExhausted:
            # Perhaps by what has gone meanwhile.
            subnet = first_free(config.pool, run.host.see_taken_anew(runs), runs, max_runs=config.max_runs)
        state.reserve(subnet, plan.run_id)
    gateway = str(subnet.network_address + 1)
    ports = [port for port in range(config.door_ports[0], config.door_ports[1] + 1) if port != plan.lease_port]
    relay = doors.listen("relay", gateway, ports) if plan.broker is not None else None
    run.listening += [relay] if relay is not None else []
    proxy = doors.listen("proxy", gateway, ports) if plan.allow else None
    run.listening += [proxy] if proxy is not None else []
    seal = Seal(
        run_id=plan.run_id,
        subnet=subnet,
        lease_port=plan.lease_port if relay is None else relay.port,
        proxy_port=None if proxy is None else proxy.port,
    )
    run.claim.update(
        subnet=str(subnet),
        gateway=gateway,
        sandbox=str(seal.sandbox),
        lease_ports=seal.ports,
        proxy_port=seal.proxy_port,
        hosts=tuple(f"{entry.host}:{entry.port}" for entry in plan.allow),
    )
    return seal, [str(IPv4Address(first + 1)) for first in reserved[-prove.NEIGHBOURS :]]


def _seal(run: Run, streams: Streams, door: Callable[[], Doorkeeper] | None) -> None:
    plan, seal = run.plan, run.seal
    run.claim.update(cgroup=str(run.host.add_cgroup(plan.run_id)))
    if plan.confinement is not Confinement.OPEN:
        # Not before that: cgroups are not made meanwhile.
        run.mover = OwnThread("sealnet-cgroup")
        run.mover.begin(cgroup.anticipate)
    if plan.confinement is Confinement.OPEN:
        run.inside = Inside(lambda: None, seal.netns)
        spawn.lay_out(run, streams, run.inside)
        spawn.hold(run, streams)
        run.settle()
        run.claim.update(state="built", netns_inode=run.inside.inode)
        return
    alias = f"{plan.user.name}: {plan.command}"
    born, begin = partial(spawn.lay_out, run, streams), partial(_begin, run, streams, door)
    applied = sealing.apply(run.host, seal, alias=alias, sysctls=sysctl.expected(), born=born, begin=begin)
    run.inside = applied.inside
    # A view that cannot be made is said before anybody is asked for anything.
    run.settle()
    run.checks += applied.checks
    run.proof_ms += sum(one.took_ms for one in applied.checks)
    run.claim.update(
        state="built",
        ifindex=applied.ifindex,
        mac=applied.seen.host.mac or None,
        netns_inode=applied.inside.inode,
        rulesets=dict(applied.seen.rulesets),
    )
    if seal.subnet is not None:
        # The lease is last: until now the link leads nowhere.
        run.host.grant(seal, ttl_s=run.config.lease_ttl_s)
        _serve(run)
        run.checks.append(prove.lease(run.host, seal))
        if not run.checks[-1].ok:
            raise NotSealed(f"cannot seal run {run.run_id}: its lease does not read back")


def _serve(run: Run) -> None:
    """Hand the run's listeners to its door, and let it try what lies behind them."""
    if run.door is None:
        return
    if run.record.durable is not None:
        # Before it serves: who finds the record is to find the door.
        run.claim.update(durable={**run.record.durable, "door": run.door.doorway(run.listening, run.plan)})
    for listening in run.listening:
        if listening.kind == "proxy":
            run.log = doors.open_log(run.claim.fd)
        run.door.serve(run.run_id, listening, run.plan, str(run.seal.sandbox), run.log)
    failed, options = run.door.preflight(run.run_id, run.plan) if run.plan.preflight else ([], [])
    if failed:
        hint = "is it up, and its name right? --no-preflight starts the run all the same"
        if options:
            hint = f"{' '.join(options)} lets a name lead to a private address, if that is meant"
        raise NoBroker(f"cannot reach {'; '.join(failed)}", hint=hint)


def _begin(run: Run, streams: Streams, door: Callable[[], Doorkeeper] | None, inside: Inside) -> None:
    """What takes its time beside the building of the seal."""
    if door is not None:
        run.door = door()
    spawn.hold(run, streams)
    run.stand_in = prove.stand_in(inside, run.plan.user, allow_userns=run.plan.allow_userns)


def _prove(run: Run) -> None:
    if run.inside is None or run.stand_in is None:
        return
    plan, began = run.plan, time.perf_counter()
    timeout_s = _PREFLIGHT_S if plan.preflight else _ASKED_ANYWAY_S
    with run.stand_in as stand_in:
        try:
            proof = prove.network(run.host, run.seal, run.inside, stand_in, neighbours=run.neighbours, timeout_s=timeout_s)
        except OSError as error:
            why, hint = _changed(run) or (f"the host's ends of it cannot be had: {error.strerror}", None)
            raise CannotSeal(f"cannot prove the seal of run {plan.run_id}: {why}", hint=hint) from error
        run.proof_ms += (time.perf_counter() - began) * 1e3
        run.claim.state.add_probed(run.run_id, proof.tried)
        shut = [one for one in proof.checks if one.kind == "positive" and one.ok is False and one.name in _DOORS]
        if shut and plan.preflight:
            run.checks += proof.checks
            raise _no_broker(run, stand_in, shut[0])
    # A broker that may still come is no fault of the seal; without it the proof is inconclusive.
    run.checks += [replace(one, ok=None) if one in shut else one for one in proof.checks]
    wrong = next((str(one) for one in proof.checks if one not in shut and one.ok is False), proof.failed)
    if wrong is not None:
        raise NotSealed(f"cannot prove the seal of run {run.run_id}: {wrong}")
    run.claim.update(state="proved")


def _changed(run: Run) -> tuple[str, str | None] | None:
    """What somebody has done to the seal since it was built, in words, and what to do about it; None also where that cannot be read."""
    try:
        sealing.verify(run.host, run.seal, run.inside, sysctls=sysctl.expected())
    except NotSealed as error:
        return error.message.partition(": ")[2], error.hint
    except (SealnetError, OSError):
        # The run is refused all the same, with what is known already.
        pass
    return None


def _no_broker(run: Run, stand_in: StandIn, answer: Check) -> NoBroker:
    """Why nothing answered, as far as this host tells."""
    port = (run.seal.lease_port if answer.name == "broker" else run.seal.proxy_port) or 0
    gateway = run.seal.gateway
    what = f"cannot reach the {answer.name} of run {run.run_id} at {gateway}:{port}: {answer.found}"
    found = run.host.listeners(port)
    if not found:
        return NoBroker(f"{what}; nothing listens on port {port} of this host", hint="start the broker first, or pass --no-preflight")
    addresses = sorted({str(listener.address) for listener in found})
    if not any(listener.address.is_unspecified or listener.address == gateway for listener in found):
        return NoBroker(
            f"{what}; the broker listens on {', '.join(addresses)} alone",
            hint="let it listen on 0.0.0.0, where a firewall keeps others out, or on the gateway's address",
        )
    if changed := _changed(run):
        return NoBroker(f"{what}; the seal was changed since it was built: {changed[0]}", hint=changed[1])
    blame = run.host.blame(run.seal, port, lambda: prove.answers(run.seal, port, stand_in, timeout_s=_ASKED_ANYWAY_S))
    is_door = answer.name == "proxy" or run.plan.broker is not None
    return NoBroker(f"{what}; {blame.cause()}", hint=blame.hint(port, run.config.door_ports if is_door else None))
