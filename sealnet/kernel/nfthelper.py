"""libnftables in a process of its own, for one that holds more descriptors than the library can use, or must not end with it.

`python -I -m sealnet.kernel.nfthelper FD NETNS MNTNS` is that process: each connection that comes over the socket FD is served by a thread,
in the network namespace that each request brings along. It ends with its maker.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from sealnet.errors import CannotSeal
from sealnet.kernel import libc, messages, nft, owncode, process

# A request is [nft commands, whether JSON is wanted], an answer [code, output, error].
_WITHIN_S = 30.0
_OWN_NETNS = "/proc/thread-self/ns/net"


class Helper:
    """The process, started when it is first needed, and anew when it has died. For any number of threads.

    It lives in the namespaces of the thread that makes this: whoever needs it first may be in a run's, and it would keep them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._namespaces = [os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "mnt")]
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: list[socket.socket] = []
        self.starts = 0
        """How often it was started; each time but the first because it had died."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def run(self, netns: int, text: str, *, as_json: bool) -> tuple[int, str, str]:
        """Run nft commands in the namespace of a descriptor.

        Raises CannotSeal when the process dies of it, or is too late: whether anything was done is not known then.
        """
        with self._connection() as connection:
            try:
                connection.settimeout(_WITHIN_S)
                messages.send(connection, json.dumps([text, as_json]).encode(), [netns])
                code, output, error = json.loads(messages.receive(connection)[0])
            except (OSError, EOFError, ValueError) as failed:
                raise CannotSeal("cannot talk to nftables: the process that does has ended, or does not answer") from failed
        return int(code), str(output), str(error)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """One that nobody else uses. One that was not used to its end is not used again, and neither is its process."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            process = self._process
            connection = self._idle.pop() if self._idle else self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            with self._lock:
                if self._process is process:
                    self._end()
            raise
        with self._lock:
            if self._process is process:
                self._idle.append(connection)
            else:
                connection.close()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = (theirs.fileno(), *self._namespaces)
            try:
                self._process = subprocess.Popen(
                    [*owncode.program("sealnet.kernel.nfthelper"), *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=fds,
                    cwd="/",
                    env={"PATH": ":".join(process.TOOL_PATH), "LANG": "C.UTF-8"},
                    start_new_session=True,
                )
            except OSError as error:
                raise CannotSeal(f"cannot start the process that talks to nftables: {error.strerror}") from error
        self.starts += 1

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                if self._control is not None:
                    socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise CannotSeal(f"cannot talk to nftables: {error.strerror}") from error
        return ours

    def _end(self) -> None:
        for connection in (*self._idle, self._control):
            if connection is not None:
                connection.close()
        self._idle, self._control = [], None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        with self._lock:
            self._end()
            for fd in self._namespaces:
                os.close(fd)
            self._namespaces = []


# The process


def _serve(connection: socket.socket) -> None:
    home = os.open(_OWN_NETNS, os.O_RDONLY | os.O_CLOEXEC)
    own: nft.Library | None = None
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            data, fds = messages.receive(connection)
            text, as_json = json.loads(data)
            try:
                if os.path.samestat(os.fstat(fds[0]), os.fstat(home)):
                    own = own or nft.Library()
                    answer: Any = own.run(text, as_json=as_json)
                else:
                    answer = _run_in(fds[0], home, text, as_json=as_json)
            finally:
                for fd in fds:
                    os.close(fd)
            messages.send(connection, json.dumps(answer).encode())


def _run_in(netns: int, home: int, text: str, *, as_json: bool) -> tuple[int, str, str]:
    """In another namespace; this thread does not stay there, nor does a socket of the library's, for it would keep it."""
    libc.setns(netns, libc.CLONE_NEWNET)
    try:
        return nft.Library().run(text, as_json=as_json)
    finally:
        libc.setns(home, libc.CLONE_NEWNET)


def main() -> None:
    if len(sys.argv) != 4 or not all(word.isdecimal() for word in sys.argv[1:]):
        sys.exit("usage: sealnet.kernel.nfthelper FD NETNS MNTNS")
    fd, *namespaces = map(int, sys.argv[1:])
    for namespace, kind in zip(namespaces, (libc.CLONE_NEWNET, libc.CLONE_NEWNS), strict=True):
        libc.setns(namespace, kind)
        os.close(namespace)
    control = socket.socket(fileno=fd)
    while True:
        _data, fds, _flags, _address = socket.recv_fds(control, 1, 1)
        if not fds:
            os._exit(0)
        threading.Thread(target=_serve, args=(socket.socket(fileno=fds[0]),), daemon=True).start()


if __name__ == "__main__":
    main()
