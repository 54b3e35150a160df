"""Many runs in one process: each ends as it would alone, none disturbs another, nothing stays."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sealnet import request
from sealnet.errors import NoSuchRun, RunExists, SealnetError
from sealnet.guard import Upkeep
from sealnet.kernel import process
from sealnet.model.config import Config
from sealnet.model.plan import Plan
from sealnet.records import State
from sealnet.running import Run, Streams
from sealnet.worker import runs as workers
from sealnet.worker.runs import Runs
from tests.lab import PATIENCE, Host

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

OWNER = 1000
QUIET = Streams(subprocess.DEVNULL, subprocess.DEVNULL, subprocess.DEVNULL)
SH = ("sh", "-c")


def plan(run_id: str, *argv: str, **options: Any) -> Plan:
    return request.plan(argv, run_id=run_id, **options)


def in_worker(
    host: Host, story: Callable[[Runs], Awaitable[None]], *, end: bool = True, told: list[str] | None = None, crew: int | None = None
) -> None:
    """A story told with the runs of a worker of its own, and its `crew`. `told` is given what it complains of."""

    async def tell() -> None:
        if told is not None:
            asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["message"]))
        state = State(host.state)
        state.prepare()
        runs = Runs(state, Config(), crew=crew)
        await runs.begin()
        try:
            await story(runs)
        finally:
            await runs.close(end=end)

    asyncio.run(tell())


@pytest.fixture
def beside() -> Iterator[Path]:
    """A directory that anybody may reach, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def status_of(runs: Runs, asked: Plan, **options: Any) -> int:
    await runs.launch(asked, owner=OWNER, streams=QUIET, **options)
    ended = await runs.wait(asked.run_id)
    assert ended.fault is None
    return ended.status


# What each command ends with.
ENDS = (
    (("true",), 0),
    ((*SH, "exit 7"), 7),
    ((*SH, "kill -TERM $$"), 128 + signal.SIGTERM),
    (("/etc/passwd",), 126),
    (("/nonexistent/tool",), 127),
    (("curl", "-fsS", "-o", "/dev/null", "http://broker.sealnet:8080/"), 0),
    (("curl", "-s", "http://192.0.2.1/"), 7),
)


@pytest.mark.tool("curl")
def test_sixty_four_at_once_end_as_each_would_alone(host: Host) -> None:
    host.broker(8080)

    async def story(runs: Runs) -> None:
        asked = [(plan(f"at-once-{number}", *argv, lease_port=8080), status) for number in range(64) for argv, status in [ENDS[number % 7]]]
        found = await asyncio.gather(*(status_of(runs, each) for each, _status in asked))

        assert found == [status for _each, status in asked]
        assert runs.records() == []

    in_worker(host, story)


@pytest.mark.parametrize("crew", [0, 1, 2])
def test_launches_that_wait_for_somebody_keep_no_run_from_its_end(host: Host, crew: int) -> None:
    """As those do whose broker takes no connection; here for the lock under which subnets are chosen."""
    host.broker(8080)

    async def story(runs: Runs) -> None:
        state, names = State(host.state), [f"slow-{number}" for number in range(workers._THREADS)]
        await runs.launch(plan("ends", "sleep", "600"), owner=OWNER, streams=QUIET)
        with state.allocating():
            slow = [asyncio.ensure_future(status_of(runs, plan(name, "true", lease_port=8080))) for name in names]
            await until(lambda: set(names) <= set(state.run_ids()), "all are about to choose")
            end = runs.wait("ends")

            await asyncio.wait_for(runs.kill("ends"), 30 * PATIENCE)

            assert (await asyncio.wait_for(end, 30 * PATIENCE)).status == 137
            assert not any(one.done() for one in slow)
            assert len(runs.crew.pids) == (1 + crew if crew else 0)
        assert await asyncio.gather(*slow) == [0] * len(names)

    in_worker(host, story, crew=crew)


