"""Who a process is to the kernel: read of another, or taken on by this one for good."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sealnet.kernel import libc, netns
from sealnet.model.plan import User

# linux/prctl.h, linux/capability.h, linux/seccomp.h.
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 4, 22, 38
_MODE_FILTER = 2
_INSTRUCTION_SIZE = 8
CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


class Identity(NamedTuple):
    """What /proc tells of a process (proc(5)); ids are (real, effective, saved, file system)."""

    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: tuple[int, ...]
    capabilities: dict[str, int]
    no_new_privs: bool
    seccomp: int
    netns_inode: int


def read(pid: int) -> Identity:
    """Raises OSError when the process is gone; one that has ended and waits to be waited for is."""
    inode = netns.inode_of(pid)
    if inode is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    told = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        told[name] = value.split()
    return Identity(
        uids=tuple(map(int, told["Uid"])),
        gids=tuple(map(int, told["Gid"])),
        groups=tuple(sorted(map(int, told["Groups"]))),
        capabilities={name: int(told[name][0], 16) for name in CAPABILITY_SETS},
        no_new_privs=told["NoNewPrivs"] == ["1"],
        seccomp=int(told["Seccomp"][0]),
        netns_inode=inode,
    )


def assume(user: User, program: bytes, *, outlives_starter: bool = False) -> None:
    """Become what a payload is: its ids, no capability in any set, no_new_privs, its system call filter (`struct sock_filter`s).

    For a process of its own with one thread; there is no way back. The order is setpriv(1)'s: what needs a capability comes first.
    Unless `outlives_starter`, it dies with the thread that started it.
    """
    libc.drop_bounds(_last_capability())
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    libc.drop_capabilities()
    libc.prctl(_SET_NO_NEW_PRIVS, 1)
    # A change of ids clears both: the process dies with the thread that made it, and its new user may not look into it.
    libc.prctl(_SET_PDEATHSIG, 0 if outlives_starter else 9)
    libc.prctl(_SET_DUMPABLE, 0)
    _filter(program)


def call_itself(name: str) -> None:
    """What ps(1) and top(1) call this process, where that can be set (a container's /proc may be read-only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="ascii")


def die_with(parent: int) -> None:
    """Have the kernel end this process as soon as the thread of `parent` ends that has started it (PR_SET_PDEATHSIG, prctl(2))."""
    libc.prctl(_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        # It was too late for that.
        os._exit(1)


def assume_in_thread(user: User, program: bytes) -> None:
    """Have the calling thread, and no other, be to files and to the network what a payload is, for good: as `assume`, but real, effective
    and saved ids stay root's, so that nobody else may signal, limit, trace or schedule it (kill(2), prlimit(2), ptrace(2), setpriority(2)).

    A socket is its maker's by the file system ids; ping(8)'s range of groups is of the effective one. For a thread that ends soon.
    """
    libc.drop_bounds(_last_capability())
    libc.set_effective_group(user.gid)
    libc.set_file_identity(user.uid, user.gid, user.groups)
    if libc.file_identity() != (user.uid, user.gid):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    libc.drop_capabilities()
    libc.prctl(_SET_NO_NEW_PRIVS, 1)
    _filter(program)


@cache
def _last_capability() -> int:
    return int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))


def _filter(program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    fprog = _Program(len(program) // _INSTRUCTION_SIZE, ctypes.addressof(instructions))
    libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(fprog))


@contextlib.contextmanager
def taken_on(user: User | None) -> Iterator[None]:
    """The calling thread, and no other, is `user` to files and to whom it talks to, without root's capabilities. None is no change.

    Raises OSError where the kernel refuses, and then nothing was done as root.
    """
    if user is None or user.uid == 0:
        yield
        return
    before = os.getgroups()
    try:
        libc.set_effective_identity(user.uid, user.gid, user.groups)
        yield
    finally:
        libc.set_effective_identity(0, 0, before)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))
