"""The egress record's line: whole, printable, of a length that does not change."""

from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from sealnet.model.egress import ALLOW, DENY, End, Request, denial, head, room

KEYS = "schema seq run_id time verdict method host port address reason bytes_up bytes_down duration_s".split()
REQUEST = Request("CONNECT", "allowed.test", 443)


def test_an_allowed_request() -> None:
    line = head(seq=1, run_id="run-1", time=1.25, verdict=ALLOW, request=REQUEST) + room(End())

    assert list(json.loads(line)) == KEYS
    assert json.loads(line)["bytes_up"] is None
    assert line.endswith("}\n")


def test_a_denied_request() -> None:
    line = head(seq=2, run_id="run-1", time=1.25, verdict=DENY, request=REQUEST) + denial("not declared", "10.0.0.1")

    found = json.loads(line)
    assert list(found) == KEYS
    assert (found["verdict"], found["reason"], found["address"]) == (DENY, "not declared", "10.0.0.1")


@given(
    st.none() | st.sampled_from(["::ffff:255.255.255.255", "2606:2800:0220:0001:0248:1893:25c8:1946", "8.8.8.8"]),
    st.none() | st.text(max_size=300) | st.text('\\"\0é', max_size=200),
    st.none() | st.integers(0, 2**63),
    st.none() | st.floats(0, 1e9),
)
def test_what_is_known_later_takes_the_room_that_there_is(address, reason, count, duration) -> None:
    filled = room(End(address, reason, count, count, duration))

    assert len(filled) == len(room(End()))
    found = json.loads('{"address": ' + filled)
    assert found["address"] == address
    assert found["bytes_up"] == count
    assert re.fullmatch(r"[ -~]*\n", filled)


@given(st.text(max_size=400), st.text(max_size=400), st.text(max_size=400))
def test_no_field_breaks_the_line(method: str, host: str, reason: str) -> None:
    """LOG-01"""
    line = head(seq=1, run_id="r", time=0.0, verdict=DENY, request=Request(method, host, None)) + denial(reason)

    assert re.fullmatch(r"[ -~]*\n", line)
    found = json.loads(line)
    assert all(len(found[key]) <= 256 and re.fullmatch(r"[ -~]*", found[key]) for key in ("method", "host", "reason"))
