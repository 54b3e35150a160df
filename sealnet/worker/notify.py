"""What systemd and a daemon tell each other: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3), without its library."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from sealnet.errors import UsageError

_FIRST_FD = 3


class Notifier:
    """Tells the service manager how it goes, where there is one; what it cannot be told is no reason to fail."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """What is meant for this process is taken out, for nothing that it starts is meant by it."""
        self._address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", str(os.getpid()))
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and int(usec) and pid == str(os.getpid()) else None
        """How often it must hear WATCHDOG=1 at least."""

    def tell(self, *lines: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        address = f"\0{self._address[1:]}" if self._address[0] == "@" else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.sendto("\n".join(lines).encode(), address)
            except OSError:
                return


def listening(environ: MutableMapping[str, str]) -> socket.socket | None:
    """The one socket that systemd listens on for this process, if it does. Raises UsageError where it is not what the unit should have."""
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit() or not int(count):
        return None
    if int(count) != 1:
        raise UsageError(f"cannot use {count} sockets: the worker listens on one", hint="one ListenStream= in sealnet-worker.socket")
    sock = socket.socket(fileno=_FIRST_FD)
    sock.set_inheritable(False)
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise UsageError(
            "cannot use the socket that was passed: it is no listening Unix stream", hint="ListenStream=/run/sealnet/worker.sock"
        )
    return sock
