"""The processes that launch and end runs for a worker: they die, and no run is lost, left behind or told wrongly for that."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from e2e import test_worker_durable as durable
from e2e.test_worker_durable import SH, WAITS, Worker
from sealnet.kernel import process
from sealnet.records import State
from tests.lab import Host, wait_for
from tests.worker import ALONE

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
        assert State(host.state).run_ids() == ["beside"], point
        assert worker.do("live") == ["beside"]
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
