"""Many runs at once, many in a row, and many killed at any moment of their set-up: nothing clashes and nothing stays."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

import sealnet
from sealnet import SealnetError
from sealnet.kernel import cgroup
from sealnet.kernel.process import is_stopped
from sealnet.records import State
from tests.lab import LAN_PEER, SEALNET, Host, wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

LEASE = ("--lease-port", "8080")
WIDTH = 4


def assert_no_lock_is_held(host: Host) -> None:
    for path in host.state.rglob("*lock"):
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def waits_for_a_lock(pid: int) -> bool:
    """Whether a process is blocked in flock(2): an arrow marks the waiting in /proc/locks."""
    return any("->" in line and f" {pid} " in line for line in Path("/proc/locks").read_text().splitlines())


def test_thirty_at_once_get_thirty_subnets(host: Host) -> None:
    """LIF-11, https://github.com/kubernetes/minikube/issues/10833 and https://github.com/moby/libnetwork/issues/915"""
    host.broker(8080)
    routed = [IPv4Network("198.18.0.0/27"), IPv4Network("198.18.1.0/30")]
    for prefix in routed:
        host.run("ip", "route", "add", str(prefix), "via", LAN_PEER)
    host.settled()
    # They stay until all of them have been seen together.
    script = "until [ -e go ]; do sleep 0.1; done; exec curl -fsS http://broker.sealnet:8080/hello"
    host.state.mkdir(mode=0o711, exist_ok=True)
    with open(host.state / "alloc.lock", "w") as lock:
        # Nobody gets past this lock for now, so these are killed while they allocate.
        fcntl.flock(lock, fcntl.LOCK_EX)
        doomed = [host.spawn(*SEALNET, "run", "--run-id", f"doomed-{number}", *LEASE, "--", "touch", "ran") for number in range(4)]
        for process in doomed:
            wait_for(lambda process=process: waits_for_a_lock(process.pid), timeout_s=30, what=f"{process.pid} is allocating")
        leased = {
            f"leased-{number}": host.spawn(*SEALNET, "run", "--run-id", f"leased-{number}", *LEASE, "--", "sh", "-c", script)
            for number in range(30)
        }
        severed = [host.spawn(*SEALNET, "run", "--", "sleep", "2") for _ in range(6)]
        for process in doomed:
            process.kill()
            process.wait(60)

    def running() -> list[dict[str, Any]] | None:
        found = [host.record(run_id) for run_id in leased]
        there = [record for record in found if record and record["state"] == "running"]
        ended = [process for process in leased.values() if process.poll() is not None]
        # One that has failed never will be.
        assert ended == [], [process.communicate() for process in ended]
        return there if len(there) == len(leased) else None

    records = wait_for(running, timeout_s=90, what="thirty runs are running")
    routes = host.run("ip", "route").stdout
    listed = json.loads(host.sealnet("ls", "--json").stdout)
    Path("go").touch()
    outputs = [(process.communicate(timeout=60), process.returncode) for process in leased.values()]
    statuses = [process.wait(60) for process in severed]

    subnets = [IPv4Network(record["subnet"]) for record in records]
    assert len(set(subnets)) == 30
    assert not any(subnet.overlaps(prefix) for subnet in subnets for prefix in routed)
    assert all(f"{record['subnet']} dev {record['ifname']} " in routes for record in records)
    assert set(leased) <= {shown["run_id"] for shown in listed}
    assert outputs == [(("/hello", ""), 0)] * 30
    assert statuses == [0] * 6
    assert not Path("ran").exists()
    assert [process.returncode for process in doomed] == [-signal.SIGKILL] * 4
    assert host.sealnet("reap", "--orphans").returncode == 0
    assert host.left_over() == []
    assert_no_lock_is_held(host)


