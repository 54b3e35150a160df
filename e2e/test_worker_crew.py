"""The processes that launch and end runs for a worker: they die, and no run is lost, left behind or told wrongly for that."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e import test_worker_durable as durable
from e2e.test_worker_durable import SH, WAITS, Worker
from e2e.test_worker_runs import OWNER, QUIET, in_worker, plan
from sealnet.errors import CannotSeal, SealnetError
from sealnet.kernel import process
from sealnet.records import ALIVE, State
from sealnet.worker import crew, first, handover
from sealnet.worker.runs import Runs
from tests.crash import descriptors
from tests.lab import Host, wait_for
from tests.worker import ALONE, NO_MORE, ODD, STAYS

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

POINTS = (*durable.BEFORE, "announced", "released")
ENDS = ("its end kept", "its subnet released", "torn down")


def idle(host: Host) -> bool:
    return State(host.state).run_ids() == []


@pytest.mark.tool("curl")
def test_who_dies_in_a_launch_leaves_nothing_of_it_and_everything_of_the_others(host: Host) -> None:
    host.broker(8080)
    worker = Worker(host, {f"victim-{number}": point + ALONE for number, point in enumerate(POINTS)})
    worker.launch("beside", WAITS, lease_port=8080)
    lives = [*SH, "touch ran; exec sleep 600"]

    for number, point in enumerate(POINTS):
        # What had been let go is ended: its caller was told that it does not run.
        assert worker.launch(f"victim-{number}", lives, lease_port=8080) == "CannotSeal", point
        assert os.listdir(host.state / "runs") == ["beside"], point
        assert worker.do("live") == ["beside"]
        # Its caller was told that it has not run, so it has no end either.
        assert not (host.state / "ended" / f"victim-{number}.json").exists()
    assert Path("ran").exists()
    assert worker.do("crew")[1] == len(POINTS)
    # Another is there.
    worker.launch("after", [*SH, "exit 3"], lease_port=8080)
    assert worker.do("wait", "after") == [3, None, 1000, True]
    Path("go").touch()
    # Whoever has launched it is dead, and what it has written is not.
    assert worker.do("wait", "beside") == [6, None, 1000, True]
    worker.close()


@pytest.mark.parametrize("point", ENDS)
def test_who_dies_while_it_takes_a_run_away_is_followed_by_the_worker_itself(host: Host, point: str) -> None:
    host.broker(8080)
    worker = Worker(host, {"victim": point + ALONE})
    worker.launch("victim", [*SH, "exit 4"], lease_port=8080)

    assert worker.do("wait", "victim") == [4, None, 1000, True]
    assert idle(host)
    assert worker.do("crew")[1] == 1
    worker.close()


def test_a_dead_launch_is_not_cleaned_up_into_somebody_elses_run(host: Host) -> None:
    """One of the Python API has no holder while its program is away."""
    silent = "stdin=-3, stdout=-3, stderr=-3"
    script = f"import sealnet; sealnet.Sealer().launch(['sleep', '600'], run_id='theirs', durable=True, cwd='/', {silent})"
    host.run(sys.executable, "-c", script)
    record = host.record("theirs")
    assert record is not None
    assert record["state"] == "running"
    assert not State(host.state).is_held("theirs")
    worker = Worker(host, {"theirs": "begun" + ALONE})

    assert worker.launch("theirs", ["true"]) == "CannotSeal"
    assert worker.do("crew")[1] == 1

    assert host.record("theirs") == record
    assert State(host.state).is_held("theirs", ALIVE)
    worker.close()
    assert host.sealnet("reap", "theirs").returncode == 0


def test_what_cannot_be_taken_away_is_told_and_concerns_no_other_run(host: Host) -> None:
    worker = Worker(host, {"stays": STAYS, "odd": ODD})
    for name in ("stays", "odd", "other"):
        worker.launch(name, WAITS)
    Path("go").touch()

    status, fault, owner, has_receipt = worker.do("wait", "stays")
    assert (status, owner, has_receipt) == (6, 1000, True)
    assert fault == "cannot tear down run stays: it stays"
    assert worker.do("wait", "odd") == [6, None, 1000, True]
    assert worker.do("wait", "other") == [6, None, 1000, True]
    assert worker.do("crew")[1] == 0
    wait_for(lambda: idle(host), timeout_s=20, what="it is tried again")
    worker.close()


def test_where_there_can_be_no_more_of_them_those_that_there_are_do_it_all(host: Host) -> None:
    worker = Worker(host, {NO_MORE: "1"})
    names = [f"one-{number}" for number in range(8)]

    asked = [worker.ask("launch", [*SH, "exit 3"], {"run_id": name}) for name in names]

    assert [worker.answer(each) for each in asked] == names
    assert [worker.do("wait", name)[0] for name in names] == [3] * 8
    pids, died, _fds = worker.do("crew")
    assert (len(pids), died) == (2, 0)
    worker.close()


@pytest.mark.parametrize("which", ["the first", "a member", "all"])
def test_one_that_is_halted_is_made_to_go_on(host: Host, which: str) -> None:
    worker = Worker(host)
    worker.launch("before", WAITS)
    first, *members = worker.do("crew")[0]
    for pid in {"the first": [first], "a member": members, "all": [first, *members]}[which]:
        os.kill(pid, signal.SIGSTOP)

    names = [f"one-{number}" for number in range(4)]
    asked = [worker.ask("launch", WAITS, {"run_id": name}) for name in names]
    assert [worker.answer(each) for each in asked] == names
    Path("go").touch()
    assert [worker.do("wait", name)[0] for name in ("before", *names)] == [6] * 5
    assert worker.do("crew")[1] == 0
    worker.close()


def test_none_is_forked_of_a_worker_that_reads_names_of_files_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would as well, and those that replace them would not."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")

    assert first.fork(State("/nowhere"), 2) == []


def test_where_none_can_be_forked_a_worker_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    assert first.fork(State("/nowhere"), 2) == []
    assert descriptors() == before


def test_a_pid_that_is_anothers_by_now_is_not_waited_for() -> None:
    """Of one that First had forked nobody here is told, and its pid may have been given to another child."""
    with subprocess.Popen(["sh", "-c", "exit 7"]) as other:
        wait_for(lambda: os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, what="it has ended")
        ours, theirs = socket.socketpair()
        with theirs, subprocess.Popen(["true"]) as gone:
            pidfd = os.pidfd_open(gone.pid)
            gone.wait()
            crew._Member(ours, other.pid, pidfd).end()

        assert other.wait() == 7


def test_there_are_never_more_of_them_than_there_may_be(host: Host) -> None:
    """However many wait for the first one."""

    async def story(runs: Runs) -> None:
        asked = [plan(f"cold-{number}", "true") for number in range(16)]
        await asyncio.gather(*(runs.launch(each, owner=OWNER, streams=QUIET) for each in asked))
        assert len(runs.crew.pids) <= 1 + 2
        await asyncio.gather(*(runs.wait(each.run_id) for each in asked))

    in_worker(host, story, crew=2)


def test_of_the_connections_of_a_burst_a_few_are_kept_and_with_the_others_go_their_threads(host: Host) -> None:
    async def story(runs: Runs) -> None:
        names = [f"burst-{number}" for number in range(3 * crew._IDLE)]
        await asyncio.gather(*(runs.launch(plan(name, "sleep", "60"), owner=OWNER, streams=QUIET) for name in names))
        ends = [runs.wait(name) for name in names]
        await asyncio.gather(*(runs.kill(name) for name in names))
        await asyncio.gather(*ends)
        (member,) = runs.crew._members
        # As many as may be kept: there were more.
        assert len(member.idle) == crew._IDLE
        # And its own, and those of a Host.
        wait_for(lambda: len(os.listdir(f"/proc/{member.pid}/task")) <= crew._IDLE + 3, what="the others have ended")

    in_worker(host, story, crew=1)


def test_those_that_die_while_they_do_nothing_are_replaced_once(host: Host) -> None:
    """Whoever sees it first ends them: what is closed twice may be another's by then."""

    async def story(runs: Runs) -> None:
        for number in range(4):
            names = [f"idle-{number}-{one}" for one in range(12)]
            found = await asyncio.gather(*(runs.launch(plan(name, "sleep", "60"), owner=OWNER, streams=QUIET) for name in names))
            assert [each.run_id for each in found] == names
            for pid in runs.crew.pids[1:]:
                os.kill(pid, signal.SIGKILL)
            ends = [runs.wait(name) for name in names]
            await asyncio.gather(*(runs.kill(name) for name in names))
            assert {(each.status, each.fault) for each in await asyncio.gather(*ends)} == {(137, None)}
            assert idle(host)

    in_worker(host, story, crew=2)


