"""The head of a request, by h11; and of a plain CONNECT, which is what most are, without it.

What the short way takes, h11 takes for the same: a test holds the two together. Everything else is h11's to read.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import h11

from sealnet.model import authority
from sealnet.model.authority import Authority, BadTarget

MAX_HEAD = 16 * 1024
HEAD_S = 10.0

# Headers of a CONNECT that mean nothing to a proxy that asks for no password and keeps no connection.
_MEANINGLESS = frozenset((b"user-agent", b"proxy-connection", b"proxy-authorization", b"accept", b"connection", b"pragma"))
# Any other may name what frames the message.
_PLAIN_CONNECTION = frozenset((b"close", b"keep-alive"))
_SHORT = re.compile(rb"CONNECT ([A-Za-z0-9.-]{1,253}):([1-9][0-9]{0,4}) HTTP/1\.[01]", re.ASCII)
# RFC 9110 5.5, without what is obsolete.
_FIELD = re.compile(rb"([A-Za-z-]+):[ \t]*+([!-~](?:[ \t!-~]*+))?", re.ASCII)
_MAX_SHORT, _REMEMBERED = 1024, 64
_METHOD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}", re.ASCII)

# RFC 9110 7.6.1 and what older clients send; with Proxy-*, none of a proxy's business to pass on.
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"))
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host"))

Headers = list[tuple[bytes, bytes]]


class BadRequest(Exception):
    """`status` is the answer; the text says why, and quotes nothing of the request."""

    def __init__(self, text: str, status: int = 400, reason: str = "bad request") -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.target: Authority | None = None
        """What was asked for, where that could be read."""


class Head(NamedTuple):
    """What was asked: `path` is the origin-form of a plain request, None for CONNECT."""

    method: str
    target: Authority
    path: str | None = None
    headers: Headers = []  # noqa: RUF012 - never changed
    is_1_1: bool = True
    has_body: bool = False


def short(data: bytes) -> Head | None:
    """A CONNECT, and nothing after it, that is unlike all that needs a closer look. None: ask h11."""
    return _short(data) if data.endswith(b"\r\n\r\n") and len(data) <= _MAX_SHORT else None


@lru_cache(_REMEMBERED)  # One client asks in the same words each time.
def _short(data: bytes) -> Head | None:
    first, *lines = data[:-4].split(b"\r\n")
    found = _SHORT.fullmatch(first)
    if found is None:
        return None
    hosts = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            return None
        name = field[1].lower()
        if name == b"host":
            hosts.append(field[2] or b"")
        elif name not in _MEANINGLESS or (name == b"connection" and (field[2] or b"").lower() not in _PLAIN_CONNECTION):
            return None
    try:
        target = Authority(authority.name(found[1].decode("ascii")), authority.port(found[2].decode("ascii")))
    except BadTarget:
        return None
    if len(hosts) != 1 or not (hosts[0] == str(target).encode() or authority.agrees(hosts[0].decode("ascii"), target, default_port=None)):
        return None
    return Head("CONNECT", target)


def read(request: h11.Request) -> Head:
    """Raises BadRequest."""
    method = request.method.decode("ascii")
    if request.http_version not in (b"1.0", b"1.1"):
        raise BadRequest("only HTTP/1.0 and HTTP/1.1 are spoken here")
    target = request.target.decode("ascii")
    try:
        if method == "CONNECT":
            asked, path = authority.connect_target(target), None
        else:
            asked, path = authority.http_target(target)
    except BadTarget as e:
        raise BadRequest(str(e), e.status, "not declared" if e.status == 403 else "bad request") from None
    try:
        return _judged(request, method, asked, path)
    except BadRequest as e:
        e.target = asked
        raise


def _judged(request: h11.Request, method: str, asked: Authority, path: str | None) -> Head:
    """The head of a request whose target could be read. Raises BadRequest."""
    headers: Headers = list(request.headers)
    names = [name for name, _ in headers]
    is_1_1 = request.http_version == b"1.1"
    if method == "TRACE":
        raise BadRequest("TRACE is not passed on", 405)
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (hosts and not authority.agrees(hosts[0], asked, default_port=None if path is None else authority.HTTP)):
        raise BadRequest("the Host header does not name the target", reason="host mismatch")
    return Head(method, asked, path, _cleaned(headers), is_1_1, _has_body(headers, names, is_1_1=is_1_1, is_connect=path is None))


def _has_body(headers: Headers, names: list[bytes], *, is_1_1: bool, is_connect: bool) -> bool:
    lengths = [value for name, value in headers if name == b"content-length"]
    if b"transfer-encoding" in names:
        if lengths:
            raise BadRequest("it has both Content-Length and Transfer-Encoding")
        if not is_1_1:
            raise BadRequest("it has a Transfer-Encoding, which HTTP/1.0 does not know")
    elif not lengths:
        return False
    # h11 has made one of several that are equal, and refused those that are not.
    if any(not length.isdigit() for length in lengths):
        raise BadRequest("its Content-Length is not a number")
    if is_connect:
        raise BadRequest("a CONNECT has no body")
    return b"transfer-encoding" in names or lengths != [b"0"]


def nominated(headers: Headers) -> set[bytes]:
    """What the Connection header says is between this peer and the proxy only."""
    return {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}


def _cleaned(headers: Headers) -> Headers:
    """What is for the origin: Host is the caller's to write, from the target. Raises BadRequest where framing would be removed."""
    told = nominated(headers)
    if told & _FRAMING:
        raise BadRequest("its Connection header names what frames the message")
    return [
        (name, value)
        for name, value in headers
        if name not in told
        and name not in _HOP_BY_HOP
        and name != b"host"
        and not name.startswith(b"proxy-")
        and (name != b"expect" or value.strip().lower() == b"100-continue")
    ]


def cleaned_response(headers: Headers, *, has_length: bool) -> Headers:
    """What is for the client. X-Sealnet-* is the door's own word, which no origin has. `has_length`: its Content-Length means something."""
    told = nominated(headers) - _FRAMING
    return [
        (name, value)
        for name, value in headers
        if name not in told
        and name not in _HOP_BY_HOP
        and not name.startswith((b"proxy-", b"x-sealnet-"))
        and (name != b"content-length" or has_length)
    ]


def first_words(data: bytes) -> tuple[str, str]:
    """Method and redacted target of what could not be read, as far as they can be told."""
    line = data[:MAX_HEAD].split(b"\n", 1)[0].decode("latin-1")
    words = line.split(" ", 2)
    method = words[0] if _METHOD.fullmatch(words[0]) else ""
    # Without a method in front it is no request line: nobody can tell what it is, and it may be a secret.
    return method, authority.redacted(words[1].strip("\r")) if method and len(words) > 1 else ""
