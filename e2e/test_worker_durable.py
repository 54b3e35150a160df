"""A worker dies, whenever it may be: payloads, seals and leases go on, the next one takes them over, and every end is told right."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sealnet.kernel import process
from sealnet.model.durable import LEASE_TTL_S
from sealnet.records import State
from tests import worker as driver
from tests.lab import Host, wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

SH = ["sh", "-c"]
# Tells of every time that its broker did not answer, and of the first that it did.
ASK = "curl -fsS -m 5 -o /dev/null $SEALNET_BROKER_URL && touch answered || echo $? >>gaps"
ASKS = [*SH, f"until [ -e stop ]; do {ASK}; sleep 0.02; done; exit 5"]
WAITS = [*SH, "until [ -e go ]; do sleep 0.02; done; exit 6"]


class Worker:
    """One worker process."""

    def __init__(self, host: Host, deaths: dict[str, str] | None = None) -> None:
        self.process = host.spawn(sys.executable, "-I", driver.__file__, json.dumps(deaths or {}), stdin=subprocess.PIPE, stderr=None)
        self._numbers = itertools.count(1)
        self._told: dict[int, Any] = {}
        self._text = ""
        self.adopted = self.answer(0)

    def ask(self, *request: Any) -> int:
        number = next(self._numbers)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([number, *request]) + "\n")
        self.process.stdin.flush()
        return number

    def answer(self, number: int, *, within_s: float = 30.0) -> Any:
        assert self.process.stdout is not None
        deadline = time.monotonic() + within_s
        while number not in self._told:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer to {number}"
            data = os.read(self.process.stdout.fileno(), 65536).decode()
            assert data, f"the worker has ended: {self.process.wait(60)}"
            *lines, self._text = (self._text + data).split("\n")
            self._told.update(map(json.loads, lines))
        return self._told[number]

    def do(self, *request: Any) -> Any:
        return self.answer(self.ask(*request))

    def launch(self, run_id: str, argv: list[str], **options: Any) -> Any:
        return self.do("launch", argv, {"run_id": run_id, **options})

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(60) == -signal.SIGKILL

    def dies(self) -> None:
        assert self.process.wait(60) == -signal.SIGKILL

    def close(self, *, end: bool = True) -> None:
        self.do("close", end)
        assert self.process.wait(60) == 0


def gaps() -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path("gaps").read_text()
    return ""


BEFORE = ("claimed", "allocated", "built", "proved", "started", "in its cgroup")
AFTER = ("announced", "released")


@pytest.mark.tool("curl")
def test_a_worker_that_dies_while_it_launches_takes_nothing_with_it_and_leaves_nothing_half_done(host: Host) -> None:
    host.broker(8080)
    first = Worker(host)
    first.launch("asks", ASKS, lease_port=8080)
    first.launch("waits", WAITS)
    wait_for(Path("answered").exists, what="the broker answers")
    first.kill()

    for number, point in enumerate((*BEFORE, *AFTER)):
        worker = Worker(host, {f"victim-{number}": point})
        assert set(worker.adopted) >= {"asks", "waits"}
        worker.ask("launch", ["sleep", "60"], {"run_id": f"victim-{number}", "lease_port": 8080 if number % 2 else None})
        worker.dies()
        # A plain run meanwhile takes away what has died, and nothing that lives.
        if number % 3 == 2:
            assert host.sealnet("run", "--", "true").returncode == 0
        assert {"asks", "waits"} <= set(State(host.state).run_ids())

    last = Worker(host)
    assert set(last.adopted) >= {"asks", "waits"}
    found = {point: last.do("wait", f"victim-{number}") for number, point in enumerate(BEFORE)}
    assert found == dict.fromkeys(BEFORE, "NoSuchRun")
    # Held at its first instruction, it dies with whoever holds it; let go, it lives.
    announced, released = (f"victim-{len(BEFORE) + number}" for number in range(2))
    assert last.do("wait", announced) == [137, None, 1000, True]
    assert released in last.adopted
    assert last.do("signal", released, signal.SIGTERM) is True
    assert last.do("wait", released) == [143, None, 1000, True]
    Path("go").touch()
    assert last.do("wait", "waits") == [6, None, 1000, True]
    assert gaps() == ""
    Path("stop").touch()
    assert last.do("wait", "asks") == [5, None, 1000, True]
    assert last.do("live") == []
    last.close()


@pytest.mark.tool("curl")
def test_kills_at_any_moment_of_a_worker_leave_what_was_released_alive_and_nothing_else(host: Host) -> None:
    host.broker(8080)
    first = Worker(host)
    first.launch("asks", ASKS, lease_port=8080)
    wait_for(Path("answered").exists, what="the broker answers")
    first.kill()
    chance = random.Random(1)
    lived: set[str] = {"asks"}

    for number in range(10):
        worker = Worker(host)
        assert lived <= set(worker.adopted)
        # Some of them end by themselves, or are ended, while the worker dies.
        victims = [f"victim-{number}-{one}" for one in range(3)]
        numbers = [
            worker.ask("launch", ["sleep", str(seconds)], {"run_id": victim, "lease_port": 8080 if number % 2 else None})
            for victim, seconds in zip(victims, (0, 60, 60), strict=True)
        ]
        with contextlib.suppress(AssertionError):
            worker.answer(numbers[2], within_s=chance.uniform(0, 0.25))
            worker.ask("kill", victims[1])
        time.sleep(chance.uniform(0, 0.05))
        worker.kill()

        following = Worker(host)
        assert "asks" in following.adopted
        for victim in victims:
            if victim in following.adopted:
                following.do("kill", victim)
            told = following.do("wait", victim)
            assert told == "NoSuchRun" or told[0] in ((0, 137) if victim == victims[0] else (137,)), told
        assert following.do("live") == ["asks"]
        following.kill()

    last = Worker(host)
    assert gaps() == ""
    Path("stop").touch()
    assert last.do("wait", "asks") == [5, None, 1000, True]
    last.close()


@pytest.mark.parametrize("point", ["seen to its end", "its end kept", "its subnet released", "torn down", "timed out"])
def test_a_worker_that_dies_while_it_takes_a_run_away_still_tells_how_that_ended(host: Host, point: str) -> None:
    host.broker(8080)
    first = Worker(host, {"victim": point})
    if point == "timed out":
        first.launch("victim", [*SH, "trap '' TERM; sleep 60 & wait; wait"], timeout_s=0.3, grace_s=0.3)
    else:
        first.launch("victim", WAITS, lease_port=8080)
        Path("go").touch()
    first.dies()

    second = Worker(host)
    assert second.do("wait", "victim") == [124 if point == "timed out" else 6, None, 1000, True]
    second.close(end=False)
    # And to whoever asks the one after that.
    third = Worker(host)
    assert third.adopted == []
    assert third.do("wait", "victim") == [124 if point == "timed out" else 6, None, 1000, True]
    third.close()


@pytest.mark.parametrize("taken_by", [("reap", "--orphans"), ("run", "--", "true"), ("reap", "RUN"), ("reap", "--all"), None])
def test_an_end_that_no_worker_saw_is_told_by_the_next(host: Host, taken_by: tuple[str, ...] | None) -> None:
    first = Worker(host)
    first.launch("ended", WAITS)
    first.launch("late", ["sleep", "60"], timeout_s=0.5, grace_s=0)
    first.kill()
    Path("go").touch()
    state = State(host.state)
    wait_for(lambda: not state.is_held("ended", "alive"), what="the payload has ended")
    by_name = taken_by is not None and taken_by[-1] in ("RUN", "--all")
    if taken_by is not None:
        done = host.sealnet(*("ended" if word == "RUN" else word for word in taken_by))
        assert (done.returncode, done.stderr) == (0, "")
        assert "ended" not in state.run_ids()
    assert ("late" in state.run_ids()) is (taken_by is None or taken_by[-1] != "--all")

    second = Worker(host)
    assert second.do("wait", "ended") == [6, None, 1000, True]
    # Its time went on while there was no worker; one that was reaped was killed.
    assert second.do("wait", "late")[0] == (137 if by_name and taken_by == ("reap", "--all") else 124)
    second.close()


MUTATIONS = {
    "another boot": lambda record, _stranger: record.update(boot_id="0" * 36),
    "a stranger for its init": lambda record, stranger: (
        record.update(init_pid=stranger[0]),
        record["durable"].update(init_start=stranger[1]),
    ),
    "a stranger for its bwrap": lambda record, stranger: record["durable"].update(bwrap_pid=stranger[0], bwrap_start=stranger[1]),
    "a reused pid": lambda record, stranger: record["durable"].update(init_start=stranger[1]),
    "another namespace": lambda record, _stranger: record.update(netns_inode=record["netns_inode"] + 1),
    "never released": lambda record, _stranger: record.update(state="started"),
    "not durable": lambda record, _stranger: record.update(durable=None),
}


def test_a_run_that_is_not_what_its_record_says_is_not_taken_over_and_no_stranger_is_touched(host: Host) -> None:
    stranger = host.spawn("sleep", "300")
    first = Worker(host)
    names = {f"mutant-{number}": what for number, what in enumerate(MUTATIONS)}
    for name in names:
        first.launch(name, ["sleep", "300"])
    first.launch("control", ["sleep", "300"])
    first.kill()
    for name, what in names.items():
        path = host.state / "runs" / name / "record.json"
        record = json.loads(path.read_text())
        MUTATIONS[what](record, (stranger.pid, process.start_time(stranger.pid)))
        path.write_text(json.dumps(record))
    # A directory that nobody has claimed, and one whose lock somebody holds.
    (host.state / "runs" / "empty").mkdir()

    second = Worker(host)

    assert second.adopted == ["control"]
    assert stranger.poll() is None
    assert set(State(host.state).run_ids()) == {"control"}
    second.close()


@pytest.mark.tool("curl")
def test_a_worker_that_ends_leaves_its_runs_to_the_next(host: Host) -> None:
    host.broker(8080)
    first = Worker(host)
    first.launch("asks", ASKS, lease_port=8080)
    first.launch("door", asks("door"), broker="tcp:127.0.0.1:8080")
    answers_again("door")
    first.close(end=False)
    # Nobody sees to them, and they wait for a worker; what a lease has left is what it was granted for.
    listed = {run["run_id"]: run["state"] for run in json.loads(host.sealnet("ls", "--json").stdout)}
    assert listed == {"asks": "running", "door": "running"}
    assert "no worker sees to it" in host.sealnet("check", "asks").stdout
    leases = json.loads(host.run("nft", "-j", "list", "set", "inet", "sealnet", "leases").stdout)["nftables"]
    timeouts = [element["elem"]["timeout"] for entry in leases for element in entry.get("set", {}).get("elem", [])]
    assert timeouts == [LEASE_TTL_S] * 2

    second = Worker(host)
    assert second.adopted == ["asks", "door"]
    answers_again("door")
    assert "sealed" in host.sealnet("check", "asks").stdout
    Path("stop").touch()
    assert [second.do("wait", name) for name in ("asks", "door")] == [[5, None, 1000, True]] * 2
    assert gaps() == ""
    assert not Path("door.gaps").exists()
    second.close()


def test_two_workers_never_have_one_run(host: Host) -> None:
    first = Worker(host)
    first.launch("mine", WAITS)

    second = Worker(host)
    assert second.adopted == []
    assert second.do("wait", "mine") == "NoSuchRun"
    first.kill()
    third = Worker(host)
    assert third.adopted == ["mine"]
    Path("go").touch()
    assert third.do("wait", "mine") == [6, None, 1000, True]
    second.close()
    third.close()


def test_what_was_done_to_a_seal_while_no_worker_lived_is_found_and_put_back(host: Host) -> None:
    host.broker(8080)
    first = Worker(host)
    first.launch("asks", ASKS, lease_port=8080)
    wait_for(Path("answered").exists, what="the broker answers")
    first.kill()
    record = host.record("asks")
    assert record is not None
    host.run("nft", "flush", "ruleset")
    host.run("ip", "link", "set", record["ifname"], "down")
    wait_for(gaps, what="the broker does not answer")

    second = Worker(host)
    Path("answered").unlink()
    wait_for(Path("answered").exists, what="the broker answers again")
    record = host.record("asks")
    assert record is not None
    assert {event["event"] for event in record["events"]} >= {"gate-restored", "link-down"}
    second.close()


def door_pids() -> dict[int, str]:
    """The door processes of this throw-away host, with when each started."""
    here, found = os.stat("/proc/self/ns/net").st_ino, {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if b"\0sealnet.door\0" in Path(f"/proc/{pid}/cmdline").read_bytes() and os.stat(f"/proc/{pid}/ns/net").st_ino == here:
                found[pid] = process.executable(pid)
    return found


@pytest.fixture
def broker_socket(host: Host) -> Iterator[str]:
    """A broker at a Unix socket, not in a directory of pytest's own, which is root's alone."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/broker.sock"
        os.chmod(directory, 0o755)
        host.broker(8081)
        host.spawn("socat", f"UNIX-LISTEN:{path},fork,mode=666,backlog=64", "TCP:127.0.0.1:8081")
        wait_for(lambda: os.path.exists(path), what="the socket is there")
        yield path


