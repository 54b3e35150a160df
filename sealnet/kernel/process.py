"""Processes: when one started, what it descends from, which run's namespace it is in; and tools by trusted path."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

from sealnet.errors import CannotSeal, UsageError
from sealnet.model.plan import User

# A tool is taken from here and from nowhere else: neither the caller's PATH nor the working directory is trusted with root.
TOOL_PATH = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
PACKAGES = {"bwrap": "bubblewrap", "env": "coreutils", "sh": "dash", "ip": "iproute2", "sleep": "coreutils"}
PACKAGES |= dict.fromkeys(("setpriv", "setsid", "unshare"), "util-linux")


def tool(name: str) -> str:
    """The absolute path of a system tool that root owns and nobody else may write."""
    for directory in TOOL_PATH:
        path = f"{directory}/{name}"
        try:
            found = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode) and found.st_uid == 0 and not found.st_mode & 0o022 and found.st_mode & 0o111:
            return path
    raise CannotSeal(
        f"cannot find tool {name}: it is not in {', '.join(TOOL_PATH)}, owned by root and writable by nobody else",
        hint=f"apt-get install {PACKAGES.get(name, name)}",
    )


def version(path: str) -> str | None:
    """What a tool says that its version is; None where it does not tell."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\d+(\.\d+)+", said)
    return found[0] if found else None


def too_old(name: str, needed: str) -> str | None:
    """`found X, needed Y` when a tool says that it is older than it must be."""
    found = version(tool(name))
    if found and [int(part) for part in found.split(".")] < [int(part) for part in needed.split(".")]:
        return f"found {name} {found}, needed {needed}"
    return None


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (proc(5), stat field 22): with the pid it names one process for good.

    None when it is gone. Raises OSError where that cannot be told: no descriptor is left.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def open_exactly(pid: int | None, start: int | None) -> int | None:
    """A pidfd of the process of that pid that started then; None when it is gone, whoever has its pid by now."""
    if pid is None or start is None:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, OverflowError):
        # The latter is a number that is no pid: a record is damaged.
        return None
    # In this order: the descriptor names one process, and if the pid was another's when that was asked, it was so before.
    try:
        is_it = start_time(pid) == start
    except OSError:
        os.close(pidfd)
        raise
    if is_it:
        return pidfd
    os.close(pidfd)
    return None


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name is in parentheses and may hold anything, also parentheses.
    return text[text.rindex(")") + 2 :].split(" ")


def lives(pid: int) -> bool:
    """Whether it is there and has not ended: one that waits to be waited for has."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def children(pid: int) -> list[int]:
    """The children of a process's main thread (CONFIG_PROC_CHILDREN), oldest first."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


def parent(pid: int) -> int | None:
    """The parent's pid; None when the process is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def executable(pid: int) -> str:
    """The name of the file that a process runs; empty when it is gone."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    return ""


def has_shell() -> bool:
    """Whether somebody above us in our session can continue us once we have stopped: else our group is orphaned (setpgid(2))."""
    session, group, pid = os.getsid(0), os.getpgrp(), os.getppid()
    while pid > 1:
        try:
            if os.getsid(pid) != session:
                return False
            if os.getpgid(pid) != group:
                return True
        except OSError:
            return False
        fields = _stat(pid)
        if fields is None:
            return False
        pid = int(fields[1])
    return False


def is_stopped(pid: int) -> bool:
    """Whether job control has stopped the process (state T)."""
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


def is_ending(pid: int) -> bool:
    """Whether it is on its way out (PF_EXITING): an init stays so until all of its pid namespace have been waited for."""
    fields = _stat(pid)
    return fields is not None and bool(int(fields[6]) & 0x4)


def has_default(pid: int, signum: int) -> bool:
    """Whether the process neither ignores nor catches a signal."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigIgn:", "SigCgt:"))]
        return not any(mask >> (signum - 1) & 1 for mask in masks)
    return False


def umask(pid: int) -> int:
    """Of another process (proc(5), Linux 4.7). Raises OSError when it is gone, ValueError where it is not told."""
    return int(_status(pid, "Umask")[0], 8)


def effective_uid(pid: int) -> int:
    """Raises OSError when the process is gone."""
    return int(_status(pid, "Uid")[1])


def _status(pid: int, name: str) -> list[str]:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1:]
    raise ValueError(f"no {name}")


def limits(pid: int) -> dict[int, tuple[int, int]]:
    """RLIMIT_* numbers of another process with (soft, hard), -1 without limit. Raises OSError when it is gone.

    prlimit(2) would ask for a capability that a container's root may lack.
    """
    # A head, then a line for each number from 0 on: name, soft, hard, unit, in columns (fs/proc/base.c).
    lines = Path(f"/proc/{pid}/limits").read_text(encoding="ascii").splitlines()[1:]
    return {number: (_limit(line[26:47]), _limit(line[47:68])) for number, line in enumerate(lines)}


def _limit(text: str) -> int:
    word = text.strip()
    return -1 if word == "unlimited" else int(word)


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def caller(uid: int, gid: int) -> User:
    """Who has connected to us. Without an account it has the group that it had, and no other: one of its uid's number may be somebody's."""
    found = user(str(uid))
    return found if has_account(uid) else replace(found, gid=gid)


def has_account(uid: int) -> bool:
    """Whether a uid is one of an account's."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def user(name: str) -> User:
    """A user by name or uid. A uid without an account gets no groups and no home of its own."""
    try:
        if name.isdigit():
            try:
                entry = pwd.getpwuid(int(name))
            except KeyError:
                uid = int(name)
                if uid >= 2**32 - 1:
                    raise UsageError(f"cannot use user {name}: a uid is less than {2**32 - 1}") from None
                return User(name=name, uid=uid, gid=uid, groups=(), home="/", shell="/bin/sh")  # noqa: S604 - a login shell
        else:
            entry = pwd.getpwnam(name)
    except (KeyError, OverflowError, ValueError):
        raise UsageError(f"cannot use user {name!r}: there is no such account", hint="look it up: getent passwd") from None
    groups = tuple(sorted(set(os.getgrouplist(entry.pw_name, entry.pw_gid))))
    return User(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, groups=groups, home=entry.pw_dir, shell=entry.pw_shell or "/bin/sh")
