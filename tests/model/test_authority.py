"""Host names and ports: one grammar for what is declared and for what is asked."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealnet.errors import UsageError
from sealnet.model.authority import (
    Authority,
    BadTarget,
    Entry,
    agrees,
    connect_target,
    declared,
    entries,
    http_target,
    name,
    redacted,
    shown,
)

LABELS = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=63).filter(lambda s: s[0] != "-" and s[-1] != "-")
NAMES = (
    st.lists(LABELS, min_size=1, max_size=4)
    .map(".".join)
    .filter(lambda s: len(s) <= 253 and not re.fullmatch(r"0x[0-9a-f]*|\d+", s.split(".")[-1]))
)
ODD = st.text(st.sampled_from("aA.-_[]:@/\\%*0x 9\r\n\0\u212a\u3002é"), max_size=40) | st.text(max_size=300)


@given(NAMES)
def test_a_name_is_itself_in_any_case_and_with_one_trailing_dot(text: str) -> None:
    assert name(text) == name(text.upper()) == name(text + ".") == text


@given(ODD)
def test_a_name_is_canonical_or_refused(text: str) -> None:
    try:
        found = name(text)
    except BadTarget:
        return
    assert name(found) == found
    assert re.fullmatch(r"[a-z0-9.-]{1,253}", found)
    assert found in (text.lower(), text.lower()[:-1])


@given(ODD | NAMES.map(lambda n: f"{n}:443") | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
def test_no_text_is_read_in_two_ways(text: str) -> None:
    """NAME-09: nothing but BadTarget is ever raised."""
    for parse in (connect_target, http_target, lambda t: agrees(t, Authority("a.test", 1), default_port=80), declared, redacted, shown):
        try:
            parse(text)
        except (BadTarget, UsageError):
            pass
    try:
        found = connect_target(text)
    except BadTarget:
        return
    assert str(found) in (text.lower(), re.sub(r"\.:", ":", text.lower()))


@pytest.mark.parametrize("text", ["a" * 60_000, "a." * 100_000, ":" * 100_000, "[" * 100_000, "@" * 100_000, "http://" * 20_000])
def test_a_giant_is_refused_without_much_work(text: str) -> None:
    """NAME-09: the time is pytest's limit to judge; quadratic work on these would take minutes."""
    for _ in range(100):
        for parse in (connect_target, http_target, declared):
            with pytest.raises((BadTarget, UsageError)):
                parse(text)
        shown(text)
    redacted(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("allowed.test:443", ("allowed.test", 443)),
        ("ALLOWED.test.:1", ("allowed.test", 1)),
        ("xn--bcher-kva.test:65535", ("xn--bcher-kva.test", 65535)),
        ("broker:80", ("broker", 80)),
        ("1.2.3.4a:80", ("1.2.3.4a", 80)),
    ],
)
def test_connect_targets(text: str, expected: tuple[str, int]) -> None:
    assert connect_target(text) == expected


@pytest.mark.parametrize("form", "2130706433 0x7f000001 0177.0.0.1 127.1 0 127.0.0.1 0x 1.0x7f 2852039166 127.0.0.1.".split())
def test_an_address_in_any_spelling_is_no_name(form: str) -> None:
    """NAME-07"""
    with pytest.raises(BadTarget, match="address") as caught:
        connect_target(f"{form}:443")
    assert caught.value.status == 403


@pytest.mark.parametrize(
    ("text", "expected", "path"),
    [
        ("http://allowed.test", ("allowed.test", 80), "/"),
        ("HTTP://Allowed.TEST./a?b", ("allowed.test", 80), "/a?b"),
        ("http://allowed.test:8080?x=http://evil.test/", ("allowed.test", 8080), "/?x=http://evil.test/"),
        ("http://allowed.test/@evil.test/", ("allowed.test", 80), "/@evil.test/"),
    ],
)
def test_http_targets(text: str, expected: tuple[str, int], path: str) -> None:
    assert http_target(text) == (expected, path)


@pytest.mark.parametrize(
    "text",
    [
        *("/", "*", "allowed.test", "http:allowed.test", "http:/allowed.test", "http:///x", "http://", "http://:80/", "http://a.test:/"),
        *("http://u@a.test/", "http://a.test/#f", "http://a.test\\x", "http://a.test/a b", "http://[::1]/", "http://a.test:80:80/"),
        *("https://a.test/", "ftp://a.test/", "http://a_b.test/", "http://a.test/\x7f", "http://a.test/é"),
    ],
)
def test_http_targets_that_are_none(text: str) -> None:
    with pytest.raises(BadTarget):
        http_target(text)