_MEET = """
import socket, sys
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.connect(sys.argv[1])
print(len(door.recv(65536)))
"""


def asks(name: str) -> list[str]:
    ask = f"curl -fsS -m 5 -o /dev/null $SEALNET_BROKER_URL && touch {name}.answered || echo $? >>{name}.gaps"
    return [*SH, f"until [ -e stop ]; do {ask}; sleep 0.02; done; exit 5"]


def answers_again(name: str) -> None:
    Path(f"{name}.answered").unlink(missing_ok=True)
    wait_for(Path(f"{name}.answered").exists, what=f"the broker of {name} answers")


@pytest.mark.tool("curl", "socat")
def test_a_door_outlives_its_worker_and_the_next_one_has_it_again(host: Host, broker_socket: str) -> None:
    host.broker(8080)
    user = {"user": "nobody"}
    host.directory.chmod(0o777)
    first = Worker(host)
    first.launch("tcp", asks("tcp"), broker="tcp:127.0.0.1:8080")
    first.launch("unix", asks("unix"), broker=f"unix:{broker_socket}")
    first.launch("other", asks("other"), broker="tcp:127.0.0.1:8080", **user)
    for name in ("tcp", "unix"):
        answers_again(name)
    doors = door_pids()
    # One for each user.
    assert len(doors) == 2

    first.kill()
    wait_for(Path("unix.gaps").exists, what="nobody is there to dial for the door")
    answers_again("tcp")
    # Root alone may meet it, whatever the modes on the way say.
    place = next((host.state / "doors").glob("0-*.sock"))
    place.parent.chmod(0o711)
    place.chmod(0o666)
    meet = ("/usr/bin/python3", "-c", _MEET, str(place))
    assert host.run("setpriv", "--reuid", "65534", "--clear-groups", *meet).stdout == "0\n"
    assert int(host.run(*meet).stdout) > 0

    second = Worker(host)
    assert second.adopted == ["other", "tcp", "unix"]
    assert door_pids() == doors
    answers_again("unix")
    # It goes on serving new ones.
    second.launch("new", asks("new"), broker=f"unix:{broker_socket}")
    answers_again("new")
    assert door_pids() == doors
    second.kill()
    third = Worker(host)
    answers_again("unix")
    Path("stop").touch()
    for name in ("tcp", "unix", "new", "other"):
        assert third.do("wait", name) == [5, None, 1000, True]
    assert not Path("tcp.gaps").exists()
    assert not Path("other.gaps").exists()
    third.close()
    wait_for(lambda: not door_pids(), what="no door is left")
    assert list((host.state / "doors").iterdir()) == []


