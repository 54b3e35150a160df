"""Advisory locks that the kernel lets go of with the process, whatever becomes of it (flock(2))."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from sealnet.kernel import process

_PATIENCE_S = 1.0


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, made where it is missing."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        acquire(fd)
        yield
    finally:
        os.close(fd)


def acquire(fd: int) -> None:
    """Wait for the exclusive lock of an open file.

    Whoever holds it and was halted (SIGSTOP, ^Z) is made to go on: all that others may do is wait, and he would keep them for ever.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        awake = threading.Event()
        watcher = threading.Thread(target=_keep_going, args=(fd, awake), name="sealnet-lock", daemon=True)
        watcher.start()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        finally:
            awake.set()
            watcher.join()


def _keep_going(fd: int, is_ours: threading.Event) -> None:
    while not is_ours.wait(_PATIENCE_S):
        pid = holder(fd)
        if pid is not None and process.is_stopped(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def holder(fd: int) -> int | None:
    """The pid that /proc/locks (proc_locks(5)) names for the flock(2) of this file; None where nobody has it."""
    found = os.fstat(fd)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        # 1: FLOCK  ADVISORY  WRITE 812 00:1a:5043 0 EOF; who waits has an arrow before it, and a process elsewhere pid 0.
        words = line.split()
        if words[1] == "FLOCK" and words[3] == "WRITE" and words[5] == file and words[4].isdecimal() and int(words[4]) > 0:
            return int(words[4])
    return None


def new(path: Path) -> int:
    """A new lock file, held from its first moment on."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def hold(path: Path) -> int:
    """Hold an existing lock file that may be on a read-only mount: flock(2) asks for no right to write."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def take(path: Path) -> int | None:
    """Hold the lock file `path`, made where it is missing; None when some process does already."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def is_held(path: Path) -> bool:
    """Whether some process holds it. Asks for a shared lock, so that two who ask at once do not see each other.

    Raises OSError where that cannot be told, for want of a descriptor: nobody is to be taken for gone then.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
