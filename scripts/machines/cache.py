"""Where images are kept, outside the checkout: one directory per thing, named by what it is made from and replaced when that changes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def root() -> Path:
    """$SEALNET_VM_CACHE, else sealnet-vm in the user's cache."""
    if told := os.environ.get("SEALNET_VM_CACHE"):
        return Path(told).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sealnet-vm"


def key_of(recipe: Any, *sources: Path) -> str:
    """A short name for a recipe (JSON) and the code that follows it."""
    told = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for source in sources:
        told.update(source.read_bytes())
    return told.hexdigest()[:12]


def find(name: str, key: str) -> Path | None:
    made = root() / f"{name}@{key}"
    return made if made.is_dir() else None


def obtain(name: str, key: str, make: Callable[[Path], None], *, fresh: bool = False) -> Path:
    """The directory NAME@KEY, made by `make` unless it is there; whoever else wants it meanwhile waits. Other keys of that name go away."""
    root().mkdir(parents=True, exist_ok=True)
    wanted = root() / f"{name}@{key}"
    with _locked(name):
        if wanted.is_dir() and not fresh:
            return wanted
        # Nobody else makes it now, so these are of makers that were killed.
        for left in root().glob(f".{name}-*"):
            shutil.rmtree(left)
        # A directory that is there is whole: it gets its name last.
        making = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root()))
        try:
            making.chmod(0o755)
            make(making)
            for old in root().glob(f"{name}@*"):
                shutil.rmtree(old)
            making.rename(wanted)
        finally:
            if making.exists():
                shutil.rmtree(making)
    return wanted


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    with open(root() / f".{name}.lock", "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
