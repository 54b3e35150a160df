"""The escape kit: the same attempts from outside, as the control, and from inside, with everything listening; then the verdicts."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

from sealnet import launch as launching
from sealnet import request
from sealnet.attack import deeds, network
from sealnet.attack.ends import Ends, free_port, goes_to, refuse_taken
from sealnet.attack.lab import Lab
from sealnet.attack.ways import By, Peer, Place, Way
from sealnet.errors import CannotSeal, NoBroker
from sealnet.kernel import process
from sealnet.kernel.host import Host
from sealnet.kernel.nft import Nft
from sealnet.model import attack, names, ruleset
from sealnet.model.attack import Answer, Row, Seen
from sealnet.model.config import Config
from sealnet.model.plan import Plan, User
from sealnet.records import State
from sealnet.running import Run, Streams

_PAYLOAD_S, _READY_S = 60.0, 10.0
# What was on its way when the payload had its last answer has arrived by then: nothing here crosses more than two veths.
_SETTLE_S = 0.1
_BROKER = "broker"
_WIRE = "its link, where its broker was heard"
# The second run: prints whatever it is sent.
_RECEIVER = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("", 40001))
print("ready", flush=True)
while True:
    print(sock.recv(64).decode(errors="replace"), flush=True)
"""
_RECEIVES = 40001
# Apart: what a deed changes where it succeeds goes with these.
_APART = ("--net", "--mount", "--ipc", "--uts", "--propagation", "private", "--")
_PLAIN_BWRAP = (
    *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--share-net", "--die-with-parent"),
    # Somewhere to write.
    *("--perms", "1777", "--tmpfs", "/dev/shm", "--setenv", "TMPDIR", "/dev/shm"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """The rows, what the payload got from its own broker, and how many ms its seal took, from the claim to the held payload."""

    rows: list[Row]
    broker: Answer | None
    broker_url: str
    seal_ms: float


@dataclass(slots=True)
class Kit:
    """One attack. `user` is the payload's; None, which only an unsealed one may have, is root as bwrap leaves it.

    `only` names the rows that are wanted. Of the layers in `without` (gate, filter) the seal is robbed just before its payload starts.
    `lease_port` is the brokers' of both runs, where a firewall lets in some ports only; else each has a free one.
    """

    state: State
    config: Config
    user: User | None
    sealed: bool = True
    lab: Lab | None = None
    only: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    lease_port: int | None = None

    def __post_init__(self) -> None:
        if self.without and self.lab is None:
            raise ValueError("only a throw-away host may lose a layer")

    def attack(self) -> Report:
        """Raises a SealnetError where a run cannot be sealed; whatever happens, nothing is left."""
        if self.lease_port is not None:
            refuse_taken(self.lease_port)
        host = Host(self.state.path, self.state.tag)
        with contextlib.ExitStack() as stack, _ended_by_signals():
            stack.callback(host.close)
            # What a launch must not hand on.
            spare = os.dup(stack.enter_context(open("/dev/null", "rb")).fileno())
            stack.callback(os.close, spare)
            os.set_inheritable(spare, True)
            ends = Ends(stack)
            peer, peer_run = self._peer(host, ends)
            if self.sealed:
                return self._sealed(host, ends, peer, spare)
            return self._unsealed(ends, peer, peer_run, spare)

    def _peer(self, host: Host, ends: Ends) -> tuple[Peer, Run]:
        """The second run. Its broker is a listener that nobody but its own payload may reach."""
        port, found = self.lease_port or free_port(), []
        plan = request.plan([process.tool("python3"), "-I", "-c", _RECEIVER], lease_port=port, user="nobody", cwd="/", environ={})

        def checkpoint(step: str) -> None:
            if step == "built":
                found.append(ends.listen(self.state.read(plan.run_id).gateway or "", port)[1])

        streams = Streams(subprocess.DEVNULL, subprocess.PIPE)
        run = self._launch(plan, host, streams, checkpoint)
        ends.stack.enter_context(run)
        run.release()
        told = run.spawned.stdout.fileno() if run.spawned.stdout is not None else -1
        ready, _, _ = select.select([told], [], [], _READY_S)
        if not ready or b"ready" not in os.read(told, 64):
            raise CannotSeal("cannot start the second run of the attack: its payload did not come up")
        found[0].heard()
        seal = run.seal
        return Peer(
            gateway=str(seal.gateway),
            sandbox=str(seal.sandbox),
            port=port,
            broker=found[0],
            receives=_RECEIVES,
            told=told,
            netns_inode=run.record.netns_inode or 0,
        ), run

    def _sealed(self, host: Host, ends: Ends, peer: Peer, spare: int) -> Report:
        port, user, places = self.lease_port or free_port(), self.user or process.user("nobody"), []
        plan = request.plan([process.tool("python3"), "-I", "-c", _program()], lease_port=port, user=str(user.uid), cwd="/", environ={})

        def checkpoint(step: str) -> None:
            # The gateway's address exists from here on, and the payload does not yet.
            if step != "built":
                return
            record = self.state.read(plan.run_id)
            if self.lab is not None:
                self.lab.loosen(record.ifname)
            gateway = record.gateway or ""
            ends.broker(gateway, port)
            places.append(
                Place(
                    sealed=True,
                    gateway=gateway,
                    port=port,
                    subnet=IPv4Network(f"{gateway}/30", strict=False),
                    device=names.SANDBOX_LINK,
                    run_id=plan.run_id,
                    wire=ends.wire(record.ifname),
                    user=user,
                    lab=self.lab,
                    peer=peer,
                )
            )

        began = time.perf_counter()
        streams = Streams(subprocess.PIPE, subprocess.PIPE)
        run = self._launch(plan, host, streams, checkpoint)
        took_ms = (time.perf_counter() - began) * 1e3
        ends.stack.enter_context(run)

        def inside(attempts: bytes) -> bytes:
            self._rob(run)
            run.release()
            try:
                return run.spawned.communicate(attempts, timeout=_PAYLOAD_S)[0]
            except subprocess.TimeoutExpired as late:
                # What it told so far counts; of the rest nobody knows.
                return late.output or b""

        return self._judge(places[0], self._wanted(ends, places[0]), spare, [inside], took_ms)

    def _launch(self, plan: Plan, host: Host, streams: Streams, checkpoint: Callable[[str], None]) -> Run:
        try:
            return launching.launch(plan, host=host, state=self.state, config=self.config, streams=streams, checkpoint=checkpoint)
        except NoBroker as error:
            if self.lease_port is not None:
                raise
            # The next attempt has another port.
            raise NoBroker(
                error.message, hint="name a port that this host's firewall lets in from links seal*: --lease-port PORT"
            ) from error

    def _rob(self, run: Run) -> None:
        table = f"{ruleset.FAMILY} {ruleset.TABLE}"
        if "gate" in self.without:
            run.host.gate.nft.apply(f"delete table {table}", "delete the gate of the throw-away host")
        if "filter" in self.without and run.inside is not None:
            run.inside.call(lambda: Nft().apply(f"delete table {table}", f"delete the filter of run {run.run_id}"))

    def _unsealed(self, ends: Ends, peer: Peer, peer_run: Run, spare: int) -> Report:
        """In plain bwrap, at the gateway of the second run. What would change the host's network is done in one apart."""
        port, link = free_port(), peer_run.seal.ifname
        ends.broker(peer.gateway, port)
        place = Place(
            sealed=False,
            gateway=peer.gateway,
            port=port,
            subnet=IPv4Network(f"{peer.gateway}/30", strict=False),
            device=link,
            run_id=peer_run.run_id,
            wire=ends.wire(""),
            user=self.user or process.user("0"),
            lab=self.lab,
            peer=peer,
        )
        command = [process.tool("bwrap"), *_PLAIN_BWRAP, "--"]
        if self.user is not None:
            ids = ("--reuid", str(self.user.uid), "--regid", str(self.user.gid), "--clear-groups")
            command += [process.tool("setpriv"), *ids]
        command += [process.tool("python3"), "-I", "-c", _program()]
        apart = [process.tool("unshare"), "--net", "--"]
        return self._judge(
            place,
            self._wanted(ends, place),
            spare,
            [lambda attempts: _communicate(command, attempts, spare), lambda attempts: _communicate([*apart, *command], attempts, spare)],
            0.0,
        )

    def _wanted(self, ends: Ends, place: Place) -> list[Way]:
        found = (*network.ways(ends, place), *deeds.ways(ends, place))
        return [way for way in found if self.only is None or way.name in self.only]

    def _judge(self, place: Place, tried: list[Way], spare: int, inside: Sequence[Callable[[bytes], bytes]], took_ms: float) -> Report:
        """Controls, attempts, verdicts. A second `inside` is for what is done apart."""
        control, control_heard = _controls(tried, spare)
        # The wire has heard the proof of the seal; what counts is what it hears from now on.
        broker_heard = place.wire.ear(goes_to(place.gateway, place.port))
        for ear in (broker_heard, *(way.ear for way in tried if way.ear is not None)):
            ear.heard()
        batches: list[list[Way]] = [[way for way in tried if way.absent is None]]
        if len(inside) == 2:
            batches = [[way for way in batches[0] if not way.apart], [way for way in batches[0] if way.apart]]
        answers: dict[str, Answer] = {}
        first = [(_BROKER, "http", place.gateway, place.port)]
        for batch, run in zip(batches, inside, strict=True):
            answers |= _answers(run(json.dumps([*first, *((way.name, *way.attempt) for way in batch)]).encode()))
            first = []
        time.sleep(_SETTLE_S)
        broker = answers.get(_BROKER)
        # Unsealed, what does not leave may only have no route: nobody refused it.
        wire = _WIRE if place.sealed and broker_heard.heard() else None
        rows = [
            attack.judged(
                Seen(
                    absent=way.absent,
                    control=control.get(way.name),
                    control_heard=control_heard.get(way.name),
                    witnessed=wire if way.wire else way.witnessed,
                    answer=answers.get(way.name),
                    heard=way.ear.heard() if way.ear is not None else None,
                    lacking=way.lacking,
                ),
                name=way.name,
                group=way.group,
                tried=way.tried,
                must_reach=way.plain is By.USER or (way.plain is By.ROOT and place.user.uid == 0),
            )
            for way in tried
        ]
        return Report(rows, broker, f"http://{place.gateway}:{place.port}/", took_ms)


def _controls(tried: Iterable[Way], spare: int) -> tuple[dict[str, Answer], dict[str, bool]]:
    """The same attempts by root on the host, and what the other ends heard of them."""
    wanted = [way for way in tried if way.absent is None and way.witnessed is None and not way.wire]
    command = [process.tool("python3"), "-I", "-c", _program()]
    found: dict[str, Answer] = {}
    for prefix, batch in (
        ([], [way for way in wanted if not way.apart]),
        ([process.tool("unshare"), *_APART], [way for way in wanted if way.apart]),
    ):
        attempts = [(way.name, *(way.control or way.attempt)) for way in batch]
        found |= _answers(_communicate([*prefix, *command], json.dumps(attempts).encode(), spare))
    time.sleep(_SETTLE_S)
    return found, {way.name: way.ear.heard() for way in wanted if way.ear is not None}


def _communicate(command: list[str], data: bytes, spare: int) -> bytes:
    try:
        return subprocess.run(command, input=data, stdout=subprocess.PIPE, pass_fds=(spare,), timeout=_PAYLOAD_S, check=False).stdout
    except subprocess.TimeoutExpired as late:
        return late.output or b""


def _answers(told: bytes) -> dict[str, Answer]:
    """What the payload printed, as far as it came: a line that is cut short is no answer."""
    found: dict[str, Answer] = {}
    for line in told.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            one: dict[str, Any] = json.loads(line)
            found[one["name"]] = Answer(str(one["got"]), str(one["code"]), float(one["ms"]))
    return found


def _program() -> str:
    return (importlib.resources.files("sealnet.attack") / "escapes.py").read_text(encoding="utf-8")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """The first signal ends the attack, and those after it do not keep everything from being taken away."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(signum: int, _frame: object) -> None:
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    before = {signum: signal.signal(signum, end) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
