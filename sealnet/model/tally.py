"""How much of what a run tried is listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sealnet.model.ruleset import TALLY

# (address, protocol, port, packets)
Row = tuple[str, str, int, int]

# So many rows are the proofs' own at most: they stand in the same sets, and are not listed.
_PROBES = 96


def covered(confinement: str | None, events: Sequence[Mapping[str, Any]], tried: Sequence[Row], *, listed: int | None = None) -> str:
    """`whole`, `cut` (counting began anew with a filter that was put back), `full` (there may be more than is listed), or `none` (open).

    `listed` is how many rows are shown of those that were counted, where not all are.
    """
    if confinement == "open":
        return "none"
    if any(event.get("event") == "filter-changed" for event in events):
        return "cut"
    of_ipv6 = sum(":" in address for address, *_ in tried)
    most = max(of_ipv6, len(tried) - of_ipv6)
    return "full" if most >= TALLY - _PROBES or (listed is not None and listed < len(tried)) else "whole"
