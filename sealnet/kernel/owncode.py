"""Where this program's own code lies, and how a part of it is started as a program of its own."""

from __future__ import annotations

import os
import sys

from sealnet.errors import UsageError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_PART = f"{_PACKAGE}/kernel/part.py"


def is_own_code(path: str) -> bool:
    """Whether this program's own code is in `path`, or `path` in that: what root runs next.

    `path` is a real one: to resolve it again would race with who may change it.
    """
    return any(os.path.commonpath((path, place)) in (path, place) for place in _places())


def require_not_in(path: str) -> None:
    """Raises UsageError where a payload could write this program's own code in `path`."""
    if is_own_code(path):
        raise UsageError(
            f"cannot make {path} writable in a run: sealnet itself is in it, and root runs that next",
            hint="--ro-bind, or another directory",
        )


def _places() -> list[str]:
    """The package, what starts it in a checkout, and the virtual environment."""
    found, scripts = [_PACKAGE], f"{os.path.dirname(_PACKAGE)}/scripts"
    if os.path.exists(f"{scripts}/start.py"):
        found.append(os.path.realpath(scripts))
    # Without site (python -S), sys.prefix does not tell of one.
    for prefix in {sys.prefix, os.path.dirname(os.path.dirname(sys.executable))} - {sys.base_prefix}:
        if os.path.exists(f"{prefix}/pyvenv.cfg"):
            found.append(os.path.realpath(prefix))
    return found


def program(module: str) -> tuple[str, ...]:
    """The command that runs a module's `main`, whose words come behind it, with what this process imports from and nothing else.

    Nothing in the caller's directory, no .pth file of anybody's, and /usr/local only where this process has it: the part is root's.
    """
    installed = (path for path in sys.path if path.startswith("/") and os.path.basename(path) in ("site-packages", "dist-packages"))
    return (sys.executable, "-IS", _PART, *dict.fromkeys((os.path.dirname(_PACKAGE), *installed)), "--", module)
