"""The Python API, as a program that runs many uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import sealnet
from sealnet.kernel import process
from tests.lab import SEALNET, Host, wait_for
from tests.upstream import Upstream

pytestmark = pytest.mark.root


@pytest.fixture
def upstream(host: Host) -> Upstream:
    return Upstream(host)


def children() -> list[str]:
    """Doors that this process still has."""
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in process.children(os.getpid())]
    return [command.decode() for command in commands if b"sealnet.door" in command]


def test_run_is_like_subprocess_run(host: Host) -> None:
    host.broker(8080)

    done = sealnet.run(
        ["sh", "-c", "cat; echo told >&2; curl -s -m 2 http://192.0.2.9/; exit 3"],
        input="hello",
        capture_output=True,
        text=True,
        lease_port=8080,
    )

    assert (done.returncode, done.stdout, done.stderr) == (3, "hello", "told\n")
    assert done.tried == (("192.0.2.9", "tcp", 80, 1),)
    with pytest.raises(subprocess.CalledProcessError):
        done.check_returncode()


def test_a_run_may_have_doors(host: Host, upstream: Upstream) -> None:
    host.broker(8080, "127.0.0.1")
    script = "curl -fsS $URL/x; curl -fsS http://allowed.test/y; curl -s -o /dev/null -w ' %{http_code}' http://evil.test/"

    done = sealnet.run(
        ["sh", "-c", script], capture_output=True, text=True, broker="tcp:127.0.0.1:8080", allow=["allowed.test:80"], broker_env=["URL"]
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "/x/y 403", "")
    assert (done.receipt.verdict, list(done.receipt.hosts)) == ("allowlist", ["allowed.test:80"])
    with pytest.raises(sealnet.NoBroker, match=r"cannot reach lan.test:80: 192.168.77.2 is refused: private") as refused:
        sealnet.run(["true"], allow=["lan.test:80"])
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("--allow-private lan.test:80 ")
    assert sealnet.run(["true"], allow_private=["lan.test:80"]).returncode == 0
    for mistake in ({"allow": ["http://a.test"]}, {"broker": "a:1"}, {"allow": ["a.test"], "network": "sealed"}):
        with pytest.raises(sealnet.UsageError):
            sealnet.run(["true"], **mistake)  # type: ignore[arg-type]
    assert children() == []


def test_threads_have_doors_side_by_side_and_a_sealer_ends_them_with_their_runs(host: Host, upstream: Upstream) -> None:
    host.broker(8080, "127.0.0.1")
    sealer = sealnet.Sealer()
    said: dict[int, str] = {}

    def one(number: int) -> None:
        ask = f"curl -fsS $SEALNET_BROKER_URL/{number}; curl -fsS http://allowed.test/{number}"
        out = host.directory / f"said-{number}"
        with out.open("wb") as file:
            with sealer.launch(["sh", "-c", ask], broker="tcp:127.0.0.1:8080", allow=["allowed.test:80"], stdout=file.fileno()) as run:
                assert run.wait(60) == 0
        said[number] = out.read_text()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    with sealer.launch(["sleep", "600"], run_id="long", allow=["allowed.test:80"]) as run:
        assert len(run.record.lease_ports) == 1
    for thread in threads:
        thread.join()

    assert said == {number: f"/{number}/{number}" for number in range(4)}
    assert children() == []
    assert sealer.runs() == []


def test_a_child_that_keeps_the_pipe_open_does_not_keep_run_from_returning(host: Host) -> None:
    done = sealnet.run(["sh", "-c", "sleep 600 & echo told"], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "told\n")


def test_a_timeout_is_124(host: Host) -> None:
    assert sealnet.run(["sleep", "600"], timeout_s=0.3, grace_s=0.3).returncode == 124


def test_what_cannot_be_sealed_raises_and_leaves_nothing(host: Host) -> None:
    with pytest.raises(sealnet.NoBroker, match="nothing listens on port 8080"):
        sealnet.run(["true"], lease_port=8080)
    with pytest.raises(sealnet.UsageError):
        sealnet.run(["true"], lease_port=8080, network="severed")


def test_threads_run_side_by_side(host: Host) -> None:
    host.broker(8080)
    done: dict[int, str] = {}

    def one(number: int) -> None:
        command = ["sh", "-c", f"curl -s http://broker.sealnet:8080/{number}"]
        done[number] = str(sealnet.run(command, capture_output=True, text=True, lease_port=8080).stdout)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert done == {number: f"/{number}" for number in range(8)}


def test_a_sealer_launches_lists_and_reaps(host: Host) -> None:
    sealer = sealnet.Sealer()
    with sealer.launch(["sleep", "600"], run_id="long", stdin=subprocess.DEVNULL) as run:
        assert [(record.run_id, record.state) for record in sealer.runs()] == [("long", "running")]
        with pytest.raises(sealnet.RunExists):
            sealer.launch(["true"], run_id="long")
        with pytest.raises(TimeoutError):
            run.wait(0.05)
        assert run.send_signal(15)
        assert run.wait(60) == 143
    assert sealer.runs() == []
    assert sealer.reap("long") is False


def test_a_run_that_somebody_else_has_reaped_is_no_trouble(host: Host) -> None:
    sealer = sealnet.Sealer()
    with sealer.launch(["sleep", "600"], run_id="mine") as run:
        assert sealer.reap("mine") is True
        assert run.wait(60) == 137
        # The id is free, and what is closed below is not the new run of that name.
        with sealer.launch(["sleep", "600"], run_id="mine") as again:
            run.close()
            assert again.poll() is None
            assert wait_for(again.payload_pid)


def test_a_run_holds_no_copy_of_the_names_of_other_runs(host: Host) -> None:
    """One that it held would keep the other's namespace after its end."""
    sealer = sealnet.Sealer()
    with sealer.launch(["sleep", "60"]) as first, sealer.launch(["sleep", "60"]) as second:
        name = f"/run/netns/sealnet-{first.run_id} "
        assert second.starter is not None

        held = second.starter.call(Path("/proc/thread-self/mountinfo").read_text)

        assert name in Path("/proc/self/mountinfo").read_text()
        assert name not in held
        assert name not in Path(f"/proc/{second.spawned.pid}/mountinfo").read_text()