@pytest.mark.parametrize(
    ("header", "port", "expected"),
    [
        ("a.test:443", None, True),
        ("A.test.", None, True),
        ("a.test", 80, False),
        ("a.test:80", None, False),
        ("b.test:443", None, False),
        ("[a.test]:443", None, False),
        ("", None, False),
        ("a.test:443, a.test:443", None, False),
    ],
)
def test_host_headers(header: str, port: int | None, expected: bool) -> None:
    assert agrees(header, Authority("a.test", 443), default_port=port) is expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("*", "wildcard"),
        ("*.test", "wildcard"),
        ("https://allowed.test", "scheme"),
        ("allowed.test/", "path"),
        ("10.0.0.0/8", "path"),
        ("u@allowed.test", "user information"),
        ("allowed.test:0", "port"),
        ("allowed.test:", "port"),
        ("allowed.test:65536", "port"),
        (":443", "no host name"),
        ("", "empty"),
        ("  ", "empty"),
        ("# comment", "comment"),
        ("allowed.test\r", "blanks"),
        ("\ufeffallowed.test", "blanks"),
        ("allowed.test evil.test", "hyphens"),
        ("127.0.0.1:443", "address"),
        ("2130706433", "address"),
        ("[::1]:443", "address"),
        ("::1", "address"),
        ("a..b.test", "empty label"),
        (".allowed.test", "empty label"),
        ("a" * 64 + ".test", "63"),
        ("a." * 130 + "test", "253"),
        ("-a.test", "hyphen"),
        ("bücher.test", "blanks"),
        ("localhost", "one label"),
    ],
)
def test_an_entry_that_says_more_or_less_than_a_host_is_an_error(text: str, says: str) -> None:
    """NAME-10"""
    with pytest.raises(UsageError, match=says) as caught:
        declared(text)
    assert shown(text) in caught.value.message or repr(shown(text)) in caught.value.message
    assert "--allow" in caught.value.message


def test_entries() -> None:
    found = entries(["pypi.org", "PyPI.org.:443", "a.test:80"], ["db:5432", "a.test:80"])

    assert found == (Entry("pypi.org", 443), Entry("a.test", 80, True), Entry("db", 5432, True))


def test_ten_thousand_entries_and_one_that_is_bad() -> None:
    """NAME-10"""
    many = [f"h{number}.test" for number in range(10_000)]

    assert len(entries(many)) == 10_000
    with pytest.raises(UsageError, match=re.escape("*.test")):
        entries([*many, "*.test"])


@given(st.text(max_size=400))
def test_what_is_shown_is_printable_ascii_of_limited_length(text: str) -> None:
    assert re.fullmatch(r"[ -~]{0,256}", shown(text))
    assert shown(text).endswith("...") or len(text) <= 256


@given(st.text(string.ascii_letters + ":/@.?#\\", max_size=20), st.text(string.ascii_letters + ":/@.?#\\", max_size=20))
def test_what_is_before_an_at_sign_or_after_a_slash_is_not_shown(before: str, after: str) -> None:
    assert "0S" not in redacted(f"{before}0S@{after}")
    assert "0S" not in redacted(f"http://a.test/{before}0S{after}")
    assert "0S" not in redacted(f"http://a.test?{before}0S{after}")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("[::1]:443", "[::1]:443"),
        ("http://A.test:1/x", "A.test:1"),
        ("/p", ""),
        ("u:p@a.test:443", "a.test:443"),
        ("http://u:p/w@a", "(redacted)"),
        ("http://u:SEKRET%40evil.test/", "u(redacted)"),
        ("http://u:SEKRET", "u(redacted)"),
        ("http%3A%2F%2Fu%3ASEKRET%40evil.test", "http(redacted)"),
        ("http://evil.test%2fp%3ftoken=SEKRET", "evil.test(redacted)"),
        ("http://evil.test;SEKRET/", "evil.test(redacted)"),
        ("evil.test:443;SEKRET", "evil.test(redacted)"),
        ("http://evil.test:SEKRET/", "evil.test(redacted)"),
        ("token=SEKRET", "token(redacted)"),
        ("evil.test&token=SEKRET", "evil.test(redacted)"),
        ("data:SEKRET", "data(redacted)"),
        ("evil.test:443", "evil.test:443"),
    ],
)
def test_redacted(target: str, expected: str) -> None:
    assert redacted(target) == expected
