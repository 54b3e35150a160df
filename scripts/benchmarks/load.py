"""Clients that ask a proxy for tunnels, many at once, each in a process of its own: `load ADDRESS PORT TARGET STATUS`, told by lines.

`rate PARALLEL COUNT` prints tunnels per second, each opened and closed; `answer COUNT` the median of a request and its answer in us;
`hold COUNT` opens tunnels and keeps them until the next line. An answer with another status than STATUS ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback

_PROXY = (sys.argv[1], int(sys.argv[2]))
_REQUEST = "CONNECT {0} HTTP/1.1\r\nHost: {0}\r\n\r\n".format(sys.argv[3]).encode()
_STATUS = sys.argv[4].encode()
_AT_ONCE_S = 60


def ask() -> socket.socket:
    sock = socket.create_connection(_PROXY, _AT_ONCE_S)
    sock.send(_REQUEST)
    answer = sock.recv(4096)
    if answer.split(b" ", 2)[1:2] != [_STATUS]:
        raise RuntimeError(f"the proxy said {answer[:60]!r}")
    return sock


def tunnel() -> None:
    """Opened, and closed at all ends: a proxy that counts its connections has one less by then."""
    with ask() as sock:
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            sock.recv(1)


def rate(parallel: int, count: int) -> float:
    if parallel == 1:
        return _rate_of_one(count)
    go, done = os.pipe(), os.pipe()
    workers = [_worker(go, done, count // parallel) for _ in range(parallel)]
    for end in (go[0], done[1]):
        os.close(end)
    try:
        # Each has told that it is there before any of them starts.
        _take(done[0], parallel)
        began = time.perf_counter()
        os.close(go[1])
        _take(done[0], parallel)
        took = time.perf_counter() - began
    finally:
        # Whoever is left holds the standard output, whose end tells that this has failed.
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(done[0])
    return count // parallel * parallel / took


def _rate_of_one(count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        tunnel()
    return count / (time.perf_counter() - began)


def _worker(go: tuple[int, int], done: tuple[int, int], count: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(go[1])
        os.close(done[0])
        os.write(done[1], b"x")
        os.read(go[0], 1)
        for _ in range(count):
            tunnel()
        os.write(done[1], b"x")
        # Its end would take time from the others.
        os.close(done[1])
        signal.pause()
    except Exception:  # noqa: BLE001 - whatever it is, it is told
        traceback.print_exc()
    finally:
        os._exit(1)


def _take(fd: int, count: int) -> None:
    while count:
        told = os.read(fd, count)
        if not told:
            raise RuntimeError("a client has failed")
        count -= len(told)


def answer(count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        sock = ask()
        times.append(time.perf_counter() - began)
        sock.close()
    return sorted(times)[count // 2] * 1e6


def main() -> None:
    held: list[socket.socket] = []
    print("ready", flush=True)
    for line in sys.stdin:
        for sock in held:
            sock.close()
        held = []
        what, *amounts = line.split()
        numbers = [int(amount) for amount in amounts]
        if what == "hold":
            held = [ask() for _ in range(numbers[0])]
            print(len(held), flush=True)
        elif what == "rate":
            print(rate(*numbers), flush=True)
        else:
            print(answer(*numbers), flush=True)


main()
