"""The numbers of scripts/bench: quantiles, intervals, ratios, turns, and what the page says of them."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as some

from scripts.benchmarks import figures, report
from scripts.benchmarks.parts import parse_importtime
from scripts.benchmarks.report import Target
from scripts.benchmarks.result import Result

_VALUES = some.lists(some.floats(min_value=0.001, max_value=1e6), min_size=2, max_size=40)


@given(_VALUES)
def test_quantiles_are_those_of_the_standard_library(values: list[float]) -> None:
    assert figures.median(values) == pytest.approx(statistics.median(values))
    assert figures.quantile(values, 0.95) == pytest.approx(statistics.quantiles(values, n=20, method="inclusive")[-1])
    assert (figures.quantile(values, 0.0), figures.quantile(values, 1.0)) == (min(values), max(values))


def test_nothing_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="nothing"):
        figures.quantile([], 0.5)


@given(_VALUES)
def test_an_interval_holds_its_median_and_stays_within_the_values(values: list[float]) -> None:
    found = figures.median_interval(values)

    assert min(values) <= found.low <= found.high <= max(values)
    assert found.value == figures.median(values)


def test_a_ratio_of_pairs_is_not_troubled_by_what_slowed_both() -> None:
    control = [1.0, 1.1, 9.0, 1.0, 8.0, 1.2, 1.0, 7.0]

    paired = figures.ratio([2 * value for value in control], control)
    unpaired = figures.ratio([2 * value for value in control], [*control, 1.0])

    assert (paired.low, paired.value, paired.high) == pytest.approx((2.0, 2.0, 2.0))
    assert unpaired.low < unpaired.high


def test_turns_are_interleaved_and_the_warm_up_is_thrown_away() -> None:
    order: list[str] = []

    def one(name: str) -> dict[str, float]:
        order.append(name)
        return {name: float(len(order))}

    told = figures.in_turns({"a": lambda: one("a"), "b": lambda: one("b")}, rounds=2, warm_up=1)

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert told == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_a_target_is_met_missed_or_not_measured() -> None:
    assert report.told_target(Target("cli", "fast", 1.5, 1.2)) == ("fast", "at most 1.5x", "1.20x", "met")
    assert report.told_target(Target("cli", "fast", 1.5, 1.6))[3] == "missed"
    assert report.told_target(Target("cli", "wide", 0.95, 0.9, at_most=False))[3] == "missed"
    assert report.told_target(Target("cli", "wide", 0.95, 0.97, at_most=False))[3] == "met"
    assert report.told_target(Target("cli", "none left", 0.0, None, "")) == ("none left", "at most 0", "-", "not measured")


def test_the_page_shows_rows_ratios_and_what_is_missing() -> None:
    result = Result(missing={"other": "it is not installed"}, notes=["A note."])
    group = result.group("one command")
    group.add("control", [2.0, 2.0, 2.0])
    group.add("mine", [1.0, 1.0, 1.0], control="control")
    told = {
        "machine": {"kernel": "6.18"},
        "targets": [Target("cli", "fast", 1.5, 0.5).to_json()],
        "subjects": {"cli": result.to_json(), "lease": {"failed": "it did not end in time"}},
    }

    page = report.render(told)

    assert "| mine | 1.00 ms | 1.00 | 1.00 to 1.00 | 0.500 | 0.500 to 0.500 | control |" in page
    assert "| fast | at most 1.5x | 0.500x | met |" in page
    assert "Missing: other: it is not installed." in page
    assert "Not measured: it did not end in time." in page
    assert "| kernel | 6.18 |" in page


def test_a_target_reads_the_rows_that_subjects_write() -> None:
    result = Result()
    for title, value in (("the first run", 10.0), ("with 999 other runs alive", 14.0)):
        result.group(title).add("sealed: claim to held", [value] * 3)

    found = {target.name: target for target in report.targets({"setup": result.to_json()}, ("setup", "leaks"))}

    assert found["run 1,000 set up (claim to held, sealed), against run 1"].measured == pytest.approx(1.4)
    assert found["left behind by runs that were killed at random moments"].met is None
    assert report.targets({"parts": {"groups": []}}, ("parts",)) == []
    assert not [name for name in found if "lease" in name and "a bare veth" in name]


def test_the_targets_of_a_door_are_read_beside_their_controls() -> None:
    result = Result()
    for title, rows in (
        ("CONNECT, 32 clients", {"door": 3000.0, "squid": 2000.0}),
        ("ping-pong of one byte through a tunnel, median of a round", {"direct": 9.0, "door": 26.0}),
        ("a denied CONNECT, from connect(2) to its answer", {"door": 1500.0}),
    ):
        group = result.group(title)
        for name, value in rows.items():
            group.add(name, [value] * 3)

    found = {target.name: target for target in report.targets({"door": result.to_json()}, ("door",))}

    assert found["the allowlist proxy, against squid: CONNECT, 32 clients"].measured == pytest.approx(1.5)
    assert found["the allowlist proxy, against squid: tunnel, up"].met is None
    assert found["what a tunnel adds to a ping-pong of one byte"].measured == pytest.approx(17.0)
    assert found["a denied request, from connect(2) to its answer"].met is False
    assert len(found) == 7


def test_importtime_is_read_by_module() -> None:
    said = "import time: self [us] | cumulative | imported package\nimport time:  1500 |  2000 |   json.decoder\nan error: 1 | 2 | x\n"

    assert parse_importtime(said) == {"json.decoder": 1.5}
