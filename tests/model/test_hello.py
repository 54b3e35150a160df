"""The server name of a ClientHello, in whatever pieces it comes."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealnet.model.hello import MAX_HELLO, Hello, Malformed, State, server_name
from tests.engine import client_hello, records_of


def real_hello(name: str) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    secret = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        secret.do_handshake()
    return outgoing.read()


def feed(data: bytes, size: int = 1 << 20) -> tuple[State, Hello]:
    hello = Hello()
    state = State.HOLD
    for at in range(0, len(data), size):
        state = hello.feed(data[at : at + size])
    return state, hello


@pytest.mark.parametrize("size", [1, 2, 7, 100, 1 << 20])
@pytest.mark.parametrize("record", [1 + 16383, 60, 9])
def test_a_real_hello_in_pieces(size: int, record: int) -> None:
    message = real_hello("allowed.test")[5:]

    state, hello = feed(records_of(message, record), size)

    assert (state, hello.names) == (State.PASS, ["allowed.test"])


@given(st.data())
def test_it_is_held_until_it_is_whole(data: st.DataObject) -> None:
    whole = records_of(client_hello("allowed.test"), data.draw(st.integers(1, 80)))
    cut = data.draw(st.integers(1, len(whole) - 1))

    hello = Hello()

    assert hello.feed(whole[:cut]) is State.HOLD
    assert hello.names == []
    assert hello.feed(whole[cut:]) is State.PASS
    assert hello.names == ["allowed.test"]


def test_without_a_server_name() -> None:
    state, hello = feed(records_of(client_hello(None)))

    assert (state, hello.names) == (State.PASS, [])


@pytest.mark.parametrize("data", [b"SSH-2.0", b"GET / HTTP/1.1", b"\0\0\0", b"\x80\x2e\x01", b"\x13\x03\x01", b"\x19\x03\x01"])
def test_what_is_not_tls_passes(data: bytes) -> None:
    assert feed(data)[0] is State.DONE


@pytest.mark.parametrize("version", [b"\0\0", b"\2\0", b"\3\1", b"\3\xff", b"\4\1", b"\x0f\xff", b"\xff\xff"])
@pytest.mark.parametrize("size", [1, 50_000])
def test_whatever_version_a_record_tells(version: bytes, size: int) -> None:
    """NAME-09: there are servers that ignore it (Go: the first record below 0x1000, with TLS 1.3 all that follow)."""
    hello = Hello()
    for count, name in enumerate(("a.test", "b.test"), 1):
        record = records_of(client_hello(name))
        record = record[:1] + version + record[3:]
        for at in range(0, len(record), size):
            state = hello.feed(record[at : at + size])
        assert (state, hello.names) == (State.PASS, ["a.test", "b.test"][:count])


@pytest.mark.parametrize(
    "data",
    [
        b"\x15\x02\x01\0\2\1\0",
        b"\x17\0\0\0\1\1",
        b"\x15\x03\x01\0\2\1\0",
        b"\x14\x03\x01\0\1\1",
        b"\x17\x03\x03\0\1\1",
        b"\x16\x03\x01\0\0",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\0\1\2",
        b"\x16\x03\x01\0\4\1\1\0\0",
        records_of(client_hello("a.test", extra=b"\0\0\0\x0b\0\x09\0\0\6b.test")),
        records_of(client_hello("a.test", extra=b"\0\0\0\0")),
        records_of(client_hello("a.test") + b"\0"),
        records_of(client_hello("a.test")[:-1]) + b"\x15\x03\x01\0\2\1\0",
        records_of(client_hello("a.test")[:-1]) + b"GET / HTTP/1.1",
        records_of(b"\1\0\0\5hello"),
        records_of(client_hello("a.test"), 1) * 3,
    ],
)
def test_what_begins_like_tls_and_cannot_be_read_is_bad(data: bytes) -> None:
    state, hello = feed(data)

    assert state is State.BAD
    assert hello.reason


def test_a_hello_without_end_is_bad() -> None:
    endless = records_of(b"\1\0\x80\0" + bytes(MAX_HELLO), 100)

    state, hello = feed(endless, 1000)

    assert (state, hello.reason) == (State.BAD, "it is in too many records")


def test_a_second_hello_is_read_too() -> None:
    """RFC 8446 4.1.4: after a HelloRetryRequest, with or without the record that only pretends to change ciphers."""
    first, second = records_of(client_hello("a.test")), records_of(client_hello("b.test"), 30)
    for between in (b"", b"\x14\x03\x03\0\1\1"):
        state, hello = feed(first + between + second, 3)
        assert (state, hello.names) == (State.PASS, ["a.test", "b.test"])


@pytest.mark.parametrize(
    "after",
    [
        b"\x17\x03\x03\0\x20" + bytes(32),
        b"\x16\x03\x03\0\x46\x10\0\0\x42" + bytes(66),
        b"\x14\x03\x03\0\1\1\x16\x03\x03\0\x28\0\0\0\0",
        b"\x14\x03\x03\0\1\1\x16\x03\x03\0\x28\1\xaa\xbb\xcc\xdd\xee",
        b"\x15\x03\x03\0\2\1\0",
    ],
)
def test_what_follows_a_hello_is_left_alone(after: bytes) -> None:
    """TLS 1.3's encrypted records, 1.2's key exchange and resumption, an alert."""
    hello = Hello()

    assert hello.feed(records_of(client_hello("a.test"))) is State.PASS
    assert hello.feed(after) is State.DONE
    assert hello.feed(b"anything") is State.DONE


@given(st.binary(max_size=300), st.integers(1, 50))
def test_nothing_is_ever_raised(data: bytes, size: int) -> None:
    """NAME-09"""
    for prefix in (b"", b"\x16\x03\x01", records_of(client_hello("a.test"))):
        feed(prefix + data, size)
    try:
        server_name(data)
    except Malformed:
        pass


@given(st.data())
def test_a_changed_hello_is_read_or_bad(data: st.DataObject) -> None:
    whole = bytearray(records_of(client_hello("allowed.test")))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))

    feed(bytes(whole), data.draw(st.integers(1, 100)))


def test_many_records_take_linear_time() -> None:
    """NAME-09: the time is pytest's limit to judge."""
    for _ in range(50):
        feed(b"\x16\x03\x01\0\1\1" * 20_000, 6)
