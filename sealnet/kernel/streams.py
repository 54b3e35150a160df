"""What a descriptor would be to a payload that has it as a standard stream."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat


def leads_further(fd: int) -> str | None:
    """What it is, where a payload could get out of its view or its namespace by it; None where it is only what it carries.

    A socket belongs to the namespace that it was made in, whoever has it: any but a connected Unix stream can be connected anew there
    (connect(2), AF_UNSPEC). A directory, or a handle on a file (O_PATH), leads to the host's files, and to daemons' sockets among them.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        return "a directory"
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH:
        return "not open for reading or writing"
    if stat.S_ISSOCK(mode) and not _is_connected_pair(fd):
        return "a socket that could be connected to something else"
    # A namespace (nsfs) calls itself a plain file, and has no path.
    if stat.S_ISREG(mode) and not os.readlink(f"/proc/self/fd/{fd}").startswith("/"):
        return "a handle on something of the kernel's"
    return None


def _is_connected_pair(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
            return False
        try:
            sock.getpeername()
        except OSError as e:
            if e.errno != errno.ENOTCONN:
                raise
            return False
    return True