def test_a_run_is_taken_away_though_whoever_looks_at_it_was_halted(host: Host) -> None:
    """A supervisor looks at its run under the lock of the run's directory, and ^Z may come then."""
    host.broker(8080)
    run = host.spawn_run("halted", "sleep", "600", options=LEASE)
    script = """
        import fcntl, os, sys
        fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
        print("held", flush=True)
        sys.stdin.read()
        print("let go", flush=True)
    """
    looking = host.python(script, str(host.state / "runs" / "halted"), stdin=subprocess.PIPE)
    assert looking.stdout is not None
    assert looking.stdin is not None
    assert looking.stdout.readline() == "held\n"
    os.kill(looking.pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(looking.pid), what="it is halted")
    looking.stdin.close()

    reaped = host.sealnet("reap", "halted")

    assert (reaped.returncode, looking.stdout.readline()) == (0, "let go\n"), reaped.stderr
    assert run.wait(60) == 137
    assert host.left_over() == []


def test_fifty_runs_in_a_row_of_one_id_follow_at_once(host: Host) -> None:
    """LIF-03, https://github.com/ubicloud/ubicloud/pull/1385"""
    host.broker(8080)

    done = [host.sealnet("run", "--run-id", "again", *LEASE, "--", "true") for _ in range(50)]

    assert [(run.returncode, run.stderr) for run in done] == [(0, "")] * 50


def test_fifty_runs_in_a_row_of_one_program_leave_it_as_it_was(host: Host) -> None:
    """LIF-03, https://github.com/ubicloud/ubicloud/pull/1385: here one run ends and the next begins within microseconds."""
    host.broker(8080)
    sealnet.run(["true"], lease_port=8080)
    descriptors = len(os.listdir("/proc/self/fd"))

    again = [sealnet.run(["true"], lease_port=8080, run_id="again").returncode for _ in range(50)]
    fresh = [sealnet.run(["true"], lease_port=8080).returncode for _ in range(50)]

    assert again == fresh == [0] * 50
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert host.left_over() == []


@contextlib.contextmanager
def beside(function: Callable[[], object]) -> Iterator[None]:
    """A copy of this process does `function` over and over meanwhile, and never fails at it."""
    stop, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(stop)
        with contextlib.suppress(BaseException):
            while True:
                function()
                if select.select([], [told], [], 0)[1] and not _is_read(told):
                    os._exit(0)
        os._exit(1)
    os.close(told)
    try:
        yield
    finally:
        os.close(stop)
        _pid, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "what was done beside it has failed"


def _is_read(fd: int) -> bool:
    """Whether the other end of a pipe is open still."""
    poller = select.poll()
    poller.register(fd, select.POLLERR)
    return not poller.poll(0)


@contextlib.contextmanager
def own_cgroup() -> Iterator[None]:
    """This process is in a cgroup of its own meanwhile."""
    before = next(line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    back = Path(f"{cgroup.root()}{before}")
    own = back / f"test-{os.getpid()}"
    own.mkdir()
    (own / "cgroup.procs").write_text("0")
    try:
        yield
    finally:
        (back / "cgroup.procs").write_text("0")
        cgroup.remove(own)


def cgroups(prefix: str) -> list[Path]:
    """Every cgroup of a run whose id begins so, wherever it is and whoever's mark it bears."""
    found = [Path(directory) for directory, _below, _files in os.walk(cgroup.root())]
    return [path for path in found if path.parent.name == "sealnet" and path.name.startswith(prefix)]


def test_a_sweep_takes_no_claim_that_is_being_made(host: Host) -> None:
    """LIF-11, https://github.com/moby/libnetwork/issues/915 and LIF-09, https://github.com/vm0-ai/vm0/pull/10841"""
    host.broker(8080)
    sealnet.run(["true"])
    state, failed = State(), []

    with beside(state.sweep):
        for number in range(1000):
            try:
                # As every reap of a run does that has no record (any more).
                with state.teardown_lock(f"absent-{number}"):
                    state.forget(f"absent-{number}")
                if number % 50 == 0:
                    sealnet.run(["true"], run_id=f"swept-{number}").check_returncode()
            except (SealnetError, OSError, subprocess.CalledProcessError) as error:
                failed.append(repr(error))

    assert failed == []


def test_the_last_run_that_ends_does_not_take_the_cgroups_of_the_next(host: Host) -> None:
    """LIF-11, https://github.com/moby/libnetwork/issues/915: making is two steps, and somebody removes between them."""
    owner, failed = "a test's own", []

    def come_and_go(run_id: str) -> None:
        cgroup.remove(cgroup.add(run_id, owner))

    # In a cgroup of the test's own no other run keeps what the two share.
    with own_cgroup(), beside(lambda: come_and_go("stress-a")):
        for _ in range(2000):
            try:
                come_and_go("stress-b")
            except SealnetError as error:
                failed.append(error.message)

    assert failed == []


def forked_run(run_id: str) -> Callable[[], int]:
    """A run in a copy of this process: its set-up begins at once, where the tool would first start Python for most of its time."""

    def start() -> int:
        pid = os.fork()
        if pid == 0:
            try:
                sealnet.run(["touch", "ran"], lease_port=8080, run_id=run_id)
            finally:
                os._exit(1)
        return pid

    return start


def tool_run(host: Host, run_id: str) -> Callable[[], int]:
    argv = [*SEALNET, "run", "--run-id", run_id, *LEASE, "--", "touch", "ran"]
    quiet = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in range(3)]
    # Not by subprocess: what it spawns it also waits for, whenever the object is gone.
    return lambda: os.posix_spawn(argv[0], argv, os.environ, file_actions=quiet)


