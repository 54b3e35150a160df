"""The codec: strict with whoever calls, and of one mind with an implementation that knows nothing of it."""

from __future__ import annotations

import json

import pytest
from asyncvarlink import VarlinkMethodCall, VarlinkMethodReply
from asyncvarlink.protocol import varlink_boundaries
from hypothesis import given
from hypothesis import strategies as st

from sealnet.model import varlink
from sealnet.model.varlink import Call, Frames, Malformed, Reply, parse_call, parse_reply

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
PARAMETERS = st.dictionaries(TEXT, VALUE, max_size=4)
METHOD = st.from_regex(r"[a-z]+(\.[a-z]+)+\.[A-Z][a-z]+", fullmatch=True)


def parsed(data: bytes, **kind: bool) -> Call:
    (message,) = Frames().feed(data)
    return parse_call(message)


@given(METHOD, PARAMETERS, st.sampled_from([{}, {"more": True}, {"oneway": True}]))
def test_the_other_implementation_reads_our_calls(method: str, parameters: dict, flags: dict) -> None:
    data = varlink.render_call(method, parameters, **flags)

    theirs = VarlinkMethodCall.fromjson(json.loads(data[:-1]))

    assert varlink_boundaries(data) == [len(data)]
    assert (theirs.method, theirs.parameters) == (method, parameters)
    assert (theirs.more, theirs.oneway, theirs.upgrade) == (flags.get("more", False), flags.get("oneway", False), False)


@given(METHOD, PARAMETERS, st.sampled_from(["", "more", "oneway", "upgrade"]))
def test_we_read_the_other_implementations_calls(method: str, parameters: dict, flag: str) -> None:
    theirs = VarlinkMethodCall(method, parameters, **({flag: True} if flag else {}))

    call = parsed(json.dumps(theirs.tojson()).encode() + b"\0")

    assert call == Call(method, parameters, **({flag: True} if flag else {}))


@given(PARAMETERS, st.booleans())
def test_replies_are_the_same_to_both(parameters: dict, continues: bool) -> None:
    data = varlink.render_reply(parameters, continues=continues)
    theirs = VarlinkMethodReply.fromjson(json.loads(data[:-1]))

    assert (theirs.parameters, theirs.continues, theirs.error) == (parameters, continues, None)
    assert parse_reply(json.dumps(theirs.tojson()).encode()) == Reply(parameters, continues)


@given(METHOD, PARAMETERS)
def test_errors_are_the_same_to_both(error: str, parameters: dict) -> None:
    data = varlink.render_error(error, parameters)
    theirs = VarlinkMethodReply.fromjson(json.loads(data[:-1]))

    assert (theirs.error, theirs.parameters) == (error, parameters)
    assert parse_reply(data[:-1]) == Reply(parameters, error=error)


@given(st.lists(PARAMETERS, max_size=5), st.lists(st.integers(1, 40), min_size=1))
def test_messages_are_found_however_the_bytes_come(told: list[dict], sizes: list[int]) -> None:
    data = b"".join(varlink.render_call("a.B", parameters) for parameters in told)
    frames, found, at, turn = Frames(), [], 0, 0

    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += [parse_call(message).parameters for message in frames.feed(data[at : at + size])]
        at, turn = at + size, turn + 1

    assert found == told
    assert frames.size_bytes == 0


