"""scripts/bench, with small counts: that it measures and tells, not how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab import Host

pytestmark = pytest.mark.root

_BENCH = str(Path(__file__).parents[1] / "scripts" / "bench")


def test_a_quick_bench_writes_its_values_and_a_page(host: Host, tmp_path: Path) -> None:
    told, page = tmp_path / "told.json", tmp_path / "page.md"

    done = host.run(_BENCH, "--quick", "parts", "loopback", "--json", str(told), "--output", str(page))

    values = json.loads(told.read_text())
    assert values["schema"] == "sealnet.bench/1"
    assert list(values["subjects"]) == ["parts", "loopback"]
    rows = [row for subject in values["subjects"].values() for group in subject["groups"] for row in group["rows"]]
    assert {"to claimed", "to built", "to held", "to exec", "teardown", "no rules at all", "the gate, no lease"} <= {
        row["name"] for row in rows
    }
    for row in rows:
        assert row["count"] == len(row["values"]) > 0
        assert row["low"] <= row["median"] <= row["high"]
    compared = next(row for row in rows if row["name"] == "the gate, no lease")
    assert compared["control"] == "no rules at all"
    assert compared["ratio"]["low"] <= compared["ratio"]["value"] <= compared["ratio"]["high"]
    assert {target["subject"] for target in values["targets"]} == {"loopback"}
    assert {target["met"] for target in values["targets"]} == {None}
    assert "== Targets" in done.stdout
    assert page.read_text().startswith("# Benchmarks\n")
    assert host.directory.name not in page.read_text()


def test_an_unknown_subject_is_refused(host: Host) -> None:
    done = host.run(_BENCH, "speed", check=False)

    assert done.returncode == 2
    assert "cannot measure speed: it is none of parts, setup" in done.stderr