def test_nothing_is_left_of_a_run_that_was_waited_for(host: Host) -> None:
    host.broker(8080)
    script = "curl -s -m 2 http://192.0.2.9/; echo told; sleep 600 & exit 4"

    run = sealnet.Sealer().launch(["sh", "-c", script], lease_port=8080, stdout=subprocess.PIPE)

    assert run.wait() == 4
    assert host.left_over() == []
    # All of it is told still, and its pipe can be read to its end.
    assert run.stdout is not None
    assert run.stdout.read() == b"told\n"
    assert (run.poll(), run.wait(), run.payload_pid(), run.send_signal(15)) == (4, 4, None, False)
    assert run.tried() == [("192.0.2.9", "tcp", 80, 1)]
    assert (run.receipt.verdict, run.record.state) == ("sealed", "exited")
    with pytest.raises(sealnet.NoSuchRun):
        run.check()
    run.kill()
    run.close()
    assert run.stdout.closed


def test_a_run_of_that_id_is_not_killed_for_one_that_was_waited_for(host: Host) -> None:
    before = sealnet.Sealer().launch(["true"], run_id="again")
    before.wait()

    with sealnet.Sealer().launch(["sleep", "600"], run_id="again") as run:
        before.kill()
        before.freeze(frozen=True)
        before.close()

        assert run.poll() is None
    # Nor for one that somebody else has taken away meanwhile.
    taken = sealnet.Sealer().launch(["sleep", "600"], run_id="again")
    sealnet.Sealer().reap("again")
    with sealnet.Sealer().launch(["sleep", "600"], run_id="again") as run:
        assert taken.wait() == 137
        assert run.poll() is None
        assert run.check()["verdict"] == "severed"


LEAVES = """
import os, sealnet, sys, time
sealer = sealnet.Sealer()
for run_id, script in (("lives", "until [ -e stop ]; do sleep 0.05; done; exit 7"), ("ends", "exit 3"), ("plain", "sleep 600")):
    # What dies with us has to be held.
    keep = sealer.launch(["sh", "-c", script], run_id=run_id, durable=run_id != "plain", lease_port=8080, stdin=-3)
    globals()[run_id] = keep
print("left", flush=True)
time.sleep(600)
"""


def test_what_a_process_has_left_alive_the_next_one_takes_over(host: Host) -> None:
    host.broker(8080)
    leaver = host.spawn(sys.executable, "-I", "-c", LEAVES)
    assert leaver.stdout is not None
    assert leaver.stdout.readline() == "left\n"
    sealer = sealnet.Sealer()
    # Somebody sees to them.
    assert sealer.adopt() == []
    assert len(sealer.runs()) == 3
    host.stop(leaver)
    told = host.sealnet("check", "lives")
    assert (told.returncode, "sealnet.Sealer().adopt()" in told.stdout, "worker" in told.stdout) == (1, True, False), told.stdout
    worker = host.spawn(*SEALNET, "worker")
    wait_for((host.state / "worker.sock").exists, what="a worker is there, and takes nothing over that is not its own")

    adopted = sealer.adopt()

    assert [run.run_id for run in adopted] == ["lives"]
    wait_for(lambda: [record.run_id for record in sealer.runs()] == ["lives"], what="the others are taken away")
    assert adopted[0].check()["verdict"] == "sealed"
    # As it was proved when it started.
    assert (adopted[0].receipt.verdict, adopted[0].receipt.wording.split(" - ")[0]) == ("sealed", "network: off")
    assert adopted[0].receipt.checks
    assert sealer.adopt() == []
    with pytest.raises(TimeoutError):
        adopted[0].wait(0.2)
    Path("stop").touch()
    assert adopted[0].wait() == 7
    worker.terminate()
    worker.wait(60)


def test_what_cannot_be_left_is_refused(host: Host) -> None:
    sealer = sealnet.Sealer()

    for options in ({"broker": "tcp:127.0.0.1:8080"}, {"allow": ["a.test"]}, {"evidence": "evidence"}):
        with pytest.raises(sealnet.UsageError, match="durable"):
            sealer.launch(["true"], durable=True, **options)  # type: ignore[arg-type]

    assert list(host.directory.iterdir()) == []


def test_what_is_of_the_wrong_type_touches_nothing(host: Host) -> None:
    sealer = sealnet.Sealer()
    wrong = {"lease_port": (True, 8080.5, "8080"), "timeout_s": ("5", True), "bwrap_args": (["--dir", "/x"],), "preflight": (0,)}

    for name, values in wrong.items():
        for value in values:
            with pytest.raises(TypeError, match=f"{name} is "):
                sealer.run(["true"], **{name: value})  # type: ignore[arg-type]
    for run_id in ("..", "../subnets", ".", "x/y", ""):
        for deed in (sealer.reap, sealer.check):
            with pytest.raises(sealnet.UsageError, match="cannot use run id"):
                deed(run_id)
    told = sealer.can_seal(lease_port=True)

    assert (told.ok, told.reason) == (False, "cannot use --lease-port True: a TCP port is 1 to 65535")
    assert sealer.run(["sh", "-c", "exit $X"], set_env={"X": "9"}).returncode == 9
    assert host.left_over() == []
