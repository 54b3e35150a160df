"""Starts and ends runs from many threads when told: `crew THREADS PORT`; lines `KIND AT` and `end AT`, each answered by times."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

from scripts.benchmarks.lab import Sealnet, Started, in_threads, start_bwrap


class Crew:
    """`threads` runs at a time."""

    def __init__(self, threads: int, port: int) -> None:
        # A Host is for one thread at a time.
        sealnets = [Sealnet() for _ in range(threads)]
        self._starts: dict[str, list[Callable[[], Started]]] = {
            "bwrap": [start_bwrap] * threads,
            "severed": [sealnet.start for sealnet in sealnets],
            "sealed": [partial(sealnet.start, port=port) for sealnet in sealnets],
        }
        self._alive: list[Started] = []

    def start(self, kind: str, at_s: float) -> list[float]:
        """When each of them ran."""

        def one(start: Callable[[], Started]) -> float:
            started = start()
            ran = time.monotonic()
            self._alive.append(started)
            return ran

        return _at_once([partial(one, start) for start in self._starts[kind]], at_s)

    def end(self, at_s: float) -> list[float]:
        """When each of them was gone."""

        def one(started: Started) -> float:
            started.end()
            return time.monotonic()

        alive, self._alive = self._alive, []
        return _at_once([partial(one, started) for started in alive], at_s)


def _at_once(jobs: list[Callable[[], float]], at_s: float) -> list[float]:
    done: list[float] = []

    def one(job: Callable[[], float]) -> None:
        time.sleep(max(0.0, at_s - time.monotonic()))
        done.append(job())

    in_threads([partial(one, job) for job in jobs])
    return done


def main() -> None:
    crew = Crew(int(sys.argv[1]), int(sys.argv[2]))
    print("[]", flush=True)
    for line in sys.stdin:
        word, at = line.split()
        print(json.dumps(crew.end(float(at)) if word == "end" else crew.start(word, float(at))), flush=True)


main()
