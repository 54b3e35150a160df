"""A process that dies at a chosen system call, and what a process has open."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any


def dies_at(step: int, deed: Callable[[], object]) -> bool:
    """Do something in a process that is gone before its step-th system call; whether it came to its end instead."""

    def count(_frame: object, event: str, called: Any) -> None:
        nonlocal step
        if event == "c_call" and (called.__module__ in ("posix", "fcntl") or isinstance(getattr(called, "__self__", None), io.IOBase)):
            step -= 1
            if step < 0:
                os._exit(0)

    child = os.fork()
    if child == 0:
        sys.setprofile(count)
        try:
            deed()
        finally:
            sys.setprofile(None)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def steps_of(deed: Callable[[], object], after: Callable[[], object]) -> int:
    """Let a process die at each system call of `deed` in turn, each time followed by `after`; how many there were."""
    for step in range(400):
        if dies_at(step, deed):
            return step
        after()
    raise AssertionError("it never came to its end")


def elsewhere(deed: Callable[[], object]) -> None:
    """Do something in a process that is gone right afterwards."""
    assert dies_at(sys.maxsize, deed)


def descriptors() -> set[str]:
    """What this process has open, as /proc tells it."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        # The one that reads the directory is gone by now.
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found
