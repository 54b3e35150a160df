"""bwrap goes as far as the payload's first instruction while the seal is built: nothing of the payload runs before it is let go."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from sealnet import caller, request, spawn
from sealnet.errors import CannotSeal, Interrupted, KernelRefused, NotSealed
from sealnet.kernel import cgroup, identity, process, sockets, starter
from sealnet.kernel.firststep import FirstStep
from sealnet.kernel.host import Host
from sealnet.kernel.ownthread import OwnThread, Pending
from sealnet.launch import launch
from sealnet.model import argv
from sealnet.model.config import Config
from sealnet.records import State
from sealnet.running import Run, Streams, Ways
from tests import lab
from tests.crash import descriptors

pytestmark = pytest.mark.root

RUN = caller.new_run_id()


class Place:
    """A throw-away host, on which payloads leave a marker when they run."""

    def __init__(self, host: lab.Host) -> None:
        self.host = host
        self.state = State(host.state)
        self.state.prepare()
        self.kernel = Host(self.state.path, self.state.tag)
        self.marker = host.directory / "marker"

    def launch(self, *argv: str, checkpoint: Callable[[str], None] = lambda _step: None, **options: Any) -> Run:
        given = {"run_id": RUN, "cwd": str(self.host.directory), "environ": {"PATH": "/usr/bin"}, "user": "0"} | options
        plan = request.plan(argv or ["sh", "-c", "echo ran >marker; exec sleep 60"], **given)
        return launch(plan, host=self.kernel, state=self.state, config=Config(), streams=Streams(), checkpoint=checkpoint)


@pytest.fixture
def place(host: lab.Host) -> Iterator[Place]:
    made = Place(host)
    yield made
    made.kernel.close()


def held(run: Run) -> int:
    """The pid of what becomes the payload, once it is held."""
    lab.wait_for(lambda: process.executable(run.payload_pid() or 0) == "setpriv", what="it is held")
    return run.payload_pid() or 0


def test_a_payload_is_held_while_it_is_roots_until_it_is_let_go(place: Place) -> None:
    place.host.directory.chmod(0o777)
    with place.launch(user="nobody") as run:
        pid = held(run)
        time.sleep(0.1)
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "t"
        # It is nobody else's to write into before everything is proved.
        assert identity.read(pid).uids == (0, 0, 0, 0)
        assert not place.marker.exists()

        run.release()

        lab.wait_for(place.marker.exists, what="it runs")
        # Nobody follows it any more.
        assert "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize("step", ["claimed", "built", "proved", "started"])
def test_what_is_given_up_while_it_is_held_has_run_nothing_and_leaves_nothing(place: Place, step: str) -> None:
    spawned: list[int] = []

    def stop(now: str) -> None:
        if now == step:
            spawned.extend(cgroup.pids(Path(str(place.state.read(RUN).cgroup))) if step != "claimed" else [])
            raise Interrupted(15)

    for _ in range(3):
        with pytest.raises(Interrupted):
            place.launch(checkpoint=stop)
        assert place.host.left_over() == []
    assert not place.marker.exists()
    # Whose parent has gone is waited for by pid 1, in its own time.
    assert not [pid for pid in spawned if process.lives(pid)]


def test_bwrap_its_init_and_the_payload_are_in_the_runs_cgroup_and_nobody_else(place: Place) -> None:
    with place.launch() as run:
        run.release()
        lab.wait_for(place.marker.exists, what="it runs")
        group = Path(str(run.record.cgroup))

        assert set(cgroup.pids(group)) == {run.spawned.pid, run.init_pid, run.payload_pid()}


def test_a_stranger_in_the_runs_cgroup_refuses_the_start(place: Place) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger, place.launch() as run:
        held(run)
        assert cgroup.join(Path(str(run.record.cgroup)), stranger.pid)

        with pytest.raises(NotSealed, match=f"process {stranger.pid} is beside it in its cgroup"):
            run.release()
    assert not place.marker.exists()
    assert place.host.left_over() == []


def test_one_that_is_gone_joins_no_cgroup(place: Place) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with place.launch() as run:
        assert not cgroup.join(Path(str(run.record.cgroup)), gone.pid)
        with pytest.raises(CannotSeal, match="cannot move process 1 to cgroup /nowhere"):
            cgroup.join(Path("/nowhere"), 1)


# What root puts over the system's own programs


def programs(directory: Path, *names: str) -> Path:
    """Programs that say who has run them, and with what rights."""
    directory.mkdir()
    for name in names:
        (directory / name).write_text(f'#!/usr/bin/dash\n/usr/bin/grep CapEff /proc/self/status >>"{directory}/{name}.ran"\n')
        (directory / name).chmod(0o755)
    return directory


def test_programs_that_stand_in_the_view_are_not_run_outside_of_it(place: Place) -> None:
    """Of an image's /usr/bin neither its sh nor its bwrap may become the sandbox's maker: that one has every capability."""
    own = programs(place.host.directory / "own", "sh", "bwrap")

    with place.launch("true", ro_bind=[f"{own}:/usr/bin"]) as run:
        # It has no setsid(1).
        run.release()
        with pytest.raises(CannotSeal, match="bwrap failed with status 1"):
            run.wait(60)
        assert run.receipt.verdict == "inconclusive"

    assert sorted(os.listdir(own)) == ["bwrap", "sh"]
    # The same programs, where their maker means them to run.
    subprocess.run([own / "bwrap"], check=True)
    assert "bwrap.ran" in os.listdir(own)


def test_what_root_has_put_there_does_not_start_before_the_seal_is_proved(place: Place) -> None:
    (place.host.directory / "own").mkdir()
    with place.launch(ro_bind=[f"{place.host.directory}/own:/usr/games"]) as run:
        time.sleep(0.2)
        assert run.payload_pid() is None

        run.release()

        lab.wait_for(place.marker.exists, what="it runs")


@pytest.mark.parametrize("early", [True, False])
def test_one_whose_limits_cannot_be_set_does_not_start(place: Place, monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """It was born by then, and is ours to wait for before its init can end."""
    asked: list[int] = []

    def refuse(pid: int, *_: object) -> None:
        asked.append(pid)
        raise PermissionError(1, "Operation not permitted")

    plan = request.plan(["true"], run_id=RUN, cwd="/", environ={}, user="0", tmpfs=() if early else ("/usr/games",))
    ways = Ways(limits={resource.RLIMIT_NOFILE: (64, 64)})
    with monkeypatch.context() as patch:
        patch.setattr(starter, "prlimit", refuse)
        with (
            launch(plan, host=place.kernel, state=place.state, config=Config(), streams=Streams(), ways=ways) as run,
            pytest.raises(CannotSeal, match=r"cannot give the payload its caller's limits: .*Operation not permitted"),
        ):
            run.release()
    assert asked
    assert place.host.left_over() == []


def test_what_does_not_come_to_be_held_keeps_no_proof_waiting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    with monkeypatch.context() as patch:
        # bwrap waits on.
        patch.setattr(starter, "GO", b"")
        patch.setattr(starter, "_WITHIN_S", 0.5)
        with place.launch(checkpoint=steps.append) as run:
            assert run.starter is not None
            assert run.starter._first is not None
            assert not run.starter._first.is_done
            assert steps[-2:] == ["proved", "started"]
            with pytest.raises(CannotSeal, match=r"did not come there within 0\.5 s"):
                run.release()
    assert place.host.left_over() == []


def test_who_is_interrupted_as_bwrap_is_asked_for_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = OwnThread.do
    with place.launch():
        pass
    before = descriptors()
    for late in (False, True):

        def do(self: OwnThread, *arguments: Any, late: bool = late) -> None:
            spawns = arguments[1] is spawn._spawn_with
            if late or not spawns:
                real(self, *arguments)
            if spawns:
                if not late:
                    # It was not asked for, so nobody closes what it would have had.
                    arguments[2].close()
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(OwnThread, "do", do)
            with pytest.raises(KeyboardInterrupt):
                place.launch()
        assert place.host.left_over() == []
        assert descriptors() == before


def test_bwrap_that_cannot_be_kept_hold_of_is_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = os.pidfd_open, itertools.count(1)

    def none_left(pid: int) -> int:
        if next(asked) == 1:
            raise OSError(24, "Too many open files")
        return real(pid)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", none_left)
        with pytest.raises(CannotSeal, match="Too many open files"):
            place.launch()
    assert process.children(os.getpid()) == []
    assert place.host.left_over() == []


def test_what_ended_before_it_was_let_go_moves_nobody(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid that is another's by then would be killed at the end."""
    moved: list[int] = []
    real = cgroup.join

    def join(group: Path, pid: int) -> bool:
        moved.append(pid)
        return real(group, pid)

    monkeypatch.setattr(cgroup, "join", join)
    with place.launch("true") as run:
        pid = held(run)
        os.kill(pid, 9)
        lab.wait_for(lambda: not process.lives(pid), what="it is dead")
        # Until we have waited for it, its init does not end.
        assert process.lives(run.init_pid)
        run.release()
        assert run.wait(60) == 137
        assert run.receipt.verdict == "inconclusive"

    assert set(moved) <= {run.spawned.pid, run.init_pid, pid}
    assert place.host.left_over() == []


