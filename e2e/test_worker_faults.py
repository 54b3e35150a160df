"""What goes wrong around a worker: callers are told one clear thing or have their result, nothing is left, and the worker goes on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import test_worker_durable as durable
from e2e.test_worker_socket import ALICE, BOB, Worker, call, connect, gone, read_message, running, worker
from tests.lab import PATIENCE, Host, wait_for

__all__ = ["worker"]

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

# A release is tried with 50 runs that live beside each death; that no state loses a few is in test_worker_durable.py.
IS_FULL = os.environ.get("SEALNET_DAY") == "full"
LIVE, POINTS = (50, (*durable.BEFORE, *durable.AFTER)) if IS_FULL else (8, ("built", "started", "announced", "released"))
FORKER = 65528
ENDLESS = ("sleep", "600")
STORM = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("storming", "w").close()
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
# What a payload says where its broker answers.
ASKS = "curl -fsS -m 20 $SEALNET_BROKER_URL/told"


# The protocol by hand, for many callers at once


def request(run_id: str, *argv: str, cwd: Path = Path("/"), **options: Any) -> bytes:
    asked = {
        "argv": argv,
        "cwd": str(cwd),
        "environ": {"PATH": os.environ["PATH"]},
        "options": {"run_id": run_id, "user": str(ALICE), **options},
    }
    return json.dumps({"method": "io.sealnet.Worker.Run", "parameters": asked, "more": True}).encode() + b"\0"


@contextlib.contextmanager
def descriptors(cwd: Path = Path("/")) -> Iterator[list[int]]:
    """What goes with a request: three streams and the working directory."""
    null, root = os.open(os.devnull, os.O_RDWR), os.open(cwd, os.O_PATH)
    try:
        yield [null, null, null, root]
    finally:
        os.close(null)
        os.close(root)


def asked(worker: Worker, data: bytes) -> dict[str, Any]:
    """What is told of a run at last: its end, or why there is none."""
    with connect(worker) as sock, descriptors() as fds:
        sock.settimeout(60 * PATIENCE)
        socket.send_fds(sock, [data], fds)
        told = json.loads(read_message(sock))
        while told.get("continues"):
            told = json.loads(read_message(sock))
    return told


def connects(worker: Worker) -> socket.socket:
    """A connection, also where more than the kernel keeps for the worker are made at once."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return connect(worker)
        time.sleep(0.01)


def is_clear(told: dict[str, Any]) -> bool:
    """Whether it is a result, or an error that says what is wrong and is nobody's bug."""
    if "error" not in told:
        return told["parameters"]["ended"]["status"] == 5 and told["parameters"]["ended"]["fault"] is None
    message = told["parameters"]["message"]
    return told["error"] == "io.sealnet.Worker.Failed" and message.startswith("cannot ") and "error of its own" not in message


def is_idle(worker: Worker) -> bool:
    return os.listdir(worker.host.state / "runs") == []


def works(worker: Worker, uid: int = ALICE) -> None:
    """The worker goes on: a sealed run reaches its broker."""
    done = worker.call(uid, "run", "--lease-port", "8080", "--", "sh", "-c", ASKS)
    assert (done.returncode, done.stdout) == (0, "/told"), done.stderr


# Deaths


