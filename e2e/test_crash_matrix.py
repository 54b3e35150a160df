"""SIGKILL at every step: of a run's set-up and end, of reap, and of every helper. Never open meanwhile, and one reap takes what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sealnet import cli, guard, prove, reap, request, supervise
from sealnet.kernel import cgroup, identity, libc, netns, process, seccomp
from sealnet.kernel import host as kernels
from sealnet.model.config import Config
from sealnet.model.plan import LEASE_TTL_S, User
from sealnet.records import State
from tests import lab, steps
from tests.doors import FIRST_GATEWAY, NEXT_GATEWAY, Doors, lines
from tests.lab import wait_for
from tests.nursery import Nursery, children
from tests.steps import Step

# Every step, and its moment before as well, instead of a choice.
ALL = os.environ.get("SEALNET_CRASH_ALL") == "1"
pytestmark = [pytest.mark.root, pytest.mark.timeout(3600 if ALL else 300)]

WIDTH = 6
# One of so many steps of the set-up; but all of the last ones, from the proof on.
SPARSE, NEAR = 5, 24
BYSTANDER = "bystander"
USERS = {"sealed": "root", "severed": "nobody", "allowlist": "root"}
OPTIONS = {
    "sealed": ("--lease-port", "8080"),
    "severed": (),
    # The broker on the gateway tells that its lease stood; the door leads to the LAN peer.
    "allowlist": ("--lease-port", "8080", "--allow-private", "lan.test:7000"),
}


def is_chance(step: Step) -> bool:
    """Whether a cgroup has emptied by itself when it is killed, and what bwrap has started by the time it is moved."""
    return "cgroup.kill" in step.name or ("cgroup.procs" in step.name and step.nth > 1)


@dataclasses.dataclass
class Case:
    """A run that is driven in a copy of the test's process, as `sealnet run` is. Its payload tries the targets until it is let end."""

    place: Place
    run_id: str
    confinement: str
    step: Step | None = None
    done: bool = True
    halt_at: str | None = None
    lease_ttl_s: int = LEASE_TTL_S

    def __post_init__(self) -> None:
        self.directory = self.place.host.directory / self.run_id
        self.directory.mkdir()
        self.directory.chmod(0o777)

    def __str__(self) -> str:
        return f"{self.confinement} run {self.run_id} that is killed {'after' if self.done else 'before'} step {self.step}"

    @property
    def user(self) -> User:
        return self.place.users[self.confinement]

    @property
    def told(self) -> list[str]:
        """By whatever was in the run's namespace."""
        return lines(self.directory / "told")

    @property
    def said(self) -> str:
        """By sealnet."""
        return "\n".join(lines(self.directory / "stderr"))

    def let_end(self) -> None:
        (self.directory / "stop").touch()

    # In the copy

    def drive(self) -> int:
        os.chdir(self.directory)
        # What the others of its batch leave is to be looked at first.
        reap.reap_orphans = lambda *_, **__: []
        request.config = lambda: Config(lease_ttl_s=self.lease_ttl_s)
        # What is looked at while a run lives is looked at in its own time: each run is to take the same steps.
        guard._FIRST_LOOK_S = guard.GLANCE_S = 3600.0
        if self.halt_at is not None:
            supervise.Signals.checkpoint = self._halt  # type: ignore[method-assign, assignment]
        options = OPTIONS[self.confinement]
        payload = self.place.doors.payload(leased=bool(options))
        return self._tool(["run", "--run-id", self.run_id, *options, "--user", self.user.name, "--", *payload])

    def reap(self) -> int:
        return self._tool(["reap", self.run_id])

    def _tool(self, argv: Sequence[str]) -> int:
        names = ("/dev/null", "stdout", "stderr", "steps")
        files = [(self.directory / name).open("w", buffering=1) for name in names]
        for fd, file in enumerate(files[:3]):
            os.dup2(file.fileno(), fd)
        sys.stdout, sys.stderr = files[1:3]

        def write_down(step: Step, done: bool) -> None:
            print(json.dumps([*step, done]), file=files[3])

        # What is imported for the first time would be compiled once, and be a step of one case alone.
        sys.dont_write_bytecode = True
        steps.watch(self.run_id, write_down if self.step is None else steps.die_at(self.step, done=self.done))
        sys.argv = ["sealnet", *argv]
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 98

    def _halt(self, step: str) -> None:
        if step == self.halt_at:
            (self.directory / "halted").touch()
            wait_for((self.directory / "go").exists, timeout_s=30)

    # Beside it

    def steps(self) -> tuple[list[Step], list[Step]]:
        """What it has written down: of the time until the payload runs, and of the end."""
        told = [(Step(name, nth), done) for name, nth, done in map(json.loads, lines(self.directory / "steps"))]
        released = next((at for at, (step, done) in enumerate(told) if step.name == steps.RELEASED and done), len(told))
        begun = [(at, step) for at, (step, done) in enumerate(told) if not done and not is_chance(step)]
        return [step for at, step in begun if at < released], [step for at, step in begun if at > released]

    def namespace(self) -> int | None:
        """A descriptor of the run's network namespace, by its name or by whoever is in its cgroup; None where neither is left."""
        own = os.stat("/proc/self/ns/net")
        processes = [f"/proc/{pid}/ns/net" for pid in self.processes()]
        for path in (f"/run/netns/sealnet-{self.run_id}", *processes):
            with contextlib.suppress(OSError):
                found = os.stat(path)
                if found.st_dev == own.st_dev and found.st_ino != own.st_ino:
                    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return None

    def processes(self) -> list[int]:
        """Where reap looks: in its cgroup, and in its namespace."""
        group = cgroup.find(self.run_id, self.place.state.tag)
        found = cgroup.pids(group) if group is not None else []
        with contextlib.suppress(OSError):
            inode = os.stat(f"/run/netns/sealnet-{self.run_id}").st_ino
            found += [pid for pid in process.pids() if netns.inode_of(pid) == inode]
        return found

    def try_inside(self, rounds: int, *, join: bool = False) -> int:
        """For a copy of the test's process: to the run's namespace, with the payload's rights; try the targets. Never returns then."""
        namespace = self.namespace()
        assert namespace is not None
        group = cgroup.find(self.run_id, self.place.state.tag)
        if join and group is not None:
            (group / "cgroup.procs").write_text("0")
        record = self.place.host.record(self.run_id)
        gateway = record["gateway"] if record else None
        argv = self.place.doors.payload(gateway, leased=gateway is not None, rounds=rounds)
        # Not by its path: the way there is not open to everybody.
        os.chdir(self.directory)
        libc.setns(namespace, libc.CLONE_NEWNET)
        identity.assume(self.user, self.place.programs[self.confinement])
        os.execve(argv[0], argv, {})