def test_a_launch_that_fails_leaves_the_others_alone(host: Host) -> None:
    host.broker(8080)

    async def story(runs: Runs) -> None:
        asked = [plan(f"many-{number}", *SH, "exit 3", lease_port=8080 if number % 4 else 9) for number in range(24)]
        twice = plan("twice", "sleep", "60")
        await runs.launch(twice, owner=OWNER, streams=QUIET)
        found = await asyncio.gather(
            *(status_of(runs, each) for each in asked), runs.launch(twice, owner=OWNER, streams=QUIET), return_exceptions=True
        )

        assert isinstance(found.pop(), RunExists)
        failed = [each for each in found if isinstance(each, SealnetError)]
        assert Counter(type(each).__name__ for each in failed) == {"NoBroker": 6}
        assert [each for each in found if not isinstance(each, SealnetError)] == [3] * 18
        assert [record.run_id for record in runs.records()] == ["twice"]

    in_worker(host, story)


def test_its_time_ends_a_run_and_so_do_signals(host: Host) -> None:
    stubborn = (*SH, "trap '' TERM; touch ready; while :; do sleep 0.1; done")

    async def story(runs: Runs) -> None:
        late = asyncio.create_task(status_of(runs, plan("late", "sleep", "60", timeout_s=0.2)))
        stays = asyncio.create_task(status_of(runs, plan("stays", *stubborn, timeout_s=0.2, grace_s=0.2)))
        for name in ("asked", "killed"):
            await runs.launch(plan(name, "sleep", "60"), owner=OWNER, streams=QUIET)
        assert runs.signal("asked", signal.SIGINT)
        await runs.kill("killed")

        assert [await late, await stays] == [124, 124]
        assert [(await runs.wait(name)).status for name in ("asked", "killed")] == [128 + signal.SIGINT, 128 + signal.SIGKILL]
        for lost in (lambda: runs.signal("asked", signal.SIGINT), lambda: runs.owner("nobody")):
            with pytest.raises(NoSuchRun):
                lost()
        assert runs.owner("asked") == OWNER

    in_worker(host, story)


def test_a_launch_that_nobody_wants_any_more_is_undone(host: Host) -> None:
    async def story(runs: Runs) -> None:
        tasks = [
            asyncio.create_task(runs.launch(plan(f"unwanted-{number}", "sleep", "60"), owner=OWNER, streams=QUIET)) for number in range(12)
        ]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.003 * number)
            task.cancel()
        await asyncio.wait(tasks)
        stopped = asyncio.Event()
        stopped.set()
        with pytest.raises(SealnetError, match="interrupted"):
            await runs.launch(plan("stopped", "sleep", "60"), owner=OWNER, streams=QUIET, stop=stopped)

        assert [task for task in tasks if task.cancelled()]
        # Those whose payload had started already were ended.
        kept = [task.result().run_id for task in tasks if not task.cancelled()]
        await until(lambda: {record.run_id for record in runs.records()} <= set(kept), "what had started is ended")
        for run_id in kept:
            await runs.kill(run_id)

    in_worker(host, story, end=False)


def test_who_waits_for_a_run_is_told_of_no_later_one_of_its_name(host: Host) -> None:
    async def story(runs: Runs) -> None:
        await runs.launch(plan("name", *SH, "exit 3"), owner=OWNER, streams=QUIET)
        await runs.wait("name")

        asked = runs.wait("name")
        await runs.launch(plan("name", "sleep", "60"), owner=OWNER + 1, streams=QUIET)
        with pytest.raises(RunExists):
            await runs.launch(plan("name", "true"), owner=OWNER, streams=QUIET)

        told = await asyncio.wait_for(asked, 20)
        assert (told.status, told.owner) == (3, OWNER)
        assert runs.owner("name") == OWNER + 1
        await runs.kill("name")
        assert (await runs.wait("name")).owner == OWNER + 1

    in_worker(host, story, end=True)


def test_a_run_that_is_not_durable_ends_with_its_worker_and_payloads_keep_the_limits_that_were(host: Host) -> None:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def story(runs: Runs) -> None:
        await runs.launch(plan("limit", *SH, "ulimit -Sn >limit"), owner=OWNER, streams=QUIET)
        await runs.wait("limit")
        await runs.launch(plan("bound", "sleep", "60"), owner=OWNER, streams=QUIET, durable=False)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft
        assert [record.run_id for record in runs.records()] == ["bound"]

    in_worker(host, story, end=False)
    assert Path("limit").read_text() == f"{soft}\n"
    assert State(host.state).run_ids() == []


