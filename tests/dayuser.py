"""One user of the worker for a day: threads that run what there is to run, and judge what comes of it.

usage: dayuser.py '{"name": "alice", "threads": 7, "runs": 100, "seed": 1, "port": 8080}'
What a worker that died has not run is run again. A byte is added to the file `progress` for each run that has come to its end.
Prints what was not as it should be, and counts, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from sealnet import Sealer, client
from sealnet.asking import opened_paths, parameters
from sealnet.client import Connection, ended
from sealnet.errors import CannotSeal, NoBroker, NoSuchRun

GIVEN: Any = json.loads(sys.argv[1])
NAME, PORT = GIVEN["name"], GIVEN["port"]
# Nobody listens at this one.
SHUT = 9
# Without a worker nothing can be begun; the next one is waited for as long as a loaded machine may take to start it.
GIVE_UP_S = 240.0

SEALER = Sealer(worker="always")
SOCKET = client.path(os.environ)

# An HTTP request to where the variable says, and the status line of its answer.
ASK = 'to=${URL#http://}; exec 3<>"/dev/tcp/${to%%:*}/${to##*:}" || exit 98; printf "GET / HTTP/1.0\\r\\n\\r\\n" >&3; read -r line <&3'
BROKER = f'URL=$SEALNET_BROKER_URL; {ASK}; [[ $line == *" 200 "* ]] || exit 99; exit '
PROXY = f'URL=$http_proxy; {ASK}; [[ $line == HTTP/1.?" 4"* ]] || exit 99; exit '
ENDLESS = ["sleep", "600"]


def ran(argv: list[str], **options: Any) -> int:
    return SEALER.run(argv, **options).returncode


def script(text: str, status: int) -> list[str]:
    return ["bash", "-c", f"{text}{status}"]


def exits(run_id: str, chance: random.Random) -> tuple[int, int]:
    wanted = chance.randrange(90)
    return wanted, ran(script("exit ", wanted), run_id=run_id)


def asks(run_id: str, chance: random.Random) -> tuple[int, int]:
    wanted = chance.randrange(90)
    return wanted, ran(script(BROKER, wanted), run_id=run_id, lease_port=PORT)


def is_relayed(run_id: str, chance: random.Random) -> tuple[int, int]:
    wanted = chance.randrange(90)
    return wanted, ran(script(BROKER, wanted), run_id=run_id, broker=f"tcp:127.0.0.1:{PORT}")


def is_denied(run_id: str, chance: random.Random) -> tuple[int, int]:
    wanted = chance.randrange(90)
    return wanted, ran(script(PROXY, wanted), run_id=run_id, allow=["only.example"], preflight=False)


def is_killed(run_id: str, chance: random.Random) -> tuple[int, int]:
    signum = chance.choice((signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1))
    with SEALER.launch(ENDLESS, run_id=run_id) as run:
        run.send_signal(signum)
        return 128 + signum, run.wait()


def is_reaped(run_id: str, chance: random.Random) -> tuple[int, int]:
    with SEALER.launch(ENDLESS, run_id=run_id, lease_port=PORT) as run:
        again(lambda: SEALER.reap(run_id))
        return 137, run.wait()


def is_late(run_id: str, chance: random.Random) -> tuple[int, int]:
    return 124, ran(ENDLESS, run_id=run_id, timeout_s=chance.uniform(0.05, 0.5), grace_s=0.2)


def is_looked_at(run_id: str, chance: random.Random) -> tuple[int, int]:
    """Its owner sees it and no other's, and it is sealed whoever has restarted what."""
    with SEALER.launch(ENDLESS, run_id=run_id, lease_port=PORT) as run:
        seen = [one.run_id for one in again(SEALER.runs)]
        others = [one for one in seen if not one.startswith(f"{NAME}-")]
        assert run_id in seen, f"{run_id} does not see itself"
        assert not others, f"{run_id} sees {others}"
        told = again(run.check)
        assert told["verdict"] == "sealed", told
        run.kill()
        return 137, run.wait()