class Place:
    """A throw-away host with its doors, and a run that lives there all the time."""

    def __init__(self, host: lab.Host) -> None:
        self.host, self.doors = host, Doors(host)
        hosts = host.directory / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{lab.LAN_PEER} lan.test\n")
        hosts.chmod(0o644)
        libc.mount(str(hosts), os.path.realpath("/etc/hosts"), None, libc.MS_BIND)
        self.state = State(host.state)
        self.state.prepare()
        self._kernel = kernels.Host(self.state.path, self.state.tag)
        self.users = {name: process.user(user) for name, user in USERS.items()}
        self.programs = {name: seccomp.filter_for(user, allow_userns=False) for name, user in self.users.items()}
        self._bystander = host.directory / BYSTANDER
        self._bystander.mkdir()
        payload = self.doors.payload(leased=True)
        self._run = host.spawn_run(BYSTANDER, *payload, options=("--lease-port", "8080"), cwd=self._bystander)
        wait_for(lambda: "round" in lines(self._bystander / "told"), what="the bystander has tried")
        self._baseline = self._left()
        self.numbers = itertools.count()

    def end(self) -> None:
        """The bystander has had its broker all the time, and nothing else; what nobody had was there to be had."""
        (self._bystander / "stop").touch()
        assert self._run.wait(20) == 0
        told = lines(self._bystander / "told")
        assert told[0] == "the broker answered"
        assert set(told[1:]) == {"round"}
        self._kernel.close()
        assert not self.doors.strangers()
        self.doors.assert_open_to_the_host()

    def case(self, confinement: str, step: Step | None = None, **options: Any) -> Case:
        return Case(self, f"crash-{os.getpid()}-{next(self.numbers)}", confinement, step, **options)

    def nursery(self, deeds: Sequence[Callable[[], int]]) -> Nursery:
        return Nursery(self.host.directory / f"nursery-{next(self.numbers)}", deeds)

    def _left(self) -> set[str]:
        """Of any run, and of sealnet's own; what moves by itself left out. Processes are the nursery's affair."""
        mounts = [line.split(" ")[4] for line in lines(Path("/proc/self/mountinfo"))]
        # Elsewhere others of this machine may mount what they like.
        found = [*self.host.things_left_over(), *(f"mount {target}" for target in mounts if target.startswith("/run/"))]
        found += [f"file {path}" for path in sorted(os.listdir(self.host.state))]
        found += [f"staged {path}" for path in os.listdir(self.host.state / "stage")]
        return {re.sub(r"'expires': \d+", "", line) for line in found}

    def assert_nothing_is_left(self) -> None:
        """But the bystander, which is as sealed as it ever was, and with it the gate."""
        wait_for(lambda: self._left() == self._baseline, what=f"nothing is left: {self._left() ^ self._baseline}")
        again = prove.again(self._kernel, self.state, self.state.read(BYSTANDER))
        assert (again["verdict"], again["faults"]) == ("sealed", [])
        assert not [line for line in lines(self._bystander / "told") if line.startswith(("OPEN", "no broker"))]

    def _leases(self) -> list[dict[str, Any]]:
        told = json.loads(self.host.run("nft", "-j", "list", "set", "inet", "sealnet", "leases").stdout)["nftables"]
        return [element["elem"] for entry in told for element in entry.get("set", {}).get("elem", [])]

    def leases(self) -> list[str]:
        """The gateways of those that stand."""
        return sorted(lease["val"]["concat"][2] for lease in self._leases())

    def assert_leases_end_by_themselves(self) -> None:
        leases = self._leases()
        assert leases
        assert all(0 <= lease["expires"] <= lease["timeout"] <= LEASE_TTL_S for lease in leases)

    def reap(self, number: int) -> None:
        """By `reap --orphans`, or by the next run that starts."""
        done = self.host.sealnet(*(("run", "--", "true") if number % 2 else ("reap", "--orphans")))
        assert (done.returncode, done.stderr) == (0, "")


