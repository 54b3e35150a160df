"""A process of the crew of tests/worker.py: `crewmember.py POINTS True|False FD WORKER STATE`.

It has its worker die where it is told to, and its clock may be as wrong as that one's.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sealnet.worker import member
from tests.worker import NO_MORE, plan_deaths, unsettle_clock


def allow_forks(most: int) -> None:
    """As where the host has as many processes as it may have."""
    real, forked = os.fork, itertools.count(1)

    def fork() -> int:
        if next(forked) > most:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real()

    os.fork = fork


if __name__ == "__main__":
    points, is_unsettled = json.loads(sys.argv.pop(1)), sys.argv.pop(1) == "True"
    if is_unsettled:
        unsettle_clock()
    plan_deaths(points, int(sys.argv[2]))
    if NO_MORE in points:
        allow_forks(int(points[NO_MORE]))
    member.main()
