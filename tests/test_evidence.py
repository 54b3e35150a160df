"""A bundle on disk: begun before there is a run, never more than what has been seen, read back as it was written or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import sealnet
from sealnet.cli.log import line_of
from sealnet.errors import NoBroker, UsageError
from sealnet.evidence import Evidence
from sealnet.model.check import Check
from sealnet.model.receipt import Receipt
from tests.model.build import a_plan, egress_record

SCHEMA = json.loads((Path(__file__).parents[1] / "docs/evidence.schema.json").read_text())
FILES = ["environment.json", "plan.lock.json", "receipt.json"]


def told_in(directory: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((directory / "environment.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(told)
    return told


def proof_of(run_id: str = "run-1", **changes: Any) -> Receipt:
    held = (Check(name="loopback", kind="positive", asked="a", expected="b", found="b", ok=True, took_ms=0.1),)
    values: dict[str, Any] = {"started": 1.5, "confinement": "severed", "asked": "severed", "user": "root", "checks": held}
    return Receipt(run_id=run_id, **values | changes)


def test_what_lies_there_before_the_end_claims_nothing(tmp_path: Path) -> None:
    """sealnet may be killed at any time."""
    directory = tmp_path / "new"
    with Evidence(str(directory), "--evidence", a_plan()) as bundle:
        before = told_in(directory), sealnet.fold_evidence([directory])
        bundle.write(proof_of().render())
        during = told_in(directory), sealnet.fold_evidence([directory])

    assert sorted(os.listdir(directory)) == FILES
    for told, folded in (before, during):
        assert (told["egress_enforced"], told["complete"], told["ended"]) == (False, False, False)
        assert (folded.egress_enforced, folded.complete) == (False, False)
        assert folded.bundles[0].faults == ("the end of the run was not seen",)
    assert (before[0]["reason"], during[0]["reason"]) == ("it has not started", None)


def test_a_refusal_is_written_down(tmp_path: Path) -> None:
    with pytest.raises(NoBroker), Evidence(str(tmp_path), "--evidence", a_plan(lease_port=8080)):
        raise NoBroker("cannot reach the broker of run run-1")

    told = told_in(tmp_path)
    assert (told["reason"], told["exit_status"], told["egress_enforced"]) == ("cannot reach the broker of run run-1", 125, False)
    assert (told["confinement"], told["complete"], told["verdict"]) == ("sealed", True, "inconclusive")
    assert not sealnet.fold_evidence([tmp_path]).egress_enforced


def test_a_receipt_that_tells_more_of_the_refusal_is_kept(tmp_path: Path) -> None:
    bundle = Evidence(str(tmp_path), "--evidence", a_plan())
    bundle.write(proof_of(reason="why").render())

    bundle.refused(NoBroker("why"))
    bundle.close()

    assert json.loads((tmp_path / "receipt.json").read_text())["checks"]
    assert told_in(tmp_path)["reason"] == "why"


def test_an_earlier_bundle_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    for name in ("environment.json", "receipt.json", "old-run.egress.jsonl", "notes.txt", "NO.egress.jsonl"):
        (tmp_path / name).write_text("old")

    with Evidence(str(tmp_path), "--evidence", a_plan()):
        pass

    assert sorted(os.listdir(tmp_path)) == sorted([*FILES, "notes.txt", "NO.egress.jsonl"])
    assert told_in(tmp_path)["run_id"] == "run-1"


def test_no_link_is_followed(tmp_path: Path) -> None:
    victim, real = tmp_path / "victim", tmp_path / "real"
    victim.write_text("mine")
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    for name in FILES:
        (real / name).symlink_to(victim)

    for path in (tmp_path / "link", tmp_path / "link/below"):
        with pytest.raises(UsageError, match="it is a symbolic link, and a payload may have made it"):
            Evidence(str(path), "--evidence", a_plan())
    assert not (real / "below").exists()
    with Evidence(str(real), "--evidence", a_plan()):
        pass

    assert victim.read_text() == "mine"
    assert all((real / name).is_file() and not (real / name).is_symlink() for name in FILES)


@pytest.mark.parametrize(
    ("path", "words"),
    [("/dev/null", "/dev/null: Not a directory"), ("/nonexistent/a", "/nonexistent: No such file or directory"), ("/proc/x", "/proc/x: ")],
)
def test_where_it_cannot_be_written_is_said_before_anything_is_made(path: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        Evidence(path, "--evidence", a_plan())

    assert f"cannot use --evidence {path}: " in refused.value.message
    assert words.removeprefix(f"{path}: ") in refused.value.message


def test_it_is_written_where_it_was_opened_whatever_becomes_of_the_name(tmp_path: Path) -> None:
    """A payload that may write in the directory above moves it away and puts a link of its own there."""
    with Evidence(str(tmp_path / "a"), "--evidence", a_plan()) as bundle:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "etc").mkdir()
        (tmp_path / "a").symlink_to("etc")
        bundle.write(proof_of().render())

    assert os.listdir(tmp_path / "etc") == []
    assert json.loads((tmp_path / "b/receipt.json").read_text())["verdict"] == "severed"


def test_what_somebody_put_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would never end, a link leads elsewhere, and neither is evidence."""
    for number, plant in enumerate((os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path))):
        for name in FILES:
            directory = tmp_path / f"{number}-{name}"
            with Evidence(str(directory), "--evidence", a_plan(run_id=f"run-{number}")):
                pass
            assert "cannot be read" not in sealnet.fold_evidence([directory]).bundles[0].faults[0]
            (directory / name).unlink()
            plant(directory / name)

            folded = sealnet.fold_evidence([directory])

            assert f"{name} cannot be read" in folded.bundles[0].faults[0]
            assert (folded.egress_enforced, folded.complete) == (False, False)


def test_a_directory_that_is_none_is_worth_nothing(tmp_path: Path) -> None:
    assert sealnet.fold_evidence([tmp_path / "missing"]).bundles[0].faults == ("it cannot be read: No such file or directory",)
    assert sealnet.fold_evidence([tmp_path]).bundles[0].faults == ("there is no plan.lock.json",)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (egress_record(1, "ALLOW"), "ALLOW good.test:443 CONNECT"),
        (egress_record(1), "DENY evil.test:443 CONNECT not declared"),
        (egress_record(1, host="", port=None, method="", reason="bad request"), "DENY -:- - bad request"),
        (egress_record(1, host="a b\n\x1b[2J", method="GET\u2028"), "DENY a?b??[2J:443 GET? not declared"),
        (egress_record(1, "ALLOW", reason="failed: Connection refused"), "ALLOW good.test:443 CONNECT"),
    ],
)
def test_a_line_of_the_log(record: dict[str, Any], line: str) -> None:
    assert line_of(record) == line