def batches(cases: Sequence[Any], size: int) -> Iterator[tuple[int, Sequence[Any]]]:
    for number, at in enumerate(range(0, len(cases), size)):
        yield number, cases[at : at + size]


@pytest.fixture
def place(host: lab.Host) -> Iterator[Place]:
    made = Place(host)
    yield made
    made.end()


def chosen(sparse: Sequence[Step], whole: Sequence[Step] = ()) -> list[tuple[Step, bool]]:
    """(step, whether it is done by then)."""
    if ALL:
        return [(step, done) for step in (*sparse, *whole) for done in (False, True)]
    return [(step, True) for step in (*sparse[::SPARSE], *whole)]


def look_inside(place: Place, cases: Sequence[Case]) -> None:
    """Where a namespace is left, whoever has the payload's rights in there reaches nothing."""
    there = [case for case in cases if (fd := case.namespace()) is not None and not os.close(fd)]
    before = [case.told.count("round") for case in there]
    with place.nursery([lambda case=case: case.try_inside(2) for case in there]) as nursery:  # type: ignore[misc]
        assert [nursery.wait(number) for number in range(len(there))] == [0] * len(there)
        nursery.assert_empty()
    assert all(case.told.count("round") >= known + 2 for case, known in zip(there, before, strict=True))


