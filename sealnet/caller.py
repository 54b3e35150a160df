"""Who calls: as whom payloads run, from where, under which id. Cheap to import."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from sealnet.errors import CannotSeal, UsageError
from sealnet.kernel import process
from sealnet.model import names
from sealnet.model.plan import User


def default_user(environ: Mapping[str, str]) -> User:
    """Who called: the user behind sudo, else the process's own."""
    uid = environ.get("SUDO_UID", "")
    if uid and not uid.isdigit():
        raise UsageError(f"cannot use SUDO_UID {uid!r}: it is not a uid", hint="name the user: --user NAME")
    return process.user(uid if uid and os.geteuid() == 0 else str(os.getuid()))


def unprivileged_user(environ: Mapping[str, str]) -> str:
    """Who called, by name, or nobody where that is root: for payloads of sealnet's own."""
    user = default_user(environ)
    return "nobody" if user.uid == 0 else user.name


def new_run_id() -> str:
    """One that nobody has."""
    return names.ulid(time_ms=time.time_ns() // 1_000_000, random=os.urandom(10))


def working_directory() -> str:
    """Where the caller stands. A directory that has gone, or that another mount now covers, is refused."""
    try:
        path = os.getcwd()
        here, there = os.stat("."), os.stat(path)
    except OSError as e:
        raise UsageError(f"cannot use the working directory: {e.strerror}", hint="change to a directory that exists") from e
    if not os.path.samestat(here, there) or not path.startswith("/"):
        raise UsageError(f"cannot use the working directory: {path} now leads elsewhere", hint="change to it again: cd $PWD")
    return path


def require_root(verb: str, command: str) -> None:
    """Refuse with what to do where the process may not build a namespace."""
    if os.geteuid() != 0:
        raise CannotSeal(f"cannot {verb}: only root may", hint=f"sudo {command}")
    # CAP_NET_ADMIN 12, CAP_SYS_ADMIN 21: what a container that calls itself root often lacks.
    effective = next(int(line.split()[1], 16) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    lacking = [name for name, bit in (("CAP_NET_ADMIN", 12), ("CAP_SYS_ADMIN", 21)) if not effective >> bit & 1]
    if lacking:
        raise CannotSeal(f"cannot {verb}: this root lacks {' and '.join(lacking)}", hint="run on the host, or in a privileged container")