def kill_at_random(starts: list[Callable[[], int]], typical_s: float, chance: random.Random) -> int:
    """Start each, WIDTH at a time, and kill it at a random moment of its set-up; how many were killed before their own end.

    The set-up is what comes first of `typical_s`, the whole of a run's time; how much that is changes with the machine's load, so whoever
    ends by himself was killed too late, and the next are killed sooner.
    """
    span_s = typical_s * 0.7
    due: list[tuple[float, int]] = []
    killed = 0
    waiting = list(reversed(starts))
    while waiting or due:
        while waiting and len(due) < WIDTH:
            pid = waiting.pop()()
            due.append((time.monotonic() + chance.uniform(0, span_s), pid))
        due.sort()
        at, pid = due.pop(0)
        time.sleep(max(0.0, at - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _pid, status = os.waitpid(pid, 0)
        was_killed = os.WIFSIGNALED(status)
        span_s *= 1.05 if was_killed else 0.9
        killed += was_killed
    return killed


def typical_s(start: Callable[[str], Any]) -> float:
    """How long a run takes from its start to its end, WIDTH at a time; the middle of three."""
    took = []
    for attempt in range(3):
        began = time.monotonic()
        pids = [start(f"typical-{attempt}-{number}") for number in range(WIDTH)]
        for pid in pids:
            os.waitpid(pid, 0)
        took.append(time.monotonic() - began)
    return sorted(took)[1]


@pytest.mark.parametrize(("kind", "count"), [("forked", 150), ("tool", 50)])
def test_kills_at_any_moment_of_the_set_up_leave_nothing_that_one_reap_does_not_take(host: Host, kind: str, count: int) -> None:
    """LIF-01, https://github.com/google/gvisor/issues/2539 and LIF-07, https://github.com/moby/moby/issues/31414"""
    host.broker(8080)
    chance, prefix = random.Random(20240229), f"kill-{os.getpid()}-"
    make = forked_run if kind == "forked" else lambda run_id: tool_run(host, run_id)
    sealnet.run(["true"], lease_port=8080)
    typical = typical_s(lambda run_id: make(run_id)())
    assert host.left_over() == []
    Path("ran").unlink()

    killed = kill_at_random([make(f"{prefix}{number}") for number in range(count)], typical, chance)
    left = host.left_over()
    reaped = host.sealnet("reap", "--orphans", "--json", timeout_s=75)

    unclaimed = cgroups(prefix)
    for path in unclaimed:
        cgroup.remove(path)
    assert killed > count / 3
    # With the tool each new run takes its forerunners' remains away; one of the last may stay.
    assert kind == "tool" or sum(found.startswith("link ") for found in left) > count / 10, "the kills came too early or too late"
    assert (reaped.returncode, reaped.stderr) == (0, "")
    assert host.left_over() == []
    assert unclaimed == []
    assert not list((host.state / "runs").iterdir())
    assert_no_lock_is_held(host)
    sealed = host.sealnet("run", "--run-id", f"{prefix}0", *LEASE, "--", "curl", "-fsS", "http://broker.sealnet:8080/hello")
    assert (sealed.returncode, sealed.stdout) == (0, "/hello")
