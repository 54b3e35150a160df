"""Where this program's own code lies, and how a part of it is started as a program of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from sealnet.errors import UsageError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_PART = f"{_PACKAGE}/kernel/part.py"


def is_own_code(path: str) -> bool:
    """Whether this program's own code is in `path`, or `path` in that: what root runs next.

    `path` is a real one: to resolve it again would race with who may change it.
    """
    return _first_own([path]) is not None


def require_not_in(paths: Sequence[str]) -> None:
    """Raises UsageError where a payload could write this program's own code in one of the `paths`."""
    path = _first_own(paths)
    if path is not None:
        raise UsageError(
            f"cannot make {path} writable in a run: sealnet itself is in it, and root runs that next",
            hint="--ro-bind, or another directory",
        )


def _first_own(paths: Sequence[str]) -> str | None:
    # Once for all of them: to look at each link on the way takes 0.2 ms, and links may change meanwhile.
    places = _places() if paths else ()
    return next((path for path in paths if any(os.path.commonpath((path, place)) in (path, place) for place in places)), None)


def _places() -> set[str]:
    """The package, what starts it in a checkout, the virtual environment and whatever else is imported from; and each link on the way,
    for who can put another in its place decides what is found there.
    """
    above = os.path.dirname(_PACKAGE)
    named = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *_installed()]
    if os.path.exists(f"{above}/scripts/start.py"):
        named += [f"{above}/scripts", f"{above}/pyproject.toml"]
    if sys.executable:
        # Without site (python -S), sys.prefix does not tell of a virtual environment.
        named += [sys.executable, *(prefix for prefix in _prefixes() if os.path.exists(f"{prefix}/pyvenv.cfg"))]
    return {place for path in named for place in _on_the_way(os.path.abspath(path))}


def _prefixes() -> set[str]:
    return {sys.prefix, os.path.dirname(os.path.dirname(sys.executable))} - {sys.base_prefix}


def _installed() -> list[str]:
    return [path for path in sys.path if path.startswith("/") and os.path.basename(path) in ("site-packages", "dist-packages")]


def _on_the_way(path: str, most: int = 40) -> Iterator[str]:
    """The real path, and those of the links that lead to it."""
    here, parts = "/", path.split("/")
    while parts:
        here = os.path.normpath(os.path.join(here, parts.pop(0)))
        if most and os.path.islink(here):
            yield here
            most -= 1
            target = os.readlink(here)
            here = "/" if target.startswith("/") else os.path.dirname(here)
            parts = [*target.split("/"), *parts]
    yield here


def program(module: str) -> tuple[str, ...]:
    """The command that runs a module's `main`, whose words come behind it, with what this process imports from and nothing else.

    Nothing in the caller's directory, no .pth file of anybody's, and /usr/local only where this process has it: the part is root's.
    """
    return (sys.executable, "-IS", _PART, *dict.fromkeys((os.path.dirname(_PACKAGE), *_installed())), "--", module)
