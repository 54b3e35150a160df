"""A log is counted line by line; what was cut, lost or forged in it is seen, and each denial names the flag that would allow it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealnet.model.egressfold import MOST_DENIALS, MOST_FAULTS, Denial, Egress, Tally, flag, merged, parse
from tests.model.build import egress_line, egress_record


def tallied(*lines: bytes, ended: bool = True) -> Egress:
    tally = Tally("run-1")
    for line in lines:
        tally.add(line)
    return tally.egress(ended=ended)


def test_a_whole_log_has_no_fault() -> None:
    found = tallied(egress_line(1, "ALLOW"), egress_line(2), egress_line(3, port=80), egress_line(4))

    assert (found.records, found.allowed, found.denied, found.left_out, found.faults) == (4, 1, 3, 0, ())
    assert found.denials == (
        Denial("evil.test", 443, "not declared", 2, "--allow evil.test:443"),
        Denial("evil.test", 80, "not declared", 1, "--allow evil.test:80"),
    )


def test_an_empty_log_is_whole() -> None:
    assert tallied() == Egress()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((egress_line(1), egress_line(2)[:-1]), "line 2 was cut"),
        ((egress_line(1), egress_line(2)[:-20]), "line 2 was cut"),
        ((egress_line(1), egress_line(3)), "line 2 has number 3: records are missing"),
        ((egress_line(2),), "line 1 has number 2"),
        ((egress_line(1), egress_line(1)), "line 2 has number 1"),
        ((egress_line(1, run_id="run-2"),), "line 1 is another run's"),
        ((b"\0" * 40 + b"\n",), "line 1 cannot be read"),
        ((b"{}\n",), "it is no egress record"),
        ((b"[" * 50_000 + b"\n",), "line 1 cannot be read"),
        ((egress_line().replace(b"evil", "ev\x9bl".encode()),), "line 1 cannot be read: it has other characters"),
        ((egress_line().replace(b", ", b",\r", 1),), "line 1 cannot be read: it has other characters"),
        ((egress_line(1, "MAYBE"),), "its verdict is neither"),
        ((egress_line(True),), "its seq is missing or of the wrong kind"),
        ((egress_line(1, "ALLOW", bytes_up=None),), "1 allowed requests have no end"),
    ],
)
def test_what_is_not_whole_is_told(lines: tuple[bytes, ...], words: str) -> None:
    assert words in "; ".join(tallied(*lines).faults)


def test_a_request_that_goes_on_is_no_fault_while_the_door_lives() -> None:
    assert tallied(egress_line(1, "ALLOW", bytes_up=None), ended=False).faults == ()


@given(st.integers(1, 400))
def test_a_log_that_is_cut_anywhere_but_between_lines_is_seen(cut: int) -> None:
    whole = egress_line(1, "ALLOW") + egress_line(2) + egress_line(3)
    part = whole[: len(whole) - cut]
    ends = {len(egress_line(1, "ALLOW")), len(egress_line(1, "ALLOW") + egress_line(2))}

    found = tallied(*part.splitlines(keepends=True))

    assert bool(found.faults) == (len(part) not in ends)
    assert found.records < 3 or found.faults


@given(st.permutations(range(1, 7)))
def test_any_order_but_the_right_one_is_seen(order: list[int]) -> None:
    assert bool(tallied(*map(egress_line, order)).faults) == (order != sorted(order))


@given(st.binary())
def test_whatever_stands_there_is_counted_and_nothing_raises(data: bytes) -> None:
    lines = data.splitlines(keepends=True)

    found = tallied(*lines)

    assert found.records == len(lines)
    assert bool(found.faults) == bool(lines)


def test_a_payload_that_makes_up_names_does_not_fill_the_memory() -> None:
    number = MOST_DENIALS + 10
    found = tallied(*(egress_line(seq, host=f"h{seq}.test") for seq in range(1, number + 1)))

    assert (found.denied, len(found.denials), found.left_out, found.faults) == (number, MOST_DENIALS, 10, ())
    assert len(tallied(*[b"x\n"] * 50).faults) == MOST_FAULTS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "--allow evil.test:443"),
        ({"reason": "port not declared", "port": 8443}, "--allow evil.test:8443"),
        ({"reason": "not declared", "host": "printer"}, "--allow-private printer:443"),
        ({"reason": "private address", "address": "10.1.2.3"}, "--allow-private evil.test:443"),
        ({"reason": "private address: 10.1.2.3"}, "--allow-private evil.test:443"),
        ({"reason": "private address", "address": "127.0.0.1"}, None),
        ({"reason": "private address", "address": "169.254.169.254"}, None),
        ({"reason": "private address", "address": "what"}, None),
        ({"host": "192.0.2.1"}, None),
        ({"host": "[::1]"}, None),
        ({"host": "*.evil.test"}, None),
        ({"host": "a b"}, None),
        ({"host": "x.test --network open --allow y.test"}, None),
        ({"host": ""}, None),
        ({"port": None}, None),
        ({"port": 0}, None),
        ({"reason": "sni mismatch"}, None),
        ({"reason": "host mismatch"}, None),
        ({"reason": "bad request"}, None),
        ({"reason": "limit"}, None),
        ({"reason": None}, None),
    ],
)
def test_the_flag_that_would_allow_it(changes: dict[str, Any], expected: str | None) -> None:
    assert flag(egress_record(**changes)) == expected


def test_a_record_is_read_with_the_room_that_was_left_in_it() -> None:
    line = egress_line(1, "ALLOW").replace(b'"bytes_up": 7,', b'"bytes_up": 7                   ,')

    assert parse(line)["bytes_up"] == 7
    assert tallied(line).faults == ()


def test_denials_of_many_runs_are_summed() -> None:
    a, b = Denial("a.test", 443, "not declared", 1, None), Denial("b.test", 443, "not declared", 2, None)

    assert merged([a, b, a, a]) == (Denial("a.test", 443, "not declared", 3, None), b)
