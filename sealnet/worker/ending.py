"""The end of one run of the worker's: what it leaves is gathered and kept, then everything of it is taken away."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from sealnet import ended as ends
from sealnet import reap
from sealnet.ended import Ended
from sealnet.errors import SealnetError
from sealnet.model import tally
from sealnet.records import State, is_at
from sealnet.running import Run

_AGAIN_S = (0.2, 1.0)


def finish(run: Run, ended: Ended, keep: Callable[[Ended], None]) -> Ended:
    """How a run has ended whose processes have, with what it tried and what could not be taken away.

    `keep` is told before anything is taken away, and again if something of it stays.
    """
    found = None
    with contextlib.suppress(SealnetError, OSError):
        found = run.counted_attempts()
    ended = replace(ended, tried=() if found is None else found.rows, counted=tally.counted(run.record.confinement, found))
    keep(ended)
    run.end_is_kept = True
    # By descriptor, and not by its lock: this process may not be the only one that has that.
    state, directory, own = run.claim.state, run.claim.directory, -1
    # Where there is none left, it is not tried again here.
    with contextlib.suppress(OSError):
        own = os.dup(run.claim.fd)
    try:
        run.close(ended.status)
    except (SealnetError, OSError) as error:
        fault = str(error) if own < 0 else _take_away(run, lambda: not is_at(own, directory), state, str(error))
        if fault is not None:
            ended = ends.with_fault(ended, fault)
            keep(ended)
    finally:
        if own >= 0:
            os.close(own)
    return ended


def _take_away(run: Run, is_gone: Callable[[], bool], state: State, fault: str) -> str | None:
    """Once more, and once again: what was in the way (another program's transaction, a process that took its time) is mostly gone a moment
    later. What still stays, in words.
    """
    for pause_s in _AGAIN_S:
        time.sleep(pause_s)
        try:
            reap.teardown(run.host, state, run.run_id, unless=is_gone, end_is_kept=True)
        except (SealnetError, OSError) as error:
            fault = str(error)
        else:
            return None
    return fault
