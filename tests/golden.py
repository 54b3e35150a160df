"""Golden texts: what is written down word by word, so that a change of it is a diff someone has to sign."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

# `SEALNET_REWRITE_GOLDEN=1 scripts/test tests/model` writes the texts anew; `git diff` then shows what there is to sign.
REWRITE = os.environ.get("SEALNET_REWRITE_GOLDEN") == "1"


def assert_golden(path: Path, text: str) -> None:
    """Compare a text with the file that pins it."""
    if REWRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is missing: SEALNET_REWRITE_GOLDEN=1 writes it"
    assert text == path.read_text(encoding="utf-8")


def lines_of(argv: Iterable[str]) -> str:
    """A command line as text, each option on a line of its own with its arguments."""
    lines: list[list[str]] = []
    for word in argv:
        if not lines or word.startswith("-"):
            lines.append([])
        lines[-1].append(word)
    return "".join(shlex.join(line) + "\n" for line in lines)
