"""What is tried from inside a run before its payload starts, by a process that is to the kernel what the payload will be."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from sealnet.errors import CannotSeal
from sealnet.kernel import identity
from sealnet.model.plan import User

_TCP_RETRY_S = 0.1
_REFUSAL_S = 0.3
_WITHIN_S = 5.0
_MESSAGE = 65536
# What a filter, a route, an address or a system call filter answers. Whatever else (no descriptor, no memory, no port left) is the trouble
# of who tries: it has not come to the door, and a process of the same user can make it so (prlimit(2)).
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
    """A process in the calling thread's network namespace that is to the kernel what the payload will be: user, no capability in any set,
    no_new_privs, system call filter. It is forked early and tries things when it is told.

    A thread could take all that on as well, but a signal of that user's to it would end the whole process.
    """

    def __init__(self, user: User, program: bytes) -> None:
        """Raises CannotSeal where no process can be had."""
        self._pidfd = -1
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.ExitStack() as undo:
                undo.callback(self._socket.close)
                with theirs:
                    self._pid = _fork(lambda parent: _stand_in(theirs, user, program, parent))
                # Where somebody else in this program waits for every child, the pid of one that was killed may soon be a stranger's.
                undo.callback(_end, self._pid)
                self._pidfd = os.pidfd_open(self._pid)
                undo.pop_all()
        except OSError as error:
            raise CannotSeal(f"cannot start a process that tries what a payload could: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make(self, attempts: Sequence[Attempt]) -> list[Answer] | str:
        """One answer for each, or why there is none."""
        self._socket.settimeout(_WITHIN_S + sum(one.timeout_s for one in attempts))
        try:
            self._socket.send(json.dumps(attempts).encode())
            told = json.loads(self._socket.recv(_MESSAGE))
        except (OSError, ValueError):
            return "the process that was to try has ended without a word"
        return told if isinstance(told, str) else [Answer(*one) for one in told]

    def close(self) -> None:
        """End it; once is enough."""
        if self._pidfd >= 0:
            self._socket.close()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            os.close(self._pidfd)
            self._pidfd = -1


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(live: Callable[[int], None]) -> int:
    """The pid of a child that runs `live` with its parent's pid, with every signal blocked for good but those that cannot be.

    Whoever may signal the child is not who may signal this program, whose handlers and wakeup descriptor (asyncio's) it inherits.
    """
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            live(parent)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stand_in(theirs: socket.socket, user: User, program: bytes, parent: int) -> None:
    """In the child; never returns."""
    try:
        # The program's descriptors are not for a process of the payload's user, and other runs wait for the end of a pipe or a lock.
        last = max(map(int, os.listdir("/proc/self/fd")))
        os.closerange(0, theirs.fileno())
        os.closerange(theirs.fileno() + 1, last + 1)
        # What is typed at the caller's terminal is for the caller.
        os.setsid()
        told: Any
        try:
            identity.assume(user, program)
            failed = None
        except OSError as error:
            failed = f"the process that was to try could not become {user.name}: {error.strerror}"
        # One that died before it could be tied to us takes nobody with it.
        if os.getppid() != parent:
            return
        while message := theirs.recv(_MESSAGE):
            told = failed or [_try(Attempt(way, tuple(arguments), timeout_s)) for way, arguments, timeout_s in json.loads(message)]
            theirs.send(json.dumps(told).encode())
    finally:
        os._exit(0)


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