@pytest.mark.parametrize("by", [("reap", "left"), ("reap", "--all"), ("run", "--", "true")])
def test_a_door_that_was_left_ends_with_its_last_run(host: Host, by: tuple[str, ...]) -> None:
    host.broker(8080)
    first = Worker(host)
    first.launch("left", WAITS, broker="tcp:127.0.0.1:8080")
    first.kill()
    if by[0] == "run":
        Path("go").touch()
        wait_for(lambda: not State(host.state).is_held("left", "alive"), what="the payload has ended")
    assert len(door_pids()) == 1

    assert host.sealnet(*by).returncode == 0

    wait_for(lambda: not door_pids(), what="no door is left")
    assert list((host.state / "doors").iterdir()) == []


def test_a_door_that_dies_ends_what_it_led_to_and_no_run(host: Host) -> None:
    host.broker(8080)
    first = Worker(host)
    first.launch("early", WAITS, broker="tcp:127.0.0.1:8080")
    os.kill(next(iter(door_pids())), signal.SIGKILL)
    ended = lambda run_id: any(event["event"] == "door-ended" for event in (host.record(run_id) or {}).get("events", []))  # noqa: E731
    wait_for(lambda: ended("early"), what="that is noticed")
    first.launch("late", WAITS, broker="tcp:127.0.0.1:8080")
    first.kill()
    os.kill(next(iter(door_pids())), signal.SIGKILL)

    second = Worker(host)
    assert second.adopted == ["early", "late"]
    wait_for(lambda: ended("late"), what="that is noticed by the next worker")
    second.launch("new", WAITS, broker="tcp:127.0.0.1:8080")
    assert len(door_pids()) == 1
    Path("go").touch()
    assert [second.do("wait", name)[0] for name in ("early", "late", "new")] == [6, 6, 6]
    second.close()
    assert door_pids() == {}


@pytest.mark.parametrize("point", ["allocated", "built", "started", "announced"])
def test_a_worker_that_dies_while_a_door_begins_to_serve_leaves_none(host: Host, point: str) -> None:
    host.broker(8080)
    worker = Worker(host, {"victim": point})
    worker.ask("launch", ["sleep", "60"], {"run_id": "victim", "broker": "tcp:127.0.0.1:8080"})
    worker.dies()

    second = Worker(host)
    assert second.adopted == []
    wait_for(lambda: not door_pids(), what="no door is left")
    second.close()
    assert list((host.state / "doors").glob("*")) == []