def test_launches_that_are_called_off_leave_nothing_in_who_was_at_it(host: Host) -> None:
    async def story(runs: Runs) -> None:
        async def called_off(name: str, after_s: float) -> None:
            stop = asyncio.Event()
            task = asyncio.ensure_future(runs.launch(plan(name, "sleep", "60"), owner=OWNER, streams=QUIET, stop=stop))
            await asyncio.sleep(after_s)
            stop.set()
            with contextlib.suppress(SealnetError):
                await task
                await runs.kill(name)

        async def many(first: int) -> None:
            await asyncio.gather(*(called_off(f"off-{first + one}", 0.002 * one) for one in range(12)))

        await many(0)
        (member,) = runs.crew.pids[1:]
        before = len(os.listdir(f"/proc/{member}/fd"))
        for number in range(1, 6):
            await many(12 * number)
        # Two a launch would be more than a hundred.
        assert len(os.listdir(f"/proc/{member}/fd")) < before + 40
        assert runs.crew.pids[1:] == [member]

    in_worker(host, story, crew=1)


def test_a_run_that_its_worker_cannot_take_is_gone_when_that_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real, taken = handover.take, 0

    def take(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 1:
            for fd in arguments[-1]:
                os.close(fd)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*arguments)

    monkeypatch.setattr(handover, "take", take)

    async def story(runs: Runs) -> None:
        asked = plan("untaken", "sleep", "600")
        with pytest.raises(CannotSeal, match="cannot start run untaken: Too many open files"):
            await runs.launch(asked, owner=OWNER, streams=QUIET)
        assert idle(host)
        await runs.launch(asked, owner=OWNER, streams=QUIET)
        assert runs.crew.died == 0

    in_worker(host, story, crew=1)


