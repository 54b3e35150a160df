"""The Python API as a user of the worker's has it, held against the same program as root."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.test_worker_socket import ALICE, BOB, Worker, gone, running, worker  # noqa: F401
from tests.lab import wait_for

pytestmark = pytest.mark.root

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
PROGRAM = [sys.executable, "-I", str(Path(__file__).parents[1] / "tests" / "apiuser.py")]


def argv(deed: str, given: dict[str, Any]) -> list[str]:
    return [*PROGRAM, deed, json.dumps(given)]


def of(worker: Worker, uid: int, deed: str, **given: Any) -> Any:  # noqa: F811
    """What the program has seen; as root it runs its payloads as ALICE."""
    prefix = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--groups=65534"] if uid else []
    words = argv(deed, {"user": ALICE, **given})
    done = worker.host.run(*prefix, *words, cwd=worker.home(ALICE), check=False)
    assert (done.returncode, done.stderr.replace("told\n", "")) == (0, ""), done.stderr
    return json.loads(done.stdout)


def both(worker: Worker, deed: str) -> Any:  # noqa: F811
    """What the program has seen in both ways, which is the same."""
    through = of(worker, ALICE, deed)
    ours = len(worker.lines("event=started"))
    direct = of(worker, 0, deed)
    assert through == direct
    assert ours > 0
    assert len(worker.lines("event=started")) == ours, "root's was not to be the worker's"
    return through


def test_a_completed_run_is_the_same_in_both_ways(worker: Worker) -> None:  # noqa: F811
    worker.host.broker(8080)

    seen = both(worker, "completed")

    assert (seen["returncode"], seen["stdout"], seen["stderr"]) == (3, f"hello{ALICE}\n/x", "told\n")
    assert seen["tried"] == [["192.0.2.9", "tcp", 80, 1]]
    assert seen["verdict"] == ["sealed", True, "sealed"]
    assert seen["is the file's"] is True
    assert seen["bundle"] == [["completed.egress.jsonl", "environment.json", "plan.lock.json", "receipt.json"], True]
    assert seen["raised"][0] == 3
    assert all(ok for _name, _kind, ok in seen["checks"])
    assert both(worker, "others") == {
        "merged": [None, "a\nb\n"],
        "big": True,
        "deaf": 0,
        "null": "",
        "child keeps the pipe": "told\n",
        "timeout": 124,
        "signal": 138,
    }


def test_a_live_run_is_the_same_in_both_ways(worker: Worker) -> None:  # noqa: F811
    seen = both(worker, "live")

    assert seen["said"] == ["got words\n", "ready\n"]
    assert seen["listed"] == [["live", "running", ALICE]]
    assert seen["tried"] == [["192.0.2.9", "tcp", 80, 1]]
    assert seen["verdicts"] == ["severed"] * 3
    assert seen["taken"][0] == "RunExists"
    assert (seen["goes on"], seen["signalled"], seen["trapped"]) == (True, True, "usr1\n")
    assert (seen["status"], seen["after"]) == (137, [137, False, seen["tried"]])
    assert (seen["left"], seen["reaped"], seen["closed"]) == ([[], False], True, [])


def test_threads_and_tasks(worker: Worker) -> None:  # noqa: F811
    assert both(worker, "threads") is True

    seen = both(worker, "tasks")

    assert seen["many"] == [f"{number}\n" for number in range(6)]
    assert (seen["alone"], seen["cancelled"]) == (7, ["CancelledError", "CancelledError"])
    assert "nothing listens on port 1" in seen["refused"]
    assert (seen["left"], seen["ran"], seen["timed out"]) == ([], False, [])

    seen = both(worker, "streams")

    assert (seen["said"], seen["end"], seen["trapped"]) == ("got words\n", "end\n", "usr1\n")
    assert seen["seen"] == ["severed", "severed", [], "running", "live"]
    assert (seen["goes on"], seen["status"]) == (True, [137, 137])
    assert (seen["left"], seen["raised"], seen["cancelled"]) == ([], [], [True, []])
    assert (seen["kill"], seen["wait"]) == ("the run was closed", "the run was closed")
    assert "nothing listens on port 1" in seen["refused"]


def test_who_makes_a_run_and_what_is_refused(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    through, direct = (of(worker, uid, "refused") for uid in (ALICE, 0))

    assert through == direct
    assert [one[0] for one in through[:-2]] == [
        "NoBroker", "UsageError", "UsageError", "TypeError", "UsageError", "UsageError",
        "UsageError", "UsageError", "TypeError", "TypeError", "TypeError", "NoSuchRun",
    ]  # fmt: skip
    assert through[-2:] == [False, True]

    assert of(worker, ALICE, "ways", way="auto")[1:] == [True, None]
    refused, can, reason = of(worker, ALICE, "ways", way="never")
    assert refused == ["CannotSeal", "cannot start a run: only root may"]
    assert (can, reason) == (False, "cannot try a seal: only root may")
    before = len(worker.lines("event=started"))
    assert of(worker, 0, "ways", way="always")[:2] == [None, True]
    assert len(worker.lines("event=started")) == before + 1
    monkeypatch.setenv("SEALNET_CONFIG", str(worker.config))
    assert of(worker, ALICE, "ways", way="always")[0][0] == "UsageError"
    assert of(worker, ALICE, "ways", way="auto")[0][0] == "CannotSeal"
    monkeypatch.delenv("SEALNET_CONFIG")

    worker.end()

    refused, can, reason = of(worker, ALICE, "ways", way="always")
    assert refused[1].startswith("cannot reach the worker at /run/sealnet/worker.sock: ")
    assert (can, reason) == (False, refused[1])


def test_the_fixture_for_pytest(worker: Worker) -> None:  # noqa: F811
    home = worker.home(ALICE)
    (home / "test_sealed.py").write_text(
        "def test(sealed_run):\n    assert sealed_run(['id', '-u']).stdout == 'UID\\n'".replace("UID", str(ALICE))
    )
    prefix = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--groups=65534"]

    done = worker.host.run(*prefix, *PROGRAM[:2], "-m", "pytest", f"--basetemp={home}/base", "-p", "no:cacheprovider", cwd=home)

    assert "1 passed" in done.stdout
    assert len(worker.lines("event=started")) == 1


def test_the_examples_of_the_page_run(worker: Worker) -> None:  # noqa: F811
    home, host = worker.home(ALICE), worker.host
    host.broker(8080)
    (home / "agent").write_text("#!/bin/sh\nexec curl -fsS $SEALNET_BROKER_URL/$2\n")
    (home / "agent").chmod(0o755)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    told = []

    for number, block in enumerate(blocks):
        (home / f"test_{number}.py").write_text(block)
        words = ["-m", "pytest", "-q", f"--basetemp={home}/base", "-p", "no:cacheprovider"] if "def test" in block else []
        prefix = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--groups=65534"]
        told.append(host.run(*prefix, *PROGRAM[:2], *words, f"test_{number}.py", cwd=home).stdout)

    gateway = re.findall(r"198[0-9.]+:8080", told[1])[0]
    # Tasks say their words in any order.
    told[3] = "".join(sorted(told[3][:8])) + told[3][8:]
    assert told[:5] == [
        "0 /7 sealed\n",
        f"/0 network: off - egress sealed to the run's broker at {gateway} []\n",
        "b'one\\n'\n",
        "////0123[0, 0, 0, 0]\ntoo long, and gone\n",
        "b'one\\n' network: off - severed\n143\n",
    ]
    assert told[5].splitlines()[-1].startswith("1 passed")
    assert len(told) == 6


def test_a_program_that_dies_takes_its_run_along_and_a_worker_does_not(worker: Worker) -> None:  # noqa: F811
    prefix = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--groups=65534"]
    program = worker.host.spawn(*prefix, *argv("long", {}), cwd=worker.home(ALICE))
    assert program.stdout is not None
    assert [program.stdout.readline() for _ in range(2)] == ["started\n", "running\n"]

    worker.end(signal.SIGKILL)
    worker.start()
    wait_for(lambda: worker.lines("event=client-back"), what="the program waits on")
    assert worker.host.record("long") is not None
    program.kill()

    gone(worker, "long")


def test_a_users_program_takes_its_runs_over_through_the_worker(worker: Worker) -> None:  # noqa: F811
    assert of(worker, ALICE, "leave") is True
    # Somebody waits for this one, and this one is no worker's.
    waited = running(worker, ALICE, "waited", "sleep", "600")
    direct = worker.host.spawn_run("direct", "sleep", "600", options=("--worker", "never"))

    seen = of(worker, ALICE, "adopt")

    assert seen == [["lasting"], "severed", 7, []]
    assert of(worker, BOB, "adopt")[0] == []
    assert (waited.poll(), direct.poll()) == (None, None)
    for run_id in ("waited", "direct"):
        worker.host.sealnet("reap", run_id)