def test_streams_are_those_that_were_given_whatever_becomes_of_the_descriptors(host: Host) -> None:
    async def story(runs: Runs) -> None:
        outputs = [Path(f"output-{number}") for number in range(8)]

        async def one(number: int) -> None:
            fd = os.open(outputs[number], os.O_WRONLY | os.O_CREAT)
            task = asyncio.create_task(
                runs.launch(plan(f"says-{number}", "echo", str(number)), owner=OWNER, streams=Streams(subprocess.DEVNULL, fd, fd))
            )
            await asyncio.sleep(0)
            os.close(fd)
            await task
            await runs.wait(f"says-{number}")

        await asyncio.gather(*map(one, range(8)))
        assert [path.read_text() for path in outputs] == [f"{number}\n" for number in range(8)]

    in_worker(host, story)


def test_nobody_has_the_worker_bind_what_they_could_not_reach(host: Host, beside: Path) -> None:
    user = process.user("nobody")
    for name, mode in (("closed", 0o700), ("open", 0o755)):
        inner = beside / name / "inner"
        inner.mkdir(parents=True)
        (inner / "file").write_text("text")
        (inner / "file").chmod(0o644)
        inner.chmod(0o777)
        inner.parent.chmod(mode)

    async def story(runs: Runs) -> None:
        found = {}
        for where in ("closed", "open"):
            path = str(beside / where / "inner")
            asked = {
                "bind": {"bind": [f"{path}:/tmp/in"], "cwd": "/"},
                "ro-bind": {"ro_bind": [f"{path}:/tmp/in"], "cwd": "/"},
                "file": {"ro_bind": [f"{path}/file:/tmp/in"], "cwd": "/"},
                "cwd": {"cwd": path},
            }
            for what, options in asked.items():
                for who, rights in (("nobody", user), ("root", None)):
                    each = plan(f"{what}-{where}-{who}", "true", user="nobody", **options)
                    try:
                        found[what, where, who] = await status_of(runs, each, rights=rights)
                    except SealnetError as error:
                        found[what, where, who] = "Permission denied" in error.message
        # Root's own rights are the control.
        expected: dict[tuple[str, str, str], int] = dict.fromkeys(found, 0)
        expected |= {(what, "closed", "nobody"): True for what in asked}
        assert found == expected

    in_worker(host, story)


def test_no_run_is_used_by_two_threads_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: dict[int, list[str]] = {}
    clashes, lock, seen = [], threading.Lock(), Counter[str]()

    def watched(kind: type, name: str, of: Callable[[Any], int]) -> None:
        real = getattr(kind, name)

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            me = f"{name} in {threading.current_thread().name}"
            with lock:
                others = inside.setdefault(of(self), [])
                if any(not other.endswith(threading.current_thread().name) for other in others):
                    clashes.append((me, *others))
                others.append(me)
                seen[name] += 1
            try:
                return real(self, *arguments, **options)
            finally:
                with lock:
                    others.remove(me)

        monkeypatch.setattr(kind, name, call)

    for name in ("release", "kill", "close", "counted_attempts", "wait_end", "leave"):
        watched(Run, name, id)
    watched(Upkeep, "serve", lambda upkeep: next((id(run) for run in alive if run._upkeep is upkeep), 0))
    alive: list[Run] = []
    started = Run.__init__

    def begin(self: Run, *arguments: Any) -> None:
        started(self, *arguments)
        alive.append(self)

    monkeypatch.setattr(Run, "__init__", begin)

    async def story(runs: Runs) -> None:
        names = [f"shared-{number}" for number in range(12)]
        await asyncio.gather(*(runs.launch(plan(name, "sleep", "0.6"), owner=OWNER, streams=QUIET) for name in names))
        for _ in range(20):
            # A link of theirs, and everybody looks.
            host.run("nft", "add table inet sealnet; delete table inet sealnet")
            await asyncio.gather(*(runs.kill(name) for name in names[:2]), return_exceptions=True)
            await asyncio.sleep(0.02)
        await asyncio.gather(*(runs.wait(name) for name in names))

    in_worker(host, story, crew=0)
    assert clashes == []
    assert min(seen[name] for name in ("release", "kill", "close", "counted_attempts", "wait_end", "serve")) > 2


