"""Callers of the worker that mean to harm it, or others."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import pytest

from e2e.test_worker_socket import ALICE, BOB, Worker, as_user, worker
from tests.lab import PATIENCE, wait_for

__all__ = ["worker"]

pytestmark = pytest.mark.root


def test_a_callers_limits_are_its_payloads_and_not_those_of_what_root_runs(worker: Worker) -> None:
    script = "ulimit -f; ulimit -n; (echo x >file) 2>/dev/null || echo no file"
    own = worker.argv(ALICE, "run", "--", "sh", "-c", script)

    # With no byte to write, bwrap would not say how the payload ended; with so few descriptors it would not start.
    done = worker.host.run("sh", "-c", 'ulimit -f 0; ulimit -n 9; exec "$@"', "sh", *own, cwd=worker.home(ALICE))
    free = worker.call(ALICE, "run", "--", "sh", "-c", script)

    assert done.stdout.splitlines() == ["0", "9", "no file"]
    assert free.stdout.splitlines()[0] == "unlimited"
    assert (worker.home(ALICE) / "file").read_text() == "x\n"


# Descriptors and brackets in calls that wait behind one that has no end, as many as there may be; how many connections were closed.
FLOOD = """
import os
null = os.open("/dev/null", os.O_RDONLY)
brackets = b"[" + b",".join([b"[]"] * 340_000) + b"]"
socks = []
for number in range(500):
    sock = connect()
    socks.append(sock)
    sock.settimeout(0.2)
    try:
        sock.sendall(json.dumps({"method": "io.sealnet.Worker.Events", "parameters": {}, "more": True}).encode() + bytes(1))
        sock.recv(100)
        for _ in range(8):
            if WHAT == "fds":
                socket.send_fds(sock, [b'{"method":"io.sealnet.Worker.List"}' + bytes(1)], [null] * 64)
            elif number < 20:
                value = brackets if WHAT == "brackets" else text
                sock.sendall(b'{"method":"io.sealnet.Worker.List","parameters":{"x":' + value + b"}}" + bytes(1))
    except OSError:
        pass
print(len(socks), flush=True)
"""


@pytest.mark.parametrize("what", ["fds", "brackets", "text"])
def test_what_one_caller_says_at_once_keeps_nobody_from_anything(worker: Worker, what: str) -> None:
    assert worker.process is not None
    files, status = Path(f"/proc/{worker.process.pid}/fd"), Path(f"/proc/{worker.process.pid}/status")
    script = f"WHAT, text = {what!r}, b'\"' + b'x' * 1_000_000 + b'\"'\n{FLOOD}"

    with as_user(worker, ALICE, script) as flood:
        assert flood.stdout.readline() == "500\n"
        held, peak_kb = len(os.listdir(files)), int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0])
        others = worker.call(BOB, "run", "--", "true")

    assert others.returncode == 0, others.stderr
    # It has some, so it could say something; and 2304 descriptors and 18 MiB of calls are what it may.
    assert held < 3500
    assert peak_kb < 400_000
    assert {"fds": "say more at once", "brackets": "values", "text": "say more at once"}[what] in worker.log.read_text()
    wait_for(lambda: len(os.listdir(files)) < 100, what="nothing of it is kept")
    assert worker.call(ALICE, "run", "--", "true").returncode == 0


# Runs that were each asked for in most of a megabyte, and live.
LONG = """
import os
null, cwd = os.open("/dev/null", os.O_RDWR), os.open("/", os.O_PATH)
words = [f"{number} " + "x" * 110 for number in range(8000)]
for number in range(28):
    argv = ["sh", "-c", "exec sleep 600", *words]
    run = {"argv": argv, "cwd": "/", "environ": {"PATH": os.environ["PATH"]}, "options": {}, "detach": True}
    with connect() as sock:
        sock.settimeout(600)
        data = json.dumps({"method": "io.sealnet.Worker.Run", "parameters": run}).encode() + bytes(1)
        socket.send_fds(sock, [data[:1]], [null, null, null, cwd])
        sock.sendall(data[1:])
        told = b""
        while not told.endswith(bytes(1)):
            told += sock.recv(65536)
    assert b"started" in told, told
    if number in (7, 27):
        print(number, flush=True)
        sys.stdin.readline()
