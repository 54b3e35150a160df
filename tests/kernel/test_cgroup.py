"""The run's cgroup on kernels that lack a part of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealnet.kernel import cgroup
from tests.lab import wait_for

pytestmark = pytest.mark.root

# Forks for as long as it lives, each child a session of its own.
_FORKS = "while :; do setsid sh -c 'sleep 600 & wait' & sleep 0.02; done"


@pytest.fixture
def made() -> Iterator[Path]:
    found = cgroup.own() / "of-a-test"
    found.mkdir()
    yield found
    cgroup.kill(found)
    cgroup.remove(found)


@pytest.mark.parametrize("name", ["cgroup.kill", "cgroup.not-of-this-kernel"])
def test_everything_in_it_is_ended_also_where_the_kernel_has_no_file_for_that(
    made: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """cgroup.kill is of Linux 5.14."""
    monkeypatch.setattr(cgroup, "_KILL", name)
    with subprocess.Popen(["sh", "-c", f"echo $$ >{made}/cgroup.procs; {_FORKS}"]) as forking:
        try:
            wait_for(lambda: len(cgroup.pids(made)) > 10, what="it has forked")

            cgroup.kill(made)

            assert cgroup.pids(made) == []
            assert forking.wait(60) == -9
        finally:
            forking.kill()


def test_whoever_is_to_join_has_a_pid_and_it_is_never_who_writes_it(made: Path) -> None:
    """The kernel takes 0 for the writer itself, who would be moved."""
    for pid in (0, -1):
        with pytest.raises(ValueError, match="is no process"):
            cgroup.join(made, pid)
    assert cgroup.pids(made) == []
    with subprocess.Popen(["sleep", "600"]) as one:
        assert cgroup.join(made, one.pid)
        assert cgroup.pids(made) == [one.pid]
        one.kill()
    assert not cgroup.join(made, one.pid)


def test_what_is_frozen_goes_on_and_one_that_is_gone_is_no_error(made: Path) -> None:
    cgroup.freeze(made, frozen=True)
    assert (made / "cgroup.freeze").read_text().strip() == "1"

    cgroup.freeze(made, frozen=False)
    assert (made / "cgroup.freeze").read_text().strip() == "0"
    cgroup.freeze(made / "no-such", frozen=True)


def test_one_that_somebody_else_removes_meanwhile_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cgroup.add("removed-meanwhile", "a test's own")
    opened = os.open(made / "cgroup.events", os.O_RDONLY)
    cgroup.remove(made)
    # What the kernel says to who has opened the file before, and reads it now.
    with pytest.raises(OSError, match="No such device") as said:
        os.read(opened, 100)
    os.close(opened)

    def gone(*_arguments: object, **_options: object) -> str:
        raise OSError(said.value.errno, "No such device")

    monkeypatch.setattr(Path, "read_text", gone)
    monkeypatch.setattr(cgroup, "_write", gone)
    monkeypatch.setattr(Path, "exists", lambda _path: True)
    cgroup.kill(made)
    cgroup.freeze(made, frozen=True)


# What seems to be the root is where it is, to who has a cgroup namespace; the mount is the host's.
_ELSEWHERE = """
import ctypes, os, sys, threading
sys.path.insert(0, {root!r})
from sealnet.kernel import cgroup
with open({made!r} + "/cgroup.procs", "w") as file:
    file.write("0")
if ctypes.CDLL(None).unshare(0x2000000):
    raise OSError("cannot unshare")
assert cgroup.own() == cgroup.root()
waits = threading.Thread(target=cgroup.anticipate)
waits.start()
waits.join()
print("waited", flush=True)
sys.stdin.read()
"""


def test_who_waits_ahead_of_a_join_is_not_moved_itself(made: Path) -> None:
    script = _ELSEWHERE.format(root=str(Path(__file__).parents[2]), made=str(made))
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"waited\n"

        assert cgroup.pids(made) == [waiting.pid]
        waiting.communicate(timeout=60)
