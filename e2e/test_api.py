"""The Python API, as a program that runs many uses it."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

import sealnet
from sealnet.kernel import process
from tests.lab import Host, wait_for
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
        assert second.inside is not None

        held = second.inside.call(Path("/proc/thread-self/mountinfo").read_text)

        assert name in Path("/proc/self/mountinfo").read_text()
        assert name not in held
