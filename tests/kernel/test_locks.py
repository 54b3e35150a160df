"""Locks between processes of sealnet's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sealnet.kernel import locks, process
from tests.lab import wait_for

_HOLD = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


def holding(path: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_who_holds_a_lock_is_known(path: Path) -> None:
    with path.open() as file:
        assert locks.holder(file.fileno()) is None
        with holding(path) as holder:
            assert locks.holder(file.fileno()) == holder.pid
            holder.communicate()
        assert locks.holder(file.fileno()) is None


def test_who_holds_a_lock_and_was_halted_goes_on_when_somebody_waits(path: Path) -> None:
    done = threading.Event()

    def waits() -> None:
        with locks.locked(path):
            done.set()

    with holding(path) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        wait_for(lambda: process.is_stopped(holder.pid), what="it is halted")
        assert holder.stdin is not None
        # Nothing but a signal brings it on now.
        holder.stdin.close()
        waiter = threading.Thread(target=waits)
        waiter.start()
        wait_for(done.is_set, what="the lock is had")
        waiter.join()
        assert holder.wait(60) == 0


def test_who_holds_a_lock_and_goes_on_is_waited_for(path: Path) -> None:
    had = threading.Event()

    def waits() -> None:
        with locks.locked(path):
            had.set()

    with holding(path) as holder:
        waiter = threading.Thread(target=waits)
        waiter.start()
        assert not had.wait(1.5)
        holder.communicate()
        waiter.join(60)
    assert had.is_set()
