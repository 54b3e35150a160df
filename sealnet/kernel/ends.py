"""The other ends of what a proof tries: sockets of the host that answer the host itself, just before the run may not reach them."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Self

_CONTROL_S = 0.1
# No packet is sent: it only makes the kernel choose a source (TEST-NET-1, RFC 5737).
_ANYWHERE = ("192.0.2.1", 9)
# What a host answers that has not got such a thing. Whatever else (no descriptor, no port left) hides what may well be there.
ABSENT = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT))
# So much of what others send to an end is looked through for what came from the run.
_LOOKED_THROUGH = 256


class End:
    """A listening socket of the host. `control` tells how the host reached it; it is None when the host could not."""

    def __init__(self, family: int, kind: int, address: str, reached_at: str) -> None:
        """Raises OSError when the host has no such address."""
        self._socket = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind((address, 0))
            if kind == socket.SOCK_STREAM:
                self._socket.listen(_LOOKED_THROUGH)
            self.address, self.port = address, int(self._socket.getsockname()[1])
            self._family, self._kind = family, kind
            self.control = self._reach(reached_at)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def _reach(self, address: str) -> str | None:
        with socket.socket(self._family, self._kind | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(_CONTROL_S)
            try:
                sock.connect((address, self.port))
                if self._kind == socket.SOCK_DGRAM:
                    sock.send(b"control")
            except OSError as error:
                # A port that is free to listen at and none to connect from: somebody holds all the others.
                if error.errno == errno.EADDRNOTAVAIL and self._family == socket.AF_INET:
                    raise OSError(errno.EADDRINUSE, "no port is left to connect from") from error
                return None
            self._socket.settimeout(_CONTROL_S)
            if self._comes_from(sock.getsockname()[:2]):
                what = "tcp" if self._kind == socket.SOCK_STREAM else "udp"
                return f"the host reaches {what} {f'[{address}]' if ':' in address else address}:{self.port}"
        return None

    def _comes_from(self, peer: tuple[str, ...]) -> bool:
        """Whether anything does that begins with `peer`, of what comes here. Anybody of this host may send to it, and some do."""
        with contextlib.suppress(OSError):
            for _ in range(_LOOKED_THROUGH):
                if self._take()[: len(peer)] == peer:
                    return True
        return False

    def _take(self) -> tuple[str, ...]:
        """Who has sent what comes next."""
        if self._kind == socket.SOCK_DGRAM:
            return tuple(self._socket.recvfrom(64)[1])
        connection, peer = self._socket.accept()
        connection.close()
        return tuple(peer)

    def arrived(self, source: str) -> bool:
        """Whether anything has come from the address `source` since the control."""
        self._socket.settimeout(0)
        return self._comes_from((source,))


def own_address() -> str | None:
    """The address that this host would speak from to a far one; None where it has no way there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.connect(_ANYWHERE)
        return str(sock.getsockname()[0])
    return None


def opens(family: int, kind: int, protocol: int) -> str | None:
    """That the host, with every capability, can open such a socket; None where it cannot either."""
    try:
        socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol).close()
    except OSError as error:
        # A host in a container may lack the right.
        if error.errno not in ABSENT | {errno.EPERM, errno.EACCES}:
            raise
        return None
    return "the host can"
