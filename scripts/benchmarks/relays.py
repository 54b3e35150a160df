"""What thousands of connections leave in a relay, to a TCP broker and to one at a Unix socket: descriptors, threads, slots, memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.benchmarks.lab import PYTHON, SEALNET, spawned
from scripts.benchmarks.result import Effort, Result
from sealnet.kernel import process
from sealnet.records import State

_SOCKET = "/run/bench/broker.sock"
_TARGETS = {"tcp:127.0.0.1:7001": ("inet", "7001"), f"unix:{_SOCKET}": ("unix", _SOCKET)}
_SLOTS = 256
_SETTLED_S = 15.0
# A door keeps up to 32 pipes for the next who needs one; memory is the allocator's to keep.
_KEPT = ("ends of pipes that it keeps", "memory of the door")

_BROKER = """
import socket, sys, threading
kind, where = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
listener.bind(where if kind == "unix" else ("127.0.0.1", int(where)))
listener.listen(512)
def echo(sock):
    try:
        while data := sock.recv(65536):
            sock.sendall(data)
    except OSError:
        pass
    finally:
        sock.close()
print("ready", flush=True)
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
"""
# `ask N`: so many connections, in four threads: whole, reset amid, closed before a byte, in turns. `hold N`: so many at once, which of them
# are served.
_CLIENT = """
import os, socket, struct, sys, threading
where = os.environ["SEALNET_BROKER_URL"][7:].split(":")
def ask(number):
    with socket.create_connection(where, 20) as sock:
        if number % 3 == 1:
            sock.sendall(b"half")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif number % 3 == 0:
            sock.sendall(bytes(1000))
            sock.shutdown(socket.SHUT_WR)
            got = 0
            while data := sock.recv(65536):
                got += len(data)
            whole.append(got == 1000)
def hold(count):
    held = [socket.create_connection(where, 20) for _ in range(count)]
    served = 0
    for sock in held:
        try:
            sock.sendall(b"x")
            served += sock.recv(1) == b"x"
        except OSError:
            pass
    for sock in held:
        sock.close()
    return served
print("ready", flush=True)
for line in sys.stdin:
    what, count = line.split()
    whole = []
    if what == "hold":
        print(hold(int(count)), flush=True)
    else:
        threads = [threading.Thread(target=lambda first=first: [ask(n) for n in range(first, int(count), 4)]) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(sum(whole), flush=True)
"""


def measure(effort: Effort) -> Result:
    result, count = Result(), min(effort.runs, 300) if effort.quick else effort.runs
    for target, broker in _TARGETS.items():
        with _run(target, broker) as (client, sealnet, door):
            # What Python keeps is there after the first ones.
            _ask(client, f"hold {_SLOTS}", _SLOTS)
            _settled(sealnet, door, {})
            _ask(client, "ask 300", 100)
            before = _settled(sealnet, door, {})
            _ask(client, f"ask {count}", (count + 2) // 3)
            after = _settled(sealnet, door, before)
            served = _ask(client, f"hold {_SLOTS}", None)
        group = result.group(f"left of {count:,} connections to {target.partition(':')[0]}:")
        for what in before:
            unit = "KiB" if what.startswith("memory") else ""
            group.add(what, [float(after[what] - before[what])], unit=unit)
        group.add("slots of 256 that are lost", [float(_SLOTS - served)], unit="")
    result.notes.append("A third of the connections was whole, a third reset amid, a third closed before a byte; four at a time.")
    return result


@contextmanager
def _run(target: str, broker: tuple[str, str]) -> Iterator[tuple[Any, int, int]]:
    """Its payload, and the pids of its sealnet and its door."""
    with spawned([PYTHON, "-I", "-S", "-c", _BROKER, *broker], stdout=subprocess.PIPE, text=True) as serving:
        _ready(serving)
        command = [SEALNET, "run", "--run-id", "relay", "--broker", target, "--", "/usr/bin/python3", "-I", "-S", "-c", _CLIENT]
        with spawned(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            _ready(client)
            sealnet = State().read("relay").supervisor
            doors = [pid for pid in process.children(sealnet) if b"\0sealnet.door\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            yield client, sealnet, doors[0]
            client.communicate(timeout=20)


def _ready(started: Any) -> None:
    if started.stdout.readline() != "ready\n":
        raise RuntimeError("a broker or its client did not start")


def _ask(client: Any, line: str, expected: int | None) -> int:
    client.stdin.write(f"{line}\n")
    client.stdin.flush()
    told = int(client.stdout.readline() or -1)
    if expected is not None and told != expected:
        raise RuntimeError(f"{line!r}: {told} came through, not {expected}")
    return told


def _settled(sealnet: int, door: int, before: dict[str, int]) -> dict[str, int]:
    """What is held, once no more than `before`; or what is held still after a while. Memory is the door's own (private)."""
    deadline = time.monotonic() + _SETTLED_S
    while True:
        time.sleep(0.5)
        found = _held(sealnet, door)
        if (before and all(found[what] <= before[what] for what in before if what not in _KEPT)) or time.monotonic() > deadline:
            return found
        if not before and found == _held(sealnet, door):
            return found


def _held(sealnet: int, door: int) -> dict[str, int]:
    links = []
    for name in os.listdir(f"/proc/{door}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{door}/fd/{name}"))
    pipes = sum(link.startswith("pipe:") for link in links)
    return {
        "descriptors of the door": len(links) - pipes,
        "ends of pipes that it keeps": pipes,
        "threads of the door": len(os.listdir(f"/proc/{door}/task")),
        "descriptors of sealnet": len(os.listdir(f"/proc/{sealnet}/fd")),
        "memory of the door": _private_kb(door),
    }


def _private_kb(pid: int) -> int:
    told = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in told if line.startswith(("Private_Clean:", "Private_Dirty:")))