@pytest.mark.tool("curl")
def test_a_worker_that_dies_in_any_state_of_a_launch_loses_none_of_many_runs(host: Host) -> None:
    host.broker(8080)
    names = sorted(f"live-{number}" for number in range(LIVE))
    first = durable.Worker(host)
    asked = [first.ask("launch", durable.WAITS, {"run_id": name, "lease_port": 8080 if name.endswith("1") else None}) for name in names]
    for number in asked:
        first.answer(number, within_s=30 * PATIENCE)
    first.kill()
    leases = sum(name.endswith("1") for name in names)

    for number, point in enumerate(POINTS):
        worker = durable.Worker(host, {f"victim-{number}": point})
        assert set(names) <= set(worker.adopted)
        worker.ask("launch", list(ENDLESS), {"run_id": f"victim-{number}", "lease_port": 8080})
        worker.dies()

    last = durable.Worker(host)
    # Of the victims there is the one that was let go: announced ones are held still, and die.
    victims = set(last.adopted) - set(names)
    elements = json.loads(host.run("nft", "-j", "list", "set", "inet", "sealnet", "leases").stdout)["nftables"]
    assert sum(len(entry["set"].get("elem", [])) for entry in elements if "set" in entry) == leases + len(victims)
    assert victims == {f"victim-{POINTS.index('released')}"}
    Path("go").touch()
    assert [last.do("wait", name)[0] for name in names] == [6] * LIVE
    last.close()


@pytest.mark.parametrize("which", ["sealnet.kernel.nfthelper", "sealnet.door", "sealnet-crew"])
def test_a_process_of_the_workers_that_is_killed_again_and_again_takes_no_run_along(worker: Worker, which: str) -> None:
    worker.host.broker(8080)
    # A run with a door is the worker's own to launch, and any other its crew's.
    given = {"lease_port": 8080} if which == "sealnet-crew" else {"broker": "tcp:127.0.0.1:8080"}
    option = ("--lease-port", "8080") if which == "sealnet-crew" else ("--broker", "tcp:127.0.0.1:8080")
    script = f"{ASKS} >/dev/null && touch first; read line; {ASKS}"
    beside = running(worker, BOB, "beside", "sh", "-c", script, options=("--lease-port", "8080"), stdin=subprocess.PIPE)
    wait_for((worker.home(BOB) / "first").exists, what="its broker answers")
    killed = 0

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(asked, worker, request(f"one-{number}", "sh", "-c", "exit 5", **given)) for number in range(24)]
        while not all(one.done() for one in waiting):
            for pid in worker.helpers(which):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            time.sleep(0.3)
    told = [one.result() for one in waiting]

    assert killed > 0
    assert [one for one in told if not is_clear(one)] == []
    works(worker)
    done = worker.call(ALICE, "run", *option, "--", "sh", "-c", ASKS)
    assert (done.returncode, done.stdout) == (0, "/told"), done.stderr
    assert beside.communicate("\n", timeout=60 * PATIENCE)[0] == "/told"
    assert beside.returncode == 0
    wait_for(lambda: is_idle(worker), what="nothing is left")
    assert worker.lines("event=bug") == []


def test_its_crew_is_there_as_it_begins_and_has_nothing_of_the_workers(worker: Worker) -> None:
    """They are forked of it: whoever takes its lock, or connects to its socket, is to see it end."""
    assert worker.process is not None
    members, own = worker.helpers("sealnet-crew"), worker.process.pid

    def opened(pid: int) -> set[str]:
        # What was closed meanwhile is not there.
        links = (fd for fd in Path(f"/proc/{pid}/fd").iterdir())
        return {os.readlink(fd) for fd in links if fd.is_symlink()}

    assert len(members) == min(os.cpu_count() or 1, 4)
    assert any(path.endswith("/worker.lock") for path in opened(own))
    log = str(worker.log.resolve())
    for pid in members:
        shared = {path for path in opened(pid) & opened(own) if path != os.devnull}
        assert shared <= {log}, shared
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.getsid(pid) == pid
        assert Path(f"/proc/{pid}/status").read_text().count("Name:\tsealnet-crew") == 1
    worker.host.broker(8080)
    works(worker)


def test_one_of_its_crew_that_died_or_was_halted_before_it_was_needed_keeps_nobody_waiting(worker: Worker) -> None:
    assert worker.process is not None
    dead, *others = worker.helpers("sealnet-crew")
    os.kill(dead, signal.SIGKILL)
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    worker.host.broker(8080)

    began = time.monotonic()
    works(worker)
    works(worker, BOB)

    # A member is waited for for 30 s, where it says nothing.
    assert time.monotonic() - began < 20 * PATIENCE
    assert not Path(f"/proc/{dead}").exists()
    assert worker.lines("event=bug") == []


