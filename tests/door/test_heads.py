"""Request heads: the short way for CONNECT takes nothing that h11 would take for something else."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealnet.door.heads import BadRequest, Head, first_words, read, short

PIECES = [
    *(
        b"CONNECT ",
        b"connect ",
        b"allowed.test",
        b"ALLOWED.test.",
        b":443",
        b":0443",
        b":",
        b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n",
        b" HTTP/1.1\n",
        b" http/1.1\r\n",
    ),
    *(b"Host: allowed.test:443\r\n", b"Host:allowed.test\r\n", b"host: evil.test\r\n", b"User-Agent: curl/8\r\n", b"Accept: */*\r\n"),
    *(
        b"Connection: host\r\n",
        b"Content-Length: 3\r\n",
        b"Proxy-Connection: keep-alive\r\n",
        b" folded\r\n",
        b"X: y\r\n",
        b"\r\n",
        b"\n",
        b"\r",
    ),
    *(b"[::1]", b"1.2.3.4", b"a b", b"\x00", b"\xff", b"http://", b"GET ", b"User-Agent : x\r\n", b"User-Agent:\r\n", b"\t"),
]


def by_h11(data: bytes) -> Head | None:
    """None for what it refuses or waits for."""
    asked = h11.Connection(h11.SERVER, max_incomplete_event_size=16384)
    asked.receive_data(data)
    try:
        event = asked.next_event()
        found = read(event) if isinstance(event, h11.Request) else None
    except (h11.RemoteProtocolError, BadRequest):
        return None
    return None if asked.trailing_data[0] else found


PLAIN = b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: allowed.test:443\r\nUser-Agent: curl/8\r\n\r\n"


def test_a_plain_connect_takes_the_short_way() -> None:
    found = short(PLAIN)

    assert found is not None
    assert by_h11(PLAIN) is not None
    assert (found.target, found.path) == (("allowed.test", 443), None)


def check(data: bytes) -> None:
    found = short(data)
    if found is not None:
        other = by_h11(data)
        assert other is not None, data
        assert (found.method, found.target, found.path, found.has_body) == (other.method, other.target, other.path, other.has_body), data


@given(st.lists(st.sampled_from(PIECES), max_size=9).map(b"".join))
def test_the_short_way_and_h11_agree(data: bytes) -> None:
    check(data)
    check(data + b"\r\n\r\n")


@given(st.data())
def test_they_agree_on_a_connect_with_a_few_bytes_changed(data: st.DataObject) -> None:
    changed = bytearray(PLAIN)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2) | st.sampled_from(PIECES))

    check(bytes(changed))


@pytest.mark.parametrize(
    "data",
    [
        PLAIN + b"x",
        PLAIN[:-2],
        PLAIN.replace(b"443 HTTP", b"444 HTTP"),
        PLAIN.replace(b"User-Agent", b"Content-Length"),
        PLAIN.replace(b"User-Agent", b"Host"),
        PLAIN.replace(b"CONNECT", b"connect"),
        PLAIN.replace(b"Host: allowed.test:443\r\n", b""),
        PLAIN.replace(b"User-Agent: curl/8", b"Connection: host"),
        PLAIN.replace(b"User-Agent: curl/8", b"Connection: close, transfer-encoding"),
        b"CONNECT 1.2.3.4:443 HTTP/1.1\r\nHost: 1.2.3.4:443\r\n\r\n",
    ],
)
def test_the_short_way_leaves_the_rest_to_h11(data: bytes) -> None:
    assert short(PLAIN) is not None
    assert short(data) is None


@given(st.binary(max_size=200))
def test_what_cannot_be_read_is_told_without_failing(data: bytes) -> None:
    method, host = first_words(data)

    assert (method + host).isascii()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET http://allowed.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n", 400),
        (b"GET http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\nConnection: host\r\n\r\n", 400),
        (b"TRACE http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n", 405),
    ],
)
def test_a_refusal_knows_the_target_that_could_be_read(head: bytes, status: int) -> None:
    asked = h11.Connection(h11.SERVER)
    asked.receive_data(head)
    event = asked.next_event()
    assert isinstance(event, h11.Request)

    with pytest.raises(BadRequest) as refused:
        read(event)

    assert (refused.value.status, refused.value.target) == (status, ("allowed.test", 80))
