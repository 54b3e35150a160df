"""Fixtures for tests that need a host of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import lab

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _own_cgroup() -> Iterator[None]:
    """All that the tests start is below a cgroup of theirs: it is told from other tests' on this machine, and run ids do not meet."""
    if os.geteuid() != 0:
        yield
        return
    with lab.own_cgroup():
        yield


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[lab.Host]:
    """A throw-away host. Afterwards nothing of a run may be left on it (P1), and it must be as it was (P2)."""
    monkeypatch.delenv("SEALNET_STATE_DIR", raising=False)
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    with lab.throw_away_host(tmp_path) as made:
        # By hand: whatever `sealnet run` promises, it promises through a worker as well.
        worker = made.spawn(*lab.SEALNET, "worker") if os.environ.get("SEALNET_TESTS_WORKER") else None
        if worker is not None:
            lab.wait_for((made.state / "worker.sock").exists, what="the worker listens")
        yield made
        if worker is not None:
            lab.end(worker)
        made.assert_clean()
