"""The run's cgroup (version 2, also the v2 tree of a hybrid host): who belongs to it, and the one kill nobody can outrun."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sealnet.errors import CannotSeal, CannotTearDown
from sealnet.model import names

# Says which state directory a cgroup belongs to. trusted.* needs CAP_SYS_ADMIN of the host, so no payload can write it.
_OWNER = "trusted.sealnet"
_KILL = "cgroup.kill"
_POLL_S = 0.002
# What is said of a cgroup that somebody else removes: before one of its files is opened, and (kernfs) before that is read or written.
_GONE = (errno.ENOENT, errno.ENODEV)


def root() -> Path:
    """Where the version 2 tree is mounted. Raises CannotSeal when it is not."""
    # The table of mounts has a line for the name of every run, so it is read once. Of what is mounted elsewhere later the file is gone.
    if _Found.root is None or not os.path.exists(f"{_Found.root}/cgroup.controllers"):
        _Found.root = _find_root()
    return _Found.root


class _Found:
    root: Path | None = None


def _find_root() -> Path:
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _source, target, fstype = line.split(" ")[:3]
            if fstype == "cgroup2":
                return Path(target.encode().decode("unicode_escape"))
    raise CannotSeal(
        "cannot find a cgroup v2 tree: none is mounted, and a run could not be ended with certainty without one",
        hint="mount -t cgroup2 none /sys/fs/cgroup/unified",
    )


def own() -> Path:
    """The cgroup that this process is in. Raises CannotSeal as `root`."""
    return _own(root())


def _own(top: Path) -> Path:
    """The cgroup that this process is in, where it can be seen from here; else the root."""
    return _seen(top) or top


def _seen(top: Path) -> Path | None:
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            if line.startswith("0::/") and "/.." not in line:
                own = Path(f"{top}{line[3:].rstrip()}")
                # The kernel marks the path of one that has been removed.
                return own if own.is_dir() else None
    return None


def _parents() -> list[Path]:
    top = root()
    return [base / names.CGROUP_PARENT for base in dict.fromkeys((_own(top), top))]


def add(run_id: str, owner: str) -> Path:
    """Create the run's cgroup, marked with the state directory that owns it.

    It is made below the caller's own, so that whatever limits the caller limits the run.
    """
    made = _parents()[0] / names.known_run_id(run_id)
    try:
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(made.parent)
            try:
                made.mkdir()
            except FileNotFoundError:
                # The last of the other runs has ended and taken the parent with it.
                continue
            break
        os.setxattr(made, _OWNER, owner.encode())
    except OSError as e:
        with contextlib.suppress(OSError):
            if not isinstance(e, FileExistsError):
                made.rmdir()
        raise CannotSeal(f"cannot add cgroup {made}: {e.strerror}") from e
    return made


def join(cgroup: Path, pid: int) -> bool:
    """Move one process there; False when it is gone. Waits for a grace period of RCU (10 ms). Raises CannotSeal."""
    if pid <= 0:
        # 0 is whoever writes it.
        raise ValueError(f"{pid} is no process")
    try:
        _write(cgroup / "cgroup.procs", str(pid))
    except ProcessLookupError:
        return False
    except OSError as e:
        raise CannotSeal(f"cannot move process {pid} to cgroup {cgroup}: {e.strerror}") from e
    return True


def anticipate() -> None:
    """Wait for the grace period that the next `join` would wait for: who joins before another is over does not."""
    with contextlib.suppress(OSError, CannotSeal):
        own = _seen(root())
        if own is not None:
            # The calling thread, to where it is: nothing is moved, which the kernel finds out when it has waited. Were that not where it
            # seems to be (a cgroup namespace), the kernel would refuse it: a thread stays with its process.
            _write(own / "cgroup.threads", str(threading.get_native_id()))


def find(run_id: str, tag: str) -> Path | None:
    """The run's cgroup: where this process would make it, else anywhere in the tree; None when there is none of that owner.

    Raises UsageError for what is no run id.
    """
    names.known_run_id(run_id)
    for parent in _parents():
        # One that was made and not yet marked is empty, and nobody else claims the id in this state directory.
        if owner(parent / run_id) == tag or _is_bare(parent / run_id):
            return parent / run_id
    return next((parent / run_id for parent in _all_parents() if owner(parent / run_id) == tag), None)


def _is_bare(cgroup: Path) -> bool:
    return cgroup.exists() and owner(cgroup) is None and not _populated(cgroup)


def _all_parents() -> Iterator[Path]:
    for directory, below, _files in os.walk(root()):
        if names.CGROUP_PARENT in below:
            yield Path(directory) / names.CGROUP_PARENT
            below.remove(names.CGROUP_PARENT)


def owner(cgroup: Path) -> str | None:
    try:
        return os.getxattr(cgroup, _OWNER).decode(errors="replace")
    except OSError:
        return None


def run_ids(tag: str) -> list[str]:
    """The run ids that have a cgroup of that owner, where this process would make them."""
    found = set()
    with contextlib.suppress(CannotSeal):
        for parent in _parents():
            with contextlib.suppress(OSError):
                found |= {name for name in os.listdir(parent) if names.is_run_id(name) and owner(parent / name) == tag}
    return sorted(found)


def pids(cgroup: Path) -> list[int]:
    """Every process in it, and in cgroups below it."""
    found: list[int] = []
    for directory, _below, _files in os.walk(cgroup):
        with contextlib.suppress(OSError), open(f"{directory}/cgroup.procs", encoding="ascii") as file:
            found += [int(line) for line in file]
    return found


def _populated(cgroup: Path) -> bool:
    try:
        return "populated 1" in (cgroup / "cgroup.events").read_text()
    except OSError as e:
        if e.errno not in _GONE:
            raise
        return False


def bound(cgroup: Path, *, depth: int, descendants: int) -> None:
    """Limit what may be made below it: a container that may write its part of the tree could nest cgroups deeper than any path is long."""
    (cgroup / "cgroup.max.depth").write_text(str(depth))
    (cgroup / "cgroup.max.descendants").write_text(str(descendants))


def freeze(cgroup: Path, *, frozen: bool) -> None:
    """Halt everything in it, or let it go on (cgroup.freeze, Linux 5.2)."""
    try:
        _write(cgroup / "cgroup.freeze", "1" if frozen else "0")
    except OSError as e:
        if e.errno not in _GONE:
            raise


def kill(cgroup: Path, *, timeout_s: float = 10.0) -> None:
    """SIGKILL everything in it and wait until it is empty: nothing can fork its way out, and a frozen process dies as well."""
    if not cgroup.exists():
        return
    deadline = time.monotonic() + timeout_s
    while _populated(cgroup):
        try:
            _write(cgroup / _KILL, "1")
        except FileNotFoundError:
            # Before Linux 5.14: freeze, so that nobody forks meanwhile, kill each, thaw.
            _freeze_and_kill(cgroup)
        except OSError as e:
            # Somebody else has ended and removed it.
            if e.errno not in _GONE:
                raise
        settled = time.monotonic() + 1.0
        while _populated(cgroup):
            now = time.monotonic()
            if now > deadline:
                raise CannotTearDown(f"cannot end cgroup {cgroup}: processes {pids(cgroup)} are still there after {timeout_s:g} s")
            if now > settled:
                break
            time.sleep(_POLL_S)


def _write(file: Path, text: str) -> None:
    """Raises FileNotFoundError where the kernel has no such file: asked to create it, which open() does, it would say EACCES."""
    fd = os.open(file, os.O_WRONLY)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def _freeze_and_kill(cgroup: Path) -> None:
    freeze(cgroup, frozen=True)
    for pid in pids(cgroup):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    freeze(cgroup, frozen=False)


def remove(cgroup: Path, *, timeout_s: float = 2.0) -> None:
    """Remove it and what is below it; it must be empty. Succeeds if it is not there."""
    deadline = time.monotonic() + timeout_s
    for directory, _below, _files in os.walk(cgroup, topdown=False):
        while True:
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                break
            except OSError as e:
                # A process that is dead but not yet reaped by its parent still counts for a moment.
                if e.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise CannotTearDown(f"cannot remove cgroup {directory}: {e.strerror}") from e
                time.sleep(_POLL_S)
            else:
                break
    # The parent stays while others use it.
    with contextlib.suppress(OSError):
        cgroup.parent.rmdir()
