"""Processes that are started together, with everything that descends from them: whoever of it is left shows, and no zombie stays."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Self

from sealnet.kernel import libc
from tests.lab import wait_for

_SET_CHILD_SUBREAPER = 36


class Nursery:
    """Each deed in a copy of this process. Orphans below them are given to one process, which waits for all of them and then ends."""

    def __init__(self, directory: Path, deeds: Sequence[Callable[[], int]]) -> None:
        directory.mkdir()
        self._directory, self._size = directory, len(deeds)
        self._pid = os.fork()
        if self._pid == 0:
            _care(directory, deeds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self._pid, *self.left()) if self._pid else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._pid:
            os.waitpid(self._pid, 0)

    def pid(self, number: int) -> int:
        return int(wait_for(lambda: _text(self._directory / f"{number}.pid"), what="it was started"))

    def status(self, number: int) -> int | None:
        """Its exit status, -n for signal n; None while it lives."""
        text = _text(self._directory / f"{number}.status")
        return int(text) if text else None

    def wait(self, number: int) -> int:
        wait_for(lambda: self.status(number) is not None, timeout_s=60, what=f"process {number} of the nursery has ended")
        return int(_text(self._directory / f"{number}.status"))

    def left(self) -> list[int]:
        """What descends from the deeds and lives, the oldest first."""
        found, waiting = [], [self._pid]
        while waiting:
            below = children(waiting.pop(0))
            found += below
            waiting += below
        return found

    def assert_empty(self) -> None:
        """Every process has ended and was waited for."""
        wait_for(lambda: os.waitpid(self._pid, os.WNOHANG)[0], what=f"nobody is left: {[_command(pid) for pid in self.left()]}")
        self._pid = 0


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def _care(directory: Path, deeds: Sequence[Callable[[], int]]) -> NoReturn:
    libc.prctl(_SET_CHILD_SUBREAPER, 1)
    numbers = {}
    for number, deed in enumerate(deeds):
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                status = deed()
            finally:
                os._exit(status)
        numbers[pid] = number
        _put(directory / f"{number}.pid", pid)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid in numbers:
            _put(directory / f"{numbers[pid]}.status", os.waitstatus_to_exitcode(status))


def _put(path: Path, number: int) -> None:
    path.with_suffix(".new").write_text(str(number))
    path.with_suffix(".new").rename(path)


def _text(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')}"
    return str(pid)
