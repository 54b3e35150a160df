"""The ends of runs: kept before their record goes, told once, bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sealnet import ended
from sealnet.ended import Ended, Kept
from sealnet.model.durable import Durable
from sealnet.records import State
from tests.model.build import a_record

TRIED, EVENTS = (("192.0.2.1", "tcp", 443, 2),), ({"event": "x"},)
END = Ended(run_id="run-1", owner=1000, started=1.5, status=3, at_s=ended.now(), tried=TRIED, events=EVENTS)
DURABLE = Durable(owner=1000, on_tamper="restore", grace_s=5, gid=0, groups=()).to_json()


@pytest.fixture
def state(tmp_path: Path) -> State:
    made = State(tmp_path)
    made.prepare()
    return made


def test_an_end_reads_back_as_it_was_written(state: State) -> None:
    ended.keep(state, END)

    assert ended.read(state, "run-1") == END
    assert ended.read(state, "run-2") is None
    assert (state.path / "ended").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "sealnet.ended/1"}', '{"schema": "sealnet.ended/1", "tried": 3}', "\xff"])
def test_what_is_no_end_is_none(state: State, text: str) -> None:
    ended.keep(state, END)
    (state.path / "ended" / "run-2.json").write_text(text)

    assert ended.read(state, "run-2") is None
    kept = Kept(state)
    kept.read()
    assert kept.of("run-1") == END
    assert kept.of("run-2") is kept.owner("run-2") is None


@pytest.mark.parametrize(
    ("changes", "told", "status"),
    [
        ({}, None, 137),
        ({}, 4, 4),
        ({"durable": DURABLE | {"is_late": True}}, 143, 124),
        ({"receipt": None}, 4, None),
        ({"durable": None}, 4, None),
        ({"durable": {"owner": "x"}}, 4, None),
    ],
)
def test_an_end_that_nobody_saw_is_told_by_the_record_and_by_bwrap(
    state: State, changes: dict[str, object], told: int | None, status: int | None
) -> None:
    record = a_record(**{"state": "running", "receipt": {"verdict": "sealed"}, "durable": DURABLE} | changes)

    ended.keep_unseen(state, record, told)

    found = ended.read(state, record.run_id)
    assert (None if found is None else found.status) == status
    assert found is None or found.counted == "none"


def test_an_end_that_is_known_is_not_told_anew_but_for_the_next_run_of_that_id(state: State) -> None:
    record = a_record(state="running", receipt={}, durable=DURABLE)
    ended.keep(state, replace(END, run_id=record.run_id, started=record.started))

    ended.keep_unseen(state, record, 9)
    assert (ended.read(state, record.run_id) or END).status == 3
    ended.keep_unseen(state, replace(record, started=record.started + 1), 9)
    assert (ended.read(state, record.run_id) or END).status == 9


def test_of_many_ends_the_last_are_kept_and_none_for_long(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "MOST", 5)
    for number in range(8):
        ended.keep(state, replace(END, run_id=f"run-{number}", at_s=ended.now() - 100 + number))
    (state.path / "ended" / "not a run").touch()
    kept = Kept(state)

    kept.read()
    files = sorted(json.loads(path.read_text())["run_id"] for path in (state.path / "ended").glob("*.json"))
    assert files == [f"run-{number}" for number in range(3, 8)]
    assert [kept.of(f"run-{number}") is not None for number in range(8)] == [False] * 3 + [True] * 5

    kept.add(replace(END, run_id="run-3", status=9, at_s=ended.now()))
    kept.add(replace(END, run_id="run-9", at_s=ended.now()))
    assert kept.of("run-4") is None
    assert (kept.of("run-3") or END).status == 9
    monkeypatch.setattr(ended, "FOR_S", 50.0)
    assert kept.of("run-5") is None
    assert kept.of("run-9") is not None


@pytest.mark.parametrize("bound", ["MOST", "MOST_BYTES"])
def test_who_has_most_ends_loses_his_own(state: State, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(ended, bound, 6 if bound == "MOST" else 6 * len(END.render()) + 100)
    kept = Kept(state)

    for number, owner in enumerate([1, 1, *[2] * 20]):
        end = replace(END, run_id=f"run-{number:02}", owner=owner, at_s=ended.now())
        ended.keep(state, end)
        kept.add(end)

    left = [f"run-{number:02}" for number in (0, 1, 18, 19, 20, 21)]
    assert [run_id for run_id in (f"run-{number:02}" for number in range(22)) if kept.of(run_id)] == left
    assert sorted(path.stem for path in (state.path / "ended").glob("*.json")) == left
