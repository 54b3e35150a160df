"""Which services of this host run, of those that touch links or filters: by what they are, not by what they call themselves."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from sealnet.kernel import netns
from sealnet.model.facts import Daemon

# By name, what they are besides: systemd-udevd is a link to udevadm.
WATCHED = {
    "firewalld": "firewalld",
    "dockerd": "dockerd",
    "NetworkManager": "NetworkManager",
    "systemd-networkd": "systemd-networkd",
    "systemd-udevd": "udevadm",
}
# Accounts of the system's own (login.defs(5), SYS_UID_MAX).
_LAST_SYSTEM_UID = 999


class Candidate(NamedTuple):
    """A process that has the name of a service. `program` is the real path of what it executes, a script's for an interpreter."""

    name: str
    pid: int
    uid: int
    netns: int | None
    program: str
    owner: int
    mode: int


def see() -> list[Daemon]:
    """The services of `WATCHED` that run in the calling thread's network namespace."""
    import psutil

    own, found = netns.inode_of("self"), []
    for process in psutil.process_iter(["pid", "name"]):
        name, pid = process.info["name"], process.info["pid"]
        if name in WATCHED:
            try:
                program = _program(process.exe(), process.cmdline())
                # What it executes, not what lies there now: a package may have been upgraded under it.
                status = os.stat(f"/proc/{pid}/exe" if program == process.exe() else program)
                candidate = Candidate(name, pid, process.uids().real, netns.inode_of(pid), program, status.st_uid, status.st_mode)
                sure = True
            except (psutil.AccessDenied, PermissionError):
                candidate, sure = Candidate(name, pid, 0, own, name, 0, 0o755), False
            except (psutil.Error, OSError):
                # It has ended meanwhile.
                continue
            if is_genuine(candidate, own):
                found.append(Daemon(name=name, pid=pid, sure=sure))
    return found


def is_genuine(candidate: Candidate, own: int | None) -> bool:
    """Whether it is that service of this host, and not one in a container, or somebody's program of the same name."""
    return (
        candidate.uid <= _LAST_SYSTEM_UID
        and candidate.netns == own
        and os.path.basename(candidate.program) in (candidate.name, WATCHED.get(candidate.name))
        and candidate.owner == 0
        and not stat.S_IMODE(candidate.mode) & 0o022
    )


def _program(executable: str, arguments: Iterable[str]) -> str:
    """What is executed; of an interpreter the script that it was given."""
    executable = executable.removesuffix(" (deleted)")
    if not os.path.basename(executable).startswith("python"):
        return executable
    _interpreter, *rest = arguments
    return next((word for word in rest if not word.startswith("-")), executable)
