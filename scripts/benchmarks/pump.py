"""Both ends of a measured connection. As a program the serving one: `pump CPU FD...`, listening sockets of any namespace."""

from __future__ import annotations

import os
import socket
import sys
import threading

BLOCK = 1 << 20
# What the client sends first: its kind and, of a transfer, its size.
HEAD_BYTES = 9

# The client is given as text to `python3 -c ADDRESS PORT [TARGET]`, so that it is the same program outside and inside of a sandbox. With a
# target it asks a proxy for a tunnel.
CLIENT = """
import socket, sys, time

def connect(kind, size=0):
    sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for target in sys.argv[3:]:
        sock.sendall(f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode())
        if b" 200 " not in sock.recv(4096):
            raise OSError("the proxy denies it")
    sock.sendall(kind + size.to_bytes(8, "big"))
    return sock

def echo(count):
    times = []
    for _ in range(count):
        began = time.perf_counter()
        echoing.send(b"x")
        echoing.recv(1)
        times.append(time.perf_counter() - began)
    return sorted(times)[count // 2] * 1e6

def up(mib):
    block, size = bytes(1 << 20), mib << 20
    with connect(b"u", size) as sock:
        sock.recv(1)
        began = time.perf_counter()
        for _ in range(mib):
            sock.sendall(block)
        sock.recv(1)
        return mib / 1024 / (time.perf_counter() - began)

def down(mib):
    block, left = bytearray(1 << 20), mib << 20
    with connect(b"d", left) as sock:
        sock.recv(1)
        began = time.perf_counter()
        while left:
            got = sock.recv_into(block)
            if not got:
                raise EOFError
            left -= got
        return mib / 1024 / (time.perf_counter() - began)

echoing = connect(b"e")
print("ready", flush=True)
for line in sys.stdin:
    what, amount = line.split()
    print({"echo": echo, "up": up, "down": down}[what](int(amount)), flush=True)
"""


def main() -> None:
    # Its threads inherit this.
    os.sched_setaffinity(0, {int(sys.argv[1])})
    threads = [threading.Thread(target=_accept, args=(socket.socket(fileno=int(fd)),)) for fd in sys.argv[2:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _accept(listener: socket.socket) -> None:
    while True:
        sock, _address = listener.accept()
        threading.Thread(target=_serve, args=(sock,), daemon=True).start()


def _serve(sock: socket.socket) -> None:
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = sock.recv(HEAD_BYTES, socket.MSG_WAITALL)
        if len(head) < HEAD_BYTES:
            # The preflight of a sealed run hangs up at once.
            return
        kind, left = head[:1], int.from_bytes(head[1:], "big")
        if kind == b"e":
            while data := sock.recv(1):
                sock.send(data)
            return
        sock.send(b"x")
        if kind == b"u":
            buffer = bytearray(BLOCK)
            while left and (got := sock.recv_into(buffer)):
                left -= got
            sock.send(b"x")
        else:
            block = bytes(BLOCK)
            for _ in range(left // BLOCK):
                sock.sendall(block)


if __name__ == "__main__":
    main()