"""


def test_what_a_run_was_asked_for_in_is_not_kept_as_long_as_it_lives(worker: Worker) -> None:
    assert worker.process is not None
    status = Path(f"/proc/{worker.process.pid}/status")
    found_kb = []

    with as_user(worker, ALICE, LONG) as long:
        for last in ("7", "27"):
            assert long.stdout.readline() == f"{last}\n"
            found_kb.append(int(re.findall(r"VmRSS:\s+(\d+)", status.read_text())[0]))
            long.stdin.write("\n")
            long.stdin.flush()

    # 20 of them came in 18 MB, and are 30 MB to Python.
    assert found_kb[1] - found_kb[0] < 12_000
    assert len(worker.lines("event=started")) == 28
    assert worker.host.sealnet("reap", "--all").returncode == 0


def test_a_run_is_halted_by_its_owner_and_by_nobody_else(worker: Worker) -> None:
    done = worker.call(ALICE, "run", "--detach", "--run-id", "name", "--", "sleep", "600")
    assert done.returncode == 0, done.stderr
    frozen = Path(worker.host.record("name")["cgroup"]) / "cgroup.freeze"
    script = """
sock = connect()
for state in (True, False):
    call = {"method": "io.sealnet.Worker.Freeze", "parameters": {"run_id": "name", "frozen": state}}
    sock.sendall(json.dumps(call).encode() + bytes(1))
    print(sock.recv(1000).decode()[:-1], flush=True)
    sys.stdin.readline()
"""

    told, states = [], []
    for uid in (ALICE, BOB):
        with as_user(worker, uid, script) as user:
            for _ in range(2):
                told.append("error" in user.stdout.readline())
                states.append(frozen.read_text().strip())
                user.stdin.write("\n")
                user.stdin.flush()

    assert told == [False, False, True, True]
    assert states == ["1", "0", "0", "0"]


# A TCP socket with data that nobody takes, and that waits for it when it is closed: passed with a call, malformed or not, and in the queue
# of a Unix socket that is passed.
LINGER = """
import array, os, struct, time
listener = socket.create_server(("127.0.0.1", 0))
kept = []

def lingering():
    one = socket.create_connection(listener.getsockname())
    kept.append(listener.accept()[0])
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(65536))
    except BlockingIOError:
        pass
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    return one

for text in (b'{"method":"org.varlink.service.GetInfo"}', b'{"method":"io.sealnet.Worker.Run"}', b'nonsense'):
    sock, one = connect(), lingering()
    kept.append(sock)
    socket.send_fds(sock, [text[:1]], [one.fileno()])
    one.close()
    sock.sendall(text[1:] + bytes(1))
sock, one = connect(), lingering()
ours, theirs = socket.socketpair()
socket.send_fds(ours, [b"x"], [one.fileno()])
one.close()
ours.close()
kept.append(sock)
socket.send_fds(sock, [b"{"], [theirs.fileno()])
theirs.close()
sock.sendall(b'"method":"org.varlink.service.GetInfo"}' + bytes(1))
print("sent", flush=True)
"""


IDLE = {"do_epoll_wait", "futex_do_wait", "poll_schedule_timeout.constprop.0", "0"}


def test_what_waits_when_it_is_closed_keeps_nobody_but_its_own(worker: Worker) -> None:
    with as_user(worker, ALICE, LINGER) as alice:
        assert alice.stdout is not None
        assert alice.stdout.readline() == "sent\n"

        began = time.monotonic()
        for _ in range(3):
            assert worker.call(BOB, "run", "--", "true").returncode == 0
        took_s = time.monotonic() - began
        assert worker.process is not None
        waits = []
        for task in Path(f"/proc/{worker.process.pid}/task").iterdir():
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                waits.append((task / "wchan").read_text())

    # They wait for a minute, one after the other.
    assert took_s < 30 * PATIENCE
    assert [where for where in waits if where not in IDLE], waits
    assert worker.lines("event=bug") == []
