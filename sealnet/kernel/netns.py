"""Network namespaces: a thread that lives in one, the name under /run/netns, and the proof whose namespace it is."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from sealnet.errors import CannotSeal
from sealnet.kernel import libc
from sealnet.kernel.ownthread import OwnThread

NAMES = Path("/run/netns")

T = TypeVar("T")


class Kept(Protocol):
    """Sockets."""

    def close(self) -> None: ...


class Inside(OwnThread):
    """A thread inside a network namespace.

    setns(2) and unshare(2) move one thread, so nothing else in the process notices, and no fork is needed (0.12 ms, against 5-8 ms).
    What the thread spawns is born in the namespace.
    """

    netnsid: int | None = None
    """Its number in the host's namespace, kept by whoever has looked it up."""
    kept: Kept | None = None
    """What was opened in there, for any thread; closed with this."""

    def __init__(self, enter: Callable[[], None], name: str) -> None:
        super().__init__(name)
        try:
            self.fd: int = self.call(_enter, enter)
        except BaseException:
            self.end()
            raise
        self.inode = os.fstat(self.fd).st_ino

    @classmethod
    def new(cls, name: str) -> Self:
        """In a new namespace that nothing else holds."""
        return cls(lambda: libc.unshare(libc.CLONE_NEWNET), name)

    @classmethod
    def joined(cls, fd: int, name: str) -> Self:
        """In the namespace that `fd` refers to."""
        return cls(lambda: libc.setns(fd, libc.CLONE_NEWNET), name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and let go of the namespace; once is enough."""
        self.end()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self.let_go()

    def let_go(self) -> None:
        """Close what is kept. Whoever asks later opens it anew."""
        if self.kept is not None:
            self.kept.close()
            self.kept = None

    def resting(self) -> Visit:
        """What can stand for this, without a thread or anything kept. Raises OSError where no descriptor is left."""
        resting = Visit(self.fd)
        resting.netnsid = self.netnsid
        return resting


def _enter(enter: Callable[[], None]) -> int:
    enter()
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class Visit(Inside):
    """The same without a thread that stays: each call is made by one of its own. For whoever holds a thousand."""

    def __init__(self, fd: int) -> None:
        """In the namespace that `fd` refers to; that stays the caller's."""
        self.fd = os.dup(fd)
        self.inode = os.fstat(self.fd).st_ino

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        with Inside.joined(self.fd, f"netns-{self.inode}") as inside:
            return inside.call(function, *arguments)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _is_namespace(path: Path) -> bool:
    """Whether a namespace is mounted at `path`: a file of nsfs, which alone reports st_dev of an unnamed device and mode 0444."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_dev == Path("/proc/self/ns/net").stat().st_dev


def add_name(name: str, fd: int) -> None:
    """Give the namespace of `fd` a name for `ip netns`. A left-over plain file of that name is replaced; anything else is refused."""
    path = NAMES / name
    NAMES.mkdir(mode=0o755, exist_ok=True)
    if _is_namespace(path):
        raise CannotSeal(
            f"cannot add netns {name}: one of that name exists and is not this run's", hint=f"look at it: ip netns pids {name}"
        )
    try:
        flags = os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        place = os.open(path, flags, 0o444)
        try:
            if not stat.S_ISREG(os.fstat(place).st_mode):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            libc.mount(f"/proc/self/fd/{fd}", f"/proc/self/fd/{place}", "none", libc.MS_BIND)
        finally:
            os.close(place)
    except OSError as e:
        raise CannotSeal(f"cannot add netns {name}: {os.strerror(e.errno or 0)} ({path})", hint=f"look at it: ls -ld {path}") from e


def remove_name(name: str) -> None:
    """Take the name away, also where mounts are stacked on it. Succeeds if there is none."""
    path = NAMES / name
    while True:
        try:
            libc.umount(str(path), libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)
        except OSError as e:
            if e.errno in (errno.EINVAL, errno.ENOENT):
                break
            raise
    # Only an empty file can be what is left of a name of ours; a link, pipe or directory of somebody else's stays.
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def remove_name_elsewhere(name: str, is_own: Callable[[int], bool]) -> None:
    """Unmount the name in every other mount namespace that has a copy of it, when `is_own(descriptor of the namespace)`.

    A mount namespace that was made while the run lived holds the run's namespace by its copy, and nobody there would ever see it.
    """
    path, own, seen = str(NAMES / name), _mount_inode("self"), set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        inode = _mount_inode(pid)
        if inode is None or inode == own or inode in seen:
            continue
        seen.add(inode)
        with contextlib.suppress(OSError):
            if f" {path} " in Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="replace"):
                fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
                thread = threading.Thread(target=_remove_name_in, args=(fd, path, is_own), name=name)
                thread.start()
                thread.join()


def _mount_inode(pid: str) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/mnt").stat().st_ino
    except OSError:
        return None


def _remove_name_in(mount_fd: int, path: str, is_own: Callable[[int], bool]) -> None:
    try:
        # setns(2): a thread that shares its root and working directory cannot change its mount namespace.
        libc.unshare(libc.CLONE_FS)
        libc.setns(mount_fd, libc.CLONE_NEWNS)
        while True:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not is_own(fd):
                    return
            finally:
                os.close(fd)
            libc.umount(path, libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)
    except OSError:
        # The namespace or the name went away meanwhile, or what is there is no namespace any more.
        return
    finally:
        os.close(mount_fd)


def names() -> list[str]:
    """Every entry of /run/netns, namespaces and stale files alike."""
    try:
        return sorted(os.listdir(NAMES))
    except FileNotFoundError:
        return []


def open_name(name: str) -> int | None:
    """A descriptor of the namespace of that name; None if there is none."""
    if not _is_namespace(NAMES / name):
        return None
    return os.open(NAMES / name, os.O_RDONLY | os.O_CLOEXEC)


def inode_of(pid: int | str) -> int | None:
    """The inode of a process's network namespace; None when it is gone."""
    # Asked of every process of the host when a run ends: stat(2) would take twice as long, pathlib six times.
    try:
        return int(os.readlink(f"/proc/{pid}/ns/net")[5:-1])
    except OSError:
        return None
