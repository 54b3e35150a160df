"""How much of what a run tried is listed."""

from __future__ import annotations

import pytest

from sealnet.model.ruleset import TALLY
from sealnet.model.tally import Row, covered


def rows(ipv4: int, ipv6: int = 0) -> list[Row]:
    return [("192.0.2.1", "udp", port, 1) for port in range(ipv4)] + [("2001:db8::1", "udp", port, 1) for port in range(ipv6)]


@pytest.mark.parametrize(
    ("tried", "told"),
    [
        (rows(0), "whole"),
        (rows(3000, 3000), "whole"),
        (rows(TALLY), "full"),
        # Some of what the sets hold is the proofs' own.
        (rows(TALLY - 20), "full"),
        (rows(0, TALLY - 20), "full"),
        (rows(TALLY - 200, 10), "whole"),
    ],
)
def test_a_tally_that_may_lack_something_says_so(tried: list[Row], told: str) -> None:
    assert covered("sealed", [], tried) == told
    assert covered("sealed", [{"event": "filter-changed"}], tried) == "cut"
    assert covered("sealed", [{"event": "lease-lost"}], tried) == told
    assert covered("open", [], tried) == "none"


def test_what_is_shown_in_part_is_not_whole() -> None:
    assert covered("severed", [], rows(10), listed=10) == "whole"
    assert covered("severed", [], rows(10, 1), listed=10) == "full"
