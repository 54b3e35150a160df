"""The order in which addresses are tried."""

from __future__ import annotations

from ipaddress import ip_address

from sealnet.door.dial import interleaved

A, B, C = (ip_address(f"192.0.2.{number}") for number in (1, 2, 3))
SIX, SEVEN = ip_address("2001:db8::6"), ip_address("2001:db8::7")


def test_the_families_take_turns() -> None:
    """RFC 8305 4"""
    assert interleaved([SIX, SEVEN, A, B, C]) == [SIX, A, SEVEN, B, C]
    assert interleaved([A, SIX, B]) == [A, SIX, B]
    assert interleaved([A, B]) == [A, B]
