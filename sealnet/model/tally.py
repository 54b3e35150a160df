"""How much of what a run tried is listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# (address, protocol, port, packets)
Row = tuple[str, str, int, int]


class Attempts(NamedTuple):
    """What was counted, as it was read. `is_full`: the kernel's set has no room left, so there may be more."""

    rows: tuple[Row, ...]
    is_full: bool


def counted(confinement: str | None, attempts: Attempts | None) -> str:
    """`whole`, `full` (there may be more than is listed) or `none` (an open run, or it could not be read)."""
    if confinement == "open" or attempts is None:
        return "none"
    return "full" if attempts.is_full else "whole"


def told(count: str, events: Sequence[Mapping[str, Any]], *, is_cut_short: bool = False) -> str:
    """The same, by what is known at the end: `cut` where counting began anew with a filter that was put back; `full` also where what is
    shown is cut short.
    """
    if count == "none":
        return count
    if any(event.get("event") == "filter-changed" for event in events):
        return "cut"
    return "full" if is_cut_short else count