def is_refused(run_id: str, _chance: random.Random) -> tuple[int, int]:
    try:
        ran(script("exit ", 0), run_id=run_id, lease_port=SHUT)
    except NoBroker:
        return 0, 0
    return 0, 1


def is_detached(run_id: str, chance: random.Random) -> tuple[int, int]:
    wanted = chance.randrange(90)
    given: dict[str, Any] = {"run_id": run_id, "lease_port": PORT}
    _uid, asked = parameters(script("sleep 0.2; exit ", wanted), given, detach=True)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        with Connection(SOCKET) as connection, opened_paths(given) as paths:
            connection.send("Run", asked, [null] * 3 + paths)
            replies = connection.receive()
            while not replies:
                replies = connection.receive()
            client.answer(replies[0])
    except EOFError:
        # Whether it was started is for the next worker to tell.
        pass
    finally:
        os.close(null)
    told = again(lambda: told_end(run_id))
    if told is None:
        raise CannotSeal("nothing of it ran")
    return wanted, told


def told_end(run_id: str) -> int | None:
    try:
        with Connection(SOCKET) as connection:
            return int(ended(connection, run_id)["status"])
    except NoSuchRun:
        return None


KINDS: tuple[tuple[Callable[[str, random.Random], tuple[int, int]], int], ...] = (
    (exits, 6),
    (asks, 6),
    (is_relayed, 2),
    (is_denied, 2),
    (is_killed, 2),
    (is_reaped, 1),
    (is_late, 1),
    (is_looked_at, 1),
    (is_refused, 1),
    (is_detached, 3),
)


def again(ask: Callable[[], Any]) -> Any:
    """What is asked, once there is a worker."""
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        try:
            return ask()
        except (CannotSeal, ConnectionError) as error:
            if not is_worker(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def is_worker(error: Exception) -> bool:
    """Whether it is told of a worker that was not there, or went away, and not of the run."""
    return isinstance(error, ConnectionError) or "the worker" in str(error) or "nothing of it ran" in str(error)


class Day:
    """What the threads of this user have to do, and have seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: int = GIVEN["runs"]
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self._progress = os.open("progress", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def next(self) -> int | None:
        with self._lock:
            if not self._left:
                return None
            self._left -= 1
            return self._left

    def work(self, chance: random.Random) -> None:
        while (number := self.next()) is not None:
            kind = chance.choices([one for one, _weight in KINDS], [weight for _one, weight in KINDS])[0]
            try:
                self.do(number, kind, chance)
            except Exception:  # noqa: BLE001 - it is told, and the day goes on
                self.wrong.append(f"{NAME}-{number} {kind.__name__}: {traceback.format_exc()[-1500:]}")
            os.write(self._progress, b".")

    def do(self, number: int, kind: Callable[[str, random.Random], tuple[int, int]], chance: random.Random) -> None:
        deadline, attempt = time.monotonic() + GIVE_UP_S, 0
        while True:
            try:
                wanted, found = kind(f"{NAME}-{number}-{attempt}", chance)
                break
            except (CannotSeal, ConnectionError) as error:
                # A worker that has died, or is about to end, starts nothing: whoever wanted it asks the next one.
                if not is_worker(error) or time.monotonic() > deadline:
                    raise
                self.counts["again"] += 1
                attempt += 1
                time.sleep(0.1)
        self.counts[kind.__name__] += 1
        if wanted != found:
            self.wrong.append(f"{NAME}-{number} {kind.__name__}: it ended with {found}, and not {wanted}")


def main() -> None:
    day = Day()
    threads = [threading.Thread(target=day.work, args=(random.Random(f"{GIVEN['seed']} {at}"),)) for at in range(GIVEN["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"wrong": day.wrong, "counts": day.counts}), flush=True)


if __name__ == "__main__":
    main()