def test_they_are_gone_with_their_worker_however_it_ends(host: Host) -> None:
    for how in ("closed", "killed"):
        worker = Worker(host)
        for name in ("one", "two"):
            worker.launch(f"{how}-{name}", WAITS)
        pids = worker.do("crew")[0]
        starts = [process.start_time(pid) for pid in pids]
        assert len(pids) >= 2
        assert None not in starts
        if how == "closed":
            worker.close()
        else:
            worker.kill()

        wait_for(lambda pids=pids, starts=starts: [process.start_time(pid) for pid in pids] != starts, what="they end")
        wait_for(lambda pids=pids: not any(os.path.exists(f"/proc/{pid}") for pid in pids), what="all of them")
    last = Worker(host)
    assert set(last.adopted) == {"killed-one", "killed-two"}
    last.close()


def test_a_bwrap_that_could_write_nothing_is_told_of_by_whoever_has_started_it(host: Host) -> None:
    """And where nobody can, it was killed."""
    worker = Worker(host)
    for name, expected in (("asked", 128 + signal.SIGTERM), ("unknown", 128 + signal.SIGKILL)):
        worker.launch(name, ["sleep", "600"])
        record = host.record(name)
        assert record is not None
        members = worker.do("crew")[0][1:]
        if name == "unknown":
            for pid in members:
                os.kill(pid, signal.SIGKILL)
        os.kill(record["durable"]["bwrap_pid"], signal.SIGTERM)

        assert worker.do("wait", name)[0] == expected
    worker.close()


def test_neither_descriptors_nor_dead_processes_gather(host: Host) -> None:
    host.broker(8080)
    worker = Worker(host)

    def round_of(number: int) -> None:
        names = [f"round-{number}-{one}" for one in range(16)]
        asked = [worker.ask("launch", [*SH, "exit 2"], {"run_id": name, "lease_port": 8080}) for name in names]
        asked += [worker.ask("launch", [*SH, "exit 2"], {"run_id": f"{name}-no", "lease_port": 9}) for name in names[:4]]
        found = [worker.answer(each) for each in asked]
        assert found == [*names, *["NoBroker"] * 4]
        assert [worker.do("wait", name)[0] for name in names] == [2] * 16

    def open_now() -> list[int]:
        pids, died, own = worker.do("crew")
        assert died == 0
        return [own, *(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)]

    for number in range(3):
        round_of(number)
    before = open_now()
    for number in range(3, 8):
        round_of(number)
    after = open_now()

    # A thread of the worker's that was idle until now may have its own sockets by now; a leak would be of eighty.
    assert all(late - early < 16 for early, late in zip(before, after, strict=True)), (before, after)
    pids = worker.do("crew")[0]
    wait_for(lambda: not any(process.children(pid) for pid in pids[1:]), what="nobody is left to be waited for")
    worker.close()
