"""What is tried from inside a run before its payload starts, by a thread that is to the kernel what the payload will be."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from sealnet.errors import CannotSeal
from sealnet.kernel import identity, libc
from sealnet.kernel.ownthread import OwnThread
from sealnet.model.plan import User

_TCP_RETRY_S = 0.1
_REFUSAL_S = 0.3
# What a filter, a route, an address or a system call filter answers. Whatever else (no descriptor, no memory, no port left) is the trouble
# of who tries: it has not come to the door.
_REFUSALS = frozenset(
    (
        errno.EPERM, errno.EACCES, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL,
        errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT,
    )
)  # fmt: skip


class Attempt(NamedTuple):
    """`tcp`, `tcp6` (a link-local address takes %IFNAME) and `udp` take an address and a port, `socket` a family, a type and a protocol."""

    way: str
    arguments: tuple[Any, ...]
    timeout_s: float = _REFUSAL_S

    def __str__(self) -> str:
        if self.way == "socket":
            family, kind, protocol = self.arguments
            return f"socket({socket.AddressFamily(family).name}, {socket.SocketKind(kind).name}, {protocol})"
        address, port = self.arguments
        return f"{self.way.removesuffix('6')} {f'[{address}]' if ':' in address else address}:{port}"


class Answer(NamedTuple):
    """`code` is the errno, 0 where it succeeded."""

    code: int
    took_ms: float

    def __str__(self) -> str:
        return os.strerror(self.code) if self.code else "answered"

    @property
    def refused(self) -> bool:
        """By an errno that refuses: silence is not a refusal."""
        return self.code in _REFUSALS


class StandIn:
    """A thread in a run's network namespace that is to the kernel what the payload will be when it meets the network: the user by whom
    sockets and their packets are told, no capability in any set, no_new_privs, system call filter.

    Its other ids stay root's, so nobody else may signal, limit, trace or schedule it, nor the program through it. A process of its own
    would have those of the user as well, and no rule of the kernel's network asks for them; it costs a fork of the whole program.
    """

    def __init__(self, netns_fd: int, user: User, program: bytes) -> None:
        """Raises CannotSeal where no such thread can be had. What it is to be it becomes meanwhile."""
        self._thread: OwnThread | None = None
        try:
            # Meanwhile somebody may close the other one.
            fd = os.dup(netns_fd)
            try:
                self._thread = OwnThread(f"as-{user.uid}")
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise CannotSeal(f"cannot start a thread that tries what a payload could: {error.strerror}") from error
        self._failed = self._thread.begin(_become, fd, user, program)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make(self, attempts: Sequence[Attempt]) -> list[Answer] | str:
        """One answer for each, or why there is none."""
        if self._thread is None:
            return "the thread that was to try has ended"
        return self._failed.wait() or self._thread.call(_try_all, list(attempts))

    def close(self) -> None:
        """End it; once is enough."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None


def _become(netns_fd: int, user: User, program: bytes) -> str | None:
    """In the thread, for good: why it could not become what it is to be, or None."""
    # The program's handlers are for threads of its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        try:
            libc.setns(netns_fd, libc.CLONE_NEWNET)
        finally:
            os.close(netns_fd)
        identity.assume_in_thread(user, program)
    except OSError as error:
        return f"the thread that was to try could not become {user.name}: {error.strerror}"
    return None


def _try_all(attempts: Sequence[Attempt]) -> list[Answer]:
    return [_try(attempt) for attempt in attempts]


def _try(attempt: Attempt) -> Answer:
    began = time.perf_counter()
    code = 0
    try:
        _WAYS[attempt.way](attempt)
    except TimeoutError:
        code = errno.ETIMEDOUT
    except OSError as error:
        code = error.errno or errno.EIO
    return Answer(code, (time.perf_counter() - began) * 1e3)


def _tcp(attempt: Attempt) -> None:
    """Again at once where nothing comes back: a fresh link can lose its first SYN, and TCP repeats it only a second later."""
    deadline = time.monotonic() + attempt.timeout_s
    while True:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
                sock.settimeout(min(_TCP_RETRY_S, attempt.timeout_s))
                sock.connect(attempt.arguments)
            return
        except TimeoutError:
            if time.monotonic() > deadline:
                raise


def _tcp6(attempt: Attempt) -> None:
    address, _, ifname = attempt.arguments[0].partition("%")
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        sock.settimeout(attempt.timeout_s)
        sock.connect((address, attempt.arguments[1], 0, socket.if_nametoindex(ifname) if ifname else 0))


def _udp(attempt: Attempt) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(attempt.timeout_s)
        sock.connect(attempt.arguments)
        sock.send(b"sealnet")
        sock.recv(64)


def _socket(attempt: Attempt) -> None:
    socket.socket(*attempt.arguments).close()


_WAYS = {"tcp": _tcp, "tcp6": _tcp6, "udp": _udp, "socket": _socket}
