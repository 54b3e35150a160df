"""What the host has no more of: told to the caller, and nobody's bug."""

from __future__ import annotations

import errno

from sealnet.errors import CannotSeal

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def scarcity(error: Exception) -> CannotSeal | None:
    """What to tell of an error that means that; None of any other."""
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return CannotSeal("cannot answer: no thread can be started", hint="the host is out of processes: try again later")
    if not isinstance(error, OSError) or error.errno not in _SCARCE:
        return None
    where = f" ({error.filename})" if error.filename else ""
    return CannotSeal(f"cannot answer: {error.strerror}{where}", hint="look at the limits of the worker, and whether /run is full")