# What becomes the payload is its user's for the last two programs, and other processes of that user may write into it.


def test_what_got_away_from_who_holds_it_does_not_run_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was put into it executes something, takes over its pid, and nobody traces it."""

    def get_away(self: FirstStep, _executions: int) -> None:
        self.let_go()

    with monkeypatch.context() as patch:
        patch.setattr(FirstStep, "further", get_away)
        with place.launch("sleep", "60") as run, pytest.raises(NotSealed, match="it is not held, and has not ended"):
            run.release()
    assert place.host.left_over() == []


def test_one_that_starts_another_process_before_its_time_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    own = place.host.directory / "env"
    own.write_text('#!/bin/sh\nsleep 60 &\nexec /usr/bin/env "$@"\n')
    own.chmod(0o755)
    real = process.tool
    monkeypatch.setattr(process, "tool", lambda name: str(own) if name == "env" else real(name))
    with place.launch() as run, pytest.raises(CannotSeal, match="it has started another process before that"):
        run.release()
    assert not place.marker.exists()
    assert place.host.left_over() == []


def test_who_is_beside_it_when_it_is_looked_at_refuses_the_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was put there in a way that its tracer is not told of (CLONE_UNTRACED)."""
    real = FirstStep.further

    with subprocess.Popen(["sleep", "60"]) as stranger:

        def further(self: FirstStep, executions: int) -> int | None:
            found = real(self, executions)
            cgroup.join(Path(str(place.state.read(RUN).cgroup)), stranger.pid)
            return found

        monkeypatch.setattr(FirstStep, "further", further)
        with place.launch() as run, pytest.raises(NotSealed, match=f"process {stranger.pid} is beside it in its cgroup"):
            run.release()
    assert not place.marker.exists()
    assert place.host.left_over() == []


