"""The worker's small parts: its log, what systemd tells it and is told, which streams it takes."""

from __future__ import annotations

import ast
import os
import pty
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealnet.errors import NotPermitted, UsageError
from sealnet.kernel import libc, process
from sealnet.model.calling import Peer
from sealnet.worker import notify, prepare
from sealnet.worker.log import line
from sealnet.worker.notify import Notifier

LINE = re.compile(r'level=\S+ event=\S+( [a-z_]+=([A-Za-z0-9_./:@+-]+|"([^"\\]|\\u[0-9a-f]{4})*"))*')


def test_a_line_says_what_happened() -> None:
    told = line("info", "started", run="a-1", uid=1000, left=None, command="sh -c 'x \"y\"'")

    assert told == "level=info event=started run=a-1 uid=1000 command=\"sh -c 'x \\u0022y\\u0022'\""


def test_the_page_tells_of_every_line_of_the_log() -> None:
    root = Path(__file__).resolve().parents[1]
    said: dict[str, set[str]] = {}
    for path in sorted((root / "sealnet/worker").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "log":
                level, event = call.args
                # An event is a word that stands there: what could be anything could not be told of.
                assert isinstance(event, ast.Constant), f"{path.name}:{call.lineno}"
                levels = {level.value} if isinstance(level, ast.Constant) else {"info", "error"}
                said.setdefault(event.value, set()).update(levels)
    page = (root / "docs/operations.md").read_text().partition("## The worker's log")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]

    assert {"started", "dropped", "ended", "bug"} <= said.keys()
    assert {row[0].strip("`"): set(row[1].split(", ")) for row in rows} == said


@given(st.text(max_size=600))
def test_no_value_makes_a_line_or_a_field_of_its_own(value: str) -> None:
    told = line("info", "e", value=value)

    assert LINE.fullmatch(told)
    assert told.isascii()
    assert told.isprintable()


def test_systemd_is_told() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("")
        address = sock.getsockname().replace(b"\0", b"@", 1).decode()
        environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}

        notifier = Notifier(environ)
        notifier.tell("READY=1", "STATUS=x")

        assert sock.recv(100) == b"READY=1\nSTATUS=x"
    assert notifier.watchdog_s == 3.0
    assert environ == {"HOME": "/"}
    notifier.tell("WATCHDOG=1")


@pytest.mark.parametrize("environ", [{}, {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}])
def test_no_watchdog_is_none(environ: dict[str, str]) -> None:
    notifier = Notifier(environ)

    notifier.tell("READY=1")

    assert notifier.watchdog_s is None


@pytest.mark.parametrize("environ", [{}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}, {"LISTEN_FDS": "0", "LISTEN_PID": str(os.getpid())}])
def test_no_socket_was_passed(environ: dict[str, str]) -> None:
    assert notify.listening(environ) is None


@pytest.fixture
def opened() -> Iterator[list[int]]:
    made: list[int] = []
    yield made
    for fd in made:
        os.close(fd)


def streams(opened: list[int], *fds: int, detach: bool = False, uid: int | None = None) -> object:
    null = os.open("/dev/null", os.O_RDWR)
    opened.append(null)
    who = Peer(uid=os.getuid() if uid is None else uid, gid=0, pid=os.getpid())
    return prepare._streams(who, [*fds, null, null, null][:3], detach=detach)


def test_files_pipes_and_pairs_are_taken(opened: list[int], tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    file = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    opened += [read, write, file]
    with ours, theirs:
        taken = streams(opened, ours.fileno(), write, file)

    assert (taken.stdin, taken.stdout, taken.stderr) == (ours.fileno() if ours.fileno() >= 0 else taken.stdin, write, file)
    assert (taken.controlling_terminal, taken.console) == (False, None)


def test_a_file_of_a_file_system_that_somebody_answers_for_is_no_stream(
    opened: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    proc = os.open("/proc/self/status", os.O_RDONLY)
    opened += [file, proc]
    # linux/magic.h: PROC_SUPER_MAGIC
    assert libc.file_system(proc) == 0x9FA0 != libc.file_system(file)
    streams(opened, file, uid=1)

    monkeypatch.setattr(libc, "file_system", lambda fd: 0x65735546 if fd == file else 0x9FA0)
    with pytest.raises(UsageError, match="standard input: it is on a FUSE file system"):
        streams(opened, file, uid=1)
    streams(opened, proc, uid=1)
    # Root may keep the worker waiting by other means.
    streams(opened, file, uid=0)


@pytest.mark.parametrize("which", ["directory", "namespace", "path", "tcp", "udp", "unbound", "listener", "device", "tty"])
def test_what_leads_further_than_it_says_is_refused(opened: list[int], tmp_path: Path, which: str) -> None:
    socks: list[socket.socket] = []

    def sock(*kind: int) -> int:
        socks.append(socket.socket(*kind))
        return socks[-1].fileno()

    if which == "directory":
        fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        opened.append(fd)
    elif which == "namespace":
        fd = os.open("/proc/self/ns/net", os.O_RDONLY)
        opened.append(fd)
    elif which == "path":
        fd = os.open("/etc/passwd", os.O_PATH)
        opened.append(fd)
    elif which == "device":
        opened += pty.openpty()
        fd = opened[0]
    elif which == "tty":
        opened += pty.openpty()
        fd = opened[1]
    elif which == "listener":
        fd = sock(socket.AF_UNIX, socket.SOCK_STREAM)
        socks[0].bind(str(tmp_path / "s"))
        socks[0].listen()
    else:
        fd = sock(*{"tcp": (socket.AF_INET,), "udp": (socket.AF_INET, socket.SOCK_DGRAM), "unbound": (socket.AF_UNIX,)}[which])
    try:
        # A terminal that somebody else owns; the caller's own is taken, below.
        with pytest.raises((UsageError, NotPermitted), match="standard input"):
            streams(opened, fd, uid=os.getuid() + 1)
    finally:
        for one in socks:
            one.close()


def test_a_terminal_of_the_callers_own_is_the_runs(opened: list[int]) -> None:
    opened += pty.openpty()
    slave = opened[1]

    taken = streams(opened, slave, uid=os.fstat(slave).st_uid or 0)

    assert (taken.controlling_terminal, taken.console) == (True, os.ttyname(slave))
    with pytest.raises(UsageError, match="detach"):
        streams(opened, slave, detach=True)


def test_a_caller_without_an_account_has_no_group_but_its_own() -> None:
    nobodys = next(uid for uid in range(65531, 60000, -1) if not process.has_account(uid))

    found, roots = process.caller(nobodys, 1234), process.caller(0, 1234)

    # A group of that number may be anybody's.
    assert process.user(str(nobodys)).gid == nobodys
    assert (found.uid, found.gid, found.groups) == (nobodys, 1234, ())
    assert (roots.name, roots.gid) == ("root", 0)


def test_the_habits_of_another_process_are_told() -> None:
    with subprocess.Popen(["sh", "-c", "umask 027; ulimit -S -n 77; ulimit -H -n 99; echo; exec cat"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()

        found = process.umask(child.pid), process.limits(child.pid)[7]
        taken = prepare._habits(Peer(uid=os.geteuid(), gid=0, pid=child.pid))
        # Who had connected has ended, and somebody else has its pid.
        with pytest.raises(UsageError, match="has ended"):
            prepare._habits(Peer(uid=os.geteuid() + 1, gid=0, pid=child.pid))
        child.stdin.close()

    assert found == (0o027, (77, 99))
    assert (taken[0], taken[1][7]) == found
