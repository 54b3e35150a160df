"""What the kernel's datagrams are taken apart into."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from sealnet.kernel import netlink


def message(kind: int, words: int, flags: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + 4 * words, kind, flags, 7, 0) + bytes(range(kind, kind + 4)) * words


@given(parts=st.lists(st.tuples(st.integers(16, 99), st.integers(0, 5), st.integers(1, 40)), max_size=8), cut=st.integers(0, 70))
def test_stretches_are_the_messages_in_their_order_and_nothing_else(parts: list[tuple[int, int, int]], cut: int) -> None:
    whole = b"".join(message(kind, words) * times for kind, words, times in parts)
    # An end within a message: what is cut off is in no stretch.
    datagram = whole[: len(whole) - cut] if cut < len(whole) else whole
    expected, offset = [], 0
    while offset + 16 <= len(datagram) and offset + (length := struct.unpack_from("=I", datagram, offset)[0]) <= len(datagram):
        expected.append(datagram[offset : offset + length])
        offset += length

    found, ends = [], 0
    for begin, words, width in netlink.stretches(datagram):
        assert begin == ends
        ends += 4 * len(words)
        assert {len(words) % width, begin % 4} == {0}
        assert set(words[::width]) == {4 * width}
        found += [words[at : at + width].tobytes() for at in range(0, len(words), width)]

    assert found == expected


def test_what_is_no_message_ends_a_datagram() -> None:
    two = message(24, 3) * 2

    for tail in (bytes(16), struct.pack("=I", 15) + bytes(12), struct.pack("=I", 0xFFFF_FFFF) + bytes(12), b"x" * 3):
        assert [words.tobytes() for _, words, _ in netlink.stretches(two + tail)] == [two]
    assert list(netlink.stretches(b"")) == []
