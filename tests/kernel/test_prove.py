"""The proof on the real kernel: what holds is proved, what does not is seen, and what cannot be seen is not claimed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sealnet import caller, prove, request, running
from sealnet.errors import CannotSeal, NoBroker, NotSealed
from sealnet.kernel import attempts, cgroup, ends, identity, libc, process, starter
from sealnet.kernel.attempts import Attempt, StandIn
from sealnet.kernel.ends import End
from sealnet.kernel.host import Host
from sealnet.kernel.netns import Inside
from sealnet.kernel.nft import Nft
from sealnet.kernel.output import Output
from sealnet.kernel.seccomp import filter_for
from sealnet.launch import launch
from sealnet.model.check import Check
from sealnet.model.config import Config
from sealnet.records import State
from sealnet.running import Run, Streams
from tests import lab
from tests.crash import descriptors

pytestmark = pytest.mark.root

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/receipt.schema.json").read_text())
RUN = caller.new_run_id()
NEGATIVES = {"gateway-tcp", "gateway-udp", "ipv6-link-local", "host-address", "internet", "internet-udp", "raw-socket", "vsock-socket"}
IDENTITY = {"capabilities", "no-new-privs", "seccomp", "user", "namespace"}


class Place:
    """A throw-away host with a broker, and runs launched in this process."""

    def __init__(self, host: lab.Host) -> None:
        self.host = host
        self.state = State(host.state)
        self.state.prepare()
        self.kernel = Host(self.state.path, self.state.tag)
        self._listening = contextlib.ExitStack()

    def listen(self) -> int:
        sock = self._listening.enter_context(socket.create_server(("0.0.0.0", 0)))
        return int(sock.getsockname()[1])

    def launch(self, port: int | None, *argv: str, receipt_to: Output | None = None, **options: Any) -> Run:
        given = {"run_id": RUN, "cwd": "/", "environ": {}, "user": "nobody"} | options
        plan = request.plan(argv or ["/bin/sleep", "30"], lease_port=port, **given)
        return launch(plan, host=self.kernel, state=self.state, config=Config(), streams=Streams(), receipt_to=receipt_to)

    def close(self) -> None:
        self._listening.close()
        self.kernel.close()


@pytest.fixture
def place(host: lab.Host) -> Iterator[Place]:
    made = Place(host)
    yield made
    made.close()


def named(checks: list[Check], name: str) -> Check:
    return next(one for one in checks if one.name == name)


def test_a_sealed_run_is_proved_before_its_first_instruction(place: Place) -> None:
    port = place.listen()
    with place.launch(port) as run:
        assert run.receipt.verdict == "sealed"
        run.release()

        receipt = run.receipt
        checks = {one.name: one for one in receipt.checks}
        assert checks.keys() >= NEGATIVES | IDENTITY | {
            "broker",
            "read-back",
            "lease",
            "route-to-sandbox",
            "route-to-gateway",
            "route-to-canary",
        }
        assert all(one.ok is True for one in receipt.checks)
        assert {name for name, one in checks.items() if one.kind == "negative"} == NEGATIVES
        assert all(one.control for one in receipt.checks if one.kind == "negative")
        assert checks["gateway-tcp"].control == f"the host reaches {checks['gateway-tcp'].asked}"
        assert checks["broker"].asked == f"tcp {run.seal.gateway}:{port}"
        assert checks["user"].found == "uid 65534 gid 65534 groups 65534"
        assert receipt.wording == f"network: off - egress sealed to the run's broker at {run.seal.gateway}:{port}"
        assert (receipt.network_severed, receipt.egress_sealed, receipt.egress_enforced) == (False, True, True)
        assert receipt.netns_inode == os.stat(f"/proc/{run.payload_pid()}/ns/net").st_ino
        assert receipt.versions["kernel"] == os.uname().release
        assert all(receipt.versions[name][0].isdigit() for name in ("bwrap", "setpriv", "libnftables")), receipt.versions
        told = receipt.to_json()
        jsonschema.validate(told, SCHEMA)
        assert run.record.receipt == told
        assert run.tried() == []


def test_a_severed_run_is_proved_against_its_own_loopback(place: Place) -> None:
    with place.launch(None) as run:
        run.release()

        checks = {one.name: one for one in run.receipt.checks}
        assert run.receipt.verdict == "severed"
        assert run.receipt.wording == "network: off - severed"
        assert run.receipt.network_severed
        assert checks["loopback"].ok
        assert checks.keys() >= {"host-address", "internet", "raw-socket"} | IDENTITY
        assert checks["host-address"].control == f"the host reaches {checks['host-address'].asked}"
        assert "answered the same process" in (checks["internet"].control or "")
        jsonschema.validate(run.receipt.to_json(), SCHEMA)
        assert run.tried() == []


def test_protocols_have_their_names_on_a_host_without_the_file_of_them(place: Place) -> None:
    if os.path.exists("/etc/protocols"):
        subprocess.run(["mount", "--bind", "/dev/null", "/etc/protocols"], check=True)

    with place.launch(place.listen(), "/bin/bash", "-c", "echo >/dev/tcp/192.0.2.9/443; sleep 30") as run:
        run.release()

        assert lab.wait_for(run.tried) == [("192.0.2.9", "tcp", 443, 1)]


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_the_payload_is_looked_at_itself_whoever_it_is(place: Place, user: str) -> None:
    with place.launch(None, user=user) as run:
        run.release()

        found = identity.read(run.payload_pid() or 0)
        checks = {one.name: one for one in run.receipt.checks}
        assert set(found.capabilities.values()) == {0}
        assert checks["capabilities"].ok
        assert checks["user"].found.startswith(f"uid {found.uids[0]} gid {found.gids[0]} ")
        # Whoever the test runs as has what the payload has not, so the look can tell them apart.
        own = identity.read(os.getpid())
        assert own.capabilities["CapEff"]
        wrong = [one.name for one in prove.held(own, run.plan.user, found.netns_inode or 0, "", "") if not one.ok]
        assert set(wrong) >= {"capabilities", "no-new-privs", "seccomp", "namespace"}


def test_another_live_run_is_tried(place: Place) -> None:
    port = place.listen()
    with place.launch(port, run_id=caller.new_run_id()) as other, place.launch(port) as run:
        tried = named(run.checks, "another-run")

        assert tried.ok
        assert tried.asked.startswith(f"tcp {other.seal.gateway}:")
        assert tried.control == f"the host reaches {tried.asked}"


def test_the_payload_has_done_nothing_when_the_receipt_is_written(place: Place) -> None:
    """The file is complete while the payload stands at its execve(2)."""
    marker, seen = place.host.directory / "marker", []
    place.host.directory.chmod(0o777)
    receipt = place.host.directory / "receipt.json"

    class Looking(Output):
        def write(self, data: bytes) -> None:
            seen.append((marker.exists(), json.loads(data)["verdict"], run.record.state))
            super().write(data)

    written_to = Looking(str(receipt), "--receipt")
    with place.launch(None, "/bin/touch", str(marker), bind=[str(place.host.directory)], receipt_to=written_to) as run:
        assert not receipt.exists()
        run.release()
        assert run.wait(60) == 0
    written_to.close()

    # And once more at its end.
    assert seen == [(False, "severed", "running"), (True, "severed", "exited")]
    assert marker.exists()
    assert json.loads(receipt.read_text()) == run.receipt.to_json()


def test_a_payload_that_is_not_what_it_must_be_never_starts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = place.host.directory / "marker"
    place.host.directory.chmod(0o777)
    real = identity.read

    def with_a_capability(pid: int) -> identity.Identity:
        return real(pid)._replace(capabilities={"CapEff": 1 << 12})

    for lie, refused in ((with_a_capability, True), (real, False)):
        monkeypatch.setattr(running.identity, "read", lie)
        with place.launch(None, "/bin/touch", str(marker), bind=[str(place.host.directory)]) as run:
            if refused:
                with pytest.raises(NotSealed, match=r"cannot start the payload of run .*: capabilities: .* found some in CapEff"):
                    run.release()
                assert run.payload_pid() is None
            else:
                run.release()
                assert run.wait(60) == 0
        assert marker.exists() is not refused
        assert place.host.left_over() == []


@pytest.mark.parametrize("argv", [("A=b",), ("-",), ("/bin/sh", "-c", "exit 7"), ("/bin/echo", "a=b")])
def test_the_hold_finds_the_payload_whatever_its_name(place: Place, argv: tuple[str, ...]) -> None:
    directory = place.host.directory
    directory.chmod(0o755)
    for name in ("A=b", "-"):
        (directory / name).write_text("#!/bin/sh\nexit 7\n")
        (directory / name).chmod(0o755)
    with place.launch(None, *argv, set_env=[("PATH", f"{directory}:/bin")], cwd=str(directory)) as run:
        run.release()

        assert run.receipt.verdict == "severed"
        assert run.wait(60) == (0 if argv[0] == "/bin/echo" else 7)


def test_a_payload_that_cannot_be_executed_is_inconclusive(place: Place) -> None:
    with place.launch(None, "/nonexistent/tool") as run:
        run.release()

        assert run.wait(60) == 127
        assert named(run.checks, "payload").found == "it ended before its first instruction"
        assert run.receipt.verdict == "inconclusive"
        jsonschema.validate(run.receipt.to_json(), SCHEMA)


def test_where_nothing_may_be_held_the_payload_is_looked_at_as_it_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `strace -f`, which traces bwrap already, and where Yama forbids to attach."""

    def refuse(request_: int, pid: int, data: int = 0) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(libc, "ptrace", refuse)
    with place.launch(None) as run:
        run.release()

        assert run.receipt.verdict == "severed"
        assert named(run.checks, "capabilities").found == (
            "none in any set (seen after its start: it could not be held: Operation not permitted)"
        )


