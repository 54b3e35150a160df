"""Evidence that the worker keeps: by run and not by run id, and not more than there is room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sealnet.model.record import Record
from sealnet.worker.bundles import Bundles


def record(run_id: str, started: float) -> Record:
    told: dict[str, Any] = {
        "confinement": "severed",
        "asked": "severed",
        "user": "x",
        "command": "true",
        "boot_id": "",
        "ifname": "",
        "netns": "",
    }
    return Record(run_id=run_id, started=started, supervisor=1, supervisor_start=1, **told)


def gathered(bundles: Bundles, directory: Path, run_id: str, *, started: float, owner: int, size_bytes: int = 1) -> str:
    name = bundles.new_name(run_id)
    (directory / name).mkdir(parents=True)
    (directory / name / "log").write_text("x" * size_bytes)
    bundles.keep(record(run_id, started), owner, name)
    return name


def test_who_has_a_run_id_now_is_told_nothing_of_who_had_it_before(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path)
    name = gathered(bundles, tmp_path, "name", started=1.5, owner=1000)

    assert bundles.name_of("name", 1.5) == name
    # The next one lives already, and what it has gathered is not known yet.
    assert bundles.name_of("name", 2.5) is None
    bundles.keep(record("name", 2.5), 1001, None)
    assert bundles.name_of("name", 1.5) is bundles.name_of("name", 2.5) is None


def test_who_has_most_loses_his_oldest_and_never_his_last_or_one_that_goes_on(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, most_bytes=100)
    sizes = {"live": 500, "first": 40, "second": 40, "third": 40}
    for at, (run_id, size) in enumerate(sizes.items()):
        gathered(bundles, tmp_path, run_id, started=at, owner=1000, size_bytes=size)
    gathered(bundles, tmp_path, "others", started=9, owner=1001, size_bytes=30)

    def left() -> set[str]:
        bundles.prune(lambda _run_id: True, lambda run_id: run_id == "live")
        return {path.name.partition(".")[0] for path in tmp_path.iterdir()}

    assert left() == {"live", "third", "others"}
    gathered(bundles, tmp_path, "large", started=10, owner=1000, size_bytes=1000)
    assert left() == {"live", "large", "others"}
    assert left() == {"live", "large", "others"}


def test_what_is_dropped_while_it_is_told_ends_there(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path)
    name = gathered(bundles, tmp_path, "name", started=1, owner=1000)
    (tmp_path / name / "more").write_text("y")
    assert list(bundles.parts(name)) == [("log", "x"), ("more", "y")]

    told = bundles.parts(name)
    assert next(told) == ("log", "x")
    bundles.drop(name)

    assert list(told) == []