def assert_never_open(place: Place, cases: Sequence[Case]) -> None:
    opened = [f"{case}: {line}" for case in cases for line in case.told if line.startswith("OPEN")]
    assert not opened
    assert not place.doors.strangers()


def let_end(case: Case, nursery: Nursery, number: int) -> None:
    """Once its payload has tried everything, if it ever does."""
    wait_for(lambda: "round" in case.told or nursery.status(number) is not None, timeout_s=60, what=f"{case} runs")
    case.let_end()


def strike(place: Place, number: int, cases: Sequence[Case], held: Sequence[Step]) -> None:
    """Let each die at its step; then there is nothing that is open, and one reap takes all that is left.

    No payload has run that was `held`.
    """
    with place.nursery([case.drive for case in cases]) as nursery:
        for at, case in enumerate(cases):
            let_end(case, nursery, at)
        ended = [nursery.wait(at) for at in range(len(cases))]
        assert ended == [-signal.SIGKILL] * len(cases), [(str(case), status, case.said) for case, status in zip(cases, ended, strict=True)]
        started = [f"{case}: {case.told}" for case in cases if case.step in held and case.told]
        assert not started, "the payload has run before it was released"
        wait_for(lambda: {*nursery.left()} <= {pid for case in cases for pid in case.processes()}, what=f"{nursery.left()} have ended")
        look_inside(place, cases)
        place.assert_leases_end_by_themselves()
        place.reap(number)
        nursery.assert_empty()
    place.assert_nothing_is_left()
    assert_never_open(place, cases)


@pytest.mark.parametrize("confinement", ["sealed", "severed", "allowlist"])
def test_a_death_at_any_step_of_a_run_opens_nothing_and_leaves_nothing_that_one_reap_does_not_take(place: Place, confinement: str) -> None:
    first = place.case(confinement)
    with place.nursery([first.drive]) as nursery:
        let_end(first, nursery, 0)
        assert (nursery.wait(0), first.said) == (0, "")
        nursery.assert_empty()
    place.assert_nothing_is_left()
    set_up, ends = first.steps()
    assert len(set_up) > 100
    assert len(ends) > 12
    of_door = ["listen for a proxy", "serve a proxy", "preflight", "stop", "close"] if confinement == "allowlist" else []
    assert [step.name for step in (*set_up, *ends) if step.name.startswith("door: ")] == [f"door: {what}" for what in of_door]

    early, late = set_up[:-NEAR], set_up[-NEAR:]
    doors = [step for step in early if step.name.startswith("door: ")]
    others = [step for step in early if step not in doors]
    if doors and not ALL:
        # The rest of it is a sealed run's.
        others = others[::3]
    cases = [place.case(confinement, step, done=done) for step, done in chosen(others, [*doors, *late, *ends])]
    for number, batch in batches(cases, WIDTH):
        # The last is to let it go, and is done before the whole of the release is.
        strike(place, number, batch, held=[step for step in set_up[:-1] if step.name != steps.RELEASED])
    if confinement != "severed":
        # The control of it all: from its lease on, and not before, each has had its broker.
        grant = next(at for at, step in enumerate(set_up) if step.name.startswith("nft: grant the lease"))
        unleased = {(step, done) for step in set_up[:grant] for done in (False, True)} | {(set_up[grant], False)}
        # What bwrap's child is held by goes on beside (a pipe lets it go on until then), and so does who moves it to its cgroup.
        beside = re.compile(r"^ptrace |^write a pipe$|/cgroup\.(procs|threads)$")
        ordered = [case for case in cases if case.step is not None and not beside.search(case.step.name)]
        heard = {str(case): "the broker answered" in case.told for case in ordered}
        assert heard == {str(case): (case.step, case.done) not in unleased for case in ordered}