def test_a_payload_that_is_never_seen_is_refused_where_it_cannot_be_held(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not held, and not looked at: it would run unproved."""
    monkeypatch.setattr(starter, "FirstStep", _refuse)
    monkeypatch.setattr(running, "_UNHELD_S", 0.3)
    with place.launch(None) as run:
        monkeypatch.setattr(run, "payload_pid", lambda: None)
        with pytest.raises(NotSealed, match="Operation not permitted, and it was not seen within"):
            run.release()
        assert run.wait(60) == 137


def _refuse(*_: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


MOMENTS = (
    "as it sets itself up", "while it is looked at", "its init, at its birth", "its init, before it is known", "while the seal is proved",
)  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_is_killed_while_it_is_held_ends_as_killed(place: Place, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """By the out-of-memory killer, a reap, or somebody of the same user: neither a crash nor a run that never ends."""

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        # For ptrace(2) it is gone when it has woken up.
        lab.wait_for(lambda: _state_of(pid) != "t", what="it is no longer held")

    real_ptrace, real_message, real_read = libc.ptrace, libc.ptrace_event_message, identity.read
    with monkeypatch.context() as patch:
        asked: Counter[tuple[int, bool]] = Counter()
        init: list[int] = []

        def ptrace(request_: int, pid: int, data: int = 0) -> None:
            # PTRACE_SEIZE.
            init.extend([pid] if request_ == 0x4206 else [])
            asked[request_, pid == init[0]] += 1
            # PTRACE_CONT of the payload, the second time after it was born; PTRACE_DETACH of its parent.
            if (moment == MOMENTS[0] and asked[7, False] == 3) or (moment == MOMENTS[2] and asked[17, True] == 1):
                kill(pid)
                asked.clear()
            real_ptrace(request_, pid, data)

        def message(pid: int) -> int:
            if moment == MOMENTS[3]:
                kill(pid)
            return real_message(pid)

        def read(pid: int) -> identity.Identity:
            found = real_read(pid)
            if moment == MOMENTS[1]:
                kill(pid)
            return found

        patch.setattr(libc, "ptrace", ptrace)
        patch.setattr(libc, "ptrace_event_message", message)
        patch.setattr(running.identity, "read", read)
        with place.launch(None) as run:
            if moment == MOMENTS[4]:
                lab.wait_for(lambda: process.executable(run.payload_pid() or 0) == "setpriv", what="it is held")
                pid = run.payload_pid() or 0
                kill(pid)
                lab.wait_for(lambda: _state_of(pid) == "Z", what="it is dead")
            run.release()

            if moment.startswith("its init"):
                with pytest.raises(CannotSeal, match="bwrap failed with status 137"):
                    run.wait(60)
            else:
                assert run.wait(60) == 137
            assert run.receipt.verdict == ("severed" if moment == MOMENTS[1] else "inconclusive")
    assert place.host.left_over() == []


def test_what_does_not_come_to_its_start_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's waitpid(-1) may take a stop that the hold waits for."""
    real, stolen = os.waitpid, threading.Event()
    init: list[int] = []

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        if options & 0x40000000:
            init.append(pid)
            if pid != init[0] and not stolen.is_set():
                real(pid, options)
                stolen.set()
        return real(pid, options)

    with monkeypatch.context() as patch:
        patch.setattr(starter, "_WITHIN_S", 0.5)
        patch.setattr(os, "waitpid", waitpid)
        with place.launch(None) as run, pytest.raises(CannotSeal, match=r"did not come there within 0\.5 s"):
            run.release()
    assert place.host.left_over() == []
    with place.launch(None) as run:
        run.release()
        assert run.receipt.verdict == "severed"


def test_what_traces_sealnet_does_not_break_it(place: Place) -> None:
    strace = place.host.run("strace", "-f", "-o", "/dev/null", *lab.SEALNET, "run", "--user", "nobody", "--", "true", check=False)

    assert strace.returncode == 0, strace.stderr


def test_a_run_whose_hold_is_killed_leaves_no_zombie(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> list[Check]:
        raise CannotSeal("cannot look")

    with monkeypatch.context() as patch:
        patch.setattr(prove, "held", fail)
        for _ in range(5):
            with place.launch(None) as run, pytest.raises(CannotSeal, match="cannot look"):
                run.release()

    assert place.host.left_over() == []
    with place.launch(None) as run:
        run.release()
        assert run.receipt.verdict == "severed"


def test_proofs_leave_no_descriptor_and_no_process(place: Place) -> None:
    port = place.listen()
    with place.launch(port) as run:
        run.release()
    before, children = descriptors(), place.host.run("ps", "--ppid", str(os.getpid()), "-o", "pid=").stdout.split()
    for sealed in (True, False, True):
        with place.launch(port if sealed else None) as run:
            run.release()

    assert descriptors() == before
    # ps itself is another one each time.
    assert len(place.host.run("ps", "--ppid", str(os.getpid()), "-o", "pid=").stdout.split()) == len(children)


# What is broken is seen


def flush_inside(place: Place, inside: Inside) -> None:
    """Without the filter, and with a way out: what neither must ever be."""
    inside.call(lambda: Nft().apply("flush ruleset", "flush"))


def open_gate(place: Place, inside: Inside) -> None:
    for chain in ("gate", "refuse"):
        place.host.run("nft", "flush", "chain", "inet", "sealnet", chain)
        place.host.run("nft", "add", "rule", "inet", "sealnet", chain, "accept")


def test_without_filter_and_gate_the_gateway_is_found_open(place: Place) -> None:
    port = place.listen()
    with place.launch(port) as run:
        assert run.inside is not None
        with prove.stand_in(run.inside, run.plan.user, allow_userns=False) as stand_in:
            held = prove.network(place.kernel, run.seal, run.inside, stand_in, timeout_s=1).checks
            flush_inside(place, run.inside)
            open_gate(place, run.inside)
            found = {one.name: one for one in prove.network(place.kernel, run.seal, run.inside, stand_in, timeout_s=1).checks}
        place.host.run("nft", "delete", "table", "inet", "sealnet")

    assert all(one.ok for one in held)
    assert found["broker"].ok
    for name in ("gateway-tcp", "gateway-udp"):
        assert found[name].ok is False, found[name]
        assert "it arrived" in found[name].found
    # The sink still leads nowhere, though in silence, and sockets are refused by the system call filter.
    for name in ("host-address", "internet", "internet-udp"):
        assert found[name].found == "Connection timed out"
        assert found[name].ok is False
    assert found["raw-socket"].ok


@pytest.mark.parametrize("preflight", [True, False])
def test_an_end_that_the_host_cannot_reach_counts_only_beside_a_door_that_answers(place: Place, preflight: bool) -> None:
    """A host that keeps itself from its own addresses: the positive control of the controls."""
    table = "table inet local { chain output { type filter hook output priority 0; oifname lo drop; }; }"
    port = place.listen()
    place.host.run("nft", table)
    place.host.settled()
    if not preflight:
        place._listening.close()

    with place.launch(port, preflight=preflight) as run:
        run.release()
        tcp = named(run.checks, "gateway-tcp")
        assert tcp.control == (f"it listens, and tcp {run.seal.gateway}:{port} answered the same process" if preflight else None)
        assert tcp.ok is (True if preflight else None)
        assert run.receipt.verdict == ("sealed" if preflight else "inconclusive")
        assert "host-address" not in {one.name for one in run.checks}

    place.host.run("nft", "delete", "table", "inet", "local")
    place.host.settled()
    if preflight:
        with place.launch(port) as run:
            assert named(run.checks, "gateway-tcp").control == f"the host reaches {named(run.checks, 'gateway-tcp').asked}"
            assert named(run.checks, "host-address").ok


def test_a_broker_that_may_still_come_leaves_the_proof_inconclusive(place: Place) -> None:
    port = place.listen()
    place._listening.close()
    with pytest.raises(NoBroker):
        place.launch(port)

    with place.launch(port, preflight=False) as run:
        run.release()
        told = run.receipt.to_json()

    assert (told["verdict"], told["egress_sealed"], told["preflight"]) == ("inconclusive", False, False)
    assert named(run.checks, "broker").ok is None
    assert named(run.checks, "gateway-tcp").ok
    jsonschema.validate(told, SCHEMA)


def test_a_stand_in_that_is_gone_proves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = prove.stand_in

    def gone(*arguments: Any, **options: Any) -> StandIn:
        made = real(*arguments, **options)
        made.close()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(prove, "stand_in", gone)
        with pytest.raises(NotSealed, match="the thread that was to try has ended"):
            place.launch(None)
    assert place.host.left_over() == []
    with place.launch(None) as run:
        assert named(run.checks, "internet").ok


# The stand-in


def test_the_stand_in_is_to_the_network_what_the_payload_is(place: Place) -> None:
    with place.launch(None) as run:
        run.release()
        payload = identity.read(run.payload_pid() or 0)
        assert run.inside is not None
        with prove.stand_in(run.inside, run.plan.user, allow_userns=False) as stand_in:
            assert stand_in.make([]) == []
            found = identity.read(_thread(stand_in))
            assert stand_in._thread is not None
            owner = stand_in._thread.call(_owner_of_a_socket)

    # Of the others are root's: no rule of the network's asks for them.
    assert found == payload._replace(groups=found.groups, uids=(0, 0, 0, payload.uids[3]), gids=(0, payload.gids[1], 0, payload.gids[3]))
    assert owner == (payload.uids[0], payload.gids[0])
    assert set(payload.groups) - {payload.gids[0]} == set(found.groups) - {payload.gids[0]}


def _thread(stand_in: StandIn) -> int:
    assert stand_in._thread is not None
    return stand_in._thread.call(threading.get_native_id)


def _owner_of_a_socket() -> tuple[int, int]:
    """By which `meta skuid`, `ip rule uidrange` and the like tell whose it is."""
    with socket.socket() as sock:
        found = os.fstat(sock.fileno())
        return found.st_uid, found.st_gid


def test_what_a_stand_in_has_taken_on_ends_with_it(place: Place) -> None:
    before = identity.read(os.getpid())
    with place.launch(None) as run:
        assert run.inside is not None
        with prove.stand_in(run.inside, run.plan.user, allow_userns=False) as stand_in:
            assert stand_in.make([]) == []
            assert run.inside.call(_owner_of_a_socket) == (0, 0)
    assert identity.read(os.getpid()) == before
    assert _owner_of_a_socket() == (0, 0)


@pytest.fixture
def nobody() -> Iterator[StandIn]:
    with a_stand_in() as stand_in:
        assert stand_in.make([]) == []
        yield stand_in


@contextlib.contextmanager
def a_stand_in() -> Iterator[StandIn]:
    """Where this thread is."""
    user = request.plan(["true"], user="nobody", cwd="/", environ={}).user
    with open("/proc/thread-self/ns/net") as here, StandIn(here.fileno(), user, filter_for(user, allow_userns=False)) as stand_in:
        assert stand_in.make([]) == []
        yield stand_in


@pytest.mark.parametrize("lacking", ["thread", "descriptor"])
def test_where_no_stand_in_can_be_had_nothing_runs(place: Place, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    with place.launch(None) as run:
        assert run.inside is not None
        before = descriptors()
        with monkeypatch.context() as patch:
            if lacking == "thread":
                patch.setattr(threading.Thread, "start", _no_thread)
                why = "can't start new thread"
            else:
                patch.setattr(os, "dup", _no_more)
                why = "Resource temporarily unavailable"
            with pytest.raises(CannotSeal, match=f"cannot start a thread that tries what a payload could: {why}"):
                prove.stand_in(run.inside, run.plan.user, allow_userns=False)
        assert descriptors() == before
        with prove.stand_in(run.inside, run.plan.user, allow_userns=False) as stand_in:
            assert stand_in.make([]) == []


def _no_thread(_self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _no_more(*_: Any) -> int:
    raise BlockingIOError(11, "Resource temporarily unavailable")


REACHES = (
    ("kill", "-USR1"), ("kill", "-STOP"), ("prlimit", "--nofile=0:0", "--pid"), ("ls", "-l", "/proc/{}/fd"), ("renice", "-n", "19", "-p"),
    ("chrt", "--idle", "--pid", "0"), ("taskset", "--pid", "1"),
)  # fmt: skip


@pytest.mark.parametrize("command", REACHES)
def test_its_user_has_no_hand_on_the_stand_in(host: lab.Host, nobody: StandIn, command: tuple[str, ...]) -> None:
    """Whatever reaches one thread of a program reaches all of it."""
    words = [word.format(_thread(nobody)) for word in command]
    words += [] if words != list(command) else [str(_thread(nobody))]
    # A process of that user's own, as the control.
    with subprocess.Popen(["/bin/sleep", "60"], user="nobody", group="nogroup", extra_groups=[]) as own:
        hers = [str(own.pid) if word == str(_thread(nobody)) else word.replace(str(_thread(nobody)), str(own.pid)) for word in words]
        # Until it has been executed, what it holds is still the program's.
        lab.wait_for(lambda: process.executable(own.pid) == "sleep", what="it is there")
        control = subprocess.run(hers, user="nobody", group="nogroup", extra_groups=[], capture_output=True, text=True)
        own.kill()
    refused = subprocess.run(words, user="nobody", group="nogroup", extra_groups=[], capture_output=True, text=True)

    assert (control.returncode, refused.returncode != 0) == (0, True), (control, refused)
    assert "Operation not permitted" in refused.stderr or "Permission denied" in refused.stderr
    assert nobody.make([]) == []


def test_only_what_came_to_the_door_was_refused(host: lab.Host, nobody: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor it has tried nothing."""
    there = Attempt("tcp", ("127.0.0.1", 4001), 0.2)
    (refused,) = nobody.make([there])  # type: ignore[misc]
    with monkeypatch.context() as patch:
        patch.setattr(attempts.socket, "socket", _no_descriptor)
        (untried,) = nobody.make([there])  # type: ignore[misc]

    assert (str(refused), refused.refused) == ("Connection refused", True)
    assert (str(untried), untried.refused) == ("Too many open files", False)


def _no_descriptor(*_: Any) -> None:
    raise OSError(24, "Too many open files")


def test_an_end_that_cannot_be_had_is_not_taken_for_none(place: Place) -> None:
    """No descriptor, or no port that somebody of this host does not hold already."""
    port = place.listen()
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40001")
    place.host.settled()
    with contextlib.ExitStack() as stack:
        # The gateway's ports stay free: only the other address would go untried.
        for number in (40000, 40001):
            stack.enter_context(socket.create_server((lab.LAN_HOST, number)))
        with pytest.raises(CannotSeal, match=r"cannot prove the seal of run .*: the host's ends of it cannot be had: "):
            place.launch(port)
    assert place.host.left_over() == []

    with place.launch(port) as run:
        assert named(run.checks, "host-address").ok


def test_silence_is_no_refusal(place: Place) -> None:
    """An address that drops what it gets, beside one that refuses."""
    place.host.run("nft", "table inet quiet { chain input { type filter hook input priority 0; tcp dport 4000 drop; }; }")
    place.host.settled()
    with a_stand_in() as stand_in:
        silent, refused = stand_in.make([Attempt("tcp", ("127.0.0.1", 4000), 0.2), Attempt("tcp", ("127.0.0.1", 4001), 0.2)])

    assert not silent.refused
    assert refused.refused


def test_an_end_tells_what_has_arrived_since_its_control(place: Place) -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with End(socket.AF_INET, kind, lab.LAN_HOST, lab.LAN_HOST) as end:
            assert end.control == f"the host reaches {'tcp' if kind == socket.SOCK_STREAM else 'udp'} {lab.LAN_HOST}:{end.port}"
            assert not end.arrived(lab.LAN_HOST)
            # Whoever else finds it says nothing of the run.
            for source in ("127.0.0.1", "127.0.0.1", lab.LAN_HOST):
                with socket.socket(socket.AF_INET, kind) as sock:
                    sock.bind((source, 0))
                    sock.connect((lab.LAN_HOST, end.port))
                    sock.send(b"x")
            assert end.arrived(lab.LAN_HOST)
            assert not end.arrived(lab.LAN_HOST)
    with pytest.raises(OSError, match="Cannot assign"):
        End(socket.AF_INET, socket.SOCK_STREAM, "192.0.2.7", "192.0.2.7")


def test_the_hosts_own_address_is_the_one_it_speaks_from(place: Place) -> None:
    assert ends.own_address() is None
    assert place.kernel.an_address() == lab.LAN_HOST
    place.host.run("ip", "route", "add", "default", "via", lab.LAN_PEER)
    try:
        assert ends.own_address() == lab.LAN_HOST
    finally:
        place.host.run("ip", "route", "del", "default")


# The file


def test_a_receipt_is_written_over_a_link_and_never_through_it(place: Place) -> None:
    victim = place.host.directory / "victim"
    victim.write_text("mine")
    link = place.host.directory / "receipt.json"
    link.symlink_to(victim)
    output = Output(str(link), "--receipt")

    output.write(b"{}\n")
    output.close()

    assert victim.read_text() == "mine"
    assert not link.is_symlink()
    assert link.read_bytes() == b"{}\n"
    assert link.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(place.host.directory)) == ["receipt.json", "victim"]


def test_a_directory_that_is_swapped_meanwhile_takes_the_receipt_nowhere_else(place: Place) -> None:
    directory, elsewhere = place.host.directory / "out", place.host.directory / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    output = Output(str(directory / "receipt.json"), "--receipt")
    directory.rename(place.host.directory / "moved")
    directory.symlink_to(elsewhere)

    output.write(b"{}\n")
    output.close()

    assert os.listdir(elsewhere) == []
    assert os.listdir(place.host.directory / "moved") == ["receipt.json"]


def test_a_refused_run_leaves_a_receipt_that_says_so(place: Place) -> None:
    receipt = place.host.directory / "receipt.json"
    receipt.write_text("of an earlier run")
    port = place.listen()
    place._listening.close()
    output = Output(str(receipt), "--receipt")

    with pytest.raises(NoBroker):
        place.launch(port, receipt_to=output)
    output.close()

    told = json.loads(receipt.read_text())
    assert told["verdict"] == "broken"
    assert told["reason"].startswith(f"cannot reach the broker of run {RUN}")
    assert [one["name"] for one in told["checks"] if one["ok"] is False] == ["broker"]
    jsonschema.validate(told, SCHEMA)


def test_a_receipt_that_cannot_be_written_starts_nothing(place: Place) -> None:
    marker, full = place.host.directory / "marker", place.host.directory / "full"
    place.host.directory.chmod(0o777)
    full.mkdir()
    libc.mount("tmpfs", str(full), "tmpfs", 0, "size=4k")
    output = Output(str(full / "receipt.json"), "--receipt")
    (full / "filler").write_bytes(b"x" * 4096)

    with place.launch(None, "/bin/touch", str(marker), bind=[str(place.host.directory)], receipt_to=output) as run:
        with pytest.raises(CannotSeal, match=r"cannot write --receipt .*: No space left on device"):
            run.release()
    output.close()
    libc.umount(str(full))

    assert not marker.exists()
    assert place.host.left_over() == []


# A check, later


def test_check_is_made_beside_an_independent_implementation(place: Place) -> None:
    port = place.listen()
    with place.launch(port) as run:
        run.release()

        result = run.check()

        assert (result["verdict"], result["faults"]) == ("sealed", [])
        seconds = {one["name"] for one in result["checks"] if one["asked"].startswith("pyroute2: ")}
        assert seconds >= {
            "second-link", "second-route-to-sandbox", "second-route-to-gateway", "second-route-to-canary", "second-link-inside",
            "second-links-inside", "second-routes", "second-rules",
        }  # fmt: skip
        assert next(one for one in result["checks"] if one["name"] == "processes")["found"] == "so are 1"
        assert run.tried() == []


Tamper = Callable[[Place, Run], object]


def nft(text: str) -> Tamper:
    return lambda place, run: place.host.run("nft", text.format(run=run, seal=run.seal))


def ip(*argv: str) -> Tamper:
    return lambda place, run: place.host.run("ip", *(word.format(run=run, seal=run.seal) for word in argv))


def inner(*argv: str) -> Tamper:
    return lambda place, run: place.host.inside(run.run_id, *(word.format(run=run, seal=run.seal) for word in argv))


def enslave(place: Place, run: Run) -> None:
    place.host.run("ip", "link", "add", "br0", "type", "bridge")
    place.host.run("ip", "link", "set", run.seal.ifname, "master", "br0")


def sysctl(name: str, value: str, *, inside: bool = False) -> Tamper:
    def write(place: Place, run: Run) -> None:
        path = f"/proc/sys/net/{name.format(link='eth0' if inside else run.seal.ifname)}"
        if inside:
            place.host.inside(run.run_id, "sh", "-c", f"echo {value} > {path}")
        else:
            Path(path).write_text(value)

    return write


LEASE = 'inet sealnet leases {{ "{seal.ifname}" . {seal.sandbox} . {seal.gateway} . {seal.lease_port} }}'
TAMPERED: dict[str, tuple[Tamper, str]] = {
    "address flushed": (ip("addr", "flush", "dev", "{seal.ifname}"), "has address none"),
    "address added": (ip("addr", "add", "10.99.0.1/24", "dev", "{seal.ifname}"), "10.99.0.1/24"),
    "link down": (ip("link", "set", "{seal.ifname}", "down"), "is down"),
    "link enslaved": (enslave, "is enslaved"),
    "link removed": (ip("link", "del", "{seal.ifname}"), "is gone"),
    "rule added": (ip("rule", "add", "to", "{seal.subnet}", "priority", "50", "prohibit"), "ip rule 50: "),
    "route added": (ip("route", "add", "{seal.sandbox}/32", "dev", "lan0"), "route-to-sandbox"),
    "forwarding on": (sysctl("ipv4/conf/{link}/forwarding", "1"), "forwarding = 1"),
    "rp_filter off": (sysctl("ipv4/conf/{link}/rp_filter", "0"), "rp_filter = 0"),
    "route_localnet on": (sysctl("ipv4/conf/{link}/route_localnet", "1"), "route_localnet = 1"),
    "IPv6 back outside": (sysctl("ipv6/conf/{link}/disable_ipv6", "0"), "disable_ipv6 = 0"),
    "IPv6 back inside": (sysctl("ipv6/conf/{link}/disable_ipv6", "0", inside=True), "disable_ipv6 = 0"),
    "lease removed": (nft("delete element " + LEASE), "lease: "),
    "gate removed": (nft("delete table inet sealnet"), "the gate is gone"),
    "gate changed": (nft("insert rule inet sealnet gate accept"), "the gate has been changed"),
    "filter changed": (inner("nft", "insert rule inet sealnet output accept"), "is not as it was planned"),
    "filter swapped": (
        inner("nft", "flush chain inet sealnet output; add rule inet sealnet output accept"), "is not as it was planned",
    ),
    "filter removed": (inner("nft", "delete table inet sealnet"), "is gone"),
    "link added inside": (inner("ip", "link", "add", "d0", "type", "veth", "peer", "name", "d1"), "not lo and eth0 alone"),
    "route added inside": (inner("ip", "route", "add", "default", "via", "{seal.gateway}", "metric", "1"), "second-routes"),
    "rule added inside": (inner("ip", "rule", "add", "priority", "9", "lookup", "77"), "second-rules"),
    "route added inside, v6": (inner("ip", "-6", "route", "add", "2001:db8::/32", "dev", "lo"), "second-routes-6"),
    "mark changed": (inner("ip", "link", "set", "lo", "alias", "mine"), "is gone"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_check_names_what_was_tampered_with(place: Place, what: str) -> None:
    tamper, words = TAMPERED[what]
    port = place.listen()
    with place.launch(port) as run:
        run.release()
        assert run.check()["verdict"] == "sealed"
        try:
            tamper(place, run)

            shown = place.host.sealnet("check", RUN)

            assert shown.returncode == 1
            assert f"\nbroken  run {RUN}\n" in shown.stdout
            assert words.format(seal=run.seal) in shown.stdout
        finally:
            place.host.run("ip", "rule", "del", "priority", "50", check=False)
            place.host.run("ip", "route", "del", f"{run.seal.sandbox}/32", check=False)
            place.host.run("ip", "link", "del", "br0", check=False)


def test_a_process_that_is_more_than_a_payload_is_seen(place: Place) -> None:
    """Somebody's own process, moved into the run's cgroup."""
    with place.launch(None) as run:
        run.release()
        assert run.check()["verdict"] == "severed"
        stranger = subprocess.Popen(["/bin/sleep", "30"])
        (Path(run.record.cgroup or "") / "cgroup.procs").write_text(str(stranger.pid))

        result = run.check()

        assert result["verdict"] == "broken"
        assert any(f"process {stranger.pid} has capabilities in " in fault for fault in result["faults"])
    assert stranger.wait(60) == -signal.SIGKILL


def test_a_pid_that_has_become_a_strangers_is_no_fault(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real, own = cgroup.pids, os.getpid()
    with place.launch(None) as run:
        run.release()
        for stays, found in ((False, "severed"), (True, "broken")):
            told = iter(([own], [own] if stays else []))
            monkeypatch.setattr(prove.cgroup, "pids", lambda path, told=told: real(path) + next(told, []))

            assert run.check()["verdict"] == found
        monkeypatch.undo()


def test_a_user_namespace_of_the_payloads_own_is_no_fault(place: Place) -> None:
    argv = ("/usr/bin/unshare", "--user", "--map-root-user", "/bin/sh", "-c", "echo up; exec sleep 30")
    with place.launch(None, *argv, allow_userns=True) as run:
        run.release()
        pid = run.payload_pid()
        lab.wait_for(lambda: os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "sleep", what="it has its namespace")

        assert identity.read(pid or 0).capabilities["CapEff"]
        assert run.check()["verdict"] == "severed"