def told_to_door(place: Path, *messages: bytes) -> bool:
    """Whether a door takes root for its supervisor where it is met, and what that says for what it is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(10 * PATIENCE)
        door.connect(str(place))
        with contextlib.suppress(ConnectionError):
            if not door.recv(65536):
                return False
            for message in messages:
                door.send(message)
                door.recv(65536)
        return True


@pytest.mark.tool("curl")
def test_what_is_said_where_a_door_is_met_ends_no_run(worker: Worker) -> None:
    worker.host.broker(8080)
    lives = waits(worker, ALICE, "lives", "--broker", "tcp:127.0.0.1:8080")
    place = next((worker.host.state / "doors").iterdir())
    nonsense = (b"", b"\0", b"[" * 500, b"{}", b"[]", b'{"op": "serve"}', b'{"op": "stop", "run": 7}', b'{"op": "stop", "run": "nobody"}')

    # It has a worker, and obeys nobody else.
    assert not told_to_door(place, *nonsense)
    worker.end(signal.SIGKILL)
    for message in nonsense:
        wait_for(lambda message=message: told_to_door(place, message), what="it is met")
    worker.start()

    assert worker.lines("event=adopted run=lives")
    (worker.home(ALICE) / "go").touch()
    assert lives.communicate(timeout=60 * PATIENCE)[0] == "/told"
    assert lives.returncode == 6
    assert worker.lines("event=bug") == []


# What is full


@pytest.fixture
def small(host: Host) -> Iterator[Worker]:
    """A worker whose state directory is a small file system of its own, which a test may fill or make read-only."""
    host.state.mkdir(mode=0o711)
    host.run("mount", "-t", "tmpfs", "-o", "mode=711,size=4m", "tmpfs", str(host.state))
    made = Worker(host)
    yield made
    for one in json.loads(host.sealnet("ls", "--json").stdout):
        host.sealnet("reap", one["run_id"])
    made.end()


def fill(directory: Path) -> Path:
    """Not a byte is free any more."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


def waits(worker: Worker, uid: int, run_id: str, *options: str) -> subprocess.Popen[Any]:
    """A run that ends with 6, having asked its broker, when there is a file `go`."""
    return running(worker, uid, run_id, "sh", "-c", f"until [ -e go ]; do sleep 0.02; done; {ASKS}; exit 6", options=options)


@pytest.mark.tool("curl")
def test_a_full_state_directory_refuses_launches_and_ends_no_run(small: Worker) -> None:
    small.host.broker(8080)
    lives = [waits(small, ALICE, "lives", "--lease-port", "8080"), waits(small, ALICE, "adopted", "--lease-port", "8080")]
    full = fill(small.host.state)

    refused = [small.call(BOB, "run", *words, "--", "touch", "ran") for words in ((), ("--lease-port", "8080"), ("--evidence", "bundle"))]
    # A worker that has to begin in this state loses nothing either.
    assert small.end(signal.SIGKILL) == -signal.SIGKILL
    small.start()
    assert len(small.lines("event=adopted")) == 2
    (small.home(ALICE) / "go").touch()
    told = [one.communicate(timeout=60 * PATIENCE) for one in lives]

    assert [one.returncode for one in lives] == [6, 6], told
    assert [out for out, _err in told] == ["/told"] * 2
    for done in refused:
        assert (done.returncode, "No space left on device" in done.stderr) == (125, True), done.stderr
    assert not (small.home(BOB) / "ran").exists()
    wait_for(lambda: is_idle(small), what="nothing is left")
    full.unlink()
    works(small)
    assert small.lines("event=bug") == []
    # Nothing half written either.
    assert [path for path in small.host.state.rglob(".*") if path.name != ".worker.sock.new"] == []


