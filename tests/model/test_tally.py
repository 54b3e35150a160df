"""How much of what a run tried is listed."""

from __future__ import annotations

from typing import Any

import pytest

from sealnet.model.tally import Attempts, counted, told

ROWS = (("192.0.2.1", "udp", 9, 1),)


def test_what_could_not_be_read_is_not_nothing() -> None:
    assert counted("sealed", Attempts((), is_full=False)) == "whole"
    assert counted("sealed", None) == "none"
    assert counted("open", Attempts((), is_full=False)) == counted("open", None) == "none"
    assert counted("severed", Attempts((), is_full=True)) == counted("severed", Attempts(ROWS, is_full=True)) == "full"


@pytest.mark.parametrize(
    ("count", "events", "is_cut_short", "expected"),
    [
        ("whole", [], False, "whole"),
        ("whole", [], True, "full"),
        ("full", [], False, "full"),
        ("whole", [{"event": "lease-lost"}], False, "whole"),
        ("full", [{"event": "filter-changed"}], False, "cut"),
        ("whole", [{"event": "filter-changed"}], True, "cut"),
        ("none", [{"event": "filter-changed"}], True, "none"),
    ],
)
def test_a_tally_that_may_lack_something_says_so(count: str, events: list[dict[str, Any]], is_cut_short: bool, expected: str) -> None:
    assert told(count, events, is_cut_short=is_cut_short) == expected
