"""Varlink messages (varlink.org): JSON objects that end with a NUL, read from a peer that may be hostile; and written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 1 << 20
"""Of one message."""
_MOST_DEPTH = 16
# Of one call: a message of brackets takes half a second to look through, and thirty times its length of memory.
_MOST_VALUES = 80_000
# What is no end of a text matches as well, so that nothing is looked at twice.
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_INT64 = 1 << 63
# A number that is longer is none of ours, and Python takes quadratic time for it.
_MOST_DIGITS = 25
_FLAGS = ("more", "oneway", "upgrade")


class Malformed(ValueError):
    """The peer does not speak the protocol; there is no answer to that."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `parameters` are not checked yet."""

    method: str
    parameters: dict[str, Any]
    more: bool = False
    oneway: bool = False
    upgrade: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer; an `error` has the parameters of its own kind."""

    parameters: dict[str, Any]
    continues: bool = False
    error: str | None = None


class Frames:
    """The messages in a stream of bytes."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._part = bytearray()
        self._seen = 0

    @property
    def size_bytes(self) -> int:
        """How much of a message that has begun waits for its end."""
        return len(self._part)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every message that is whole with these bytes. Raises Malformed when one is too long."""
        self._part += data
        while True:
            end = self._part.find(0, self._seen)
            if (len(self._part) if end < 0 else end) > self._most:
                raise Malformed(f"a message is longer than {self._most} bytes")
            if end < 0:
                self._seen = len(self._part)
                return
            message = bytes(self._part[:end])
            del self._part[: end + 1]
            self._seen = 0
            yield message


def parse_call(message: bytes) -> Call:
    """Raises Malformed."""
    if _values(message) > _MOST_VALUES and _values(_TEXT.sub(b"", message)) > _MOST_VALUES:
        raise Malformed(f"a call has more than {_MOST_VALUES} values")
    data = _object(message)
    if unknown := sorted(data.keys() - {"method", "parameters", *_FLAGS}):
        raise Malformed(f"a call has no {unknown[0]!r}")
    method, parameters = data.get("method"), data.get("parameters", {})
    if not isinstance(method, str) or not isinstance(parameters, dict):
        raise Malformed("a call has a method, and parameters that are an object")
    if any(type(data.get(flag, False)) is not bool for flag in _FLAGS):
        raise Malformed("more, oneway and upgrade are true or false")
    call = Call(method, parameters, *(data.get(flag, False) for flag in _FLAGS))
    if call.more + call.oneway + call.upgrade > 1:
        raise Malformed("a call is one of more, oneway and upgrade at most")
    return call


def parse_reply(message: bytes) -> Reply:
    """Raises Malformed."""
    data = _object(message)
    if unknown := sorted(data.keys() - {"parameters", "continues", "error"}):
        raise Malformed(f"a reply has no {unknown[0]!r}")
    parameters, continues, error = data.get("parameters", {}), data.get("continues", False), data.get("error")
    if not isinstance(parameters, dict) or type(continues) is not bool or not isinstance(error, str | None):
        raise Malformed("a reply has parameters that are an object, and may have an error or continue")
    return Reply(parameters, continues, error)


def render_call(method: str, parameters: Mapping[str, Any], *, more: bool = False, oneway: bool = False) -> bytes:
    flags = {name: True for name, is_set in (("more", more), ("oneway", oneway)) if is_set}
    return _render({"method": method, "parameters": parameters, **flags})


def render_reply(parameters: Mapping[str, Any], *, continues: bool = False) -> bytes:
    return _render({"parameters": parameters, **({"continues": True} if continues else {})})


def render_error(error: str, parameters: Mapping[str, Any]) -> bytes:
    return _render({"error": error, "parameters": parameters})


def _render(data: Mapping[str, Any]) -> bytes:
    # In ASCII a NUL cannot occur, and what was no UTF-8 (surrogateescape) passes as what it was.
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\0"


def _values(message: bytes) -> int:
    """How many there are at most; texts hold commas and brackets too."""
    return message.count(b",") + message.count(b"[") + message.count(b"{")


def _object(message: bytes) -> dict[str, Any]:
    try:
        data = json.loads(message.decode("utf-8"), object_pairs_hook=_once, parse_constant=_constant, parse_int=_int)
    except Malformed:
        raise
    except (ValueError, RecursionError) as e:
        raise Malformed("a message is no JSON") from e
    if not isinstance(data, dict):
        raise Malformed("a message is an object")
    _check(data)
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a field stands twice in an object")
    return found


def _constant(text: str) -> Any:
    raise Malformed(f"{text} is no JSON")


def _int(text: str) -> int:
    if len(text) > _MOST_DIGITS or not -_INT64 <= (number := int(text)) < _INT64:
        raise Malformed("a number has more than 64 bits")
    return number


def _check(data: Any) -> None:
    """Nothing too deep, no text that is no file name of any system: a NUL, or half a character that surrogateescape has not made."""
    waiting = [(data, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, dict | list):
            if depth > _MOST_DEPTH:
                raise Malformed(f"a message is nested deeper than {_MOST_DEPTH}")
            if isinstance(value, dict):
                for name in value:
                    _check_text(name)
            waiting += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, float) and value in (float("inf"), float("-inf")):
            raise Malformed("a number is too large")


def _check_text(text: str) -> None:
    try:
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as e:
        raise Malformed("a text has half a character") from e
    if 0 in encoded:
        raise Malformed("a text has a NUL")