@pytest.mark.tool("curl")
def test_a_state_directory_that_becomes_read_only_refuses_launches_and_ends_no_run(small: Worker) -> None:
    small.host.broker(8080)
    lives = waits(small, ALICE, "lives", "--lease-port", "8080")
    later = waits(small, BOB, "later", "--lease-port", "8080")
    # What is open already cannot be made so: from now on every path leads to a mount that is.
    small.host.run("mount", "--bind", str(small.host.state), str(small.host.state))
    small.host.run("mount", "-o", "remount,bind,ro", str(small.host.state))

    refused = [small.call(BOB, "run", *words, "--", "touch", "ran") for words in ((), ("--lease-port", "8080"))]
    (small.home(ALICE) / "go").touch()
    out, err = lives.communicate(timeout=60 * PATIENCE)

    for done in refused:
        assert (done.returncode, "Read-only file system" in done.stderr) == (125, True), done.stderr
    assert not (small.home(BOB) / "ran").exists()
    # Its payload has had what it asked for; that what stands in the directory could not be taken away is told.
    assert out == "/told"
    assert "cannot tear down run lives" in err
    assert "Read-only file system" in err
    assert small.host.run("ip", "-o", "link", "show").stdout.count("sealnet-lives") == 0
    small.host.run("umount", str(small.host.state))
    (small.home(BOB) / "go").touch()
    assert later.communicate(timeout=60 * PATIENCE)[0] == "/told"
    assert later.returncode == 6
    assert small.host.sealnet("reap", "lives").returncode == 0
    wait_for(lambda: is_idle(small), what="nothing is left")
    works(small)
    assert small.lines("event=bug") == []


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 8192), max(before[1], 8192)))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_two_thousand_descriptors_keep_nobody_from_anything(worker: Worker, many_descriptors: None) -> None:
    worker.host.broker(8080)
    assert worker.process is not None
    files = Path(f"/proc/{worker.process.pid}/fd")

    with contextlib.ExitStack() as held:
        # Root's, of whom there may be any number.
        for _ in range(2000):
            held.enter_context(connects(worker))
        wait_for(lambda: len(os.listdir(files)) > 2000, what="all of them are taken")
        running(worker, ALICE, "beside", *ENDLESS, options=("--lease-port", "8080"))
        works(worker)
        assert worker.call(ALICE, "check", "beside").returncode == 0
        assert worker.call(ALICE, "reap", "beside").returncode == 0

    wait_for(lambda: len(os.listdir(files)) < 200, what="none of them is kept")
    works(worker)


def test_a_worker_without_a_descriptor_left_refuses_and_goes_on(worker: Worker, many_descriptors: None) -> None:
    worker.host.broker(8080)
    worker.end()
    # Without the right to raise its limit, as in a container.
    worker.start("prlimit", "--nofile=220:220", "setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource")
    beside = waits(worker, ALICE, "beside", "--lease-port", "8080")
    assert worker.process is not None
    files = Path(f"/proc/{worker.process.pid}/fd")

    for spare in (0, 4, 12, 25):
        with contextlib.ExitStack() as held:
            callers = [held.enter_context(connect(worker)) for _ in range(8)]
            # The kernel takes more than the worker can.
            while len(os.listdir(files)) < 220 - spare:
                held.enter_context(connect(worker))
                time.sleep(0.002)
            told = []
            for number, sock in enumerate(callers):
                sock.settimeout(60 * PATIENCE)
                with descriptors() as fds, contextlib.suppress(OSError, EOFError):
                    socket.send_fds(sock, [request(f"refused-{number}", "sh", "-c", "exit 5", lease_port=8080)], fds)
            for sock in callers:
                # One whose descriptors could not be received is not called at all: it is closed.
                with contextlib.suppress(OSError, EOFError):
                    told.append(json.loads(read_message(sock)))
        assert [one for one in told if not (one.get("continues") or is_clear(one))] == []
        wait_for(lambda: os.listdir(worker.host.state / "runs") == ["beside"], timeout_s=20, what="nothing is left but what lives")

    works(worker)
    (worker.home(ALICE) / "go").touch()
    assert beside.communicate(timeout=60 * PATIENCE)[0] == "/told"
    assert beside.returncode == 6
    assert worker.lines("event=bug") == []