def orphan(place: Place, cases: Sequence[Case]) -> None:
    """Runs whose supervisors were killed when their payloads had tried everything."""
    with place.nursery([case.drive for case in cases]) as nursery:
        for at, case in enumerate(cases):
            wait_for(lambda case=case: "round" in case.told, timeout_s=30, what=f"the payload of {case} tries")  # type: ignore[misc]
            os.kill(nursery.pid(at), signal.SIGKILL)
        assert [nursery.wait(at) for at in range(len(cases))] == [-signal.SIGKILL] * len(cases)
        nursery.assert_empty()


def test_a_death_of_reap_at_any_step_opens_nothing_and_leaves_nothing_that_the_next_does_not_take(place: Place) -> None:
    def reaped(number: int, batch: Sequence[Case], step_of: dict[str, tuple[Step, bool]]) -> None:
        orphan(place, batch)
        # Somebody lives in there, as a payload may that outlives its supervisor.
        with place.nursery([lambda case=case: case.try_inside(0, join=True) for case in batch]) as payloads:  # type: ignore[misc]
            known = [case.told.count("round") for case in batch]
            for case, before in zip(batch, known, strict=True):
                wait_for(lambda case=case, before=before: case.told.count("round") > before + 1, timeout_s=30, what=str(case))  # type: ignore[misc]
                case.step, case.done = step_of.get(case.run_id, (None, True))
            with place.nursery([case.reap for case in batch]) as reaps:
                ended = [reaps.wait(at) for at in range(len(batch))]
                expected = [-signal.SIGKILL if case.step else 0 for case in batch]
                assert ended == expected, [(str(case), status, case.said) for case, status in zip(batch, ended, strict=True)]
                look_inside(place, batch)
                place.reap(number)
                reaps.assert_empty()
            payloads.assert_empty()
        place.assert_nothing_is_left()
        assert_never_open(place, batch)

    first = place.case("sealed")
    reaped(0, [first], {})
    every, none = first.steps()
    assert len(every) > 20
    assert none == []

    wanted = [(place.case("sealed"), one) for one in chosen((), every)]
    for number, batch in batches(wanted, WIDTH):
        reaped(number, [case for case, _one in batch], {case.run_id: one for case, one in batch})


# Helpers


