"""Suites that run only in a machine of scripts/vm: they start, reload and stop its network managers, and nothing of it is thrown away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.hosts.machine import Machine, is_machine

# A lane on anybody's host collects nothing here; who names a file is told why it does not run.
collect_ignore_glob = [] if is_machine() else ["test_*"]


@pytest.fixture(scope="session", autouse=True)
def _in_a_machine() -> None:
    if not is_machine():
        pytest.exit("e2e/hosts changes the host that it runs on: scripts/vm run --with managers -- pytest -q e2e/hosts", returncode=2)


@pytest.fixture(scope="session")
def _machine(_in_a_machine: None, _own_cgroup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine"))
    yield made
    made.close()


@pytest.fixture
def machine(_machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """This machine with a LAN and listeners. Afterwards nothing of a run may be left; what managers left is theirs."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    _machine.begin(tmp_path)
    try:
        yield _machine
        _machine.assert_nothing_left()
    finally:
        _machine.reap()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(900))