def test_when_no_subnet_is_free_a_caller_is_told_so(worker: Worker) -> None:
    worker.host.broker(8080)
    worker.end()
    worker.config.write_text('group = "nogroup"\npool = ["198.18.0.0/29"]\n')
    worker.start()
    lives = [waits(worker, ALICE, f"lives-{number}", "--lease-port", "8080") for number in range(2)]

    refused = worker.call(BOB, "run", "--lease-port", "8080", "--", "touch", "ran")
    severed = worker.call(BOB, "run", "--", "sh", "-c", "exit 4")
    (worker.home(ALICE) / "go").touch()
    for one in lives:
        one.communicate(timeout=60 * PATIENCE)

    assert (refused.returncode, "198.18.0.0/29" in refused.stderr) == (125, True), refused.stderr
    assert severed.returncode == 4
    assert [one.returncode for one in lives] == [6, 6]
    works(worker, BOB)


def test_who_is_told_to_end_while_the_worker_is_halted_does(worker: Worker) -> None:
    """It has his connection, and never answers."""
    assert worker.process is not None
    # A pipe's end would be the payload's as well.
    told = worker.home(ALICE) / "told"
    with told.open("w") as file:
        leaves = running(worker, ALICE, "leaves", *ENDLESS, options=("--grace", "1"), stderr=file)
    stays = running(worker, BOB, "stays", "sh", "-c", "read line; exit 3", stdin=subprocess.PIPE)
    worker.process.send_signal(signal.SIGSTOP)
    try:
        leaves.terminate()
        assert leaves.wait(60 * PATIENCE) == 125
        assert "cannot tell how run leaves ends: the worker does not answer" in told.read_text()
    finally:
        worker.process.send_signal(signal.SIGCONT)
    # Nobody is there for it any more.
    gone(worker, "leaves")
    stays.communicate("\n", timeout=60 * PATIENCE)
    assert stays.returncode == 3
    worker.host.broker(8080)
    works(worker)


# Messages


def test_a_call_that_comes_byte_by_byte_is_a_call(worker: Worker) -> None:
    data = request("slow", "sh", "-c", "exit 5")
    with connect(worker) as sock, descriptors() as fds:
        sock.settimeout(60 * PATIENCE)
        socket.send_fds(sock, [data[:1]], fds)
        for at in range(1, len(data)):
            sock.sendall(data[at : at + 1])
        assert "started" in json.loads(read_message(sock))["parameters"]
        assert json.loads(read_message(sock))["parameters"]["ended"]["status"] == 5


def test_half_a_call_or_one_too_long_is_none(worker: Worker) -> None:
    assert worker.process is not None
    files = Path(f"/proc/{worker.process.pid}/fd")
    before, data, chance = len(os.listdir(files)), request("half", "touch", "/tmp/ran"), random.Random(1)

    for _ in range(40):
        with connect(worker) as sock, descriptors() as fds:
            socket.send_fds(sock, [data[: chance.randrange(1, len(data))]], fds)
    # As long as may be is a call, with what it asks for refused; one byte more is none.
    most, padding = 1 << 20, b'{"method":"io.sealnet.Worker.List","parameters":{"x":""}}'
    for more in (0, 1):
        with connect(worker) as sock, contextlib.suppress(ConnectionError):
            sock.settimeout(60 * PATIENCE)
            sock.sendall(padding.replace(b'""', b'"' + b"x" * (most - len(padding) + more) + b'"') + b"\0")
            answer = sock.recv(1 << 16)
            assert (b"InvalidParameter" in answer) is (more == 0)

    wait_for(lambda: len(os.listdir(files)) <= before, what="nothing of it is kept")
    assert worker.lines("event=started") == []
    assert worker.lines("event=bug") == []
    assert call_list(worker) == []


