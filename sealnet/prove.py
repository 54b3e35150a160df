"""Proves a seal: by what answers and what is refused from inside, by what the payload is when it starts, and again while it lives."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from sealnet.errors import NoSuchRun, SealnetError
from sealnet.kernel import cgroup, ends, identity, process, seccomp, sysctl, within
from sealnet.kernel.attempts import Answer, Attempt, StandIn
from sealnet.kernel.ends import End
from sealnet.kernel.host import Host
from sealnet.kernel.identity import Identity
from sealnet.kernel.netns import Inside
from sealnet.model import buildargv, check, names
from sealnet.model.check import Check
from sealnet.model.durable import is_api_run
from sealnet.model.plan import Seal, User
from sealnet.model.receipt import verdict
from sealnet.model.record import Record, seal_of
from sealnet.records import ALIVE, State

_INET, _INET6, _STREAM, _DGRAM = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
_SECCOMP_FILTER = 2
NEIGHBOURS = 3
_AGAIN_S = 0.7
_HELD = "the payload in /proc, held at its execve(2)"
# Sockets that lead around an IP filter: nobody may open one in a run. A packet socket is not tried: its control would cost 10 ms of RCU.
_SOCKETS = {
    "raw-socket": (_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "vsock-socket": (socket.AF_VSOCK, _STREAM, 0),
}


class _Question(NamedTuple):
    """`end` is the host's socket that must not be reached, `control` what was seen of it just before."""

    name: str
    attempt: Attempt
    end: End | None = None
    control: str | None = None


class Proof(NamedTuple):
    """The checks, what they leave in the inside filter's tally ((address, protocol, port), once each), and why nothing could be tried."""

    checks: list[Check]
    tried: list[tuple[str, str, int]]
    failed: str | None = None


def stand_in(inside: Inside, user: User, *, allow_userns: bool) -> StandIn:
    """Who tries, in the run's namespace, what the payload must not reach."""
    return StandIn(inside.fd, user, seccomp.filter_for(user, allow_userns=allow_userns))


def network(host: Host, seal: Seal, inside: Inside, stand_in: StandIn, *, neighbours: Iterable[str] = (), timeout_s: float) -> Proof:
    """From inside the namespace and as the payload: its one door answers, and nothing else does that answers the host.

    `neighbours` are gateways of other runs, of which one that is alive is tried. Raises OSError when the host's ends of it cannot be had:
    what is there must not go untried.
    """
    with ExitStack() as stack:
        named = (("broker", seal.lease_port), ("proxy", seal.proxy_port))
        doors = [_Question(name, Attempt("tcp", (str(seal.gateway), port), timeout_s)) for name, port in named if port is not None]
        if not doors:
            # Without a door, that a connection can be made at all is shown on the namespace's own lo.
            own = stack.enter_context(inside.call(End, _INET, _STREAM, "127.0.0.1", "127.0.0.1"))
            doors = [_Question("loopback", Attempt("tcp", ("127.0.0.1", own.port)))]
        others = _listening(host, seal, neighbours, stack)
        far = (str(within.CANARY), 443)
        others += [_Question("internet", Attempt("tcp", far)), _Question("internet-udp", Attempt("udp", far))]
        for name, kind in _SOCKETS.items():
            # What this kernel has not got is no door of it.
            if (control := ends.opens(*kind)) is not None:
                others.append(_Question(name, Attempt("socket", kind), control=control))
        answers = stand_in.make([question.attempt for question in (*doors, *others)])
        if isinstance(answers, str):
            unasked = [_unasked(question, "positive", answers) for question in doors]
            return Proof(unasked + [_unasked(question, "negative", answers) for question in others], [], answers)
        checks = [_positive(question, answer) for question, answer in zip(doors, answers, strict=False)]
        answered = next((f"{one.asked} answered the same process" for one in checks if one.ok), None)
        source, refusals = str(seal.sandbox), answers[len(doors) :]
        checks += [_negative(question, answer, answered, source) for question, answer in zip(others, refusals, strict=True)]
    protocols = {"tcp": "tcp", "udp": "udp"}
    tried = [
        (question.attempt.arguments[0], protocols[question.attempt.way], question.attempt.arguments[1])
        for question in others
        if question.attempt.way in protocols
    ]
    return Proof(checks, tried)


