"""Callers' descriptors are closed beside the loop: close(2) may wait for what is at the other end, for as long as a caller likes.

A TCP socket with data that nobody takes waits for its SO_LINGER, a file of a FUSE file system for the answer to FLUSH, and a Unix socket
for both, where such a one is in its queue.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterable

_lock = threading.Lock()
# By uid, with a thread for each who has any. One that hangs keeps nobody's but its own.
_waiting: dict[int, deque[int]] = {}
MOST = 1024
"""How many of one user may wait to be closed before he is heard no more."""


def close_all(uid: int, fds: list[int]) -> None:
    """Close what this user has passed, soon; it is no longer in the list. For any thread."""
    if fds:
        _close(uid, fds)
        fds.clear()


def waiting(uid: int) -> int:
    with _lock:
        return len(_waiting.get(uid, ()))


def _close(uid: int, fds: Iterable[int]) -> None:
    with _lock:
        known = _waiting.get(uid)
        if known is not None:
            known.extend(fds)
            return
        _waiting[uid] = known = deque(fds)
    try:
        threading.Thread(target=_run, args=(uid, known), name="sealnet-closing", daemon=True).start()
    except RuntimeError:
        # No thread can be had.
        _run(uid, known)


def _run(uid: int, known: deque[int]) -> None:
    while True:
        with _lock:
            if not known:
                del _waiting[uid]
                return
            # It counts until it is closed.
            fd = known[0]
        with contextlib.suppress(OSError):
            os.close(fd)
        with _lock:
            known.popleft()
