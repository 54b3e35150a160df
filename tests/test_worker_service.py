"""What the worker tells of a run is that run's: its name may be somebody else's by the time it is looked at."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sealnet import looking, prove
from sealnet.errors import NoSuchRun
from sealnet.model.calling import Peer
from sealnet.model.config import Config
from sealnet.model.durable import Durable
from sealnet.records import State
from sealnet.worker.service import Service
from sealnet.worker.shares import Shares
from tests.lab import PATIENCE
from tests.model.build import a_record

ALICE, BOB = 1000, 1001


@dataclass
class Question:
    """One about the run `name`."""

    peer: Peer = field(default_factory=lambda: Peer(uid=ALICE, gid=ALICE, pid=1))
    parameters: dict[str, Any] = field(default_factory=lambda: {"run_id": "name"})
    told: list[dict[str, Any]] = field(default_factory=list)

    async def tell(self, parameters: dict[str, Any]) -> None:
        self.told.append(parameters)


class Nobody:
    """What has no run that lives."""

    host = None


def write(state: State, owner: int, started: float) -> None:
    durable = Durable(owner=owner, on_tamper="restore", grace_s=5, gid=0, groups=()).to_json()
    record = a_record("name", started=started, durable=durable)
    state.directory("name").mkdir(exist_ok=True)
    (state.directory("name") / "record.json").write_bytes(record.render())


@pytest.mark.parametrize("owner", [BOB, ALICE])
@pytest.mark.parametrize("method", ["_inspect", "_check"])
def test_who_looks_at_a_run_is_told_nothing_of_the_next_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, owner: int
) -> None:
    state = State(tmp_path)
    state.prepare()
    write(state, ALICE, 1.5)
    replaced: list[bool] = []

    def look(*_arguments: object) -> dict[str, Any]:
        # Its record was read, and what is found by its name is already another's.
        if replaced:
            write(state, owner, 2.5)
        return {"started": 1.5, "denied": ["the other's"] if replaced else []}

    monkeypatch.setattr(looking, "inspect", look)
    monkeypatch.setattr(prove, "again", look)
    service = Service.__new__(Service)
    service._state, service._shares, service._runs = state, Shares(Config()), Nobody()  # type: ignore[assignment]

    async def ask(question: Question) -> None:
        await asyncio.wait_for(getattr(service, method)(question, []), 10 * PATIENCE)

    own = Question()
    asyncio.run(ask(own))
    assert [list(told) for told in own.told] == [["run" if method == "_inspect" else "result"]]
    replaced.append(True)
    with pytest.raises(NoSuchRun):
        asyncio.run(ask(others := Question()))
    assert others.told == []