def answers(seal: Seal, port: int, stand_in: StandIn, *, timeout_s: float) -> bool:
    """Whether a leased port answers, asked once more."""
    told = stand_in.make([Attempt("tcp", (str(seal.gateway), port), timeout_s)])
    return not isinstance(told, str) and told[0].code == 0


def _listening(host: Host, seal: Seal, neighbours: Iterable[str], stack: ExitStack) -> list[_Question]:
    """Sockets of this host that the host itself has just reached."""
    found = []

    def add(name: str, way: str, end: End, address: str | None = None) -> None:
        stack.enter_context(end)
        found.append(_Question(name, Attempt(way, (address or end.address, end.port)), end, end.control))

    if seal.gateway is not None:
        gateway = str(seal.gateway)
        add("gateway-tcp", "tcp", End(_INET, _STREAM, gateway, gateway))
        add("gateway-udp", "udp", End(_INET, _DGRAM, gateway, gateway))
        # The address that the host end would have made itself, were IPv6 on. A host that does not speak IPv6 to itself has no such door.
        with _absent():
            end = End(_INET6, _STREAM, "::", "::1")
            if end.control is not None:
                address = f"{names.link_local(names.mac(seal.run_id, end=0))}%{names.SANDBOX_LINK}"
                add("ipv6-link-local", "tcp6", end, address)
            else:
                end.close()
    # One that is only being built, or has gone, has no address; and where the host's own firewall does not let the host itself, nobody can.
    others = (("host-address", filter(None, (ends.own_address() or host.an_address(),))), ("another-run", list(neighbours)[:NEIGHBOURS]))
    for name, addresses in others:
        for address in addresses:
            with _absent():
                end = End(_INET, _STREAM, address, address)
                if end.control is not None:
                    add(name, "tcp", end)
                    break
                end.close()
    return found


@contextlib.contextmanager
def _absent() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in ends.ABSENT:
            raise


def _unasked(question: _Question, kind: str, why: str) -> Check:
    expected = "answered" if kind == "positive" else "refused"
    return Check(name=question.name, kind=kind, asked=str(question.attempt), expected=expected, found=why, ok=None, took_ms=0.0)


def _positive(question: _Question, answer: Answer) -> Check:
    return Check(
        name=question.name,
        kind="positive",
        asked=str(question.attempt),
        expected="answered",
        found=str(answer),
        ok=answer.code == 0,
        took_ms=answer.took_ms,
    )


def _negative(question: _Question, answer: Answer, answered: str | None, source: str) -> Check:
    """Where there is no other end to look at, it counts beside the door that did answer the same process; and so does one that listens
    where the host's own firewall keeps the host from itself."""
    arrived = question.end is not None and question.end.arrived(source)
    control = question.control
    if control is None and answered is not None:
        control = answered if question.end is None else f"it listens, and {answered}"
    return Check(
        name=question.name,
        kind="negative",
        asked=str(question.attempt),
        expected="refused",
        found=f"{answer}{', and it arrived' if arrived else ''}",
        # Without its control nothing is known of it.
        ok=False if arrived or not answer.refused else None if control is None else True,
        took_ms=answer.took_ms,
        control=control,
    )


def held(found: Identity | None, user: User, netns_inode: int, otherwise: str, remark: str) -> list[Check]:
    """What a payload is, held before its first instruction; `otherwise` is why there is nothing to look at, `remark` goes with each."""
    if found is None:
        return [Check(name="payload", kind="state", asked=_HELD, expected="what it must be", found=otherwise, ok=None, took_ms=0.0)]

    def state(name: str, expected: str, told: str) -> Check:
        return Check(name=name, kind="state", asked=_HELD, expected=expected, found=told + remark, ok=told == expected, took_ms=0.0)

    sets = [name for name, value in found.capabilities.items() if value]
    ids = "uid {} gid {} groups {}"
    groups = " ".join(map(str, sorted(set(user.groups)))) or "none"
    return [
        state("capabilities", "none in any set", f"some in {', '.join(sets)}" if sets else "none in any set"),
        state("no-new-privs", "set", "set" if found.no_new_privs else "not set"),
        state("seccomp", "filter", "filter" if found.seccomp == _SECCOMP_FILTER else f"mode {found.seccomp}"),
        state(
            "user",
            ids.format(user.uid, user.gid, groups),
            ids.format(_one(found.uids), _one(found.gids), " ".join(map(str, found.groups)) or "none"),
        ),
        state("namespace", f"net:[{netns_inode}]", f"net:[{found.netns_inode}]"),
    ]


