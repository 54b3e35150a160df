"""A process of the crew of tests/worker.py: `crewmember.py POINTS True|False FD WORKER STATE`.

It has its worker die where it is told to, and its clock may be as wrong as that one's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sealnet.worker import member
from tests.worker import plan_deaths, unsettle_clock

if __name__ == "__main__":
    points, is_unsettled = json.loads(sys.argv.pop(1)), sys.argv.pop(1) == "True"
    if is_unsettled:
        unsettle_clock()
    plan_deaths(points, int(sys.argv[2]))
    member.main()
