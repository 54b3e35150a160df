"""Plain aligned columns, safe to print whatever a payload put into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sealnet.model.egressfold import Denial

# Of a column that is cut: less tells nothing.
_NARROWEST = 12


def clean(text: str) -> str:
    """Nothing that moves a cursor or makes a line: what a payload names itself goes to somebody's terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def aligned(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, last_width: int | None = None, width: int | None = None
) -> Iterator[str]:
    """The head and each row, columns two spaces apart; the last column is cut to `last_width`, the widest ones until a line has `width`."""
    lines = [head, *[[clean(cell) for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    if last_width is not None:
        widths[-1] = min(widths[-1], last_width)
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    for line in lines:
        yield "  ".join(_cut(cell, wide).ljust(wide) for cell, wide in zip(line, widths, strict=True)).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def tried_lines(tried: Sequence[tuple[str, str, int, int]], tally: str = "whole") -> Iterator[str]:
    """(address, protocol, port, packets) of what a run tried, for people. `tally` is as `sealnet.model.tally` tells it."""
    if tally == "none":
        yield "tried        not recorded: it is an open run, which has no filter, or nobody could read it"
        return
    since = " since its filter was put back; what it tried before is lost" if tally == "cut" else ""
    if not tried and tally != "full":
        yield f"tried        nothing beside its lease{since}"
        return
    yield f"tried, and refused{since}:"
    rows = [
        (str(packets), protocol, f"{address} (name lookups)" if port == 53 else address, str(port))
        for address, protocol, port, packets in tried
    ]
    yield from (f"  {line}" for line in aligned(("PACKETS", "PROTOCOL", "ADDRESS", "PORT"), rows))
    if tally == "full":
        yield "  and perhaps more: as many are listed as can be"


def target(host: str, port: int | None) -> str:
    """HOST:PORT. What is no host name is recorded as it was asked for, with its port."""
    return host if port is not None and host.endswith(f":{port}") else f"{host}:{port or '-'}"


def denial_lines(denials: Sequence[Denial]) -> Iterator[str]:
    """What a proxy denied, for people, with what would allow each."""
    if not denials:
        return
    yield "denied by the proxy:"
    rows = [(str(one.count), target(one.host, one.port), one.reason, one.flag or "-") for one in denials]
    yield from (f"  {line}" for line in aligned(("REQUESTS", "HOST", "REASON", "ALLOWED BY"), rows))


def event_lines(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What was done to a run, one line for each kind of event: how often, and the last one's details."""
    for kind in dict.fromkeys(str(event["event"]) for event in events):
        of_kind = [event for event in events if event["event"] == kind]
        times = f" ({len(of_kind)} times)" if len(of_kind) > 1 else ""
        yield clean(f"{kind}{times}: {of_kind[-1]['detail']}")


def duration(seconds: float) -> str:
    """`12s`, `3m`, `5h`, `2d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"