def builder(found: Identity | None, netns_inode: int, otherwise: str, remark: str) -> Check:
    """What a build's builder is, held before it is buildah. Its RUN steps are its children: what its bounding set lacks they never have
    over the run's network.

    Nothing is said of a RUN step itself: none has been seen by then.
    """
    expected = f"uid 0, bounding set within {buildargv.BOUNDING:#x}, no-new-privs, a filter, net:[{netns_inode}]"
    told, ok = otherwise, None
    if found is not None:
        privileges = "no-new-privs" if found.no_new_privs else "new privileges"
        bound = found.capabilities["CapBnd"]
        told = f"uid {_one(found.uids)}, bounding set {'' if bound & ~buildargv.BOUNDING else 'within '}"
        told += f"{bound if bound & ~buildargv.BOUNDING else buildargv.BOUNDING:#x}, {privileges}, "
        told += f"{'a' if found.seccomp == _SECCOMP_FILTER else 'no'} filter, net:[{found.netns_inode}]"
        ok = told == expected
    asked = "the builder in /proc, held at its execve(2)"
    return Check(name="builder", kind="state", asked=asked, expected=expected, found=told + remark, ok=ok, took_ms=0.0)


def _one(ids: Sequence[int]) -> str:
    return "/".join(map(str, dict.fromkeys(ids)))


def lease(host: Host, seal: Seal) -> Check:
    """That the gate knows the run's lease."""
    began = time.perf_counter()
    found = host.has_lease(seal)
    return Check(
        name="lease",
        kind="state",
        asked=f"nft get element inet sealnet leases, {seal.ifname} {seal.sandbox} to {seal.gateway}:{', '.join(map(str, seal.ports))}",
        expected="granted",
        found="granted" if found else "gone",
        ok=found,
        took_ms=(time.perf_counter() - began) * 1e3,
    )


def _has_ended(state: State, run_id: str) -> bool:
    """Whether somebody is taking it away, or has: what was seen missing then was not missed by the payload."""
    return not state.directory(run_id).exists() or (state.is_held(run_id) and not state.is_held(run_id, ALIVE))


def _unattended(record: Record) -> str:
    """Who is to see to a run that nobody sees to; what else can be done with it follows."""
    alone = "and nobody renews its lease" if record.lease_ports else "and nobody would put its seal right"
    if record.durable is None:
        return f"its supervisor is gone, {alone}: "
    if is_api_run(record):
        return f"the program that started it is gone, {alone}: sealnet.Sealer().adopt() of its next process takes it over, or "
    return f"no worker sees to it, {alone}: start the worker, or "


def again(host: Host, state: State, record: Record) -> dict[str, Any]:
    """Prove a live run: `{run_id, confinement, verdict, faults, inconclusive, checks}`. The verdict is the confinement's own word, or
    broken or inconclusive; of an open run it is `open`, for which nothing is proved.

    Everything is read back and tried as before its payload started. Beside that, another implementation of netlink reads links,
    addresses, rules and routes at both ends, and each process of the payload is looked at.
    """
    faults: list[str] = []
    checks: list[Check] = []
    if not state.is_held(record.run_id):
        faults.append(f"{_unattended(record)}sealnet reap {record.run_id}")
    if record.confinement != "open":
        inside = host.join(record.run_id, record.netns_inode)
        if inside is None:
            faults.append(f"netns {record.netns} is gone")
        else:
            try:
                found_faults, checks = _look(host, state, record, inside)
                faults += found_faults
            except SealnetError as error:
                faults.append(str(error))
            finally:
                inside.close()
    found = verdict(record.confinement, checks)
    if (faults or found != record.confinement) and _has_ended(state, record.run_id):
        raise NoSuchRun(f"cannot check run {record.run_id}: it has just ended", hint="see the runs there are: sealnet ls")
    return {
        "run_id": record.run_id,
        "confinement": record.confinement,
        "verdict": "broken" if faults else found,
        "faults": faults,
        "inconclusive": [str(one) for one in checks if one.ok is None],
        "checks": [one.to_json() for one in checks],
    }


