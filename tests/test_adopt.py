"""In which order a worker looks at a run that another has left, and that every one of the answers counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealnet import adopt
from sealnet.kernel import process
from sealnet.model.config import Config
from sealnet.model.durable import Durable
from sealnet.records import Claim, State
from tests.model.build import a_record

BWRAP, INIT, PAYLOAD_NS = (11, 1100), (12, 1200), 4026530000


class Scene:
    """A run that was left; `wrong` names the one thing that is not as its record says."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, wrong: str = "") -> None:
        self.asked: list[str] = []
        self.state = State(directory)
        self.state.prepare()
        self._wrong = wrong
        durable = Durable(
            owner=1000, on_tamper="restore", grace_s=5, gid=0, groups=(0,), bwrap_pid=BWRAP[0], bwrap_start=BWRAP[1], init_start=INIT[1]
        )
        record = a_record(
            state="running",
            boot_id=process.boot_id(),
            init_pid=INIT[0],
            netns_inode=PAYLOAD_NS,
            confinement="severed",
            durable=durable.to_json(),
        )
        self.claim = self.state.claim(record)
        self.inside = SimpleNamespace(inode=self._say("mark's inode", PAYLOAD_NS, 1, ask=False), fd=os.open("/", os.O_RDONLY))
        pidfds = {BWRAP: "bwrap", INIT: "init"}
        monkeypatch.setattr(
            adopt.process, "open_exactly", lambda pid, start: self._say(pidfds[pid, start], os.pidfd_open(os.getpid()), None)
        )
        monkeypatch.setattr(adopt.process, "parent", lambda _pid: self._say("parent", BWRAP[0], 1))
        monkeypatch.setattr(adopt.netns, "inode_of", lambda _pid: self._say("inode", PAYLOAD_NS, 1))
        monkeypatch.setattr(adopt, "Visit", lambda _fd: SimpleNamespace(close=lambda: None))
        monkeypatch.setattr(adopt, "_is_alive", lambda _pidfd: self._say("init lives", True, False))
        monkeypatch.setattr(self.state, "is_held", lambda _run_id, name: self._say(name, True, False))

    def _say(self, what: str, right: Any, wrong: Any, *, ask: bool = True) -> Any:
        if ask:
            self.asked.append(what)
        return wrong if what == self._wrong else right

    def __enter__(self) -> Any:
        return self.inside

    def __exit__(self, *_: object) -> None:
        pass

    def join(self, _run_id: str, _hint: int | None) -> Any:
        return self._say("mark", self, None)

    inode = property(lambda self: self.inside.inode)
    fd = property(lambda self: self.inside.fd)

    def adopt(self) -> Any:
        return adopt.adopt(self, self.state, Config(), self.claim, lambda _record, _durable: None)  # type: ignore[arg-type]


ORDER = ["bwrap", "init", "parent", "alive", "inode", "mark", "init lives"]


def test_bwrap_is_held_before_anything_is_asked_that_it_would_change_by_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)

    run = scene.adopt()

    assert run is not None
    assert scene.asked == ORDER
    assert (run.run_id, run.init_pid, run.record.supervisor) == (scene.claim.record.run_id, INIT[0], os.getpid())


@pytest.mark.parametrize("wrong", [*ORDER, "mark's inode"])
def test_each_of_the_answers_keeps_a_run_from_being_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    scene = Scene(tmp_path, monkeypatch, wrong)

    assert scene.adopt() is None
    assert scene.claim.record.supervisor != os.getpid()


CHANGES: dict[str, Callable[[Claim], None]] = {
    "not durable": lambda claim: claim.update(durable=None),
    "durable, but not as it should be": lambda claim: claim.update(durable={"owner": "root"}),
    "never released": lambda claim: claim.update(state="started"),
    "ended": lambda claim: claim.update(state="exited"),
    "of another boot": lambda claim: claim.update(boot_id="another"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_record_says_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    scene = Scene(tmp_path, monkeypatch)
    CHANGES[change](scene.claim)

    assert scene.adopt() is None
    assert scene.asked == []


def test_a_claim_that_somebody_has_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    run_id = scene.claim.record.run_id

    assert scene.state.take_over(run_id) is None
    scene.claim.close()
    with scene.state.teardown_lock(run_id):
        assert scene.state.take_over(run_id) is None
    taken = scene.state.take_over(run_id)

    assert taken is not None
    assert scene.state.take_over(run_id) is None
    assert scene.state.take_over("another") is None
