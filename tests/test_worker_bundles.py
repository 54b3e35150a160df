"""Evidence that the worker keeps: by run, and not by run id alone."""

from __future__ import annotations

from pathlib import Path

from sealnet.model.record import Record
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