def _look(host: Host, state: State, record: Record, inside: Inside) -> tuple[list[str], list[Check]]:
    from sealnet.kernel import crosscheck

    seal = seal_of(record)
    began = time.perf_counter()
    faults = _read_back(host, record, seal, inside)
    checks = [check.read_back(seal, faults, took_ms=(time.perf_counter() - began) * 1e3)]
    if seal.subnet is not None:
        checks += host.check_routes(seal)
        checks.append(lease(host, seal))
        if len(checks) == 2:
            faults.append(f"no route of link {seal.ifname} could be looked up")
    checks += crosscheck.host_side(seal) + inside.call(crosscheck.inside, seal)
    checks += _processes(record, inside.inode)
    try:
        user = process.user(record.user if record.uid is None else str(record.uid))
        with stand_in(inside, user, allow_userns=record.allow_userns) as double:
            proof = network(host, seal, inside, double, neighbours=state.neighbours(record.run_id), timeout_s=_AGAIN_S)
        state.add_probed(record.run_id, proof.tried)
        checks += proof.checks
    except OSError as error:
        faults.append(f"nothing could be tried from inside: {error}")
    return faults + [str(one) for one in checks[1:] if one.ok is False], checks


def _read_back(host: Host, record: Record, seal: Seal, inside: Inside) -> list[str]:
    seen = host.see(seal, inside)
    macs = (names.mac(record.run_id, end=0), names.mac(record.run_id, end=1))
    mark = names.mark(record.run_id, host.tag)
    faults = check.differences(seal, seen, mark=mark, sysctls=sysctl.expected(), macs=macs, group=names.LINK_GROUP)
    if record.netns_inode != seen.netns_inode:
        faults.append(f"netns {record.netns} is inode {seen.netns_inode}, not {record.netns_inode}")
    for name, sha256 in record.rulesets.items():
        if seen.rulesets.get(name) not in (sha256, ""):
            faults.append(f"the {'gate' if name == 'gate' else 'filter inside the run'} has other rules than when the run started")
    return faults


def _processes(record: Record, netns_inode: int) -> list[Check]:
    """Each process of the payload, but for what has a user namespace of its own: what it may do is bounded by that."""
    if record.cgroup is None or record.init_pid is None or record.state != "running":
        return []
    began, wrong, looked, build = time.perf_counter(), [], 0, record.kind == "build"
    own = _user_namespace(record.init_pid)
    for pid in set(cgroup.pids(Path(record.cgroup))) - {record.init_pid, process.parent(record.init_pid)}:
        try:
            found = identity.read(pid)
        except (OSError, KeyError):
            continue
        if _user_namespace(pid) != own:
            continue
        looked += 1
        # A build's are root's, and its runtime's filters come on top.
        has = [name for name, value in found.capabilities.items() if value & (~buildargv.BOUNDING if build else -1)]
        faults = [f"capabilities in {', '.join(has)}"] if has else []
        faults += [] if found.no_new_privs and found.seccomp == _SECCOMP_FILTER else ["no system call filter"]
        faults += [] if found.netns_inode == netns_inode else [f"network namespace {found.netns_inode}"]
        if faults and pid not in cgroup.pids(Path(record.cgroup)):
            # It has ended, and its pid is already another's.
            continue
        wrong += [f"process {pid} has {fault}" for fault in faults]
    return [
        Check(
            name="processes",
            kind="state",
            asked="/proc/PID/status and ns/net of every process of the payload",
            expected=f"no capability{f' but {buildargv.BOUNDING:#x}' if build else ''}, a filter, the run's namespace",
            found="; ".join(wrong) or f"so are {looked}",
            ok=not wrong,
            took_ms=(time.perf_counter() - began) * 1e3,
        )
    ]


def _user_namespace(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/user").stat().st_ino
    return None