async def until(condition: Callable[[], Any], what: str) -> None:
    """The loop goes on meanwhile."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


def test_what_others_change_is_put_back_for_every_run(host: Host) -> None:
    host.broker(8080)

    def told(runs: Runs) -> list[set[str]]:
        return [{event["event"] for event in record.events} for record in runs.records()]

    async def story(runs: Runs) -> None:
        names = [f"changed-{number}" for number in range(6)]
        await asyncio.gather(*(runs.launch(plan(name, "sleep", "60", lease_port=8080), owner=OWNER, streams=QUIET) for name in names))
        await until(lambda: all(live.run.upkeep.next_at() > time.monotonic() + 1 for live in runs._live.values()), "all are watched")
        host.run("nft", "flush", "ruleset")
        # Whoever is first puts the gate back, the others find it standing, and nothing in it.
        await until(lambda: all(events & {"gate-restored", "lease-restored"} for events in told(runs)), "every run is leased again")
        host.run("ip", "link", "set", runs.records()[0].ifname, "down")
        await until(lambda: "link-down" in told(runs)[0], "the link is up again")
        assert not any("link-down" in events for events in told(runs)[1:])
        leases = json.loads(host.run("nft", "-j", "list", "set", "inet", "sealnet", "leases").stdout)["nftables"]
        assert sum(len(entry.get("set", {}).get("elem", [])) for entry in leases) == len(names)
        for name in names:
            await runs.kill(name)
        assert all(ended.events and ended.fault is None for ended in [await runs.wait(name) for name in names])

    in_worker(host, story)


def test_a_run_that_is_gone_is_neither_killed_nor_signalled_nor_halted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then its pids, and the number of its namespace, may be somebody else's."""
    touched: list[str] = []
    for name in ("kill", "send_signal", "freeze"):
        real = getattr(Run, name)
        monkeypatch.setattr(
            Run,
            name,
            lambda self, *arguments, name=name, real=real, **options: (touched.append(name), real(self, *arguments, **options))[1],
        )

    async def story(runs: Runs) -> None:
        await runs.launch(plan("gone", "sleep", "60"), owner=OWNER, streams=QUIET)
        live = runs._live["gone"]
        # Both are there before it is taken away, and come to it afterwards.
        assert live.signal(signal.SIGKILL)
        await until(lambda: live._is_over, "it has ended")
        late = asyncio.create_task(live.kill())
        await runs.wait("gone")
        await late
        known = len(touched)
        assert known >= 2
        await live.kill()
        await live.freeze(frozen=True)
        assert not live.signal(signal.SIGTERM)
        assert len(touched) == known

    in_worker(host, story)


def test_a_run_that_cannot_be_taken_over_keeps_the_worker_from_no_other(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    async def first(runs: Runs) -> None:
        for name in ("good", "odd"):
            await runs.launch(plan(name, "sleep", "60"), owner=OWNER, streams=QUIET)

    in_worker(host, first, end=False)
    real = workers.adopt

    def adopt(host: Any, state: Any, config: Any, claim: Any, places: Any) -> Any:
        if claim.record.run_id == "odd":
            raise RuntimeError("a bug")
        return real(host, state, config, claim, places)

    monkeypatch.setattr(workers, "adopt", adopt)
    told: list[str] = []

    async def second(runs: Runs) -> None:
        assert [record.run_id for record in runs.records()] == ["good"]
        # What nobody can see to does not go on.
        assert (await runs.wait("odd")).status == 137
        assert State(host.state).run_ids() == ["good"]

    in_worker(host, second, told=told)
    assert told == ["run odd cannot be taken over, and is ended"]
