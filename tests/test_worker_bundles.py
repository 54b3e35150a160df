"""Evidence that the worker keeps: by run, and not by run id alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from sealnet.model.record import Record
from sealnet.worker import bundles
from sealnet.worker.bundles import Bundles
from tests.model.build import a_record


def record(run_id: str, started: float) -> Record:
    return a_record(run_id, started=started)


def gathered(bundles: Bundles, directory: Path, run_id: str, *, started: float) -> str:
    name = bundles.new_name(run_id)
    (directory / name).mkdir(parents=True)
    (directory / name / "log").write_text("x")
    bundles.keep(record(run_id, started), name)
    return name


def test_who_has_a_run_id_now_is_told_nothing_of_who_had_it_before(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path)
    name = gathered(bundles, tmp_path, "name", started=1.5)

    assert bundles.name_of("name", 1.5) == name
    # The next one lives already, and what it has gathered is not known yet.
    assert bundles.name_of("name", 2.5) is None
    bundles.keep(record("name", 2.5), None)
    assert bundles.name_of("name", 1.5) is bundles.name_of("name", 2.5) is None


def test_what_is_dropped_while_it_is_told_ends_there(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path)
    name = gathered(bundles, tmp_path, "name", started=1)
    (tmp_path / name / "more").write_text("y")
    assert list(bundles.parts(name)) == [("log", "x"), ("more", "y")]

    told = bundles.parts(name)
    assert next(told) == ("log", "x")
    bundles.drop(name)

    assert list(told) == []


def test_who_keeps_the_most_evidence_loses_his_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_MOST_BYTES", 1000)
    kept = Bundles(tmp_path)

    def end(run_id: str, owner: int, size: int) -> None:
        name = kept.new_name(run_id)
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_bytes(bytes(size))
        kept.keep(record(run_id, 1.0), name)
        kept.end(run_id, owner)

    def left() -> list[str]:
        return sorted(path.name.partition(".")[0] for path in tmp_path.iterdir())

    end("alice-1", 1, 300)
    for number in range(1, 4):
        end(f"bob-{number}", 2, 200)
    assert left() == ["alice-1", "bob-1", "bob-2", "bob-3"]
    end("alice-2", 1, 350)
    assert left() == ["alice-2", "bob-1", "bob-2", "bob-3"]
    end("bob-4", 2, 200)
    assert left() == ["alice-2", "bob-2", "bob-3", "bob-4"]
    # The one that has just ended may be being read.
    end("carol", 3, 2000)
    assert left() == ["alice-2", "bob-2", "bob-3", "bob-4", "carol"]
    end("dave", 4, 1)
    assert left() == ["alice-2", "bob-2", "bob-3", "bob-4", "dave"]
    assert kept.name_of("carol", 1.0) is None
    assert kept.name_of("alice-1", 1.0) is None
    assert [*kept.parts(kept.name_of("dave", 1.0) or "")] == [("log", "\0")]
    # What is forgotten with its run counts no more.
    kept.prune(lambda run_id: run_id == "dave")
    end("erin", 5, 999)
    assert left() == ["dave", "erin"]


def test_what_is_kept_has_a_limit_though_each_one_is_larger_than_all_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_MOST_BYTES", 1000)
    kept = Bundles(tmp_path)

    for owner in range(20):
        name = kept.new_name(f"run-{owner}")
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_bytes(bytes(300 + owner))
        kept.keep(record(f"run-{owner}", 1.0), name)
        kept.end(f"run-{owner}", owner)
        assert sum(file.stat().st_size for file in tmp_path.glob("*/log")) <= 1000
        assert (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["..", "../runs", "name.0123456789abcde", "name.0123456789abcdef/..", "", 7, ["name"], {}])
def test_a_name_that_is_none_of_ours_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: object) -> None:
    """It stands in a record, which may be damaged."""
    monkeypatch.setattr(bundles, "_MOST_BYTES", 0)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "record.json").write_text("x")
    kept = Bundles(tmp_path / "evidence")
    gathered(kept, tmp_path / "evidence", "other", started=1.0)

    kept.keep(record("name", 1.0), name)
    kept.end("name", 1)
    kept.end("other", 1)
    kept.prune(lambda _run_id: True)

    assert kept.name_of("name", 1.0) is None
    assert (tmp_path / "runs" / "record.json").exists()
    assert kept.name_of("other", 1.0) is not None
