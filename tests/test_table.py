"""Columns on a terminal: aligned, cut where they must be, and never more than a line wide."""

from __future__ import annotations

from sealnet.cli.table import aligned

HEAD = ("VERDICT", "TRIED", "ORACLE")
ROWS = [("BLOCKED", "tcp 198.18.0.1:40000, another port of the gateway", "the host reaches it"), ("BLOCKED", "short", "the host can")]


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert list(aligned(("A", "B"), [("one", "x"), ("three", "y")])) == ["A      B", "one    x", "three  y"]


def test_a_line_is_never_wider_than_the_terminal() -> None:
    whole, narrow = list(aligned(HEAD, ROWS)), list(aligned(HEAD, ROWS, width=60))

    assert max(map(len, whole)) > 60
    assert max(map(len, narrow)) == 60
    # Only the widest column gave way.
    assert narrow[1] == "BLOCKED  tcp 198.18.0.1:40000, anoth...  the host reaches it"
    assert narrow[2].split("  ")[0] == "BLOCKED"
    assert list(aligned(HEAD, ROWS, width=200)) == whole


def test_a_terminal_too_narrow_for_anything_leaves_columns_that_tell_something() -> None:
    assert list(aligned(HEAD, ROWS, width=1))[1] == "BLOCKED  tcp 198.1...  the host ..."


def test_the_last_column_is_cut_alone_where_that_is_asked() -> None:
    assert list(aligned(("A", "B"), [("one", "x" * 20)], last_width=8))[1] == "one  xxxxx..."
