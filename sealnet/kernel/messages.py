"""Whole messages, descriptors with them, over a stream between two processes of one program (unix(7), SCM_RIGHTS)."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Sequence

_HEAD = struct.Struct("=Q")
MOST_FDS = 8


def send(connection: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """The descriptors stay the caller's. Raises OSError where nobody is at the other end."""
    head = _HEAD.pack(len(data))
    # They go with the first byte of it. So few bytes are sent whole, or not at all.
    if fds:
        socket.send_fds(connection, [head], fds)
    else:
        connection.sendall(head)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Raises EOFError where the other end is gone, OSError where its descriptors cannot be had: none of them is left open."""
    space = socket.CMSG_SPACE(MOST_FDS * array.array("i").itemsize)
    head, ancillary, flags, _ = connection.recvmsg(_HEAD.size, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, told in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(told[: len(told) - len(told) % fds.itemsize])
    try:
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not head:
            raise EOFError
        (length,) = _HEAD.unpack(head + _exactly(connection, _HEAD.size - len(head)))
        return _exactly(connection, length), list(fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _exactly(connection: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        chunk = connection.recv(min(length - len(found), 1 << 20))
        if not chunk:
            raise EOFError
        found += chunk
    return bytes(found)