def call_list(worker: Worker) -> Any:
    with connect(worker) as sock:
        return call(sock, "List")["parameters"]["runs"]


def test_launches_that_are_cancelled_or_left_at_any_moment_leave_nothing(worker: Worker) -> None:
    worker.host.broker(8080)
    chance = random.Random(2)

    def cancelled(number: int, after_s: float) -> dict[str, Any] | None:
        run_id = f"storm-{number}"
        with connect(worker) as sock, descriptors() as fds:
            sock.settimeout(60 * PATIENCE)
            socket.send_fds(sock, [request(run_id, "sh", "-c", "sleep 0.05; exit 5", lease_port=8080)], fds)
            time.sleep(after_s)
            if number % 2:
                return None
            with connect(worker) as other:
                other.settimeout(60 * PATIENCE)
                for _ in range(5):
                    assert set(call(other, "Cancel", run_id=run_id)["parameters"]) == {"found"}
            told = json.loads(read_message(sock))
            while told.get("continues"):
                told = json.loads(read_message(sock))
            return told

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        told = list(pool.map(cancelled, range(64), [chance.uniform(0, 0.4) for _ in range(64)]))

    found = [one for one in told if one is not None]
    assert len(found) == 32
    kinds = {one["parameters"].get("kind", "ended") for one in found}
    assert kinds <= {"failed", "ended"}, found
    assert {one["parameters"]["ended"]["status"] for one in found if "error" not in one} <= {5}
    wait_for(lambda: is_idle(worker), timeout_s=20, what="nothing is left")
    works(worker)
    assert worker.lines("event=bug") == []


# The host


