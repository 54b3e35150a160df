"""A launch that fails, wherever it does, leaves nothing, has run nothing, and keeps nobody from trying again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from typing import Any

import pytest

from sealnet import caller, prove, reap, request
from sealnet.errors import CannotSeal, KernelRefused, NotSealed, UsageError
from sealnet.kernel.host import Host
from sealnet.launch import launch
from sealnet.model.config import Config
from sealnet.model.plan import Plan, Seal
from sealnet.records import State
from sealnet.running import Run, Streams
from tests import lab
from tests.crash import descriptors

pytestmark = pytest.mark.root

# The cgroup tree is the machine's own, also for a throw-away host: the run id must be nobody else's.
RUN = caller.new_run_id()
SEALED_STEPS = ("claimed", "allocated", "built", "proved", "started")
SEVERED_STEPS = ("claimed", "built", "proved", "started")

# Every method of the host that a launch uses, in the order of its first use; the severed one goes without the second line.
USED = (
    "add_cgroup", "add_netns", "add_filter", "see", "an_address",
    "see_taken", "add_gate", "add_link", "bring_up", "check_routes", "listeners", "grant", "has_lease",
)  # fmt: skip
SEVERED_USED = USED[:5]
TAKES_AWAY = ("kill", "settle", "revoke", "remove_link", "remove_netns", "remove_cgroup")


class Place:
    """A host on which a run can be launched, with a broker, and a payload that leaves a marker when it runs."""

    def __init__(self, host: lab.Host, broker: socket.socket) -> None:
        self.host, self.broker = host, broker
        self.state = State(host.state)
        self.state.prepare()
        self.kernel = Host(self.state.path, self.state.tag)
        self.marker = host.directory / "marker"
        self.runs: list[Run] = []
        # libnftables keeps a socket from its first use on, and so does the look at a lease; it is no loss of a launch.
        self.kernel.add_gate()
        self.kernel.has_lease(Seal(run_id=RUN, subnet=IPv4Network("198.18.0.0/30"), lease_port=1))

    def plan(self, *, sealed: bool = True, **options: Any) -> Plan:
        argv = ["sh", "-c", "echo ran >marker"]
        return request.plan(argv, run_id=RUN, lease_port=8080 if sealed else None, cwd=str(self.host.directory), **options)

    def launch(self, plan: Plan, checkpoint: Callable[[str], None] = lambda _step: None) -> Run:
        run = launch(plan, host=self.kernel, state=self.state, config=Config(), streams=Streams(), checkpoint=checkpoint)
        self.runs.append(run)
        return run

    def run(self, plan: Plan) -> int:
        with self.launch(plan) as run:
            run.release()
            return run.wait(60)

    @contextlib.contextmanager
    def failing(self, error: type[BaseException], match: str) -> Iterator[None]:
        """A launch fails in here: afterwards nothing of it is left, and it has run nothing."""
        before, threads = descriptors(), threading.active_count()

        with pytest.raises(error, match=match):
            yield

        assert self.host.left_over() == []
        assert not self.marker.exists()
        assert descriptors() == before
        assert threading.active_count() == threads

    def assert_works(self, plan: Plan) -> None:
        """The control: the same run, with nothing in its way."""
        assert self.run(plan) == 0
        assert self.marker.read_text() == "ran\n"
        assert self.host.left_over() == []


@pytest.fixture
def place(host: lab.Host) -> Iterator[Place]:
    with socket.create_server(("0.0.0.0", 8080)) as broker:
        made = Place(host, broker)
        yield made
        for run in made.runs:
            run.close()
        made.kernel.close()


def refuse(name: str, *, late: bool) -> Callable[..., Any]:
    """The method of that name, refused by the kernel: at once, or after it has done its work."""
    real = getattr(Host, name)

    def refused(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options) if late else None
        if hasattr(result, "close"):
            # What add_netns hands out would be the caller's to close; one that fails closes it itself.
            result.close()
        raise KernelRefused(f"cannot {name}: {os.strerror(errno.EPERM)}", errno=errno.EPERM)

    return refused


# Stopped between two steps


@pytest.mark.parametrize("step", SEALED_STEPS)
def test_a_sealed_launch_that_is_stopped_after_a_step_leaves_nothing(place: Place, step: str) -> None:
    done = []

    def stop(now: str) -> None:
        done.append(now)
        if now == step:
            raise KeyboardInterrupt(step)

    with place.failing(KeyboardInterrupt, step):
        place.launch(place.plan(), stop)

    assert tuple(done) == SEALED_STEPS[: SEALED_STEPS.index(step) + 1]
    place.assert_works(place.plan())


@pytest.mark.parametrize("step", SEVERED_STEPS)
def test_a_severed_launch_that_is_stopped_after_a_step_leaves_nothing(place: Place, step: str) -> None:
    done = []

    def stop(now: str) -> None:
        done.append(now)
        if now == step:
            raise KeyboardInterrupt(step)

    with place.failing(KeyboardInterrupt, step):
        place.launch(place.plan(sealed=False), stop)

    assert tuple(done) == SEVERED_STEPS[: SEVERED_STEPS.index(step) + 1]
    place.assert_works(place.plan(sealed=False))


def test_a_launch_that_is_taken_away_before_its_release_has_run_nothing(place: Place) -> None:
    run = place.launch(place.plan())

    run.close()

    assert not place.marker.exists()
    assert place.host.left_over() == []
    place.assert_works(place.plan())


# Refused by the kernel


@pytest.mark.parametrize(("sealed", "used"), [(True, USED), (False, SEVERED_USED)], ids=["sealed", "severed"])
def test_the_methods_that_are_refused_below_are_those_that_a_launch_uses(
    place: Place, monkeypatch: pytest.MonkeyPatch, sealed: bool, used: tuple[str, ...]
) -> None:
    seen: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return real(*arguments, **options)

        return call

    for name, real in inspect.getmembers(Host, inspect.isfunction):
        if not name.startswith("_"):
            monkeypatch.setattr(Host, name, watched(name, real))

    with place.launch(place.plan(sealed=sealed)) as run:
        launched = set(seen)
        run.release()
        run.wait(60)

    assert launched == set(used)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", USED)
def test_a_sealed_launch_that_the_kernel_refuses_leaves_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str, late: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Host, name, refuse(name, late=late))
        with place.failing(KernelRefused, f"^cannot {name}: Operation not permitted$"):
            place.launch(place.plan())

    place.assert_works(place.plan())


@pytest.mark.parametrize("name", SEVERED_USED)
def test_a_severed_launch_that_the_kernel_refuses_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Host, name, refuse(name, late=True))
        with place.failing(KernelRefused, f"^cannot {name}: Operation not permitted$"):
            place.launch(place.plan(sealed=False))

    place.assert_works(place.plan(sealed=False))


def test_a_bug_in_the_middle_of_a_launch_leaves_nothing_and_is_not_dressed_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(prove, "network", lambda *_, **__: 1 // 0)
        with place.failing(ZeroDivisionError, "division"):
            place.launch(place.plan())

    place.assert_works(place.plan())


def test_a_probe_that_the_filter_lets_through_is_no_proof(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = prove.network

    def lie(*arguments: Any, **options: Any) -> prove.Proof:
        proof = real(*arguments, **options)
        checks = [dataclasses.replace(one, found="answered", ok=False) if one.name == "internet" else one for one in proof.checks]
        return proof._replace(checks=checks)

    with monkeypatch.context() as patch:
        patch.setattr(prove, "network", lie)
        with place.failing(NotSealed, "cannot prove the seal of run .*: internet: .* found answered"):
            place.launch(place.plan())

    place.assert_works(place.plan())


def test_a_lease_that_does_not_read_back_is_no_lease(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Host, "grant", lambda *_, **__: False)
        with place.failing(NotSealed, "its lease does not read back"):
            place.launch(place.plan())

    place.assert_works(place.plan())


# Refused by what the host has not


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ro_bind": ["/dev/null:/x"]}, "cannot bind /dev/null read-only: it is neither a directory nor a regular file"),
        ({"tmpfs": ["/etc/passwd/below"]}, "cannot mount tmpfs /etc/passwd/below .*: Not a directory"),
    ],
)
def test_a_bind_that_cannot_be_made_leaves_nothing(place: Place, options: dict[str, Any], words: str) -> None:
    with place.failing(CannotSeal, words):
        place.launch(place.plan(**options))

    place.assert_works(place.plan())


@pytest.mark.parametrize("option", ["bind", "ro_bind"])
def test_a_bind_of_what_does_not_exist_is_a_usage_error(place: Place, option: str) -> None:
    with pytest.raises(UsageError, match=r"cannot use --(ro-)?bind /no/such/path: No such file or directory"):
        place.plan(**{option: ["/no/such/path"]})


def test_a_view_that_bwrap_cannot_make_leaves_nothing(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    with place.failing(CannotSeal, r"cannot start the payload of run "):
        place.run(place.plan(bwrap_args=b"--ro-bind\n/no/such/path\n/srv\n"))

    assert "/no/such/path" in capfd.readouterr().err
    place.assert_works(place.plan())


def test_a_bwrap_that_died_before_its_release_is_a_run_that_ended(place: Place) -> None:
    with place.launch(place.plan()) as run:
        run.kill()
        run.spawned.wait(60)

        run.release()

        assert run.wait(60) == 128 + signal.SIGKILL
    assert not place.marker.exists()
    place.assert_works(place.plan())


@pytest.mark.parametrize("tool", ["bwrap", "setsid", "setpriv", "env", "sh"])
def test_a_host_without_a_tool_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    from sealnet.kernel import process

    real = process.tool

    def missing(name: str) -> str:
        if name == tool:
            raise CannotSeal(f"cannot find tool {name}")
        return real(name)

    with monkeypatch.context() as patch:
        patch.setattr(process, "tool", missing)
        with place.failing(CannotSeal, f"cannot find tool {tool}"):
            place.launch(place.plan())

    place.assert_works(place.plan())


def test_a_run_that_may_be_severed_is_severed_where_it_cannot_be_sealed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "grant", refuse("grant", late=True))

    with place.launch(place.plan(fallback="sever")) as run:
        record = run.record
        run.release()
        assert run.wait(60) == 0

    assert (record.confinement, record.asked) == ("severed", "sealed")
    assert record.why_severed == "cannot grant: Operation not permitted"
    assert place.marker.exists()


# Refused twice: the launch, and what takes it away


@pytest.mark.parametrize("name", TAKES_AWAY)
def test_what_a_failed_launch_could_not_take_away_is_noted_and_left_for_reap(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def stop(step: str) -> None:
        if step == "started":
            raise NotSealed("cannot go on")

    with monkeypatch.context() as patch:
        patch.setattr(Host, name, refuse(name, late=False))
        with pytest.raises(NotSealed, match="cannot go on") as caught:
            place.launch(place.plan(), stop)

    kept = place.state.read(RUN).subnet, list(place.state.reservations().values())
    ran = place.marker.exists()
    reaped = reap.reap_orphans(place.kernel, place.state)

    assert f"cannot {name}: Operation not permitted" in "".join(caught.value.__notes__)
    assert kept == ("198.18.0.0/30", [RUN])
    assert not ran
    assert reaped == [RUN]
    assert place.host.left_over() == []
    place.assert_works(place.plan())


@pytest.mark.parametrize("errno_", [errno.EMFILE, errno.ENOMEM])
def test_a_shortage_of_the_process_is_told_like_any_other_refusal(place: Place, monkeypatch: pytest.MonkeyPatch, errno_: int) -> None:
    def short(*_: Any) -> tuple[int, int]:
        raise OSError(errno_, os.strerror(errno_))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe2", short)
        with place.failing(CannotSeal, f"^cannot start run .*: {os.strerror(errno_)}$"):
            place.launch(place.plan())

    place.assert_works(place.plan())