@given(st.binary(max_size=200))
def test_nothing_but_malformed_comes_of_any_bytes(data: bytes) -> None:
    try:
        call = parse_call(data)
    except Malformed:
        return
    assert parse_call(json.dumps({"method": call.method, "parameters": call.parameters}).encode()).method == call.method


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "no JSON"),
        (b"[]", "is an object"),
        (b'"a"', "is an object"),
        (b"{}", "has a method"),
        (b'{"method": 1}', "has a method"),
        (b'{"method": "a.B", "parameters": null}', "that are an object"),
        (b'{"method": "a.B", "parameters": []}', "that are an object"),
        (b'{"method": "a.B", "more": 1}', "true or false"),
        (b'{"method": "a.B", "more": null}', "true or false"),
        (b'{"method": "a.B", "more": true, "oneway": true}', "at most"),
        (b'{"method": "a.B", "extra": 1}', "no 'extra'"),
        (b'{"method": "a.B", "method": "a.C"}', "twice"),
        (b'{"method": "a.B", "parameters": {"a": {"b": 1, "b": 2}}}', "twice"),
        (b'{"method": "a.B", "parameters": {"a": NaN}}', "no JSON"),
        (b'{"method": "a.B", "parameters": {"a": -Infinity}}', "no JSON"),
        (b'{"method": "a.B", "parameters": {"a": 1e999}}', "too large"),
        (b'{"method": "a.B", "parameters": {"a": 9223372036854775808}}', "64 bits"),
        (b'{"method": "a.B", "parameters": {"a": ' + b"9" * 5000 + b"}}", "64 bits"),
        (b'{"method": "a.B", "parameters": {"a": "\\u0000"}}', "NUL"),
        (b'{"method": "a.B", "parameters": {"\\u0000": 1}}', "NUL"),
        (b'{"method": "a.B", "parameters": {"a": "\\ud800"}}', "half a character"),
        (b'{"method": "a.B", "parameters": {"a": "\\udc7f"}}', "half a character"),
        (b'{"method": "a.B", "parameters": {"a": "\xff"}}', "no JSON"),
        (b'\xef\xbb\xbf{"method": "a.B"}', "no JSON"),
        (b'{"method": "a.B"} x', "no JSON"),
        (b'{"method": "a.B", "parameters": {"a": ' + b"[" * 16 + b"]" * 16 + b"}}", "nested"),
        (b'{"method": "a.B", "parameters": {"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}", "nested|no JSON"),
    ],
)
def test_what_is_no_call_is_refused(message: bytes, words: str) -> None:
    with pytest.raises(Malformed, match=words):
        parse_call(message)


def test_what_is_just_a_call_is_taken() -> None:
    deep = b'{"method": "a.B", "parameters": {"a": ' + b"[" * 14 + b"]" * 14 + b', "b": 9223372036854775807, "c": "\\udcff"}}'

    call = parse_call(deep)

    assert call.parameters["b"] == 2**63 - 1
    assert call.parameters["c"].encode("utf-8", "surrogateescape") == b"\xff"


@pytest.mark.parametrize("message", [b'{"error": 1}', b'{"continues": "yes"}', b'{"parameters": []}', b'{"more": true}', b"null"])
def test_what_is_no_reply_is_refused(message: bytes) -> None:
    with pytest.raises(Malformed):
        parse_reply(message)


def test_a_message_has_a_longest() -> None:
    fits = b'{"method":"a.B","parameters":{"a":"' + b"x" * (varlink.MOST_BYTES - 38) + b'"}}'
    assert len(fits) == varlink.MOST_BYTES
    whole, dripping = Frames(), Frames()

    assert list(whole.feed(fits + b"\0")) == [fits]
    with pytest.raises(Malformed, match="longer"):
        list(whole.feed(fits + b" \0"))
    assert list(dripping.feed(fits)) == []
    with pytest.raises(Malformed, match="longer"):
        list(dripping.feed(b" "))


def test_a_call_has_so_many_values_and_a_text_is_one() -> None:
    def call(value: object) -> bytes:
        return json.dumps({"method": "a.B", "parameters": {"a": value}}, separators=(",", ":")).encode()

    assert varlink.parse_call(call('[{,",\\' * 100_000)).parameters["a"][:4] == '[{,"'
    assert len(varlink.parse_call(call(["x,"] * 70_000)).parameters["a"]) == 70_000
    for value in ([[]] * 100_000, ["x"] * 100_000, {str(at): at for at in range(100_000)}):
        with pytest.raises(Malformed, match="values"):
            varlink.parse_call(call(value))
    # Texts without an end are looked at once, and hide what stands behind them from nobody but us: it is no JSON.
    with pytest.raises(Malformed, match="no JSON"):
        varlink.parse_call(b'{"a":' + b'"\\' * 250_000 + b"," * 250_000)