def test_who_waits_for_what_is_not_his_any_more_is_not_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells who sleeps in waitpid(2); and a launch that is given up ends its thread."""
    real, threads = os.waitpid, threading.active_count()

    def never(pid: int, options: int) -> tuple[int, int]:
        return (0, 0) if options & os.WNOHANG else real(pid, options)

    monkeypatch.setattr(starter, "_WITHIN_S", 0.5)
    with place.launch() as run:
        held(run)
        with monkeypatch.context() as patch:
            patch.setattr(os, "waitpid", never)
            with pytest.raises(CannotSeal, match=r"did not come there within 0\.5 s"):
                run.release()
    assert threading.active_count() == threads
    assert place.host.left_over() == []


@pytest.mark.parametrize("lacking", range(1, 5))
def test_where_a_thread_cannot_be_had_nothing_is_left_open(place: Place, monkeypatch: pytest.MonkeyPatch, lacking: int) -> None:
    real, count = threading.Thread.start, itertools.count(1)

    def start(self: threading.Thread) -> None:
        if next(count) == lacking:
            raise RuntimeError("can't start new thread")
        real(self)

    with place.launch():
        pass
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(CannotSeal, match=r"(can't start new thread|Resource temporarily unavailable)"):
            place.launch()
    assert descriptors() == before
    assert place.host.left_over() == []


def test_a_signal_in_the_middle_of_a_spawn_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that spawns goes on, with descriptors that nobody may have closed under it."""
    real = spawn._spawn

    def slow(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        time.sleep(0.3)
        return real(*arguments)

    def interrupt(*_: object) -> None:
        raise Interrupted(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(spawn, "_spawn", slow)
            with pytest.raises(Interrupted):
                place.launch()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert place.host.left_over() == []
    assert not place.marker.exists()


@pytest.mark.parametrize("lacking", [1, 2])
def test_where_a_descriptor_cannot_be_had_none_is_left_open(place: Place, monkeypatch: pytest.MonkeyPatch, lacking: int) -> None:
    real, count = os.memfd_create, itertools.count(1)

    def memfd_create(*arguments: Any) -> int:
        if next(count) == lacking:
            raise OSError(24, "Too many open files")
        return real(*arguments)

    with place.launch():
        pass
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", memfd_create)
        with pytest.raises(CannotSeal, match="Too many open files"):
            place.launch()
    assert descriptors() == before
    assert place.host.left_over() == []


# The thread


def test_a_result_is_told_to_everybody_who_waits_and_a_thread_that_has_ended_takes_nothing() -> None:
    pending: Pending[int] = Pending()
    told: list[int] = []
    waiting = [threading.Thread(target=lambda: told.append(pending.wait())) for _ in range(3)]
    for one in waiting:
        one.start()
    own = OwnThread("test")
    own.do(pending, lambda: 7)
    for one in waiting:
        one.join(10)
    assert told == [7] * 3

    own.end()
    with pytest.raises(RuntimeError, match="has ended"):
        own.call(lambda: 7)


# The view


def test_what_is_masked_in_sys_stays_masked(place: Place) -> None:
    """In a sealed run as in an open one: who spawns bwrap sees the host's /sys."""
    found = [path for path in argv.MASKED_SYS if os.path.isdir(path) and os.listdir(path)]
    assert found
    with place.launch("sh", "-c", f"ls -A {' '.join(found)} >marker; exec sleep 60") as run:
        run.release()
        lab.wait_for(lambda: place.marker.exists() and process.executable(run.payload_pid() or 0) == "sleep", what="it has looked")

    assert not [line for line in place.marker.read_text().splitlines() if line and not line.endswith(":")]


# Sockets


@pytest.mark.parametrize("family", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_a_kernel_without_the_one_dump_for_both_families_is_asked_twice(
    host: lab.Host, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    def refuse(_filters: bytes) -> list[bytes]:
        raise KernelRefused("cannot list TCP sockets: Invalid argument", errno=22)

    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        kind = socket.AF_INET6 if ":" in family else socket.AF_INET
        with socket.socket(kind) as client:
            client.connect((family, server.getsockname()[1]))
            home, far = IPv4Address("127.0.0.1"), IPv4Address("192.0.2.9")
            together = sockets.connected([far, home])
            with monkeypatch.context() as patch:
                patch.setattr(sockets, "_dump_both", refuse)
                apart = sockets.connected([far, home])

    assert together == apart == [home]
