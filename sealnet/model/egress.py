"""The egress record (schema sealnet.egress/1): one line of JSON for each decision of a door.

The line of an allowed request is written before anything is dialled, with room for what is known only later; that is filled in on its spot.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sealnet.model.authority import shown

SCHEMA = "sealnet.egress/1"
ALLOW, DENY = "ALLOW", "DENY"
FIELD_LIMIT = 256
LATE_REASON_LIMIT = 96
# With quotes: an IPv6 address has at most 45 characters.
_ADDRESS_WIDTH, _REASON_WIDTH, _NUMBER_WIDTH, _DURATION_WIDTH = 48, LATE_REASON_LIMIT + 2, 20, 20


class Request(NamedTuple):
    """Who asked for what, as far as it could be read. `host` is canonical or redacted; `port` 0 stands for none."""

    method: str
    host: str
    port: int | None


class End(NamedTuple):
    """What is known only later of an allowed request. Bytes that are None: it was cut off, and nobody counted."""

    address: str | None = None
    reason: str | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    duration_s: float | None = None


def head(*, seq: int, run_id: str, time: float, verdict: str, request: Request) -> str:
    """The part of a line that is known when the request is judged, up to the address."""
    return (
        f'{{"schema": "{SCHEMA}", "seq": {seq}, "run_id": {_text(run_id)}, "time": {time:.6f}, "verdict": "{verdict}"'
        f', "method": {_text(request.method)}, "host": {_text(request.host)}, "port": {_number(request.port)}, "address": '
    )


def denial(reason: str, address: str | None = None) -> str:
    """The rest of a DENY line."""
    told = "null" if address is None else _text(address)
    return f'{told}, "reason": {_text(reason)}, "bytes_up": null, "bytes_down": null, "duration_s": null}}\n'


def room(end: End) -> str:
    """The rest of an ALLOW line: of the same length whatever `end` is."""
    duration = "null" if end.duration_s is None else f"{end.duration_s:.6f}"
    # Without what JSON would have to escape, which takes two characters each.
    reason = "null" if end.reason is None else '"' + shown(end.reason, LATE_REASON_LIMIT).replace('"', "'").replace("\\", "/") + '"'
    return (
        f'{room_of_address(end.address)}, "reason": {reason:<{_REASON_WIDTH}}'
        f', "bytes_up": {_number(end.bytes_up):<{_NUMBER_WIDTH}}, "bytes_down": {_number(end.bytes_down):<{_NUMBER_WIDTH}}'
        f', "duration_s": {duration:<{_DURATION_WIDTH}}}}\n'
    )


def room_of_address(address: str | None) -> str:
    """What that begins with, which is all that is known while a tunnel is open."""
    return ("null" if address is None else _text(address)).ljust(_ADDRESS_WIDTH)


def _number(value: int | None) -> str:
    return "null" if value is None else str(value)


@lru_cache(256)  # One run asks for a few names, over and over.
def _text(value: str) -> str:
    """As JSON: of printable ASCII only these two are escaped."""
    return '"' + shown(value, FIELD_LIMIT).replace("\\", "\\\\").replace('"', '\\"') + '"'


EMPTY_ROOM = room(End())
