"""What the worker says on its standard error: one line an event, `level=... event=... key=value`, safe whatever a caller put into it."""

from __future__ import annotations

import re
import sys
from collections import Counter

_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-]{1,200}", re.ASCII)
_LONGEST = 400

counted: Counter[tuple[str, str]] = Counter()
"""How many lines there were, by level and event: both are words of the worker's own."""


def line(level: str, event: str, **fields: object) -> str:
    """A value that is not plain is quoted as JSON quotes, in ASCII; None is left out."""
    told = [f"level={level}", f"event={event}"]
    told += [f"{name}={_value(str(value))}" for name, value in fields.items() if value is not None]
    return " ".join(told)


def log(level: str, event: str, **fields: object) -> None:
    counted[level, event] += 1
    print(line(level, event, **fields), file=sys.stderr, flush=True)


def _value(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    cut = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    # ASCII without control characters, and nothing that ends the quotes.
    escaped = "".join(char if 32 <= ord(char) < 127 and char not in '"\\' else f"\\u{ord(char):04x}" for char in cut)
    return f'"{escaped}"'