def executable(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    return ""


def find(helper: str, supervisor: int) -> int | None:
    below = children(supervisor)
    bwrap = next((pid for pid in below if executable(pid) == "bwrap"), 0)
    init = next(iter(children(bwrap)), 0)
    of = {
        "bwrap": bwrap,
        "init": init,
        "payload": next(iter(children(init)), None),
    }
    return of[helper]


def kill(helper: str, supervisor: int) -> None:
    os.kill(wait_for(lambda: find(helper, supervisor), what=f"there is a {helper}"), signal.SIGKILL)


# 137: bwrap was ready, and died of the signal itself, or what it had begun to start. Of one that was killed before it had executed anything
# bwrap says nothing: the payload could not be started.
_EITHER = [(125, "cannot start the payload of run .*: bwrap failed with status 137"), (137, "")]
SET_UP = (
    ("claimed", None, 0, ""),
    ("built", "bwrap", 137, ""),
    ("built", "init", 0, ""),
    ("built", "payload", 0, ""),
    ("started", "bwrap", 137, ""),
    ("started", "init", 0, ""),
    ("started", "payload", 0, ""),
)


@pytest.mark.parametrize(("step", "helper", "status", "words"), SET_UP)
def test_a_helper_that_is_killed_before_the_payload_ends_the_run_and_leaves_nothing(
    place: Place, step: str, helper: str | None, status: int, words: str
) -> None:
    case = place.case("sealed", halt_at=step)
    with place.nursery([case.drive]) as nursery:
        wait_for((case.directory / "halted").exists, timeout_s=30, what=f"the run is {step}")
        if helper is not None:
            kill(helper, nursery.pid(0))
        (case.directory / "go").touch()
        case.let_end()
        expected = _EITHER if helper in ("init", "payload") else [(status, words)]
        ended = nursery.wait(0)
        assert [words for status, words in expected if status == ended and re.search(words, case.said)], (ended, case.said)
        assert helper is None or case.told == []
        nursery.assert_empty()

    place.assert_nothing_is_left()
    assert_never_open(place, [case])


@pytest.mark.parametrize("confinement", ["sealed", "severed"])
@pytest.mark.parametrize("helper", ["bwrap", "init", "payload"])
def test_a_helper_that_is_killed_while_the_payload_lives_ends_the_run_and_leaves_nothing(
    place: Place, helper: str, confinement: str
) -> None:
    case = place.case(confinement)
    with place.nursery([case.drive]) as nursery:
        wait_for(lambda: "round" in case.told, timeout_s=30, what="the payload tries")
        kill(helper, nursery.pid(0))
        assert (nursery.wait(0), case.said) == (137, "")
        nursery.assert_empty()

    place.assert_nothing_is_left()
    assert_never_open(place, [case])


@pytest.mark.parametrize(
    ("step", "helper"),
    [(step, helper) for step, helper, _status, _words in SET_UP if helper] + [(None, one) for one in ("bwrap", "init", "payload")],
)
def test_a_helper_that_is_killed_with_its_supervisor_leaves_nothing_that_one_reap_does_not_take(
    place: Place, step: str | None, helper: str
) -> None:
    cases = [place.case("sealed", halt_at=step) for _ in range(2)]
    with place.nursery([case.drive for case in cases]) as nursery:
        for case in cases:
            lives = (case.directory / "halted").exists if step else lambda case=case: "round" in case.told  # type: ignore[misc]
            wait_for(lives, timeout_s=30, what=f"{case} is {step or 'running'}")
        # One dies of its helper first, the other of its supervisor.
        kill(helper, nursery.pid(0))
        os.kill(nursery.pid(0), signal.SIGKILL)
        pid = wait_for(lambda: find(helper, nursery.pid(1)), what=f"there is a {helper}")
        os.kill(nursery.pid(1), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        nursery.wait(0), nursery.wait(1)
        look_inside(place, cases)
        place.reap(0)
        nursery.assert_empty()

    place.assert_nothing_is_left()
    assert_never_open(place, cases)


def test_a_supervisor_that_is_stopped_loses_the_lease_and_has_it_again_when_it_goes_on(place: Place) -> None:
    case = place.case("sealed", lease_ttl_s=2)
    with place.nursery([case.drive]) as nursery:
        wait_for(lambda: "round" in case.told, timeout_s=30, what="the payload tries")
        os.kill(nursery.pid(0), signal.SIGSTOP)
        wait_for(lambda: place.leases() == [FIRST_GATEWAY], timeout_s=20, what="the lease is gone")
        wait_for(lambda: any(line.startswith("no broker") for line in case.told), what="the payload has no broker")
        rounds = case.told.count("round")
        wait_for(lambda: case.told.count("round") > rounds + 1, what="it tries again")
        os.kill(nursery.pid(0), signal.SIGCONT)
        wait_for(lambda: place.leases() == [FIRST_GATEWAY, NEXT_GATEWAY], what="the lease is back")
        wait_for(lambda: case.told.count("the broker answered") == 2, what="the broker answers again")
        case.let_end()
        assert (nursery.wait(0), case.said) == (0, "")
        nursery.assert_empty()

    place.assert_nothing_is_left()
    assert_never_open(place, [case])
