"""Host names and ports: what is declared, and what a request through the proxy asks for.

One grammar for both, so that no spelling of a request can mean a declared host without being it: A-label DNS names (RFC 1123 2.1,
RFC 5890), in lower case, one trailing dot dropped. An address in whatever spelling is never a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from sealnet.errors import UsageError

HTTPS, HTTP = 443, 80
MAX_NAME = 253

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
# What inet_aton(3), and so many a resolver, takes for a part of an address: decimal, octal, hexadecimal.
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII | re.IGNORECASE)
# RFC 3986 3.3 and 3.4 and what browsers leave bare; no fragment, which is never sent.
_PATH = re.compile(r"(?:/[!-\"$-~]*)?(?:\?[!-\"$-~]*)?", re.ASCII)


class Authority(NamedTuple):
    """A host by its canonical name, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Entry(NamedTuple):
    """A declared host. `private`: its name may resolve to a private address."""

    host: str
    port: int
    private: bool = False


class BadTarget(ValueError):
    """What was asked for is no host and port that could be declared. `status` is the HTTP answer, the text says why."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


def name(text: str) -> str:
    """The canonical spelling of a host name. Raises BadTarget with the reason; takes time linear in the length."""
    if len(text) > MAX_NAME + 1:
        raise BadTarget(f"a host name has at most {MAX_NAME} characters")
    canonical = text[:-1] if text.endswith(".") else text
    if not canonical:
        raise BadTarget("there is no host name")
    # Before lower(): a letter such as the Kelvin sign would become an ASCII one.
    if not canonical.isascii():
        raise BadTarget("a host name is ASCII; an international one is written as its A-label (xn--...)")
    if len(canonical) > MAX_NAME:
        raise BadTarget(f"a host name has at most {MAX_NAME} characters")
    canonical = canonical.lower()
    if _NAME.fullmatch(canonical) is None:
        raise BadTarget(_fault(canonical))
    if _NUMBER.fullmatch(canonical.rpartition(".")[2]):
        raise BadTarget("an address is not a host name", 403)
    return canonical


def _fault(text: str) -> str:
    if "[" in text or "]" in text or ":" in text:
        return "an address in brackets, or anything else with a bracket or colon, is not a host name"
    if "*" in text:
        return "a wildcard is not a host name: each host is declared by its own name"
    if "@" in text:
        return "it has user information before the host"
    labels = text.split(".")
    if "" in labels:
        return "it has an empty label"
    if any(len(label) > 63 for label in labels):
        return "a label has at most 63 characters"
    return "a host name is made of letters, digits and hyphens, and no label begins or ends with a hyphen"


def port(text: str) -> int:
    """Decimal, without sign, blanks or leading zeros. Raises BadTarget."""
    if _PORT.fullmatch(text) is None or int(text) > 65535:
        raise BadTarget("a port is a number from 1 to 65535")
    return int(text)


def _split(text: str, default_port: int | None) -> Authority:
    host, colon, number = text.rpartition(":") if ":" in text else (text, "", "")
    if "[" in text or "]" in text or ":" in host:
        raise BadTarget("an address is not a host name, and nothing else has brackets or two colons")
    if not colon:
        if default_port is None:
            raise BadTarget("it has no port")
        return Authority(name(host), default_port)
    # The name first: of an address it is said that it is one, whatever its port.
    canonical = name(host)
    return Authority(canonical, port(number))


def connect_target(text: str) -> Authority:
    """The authority-form of CONNECT (RFC 9112 3.2.3): host and port, both required. Raises BadTarget."""
    return _split(text, None)


def http_target(text: str) -> tuple[Authority, str]:
    """The absolute-form of a plain http request (RFC 9112 3.2.2): whom it is for, and the origin-form to send there. Raises BadTarget."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        raise BadTarget("this is a proxy: ask for http://HOST/..., or CONNECT HOST:PORT")
    if scheme[1].lower() != "http":
        raise BadTarget("a proxy request is for an http URI; for https use CONNECT HOST:PORT", 501)
    end = scheme.end()
    while end < len(text) and text[end] not in "/?#":
        end += 1
    path = text[end:]
    if _PATH.fullmatch(path) is None:
        raise BadTarget("the path has a character that no request may have")
    authority = _split(text[scheme.end() : end], HTTP)
    return authority, path if path.startswith("/") else f"/{path}"


def agrees(host_header: str, target: Authority, *, default_port: int | None) -> bool:
    """Whether a Host header names the target. CONNECT has no default port: there a header without one agrees with any."""
    try:
        asked = _split(host_header, target.port if default_port is None else default_port)
    except BadTarget:
        return False
    return asked == target


def declared(text: str, option: str = "--allow") -> Entry:
    """One entry of the allow-list: HOST[:PORT]. Raises UsageError naming the entry and the reason."""
    private = option == "--allow-private"
    try:
        if not text.strip():
            raise BadTarget("it is empty")
        if not text.isprintable() or text != text.strip() or not text.isascii():
            raise BadTarget("it has blanks, control characters or others that no host name has")
        if "://" in text:
            raise BadTarget("a scheme does not belong to it: give HOST or HOST:PORT")
        if "#" in text:
            raise BadTarget("a comment does not belong to it")
        if "/" in text:
            raise BadTarget("neither a path nor a prefix length belongs to it")
        authority = _split(text, HTTPS)
        if "." not in authority.host and not private:
            raise BadTarget("a name of one label is of a private network: --allow-private takes it")
    except BadTarget as e:
        raise UsageError(
            f"cannot use {option} {shown(text)!r}: {e}", hint=f"{option} takes a host name and a port: {option} pypi.org:443"
        ) from None
    return Entry(authority.host, authority.port, private)


def entries(allow: Iterable[str], allow_private: Iterable[str] = ()) -> tuple[Entry, ...]:
    """The allow-list, duplicates once, in the order given; what is declared in both ways may be private. Raises UsageError."""
    found: dict[tuple[str, int], Entry] = {}
    for option, texts in (("--allow", allow), ("--allow-private", allow_private)):
        for text in texts:
            entry = declared(text, option)
            found[entry.host, entry.port] = entry
    return tuple(found.values())


def shown(text: str, limit: int = 256) -> str:
    """Anything as printable ASCII of limited length: what is none of it is escaped, what is cut off is marked with "..."."""
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text
    # No more is looked at than can be shown.
    escaped = "".join(c if " " <= c <= "~" else _escape(c) for c in text[: limit + 1])
    return escaped if len(escaped) <= limit else escaped[: limit - 3] + "..."


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_PLAIN_PART = re.compile(r"(?:\[[^\]@]*\]|[0-9A-Fa-f]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*|[^\[\]%;=&:,\s]*)(?::[0-9]{1,5}$)?")


def redacted(target: str) -> str:
    """What may be shown of a target that cannot be read: no user information, no path, no query. Never what could be one of them."""
    text = target
    if found := re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/+", text, re.ASCII):
        text = text[found.end() :]
    elif text.startswith("/"):
        return ""
    authority = re.split(r"[/?#\\]", text, maxsplit=1)[0]
    if "@" in text[len(authority) :]:
        # A password may have a slash in it, and an at sign may be in a path: nobody can tell.
        return "(redacted)"
    text = authority.rpartition("@")[2]
    # What looks like a name, and a port that is a number: whatever else stands there may be a password with an escaped at sign, or a token.
    kept = _PLAIN_PART.match(text)
    told = "" if kept is None else kept[0]
    return shown(told) + ("" if told == text else "(redacted)")
