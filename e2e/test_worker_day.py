"""A day in the life of a worker: users run what they run, while it is restarted and killed; all of it comes to its right end."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.test_worker_socket import ALICE, BOB, GROUP, Worker, worker
from tests.lab import PATIENCE, SEALNET, wait_for

__all__ = ["worker"]

# SEALNET_DAY=full is what a release is tried with: some minutes.
IS_FULL = os.environ.get("SEALNET_DAY") == "full"
RUNS, RESTARTS, KILLS, MORE = (2000, 10, 5, 300) if IS_FULL else (90, 2, 1, 30)
LIMIT_S = 900 if IS_FULL else 75

pytestmark = [pytest.mark.root, pytest.mark.timeout(LIMIT_S * max(PATIENCE, 4))]

CAROL = 65529
USERS = {"alice": (ALICE, 7), "bob": (BOB, 7), "carol": (CAROL, 6)}
PROGRAM = str(Path(__file__).parents[1] / "tests" / "dayuser.py")

# In a run of its own: tries the broker at its own gateway, which must answer, and at the gateways of others, which must not.
STRANGER = """
import os, socket, time, urllib.parse
own = urllib.parse.urlsplit(os.environ["SEALNET_BROKER_URL"])
def answers(address):
    with socket.socket() as sock:
        sock.settimeout(5)
        try:
            sock.connect((address, own.port))
            sock.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
            return bool(sock.recv(1))
        except OSError:
            return False
others = [f"198.18.0.{at}" for at in range(1, 120, 4) if f"198.18.0.{at}" != own.hostname]
rounds = 0
while not os.path.exists("stop"):
    if not answers(own.hostname):
        print("its own does not answer", flush=True)
    for address in others:
        if answers(address):
            print("open:", address, flush=True)
    rounds += 1
    time.sleep(0.02)
print("rounds:", rounds, flush=True)
"""


def begin(worker: Worker, name: str, seed: int, runs: int) -> subprocess.Popen[Any]:
    uid, threads = USERS[name]
    given = {"name": name, "threads": threads, "runs": runs, "seed": seed, "port": 8080}
    prefix = ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={GROUP}"]
    return worker.host.spawn(*prefix, sys.executable, "-I", PROGRAM, json.dumps(given), cwd=worker.home(uid), stderr=None)


def told(users: list[subprocess.Popen[Any]]) -> list[dict[str, Any]]:
    return [json.loads(user.communicate(timeout=LIMIT_S * PATIENCE)[0]) for user in users]


def done_of(worker: Worker) -> int:
    return sum(path.stat().st_size for uid, _ in USERS.values() if (path := worker.home(uid) / "progress").exists())


def burden(worker: Worker) -> tuple[int, int]:
    """Descriptors of the worker, and its memory in kB, once nothing is under way."""
    assert worker.process is not None
    wait_for(lambda: len(os.listdir(worker.host.state / "runs")) <= 1, timeout_s=30, what="all other runs are gone")
    directory = Path(f"/proc/{worker.process.pid}")
    return len(os.listdir(directory / "fd")), int(re.findall(r"VmRSS:\s+(\d+)", (directory / "status").read_text())[0])


def test_every_run_of_a_day_comes_to_its_right_end_whatever_becomes_of_the_worker(worker: Worker) -> None:
    worker.host.broker(8080)
    stranger = worker.host.sealnet(
        "run", "--worker", "always", "--detach", "--run-id", "stranger", "--user", str(CAROL), "--lease-port", "8080", "--output", "seen",
        "--", "/usr/bin/python3", "-c", STRANGER, cwd=worker.home(CAROL),
    )  # fmt: skip
    assert stranger.returncode == 0, stranger.stderr
    chance = random.Random(6)
    deeds = [signal.SIGTERM] * RESTARTS + [signal.SIGKILL] * KILLS
    chance.shuffle(deeds)
    began = time.monotonic()

    users = [begin(worker, name, at, RUNS // len(USERS)) for at, name in enumerate(USERS)]
    for number, signum in enumerate(deeds):
        due = RUNS * (number + 1) // (len(deeds) + 2) + chance.randrange(8)
        wait_for(lambda due=due: done_of(worker) >= due or users[0].poll(), timeout_s=LIMIT_S, what=f"{due} runs have ended")
        assert worker.end(signum) == (0 if signum == signal.SIGTERM else -signum)
        worker.start()
    days = told(users)
    took_s = time.monotonic() - began
    # The last worker may be young: its threads and its doors are there by the end of this.
    days += told([begin(worker, name, 20 + at, MORE // len(USERS)) for at, name in enumerate(USERS)])
    before = burden(worker)
    days += told([begin(worker, name, 10 + at, MORE // len(USERS)) for at, name in enumerate(USERS)])
    after = burden(worker)
    (worker.home(CAROL) / "stop").touch()
    status = worker.host.run(*SEALNET, "wait", "stranger", check=False).returncode

    counts: dict[str, int] = {}
    for day in days:
        for kind, count in day["counts"].items():
            counts[kind] = counts.get(kind, 0) + count
    print(f"{took_s:.0f} s; {counts}; descriptors and kB before and after {MORE} more: {before} {after}")
    wrong = [one for day in days for one in day["wrong"]]
    assert not wrong, "\n".join(wrong)
    assert sum(count for kind, count in counts.items() if kind != "again") == RUNS // 3 * 3 + 2 * (MORE // 3 * 3)
    # Its lease answered all day, and nobody else's did.
    seen = (worker.home(CAROL) / "seen").read_text().splitlines()
    assert status == 0
    assert len(seen) == 1, seen
    assert int(seen[0].removeprefix("rounds: ")) > 1
    assert worker.lines("event=bug") == []
    # A thread or a door that is used for the first time has some of its own; each run that left one would be seen.
    assert after[0] <= before[0] + 20
    assert after[1] <= before[1] + 30 * MORE + 4096