def test_a_clock_that_is_set_while_runs_live_ends_none_early_and_loses_none(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody may set the machine's own; this is the worker's alone, and goes back and forth by years whenever it is read.
    monkeypatch.setenv("SEALNET_TESTS_CLOCK", "jumps")
    first = durable.Worker(host)
    first.launch("waits", durable.WAITS)
    first.launch("late", [*durable.SH, "trap '' TERM; sleep 600 & wait; wait"], timeout_s=3, grace_s=0.2)
    first.launch("patient", durable.WAITS, timeout_s=3000)
    assert first.do("live") == ["late", "patient", "waits"]
    assert first.do("wait", "late") == [124, None, 1000, True]
    first.kill()

    second = durable.Worker(host)
    assert set(second.adopted) == {"patient", "waits"}
    # What ended long ago by one reading, and will in years by the next, is still known.
    assert second.do("wait", "late") == [124, None, 1000, True]
    started = [host.record(name)["started"] for name in ("waits", "patient")]
    assert abs(started[0] - time.time()) > 3e7 or abs(started[1] - time.time()) > 3e7
    Path("go").touch()
    assert [second.do("wait", name) for name in ("patient", "waits")] == [[6, None, 1000, True]] * 2
    second.close()


def test_a_fork_storm_ends_with_its_run_and_keeps_nobody_from_anything(worker: Worker) -> None:
    worker.host.broker(8080)
    own = worker.argv(FORKER, "run", "--run-id", "storm", "--", "nice", "/usr/bin/python3", "-c", STORM)
    begun = worker.host.spawn("prlimit", "--nproc=150:150", *own, cwd=worker.home(FORKER))
    wait_for((worker.home(FORKER) / "storming").exists, what="it forks")
    procs = Path(worker.host.record("storm")["cgroup"]) / "cgroup.procs"
    wait_for(lambda: len(procs.read_text().split()) > 100, what="there are many of it")

    works(worker, BOB)
    assert worker.call(FORKER, "reap", "storm").returncode == 0

    begun.communicate(timeout=60 * PATIENCE)
    assert begun.returncode == 137
    wait_for(lambda: is_idle(worker), what="nothing is left")
    works(worker, BOB)


def test_others_that_keep_the_kernels_network_lock_busy_make_it_slow_and_no_more(worker: Worker) -> None:
    worker.host.broker(8080)
    loop = "while :; do ip link add busy0 type dummy; ip link add busy1 type veth peer busy2; ip link del busy0; ip link del busy1; done"
    others = [worker.host.spawn("unshare", "-n", "sh", "-c", loop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            datas = [request(f"one-{number}", "sh", "-c", f"{ASKS} >/dev/null && exit 5", lease_port=8080) for number in range(8)]
            told = list(pool.map(lambda data: asked(worker, data), datas))
    finally:
        for one in others:
            worker.host.stop(one)

    assert [one["parameters"].get("ended", one)["status"] for one in told] == [5] * 8
    wait_for(lambda: is_idle(worker), what="nothing is left")


# What is not what it says

FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda _record: [],
    "another's id": lambda record: record.update(run_id="control"),
    "no id at all": lambda record: record.update(run_id="../../etc"),
    "a text for a number": lambda record: record["durable"].update(bwrap_pid="1"),
    "init's pid": lambda record: record.update(init_pid=1),
    "a huge pid": lambda record: record.update(init_pid=2**70),
    "a negative pid": lambda record: record["durable"].update(bwrap_pid=-1),
    "no time": lambda record: record["durable"].update(ends_at="soon"),
    "no note": lambda record: record.update(note=None),
    "another note": lambda record: record["note"].update(tied="yes", evidence="../runs", grace_s="x"),
    "all of a cgroup": lambda record: record.update(cgroup="/"),
    "the door of nobody": lambda record: record["durable"].update(
        door={"name": "..", "pid": 1, "start": 0, "ports": [1], "broker": "/etc/shadow"}
    ),
    "another confinement": lambda record: record.update(confinement="open"),
    "no confinement": lambda record: record.update(confinement="loose"),
    "another subnet": lambda record: record.update(
        subnet="192.168.77.0/30", gateway="192.168.77.1", sandbox="192.168.77.2", lease_ports=[22]
    ),
    "another link": lambda record: record.update(ifname="lan0"),
    "events that are none": lambda record: record.update(events=[1, "x"]),
}


def test_a_record_that_was_forged_or_damaged_keeps_a_worker_from_nothing_and_touches_no_stranger(worker: Worker) -> None:
    stranger = worker.host.spawn("sleep", "600")
    names = {f"forged-{number}": change for number, change in enumerate(FORGED.values())}
    script = "until [ -e go ]; do sleep 0.05; done; exit 6"
    for name in (*names, "control"):
        with connect(worker) as sock, descriptors(worker.home(ALICE)) as fds:
            data = json.loads(request(name, "sh", "-c", script, cwd=worker.home(ALICE))[:-1]) | {"more": False}
            data["parameters"]["detach"] = True
            socket.send_fds(sock, [json.dumps(data).encode() + b"\0"], fds)
            assert "started" in json.loads(read_message(sock))["parameters"]
    worker.end(signal.SIGKILL)
    for name, change in names.items():
        path = worker.host.state / "runs" / name / "record.json"
        record = json.loads(path.read_text())
        instead = change(record)
        path.write_text(json.dumps(record if instead is None else instead))

    worker.start()

    assert worker.lines("event=adopted run=control"), worker.log.read_text()
    # What has been taken over is the caller's own; of all else nothing is left, and nobody else has lost anything.
    adopted = {line.split("run=")[1].split()[0] for line in worker.lines("event=adopted")}
    wait_for(lambda: set(os.listdir(worker.host.state / "runs")) == adopted, what="what is not taken over is taken away")
    assert stranger.poll() is None
    (worker.home(ALICE) / "go").touch()
    assert worker.host.sealnet("wait", "control").returncode == 6
    wait_for(lambda: is_idle(worker), what="nothing is left")
    assert worker.call(BOB, "run", "--", "true").returncode == 0
