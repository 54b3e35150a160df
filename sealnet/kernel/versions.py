"""What a seal was made with: kernel, tools, libraries. Nothing is executed for it: a tool's version stands in its file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

from sealnet.errors import CannotSeal, SealnetError
from sealnet.kernel import process
from sealnet.kernel.netns import Inside
from sealnet.kernel.nft import Nft
from sealnet.model.version import VERSION

# What each prints when it is asked.
_WRITTEN = {"bwrap": rb"bubblewrap (\d+(?:\.\d+)+)", "setpriv": rb"util-linux (\d+(?:\.\d+)+)"}
_LIBNFTABLES = "libnftables"
_UNKNOWN = "unknown"


def see(directory: Path) -> dict[str, str]:
    """`{name: version}`; `absent` where there is no such tool. `directory` keeps the answers, by inode, size and time of the file."""
    kept = directory / "versions.json"
    known: dict[str, list[str]] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(kept.read_text(encoding="utf-8"))
    found = {name: _version(_tool(name), known.get(name), lambda path, name=name: _written(path, _WRITTEN[name])) for name in _WRITTEN}  # type: ignore[misc]
    found[_LIBNFTABLES] = _version(_library(), known.get(_LIBNFTABLES), lambda _path: _nft())
    if found != known:
        with contextlib.suppress(OSError):
            new = directory / f".versions.{os.getpid()}"
            new.write_text(json.dumps(found), encoding="utf-8")
            new.replace(kept)
    tools = {name: version for name, (_stamp, version) in found.items()}
    return {"sealnet": VERSION, "kernel": os.uname().release, "python": platform.python_version(), **tools}


def _tool(name: str) -> str | None:
    try:
        return process.tool(name)
    except CannotSeal:
        return None


def _library() -> str | None:
    """The file that the loader would take, where it usually lies."""
    places = (f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/lib")
    return next((path for place in places if os.path.exists(path := f"{place}/libnftables.so.1")), None)


def _version(path: str | None, known: list[str] | None, look: Callable[[str], str]) -> list[str]:
    try:
        found = os.stat(path or "")
    except OSError:
        return ["", "absent"]
    stamp = f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
    return known if known is not None and known[0] == stamp else [stamp, look(path or "")]


def _written(path: str, pattern: bytes) -> str:
    with contextlib.suppress(OSError):
        if version := re.search(pattern, Path(path).read_bytes()):
            return version[1].decode()
    return _UNKNOWN


def _nft() -> str:
    """What libnftables writes into its JSON; asked in a namespace of its own, where it has nothing to tell but that."""
    with contextlib.suppress(SealnetError, OSError), Inside.new("sealnet-version") as scratch:
        return scratch.call(lambda: Nft().version())
    return _UNKNOWN
