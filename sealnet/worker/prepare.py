"""From a caller's request to what is launched: checked again on this side, and whatever it names looked at with its own rights."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sealnet import request
from sealnet.errors import NotPermitted, UsageError
from sealnet.kernel import identity, libc, process
from sealnet.kernel.mounts import DEVICES
from sealnet.kernel.streams import leads_further
from sealnet.model import calling
from sealnet.model.calling import Peer
from sealnet.model.plan import Plan, User
from sealnet.running import STREAMS, Streams, Ways

# Documentation/admin-guide/devices.txt: the payload's ends of pseudo-terminals.
_PTS = range(136, 144)
# linux/magic.h.
_FUSE = 0x65735546
# Those that the run has of its own, and gets in their place.
_HARMLESS = frozenset(number for name, number in DEVICES.items() if name != "tty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is launched for a caller; `rights` is the caller where that is not root."""

    plan: Plan
    rights: User | None
    streams: Streams
    ways: Ways


def prepare(peer: Peer, asked: Mapping[str, Any], fds: Sequence[int]) -> Prepared:
    """Raises UsageError or NotPermitted: nothing was touched. Takes its time where what the caller names lies on a slow file system."""
    if len(fds) != calling.fds_of(asked):
        raise UsageError(f"cannot run: {len(fds)} descriptors were passed, and the request names {calling.fds_of(asked)}")
    options = calling.options(peer, asked)
    umask, limits = _habits(peer)
    streams = _streams(peer, fds[:3], detach=bool(asked.get("detach")))
    rights = None
    if not peer.is_root:
        rights = options["user"] = process.caller(peer.uid, peer.gid)
    with identity.taken_on(rights):
        plan = request.plan(asked["argv"], **options, cwd=asked["cwd"], environ=asked["environ"])
        calling.require_own_places(plan, peer)
        for path, fd in zip((plan.cwd, *(bind.source for bind in plan.binds)), fds[3:], strict=True):
            _require_same(path, fd)
    return Prepared(plan=plan, streams=streams, rights=rights, ways=Ways(umask=umask, limits=limits))


def _require_same(path: str, fd: int) -> None:
    """Whether the caller means what stands there for us: it may live in another mount namespace, or have swapped it meanwhile."""
    try:
        here = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise UsageError(f"cannot use {path}: {e.strerror}") from e
    try:
        if not os.path.samestat(os.fstat(here), os.fstat(fd)):
            raise NotPermitted(
                f"cannot use {path}: it is another one for the worker than for who calls",
                hint="the caller lives in a mount namespace of its own (a container, a private /tmp): call from the host",
            )
    finally:
        os.close(here)


def _streams(peer: Peer, fds: Sequence[int], *, detach: bool) -> Streams:
    """The payload's streams. With one that leads further than it says, a payload would have more than its seal allows. Raises UsageError or
    NotPermitted.
    """
    terminals = [_is_terminal(peer, fd, name) for fd, name in zip(fds, STREAMS, strict=True)]
    if detach and any(terminals):
        raise UsageError("cannot detach from a run on a terminal", hint="--output FILE, and no terminal as input")
    first = next((fd for fd, is_terminal in zip(fds, terminals, strict=True) if is_terminal), None)
    console = None if first is None else _console(first)
    return Streams(fds[0], fds[1], fds[2], controlling_terminal=terminals[0], console=console)


def _is_terminal(peer: Peer, fd: int, name: str) -> bool:
    if (wrong := leads_further(fd)) is not None:
        raise UsageError(f"cannot use the {name}: it is {wrong}", hint="put cat in between, or a pipe")
    found = os.fstat(fd)
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFREG and not peer.is_root and libc.file_system(fd) == _FUSE:
        # Whoever closes it waits for an answer (FLUSH), and each program that is started closes what it does not take along.
        raise UsageError(
            f"cannot use the {name}: it is on a FUSE file system, which could keep the worker waiting", hint="put cat in between"
        )
    if kind in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
        return False
    if kind == stat.S_IFCHR and (os.major(found.st_rdev), os.minor(found.st_rdev)) in _HARMLESS:
        return False
    if kind == stat.S_IFCHR and os.major(found.st_rdev) in _PTS:
        # A terminal that somebody else has handed to the caller (su) could be taken from his session.
        if not peer.is_root and found.st_uid != peer.uid:
            raise NotPermitted(f"cannot use the {name}: it is a terminal of somebody else's", hint="script -qc '...' /dev/null gives one")
        return True
    raise UsageError(f"cannot use the {name}: it is no file, pipe, pair of sockets, terminal or /dev/null", hint="put cat in between")


def _console(fd: int) -> str | None:
    """The path of the payload's terminal, where it is one of ours: the descriptor keeps its number from being anybody else's."""
    try:
        path = os.ttyname(fd)
        return path if path.startswith("/dev/pts/") and os.path.samestat(os.stat(path), os.fstat(fd)) else None
    except OSError:
        return None


def _habits(peer: Peer) -> tuple[int, dict[int, tuple[int, int]]]:
    """The umask and the resource limits of who has connected: a payload has what it would have as his child. Raises UsageError."""
    try:
        umask, limits = process.umask(peer.pid), process.limits(peer.pid)
        # Its pid may be a daemon's by now, which has more than the caller may.
        if process.effective_uid(peer.pid) != peer.uid:
            raise ValueError("another process")
    except (OSError, ValueError) as e:
        raise UsageError(f"cannot run for process {peer.pid}: it has ended, or cannot be looked at") from e
    # Where we may not have more ourselves, nobody has it from us.
    hardest = {number: resource.getrlimit(number)[1] for number in limits}
    return umask, {number: (_lower(soft, hardest[number]), _lower(hard, hardest[number])) for number, (soft, hard) in limits.items()}


def _lower(asked: int, own: int) -> int:
    return min((one for one in (asked, own) if one != resource.RLIM_INFINITY), default=resource.RLIM_INFINITY)
