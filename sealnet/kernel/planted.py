"""Reads files that somebody else may have put there: no link is followed, no pipe is waited for, nothing endless is read."""

from __future__ import annotations

import errno
import os
import stat
from typing import IO


def open_plain(path: str | os.PathLike[str], directory: int | None = None) -> IO[bytes]:
    """A plain file, for reading; `path` is relative to `directory`. Raises OSError, ELOOP for a link."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))
    return open(fd, "rb")


def read_plain(path: str | os.PathLike[str], directory: int | None = None, *, most: int) -> bytes:
    """All of it. Raises OSError, EFBIG where it is longer than `most`."""
    with open_plain(path, directory) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return data
