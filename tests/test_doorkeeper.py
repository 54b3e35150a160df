"""The privileged side of a door that somebody else has taken over, and as whom it opens a Unix socket."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sealnet import doors
from sealnet.doors import Door, Listening
from sealnet.errors import CannotSeal
from sealnet.model.authority import Entry
from sealnet.model.plan import User
from sealnet.model.policy import Confinement, Target
from tests.lab import wait_for
from tests.model.build import a_plan

pytestmark = pytest.mark.root

PLAN = a_plan(confinement=Confinement.ALLOWLIST, allow=(Entry("a.test", 80),))
SOMEBODY = User(name="somebody", uid=65531, gid=65530, groups=(65529, 65530), home="/", shell="/bin/sh")

_DOOR = """\
#!{python} -I
import json, socket, sys, time
control = socket.socket(fileno=int(sys.argv[-1]))
def say(told):
    control.send(told if isinstance(told, bytes) else json.dumps(told).encode())
say({{"ready": True}})
{does}
time.sleep(100)
"""
# Answers one question after another, and asks for a socket before that where there is something to serve.
_ASKS = """
while True:
    asked = json.loads(control.recv(65536))
    told = {"run": asked["run"], "failed": None}
    if asked["op"] == "serve":
        say({"op": "dial", "id": 1, "run": asked["run"]})
        told["error"], kept, _, _ = socket.recv_fds(control, 65536, 1)
        told["error"] = told["error"].decode()
    say(told)
"""


def _listening() -> Listening:
    return doors.listen("relay", "127.0.0.1", [0])


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Door]]:
    """A door process that does something else."""
    made: list[Door] = []

    def start(does: str) -> Door:
        program = tmp_path / "door"
        program.write_text(_DOOR.format(python=sys.executable, does=does))
        program.chmod(0o755)
        with monkeypatch.context() as patched:
            patched.setattr(doors.owncode, "program", lambda module: (str(program), module))
            made.append(Door(SOMEBODY))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize(
    "does",
    [
        "say([1])",
        "say(b'[' * 100_000)",
        "say(b'\\xff')",
        "while True: say({'x': 'y' * 100_000})",
        "while True: say({'run': 'run-1', 'records': 0, 'failed': None})",
    ],
)
def test_a_door_that_makes_no_sense_is_ended(door: Callable[[str], Door], does: str) -> None:
    stray = door(does)

    wait_for(lambda: not stray.is_alive, what="it is dead")
    assert door(_ASKS).stop("run-1") == {"run": "run-1", "failed": None}


def test_nobody_waits_for_good_for_a_door_that_does_not_read(door: Callable[[str], Door], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_ANSWER_S", 1.0)
    deaf = door("while True: say({'op': 'dial', 'id': 1, 'run': 'run-1'})")

    assert deaf.stop("run-1") is None
    wait_for(lambda: not deaf.is_alive, what="it is dead")


@pytest.mark.parametrize("does", ["time.sleep(100)", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_door_that_does_not_stop_when_it_is_told_to_is_killed(
    door: Callable[[str], Door], monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """It is waited for a second, not the time that it has for an answer."""
    monkeypatch.setattr(doors, "_ANSWER_S", 1000.0)
    hung = door(does)

    assert hung.stop("run-1") is None
    hung.close()
    assert hung.process.returncode == -signal.SIGKILL


def test_nobody_waits_for_good_for_a_path_that_hangs(door: Callable[[str], Door], monkeypatch: pytest.MonkeyPatch) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        held.set()
        go_on.wait(60)

    monkeypatch.setattr(doors.libc, "set_effective_identity", hang)
    one = door(_ASKS)
    plan = a_plan(confinement=Confinement.SEALED, user=SOMEBODY, broker=Target(path="/nowhere"))

    def serve() -> None:
        with contextlib.suppress(CannotSeal):
            one.serve("run-1", _listening(), plan, "127.0.0.2", None)

    serving = threading.Thread(target=serve)
    serving.start()
    assert held.wait(60)

    one.close()

    assert not one.is_alive
    go_on.set()
    serving.join()


def test_what_a_preflight_tells_is_shown_as_text(door: Callable[[str], Door]) -> None:
    told = r"control.recv(65536); say({'run': 'run-1', 'failed': %s})"

    assert door(told % r"[{'host': 'a\x1b[2J', 'reason': 'b\n'}]").preflight("run-1", PLAN) == ([r"a\x1b[2J: b\x0a"], [])
    with pytest.raises(CannotSeal, match="makes no sense"):
        door(told % "[1]").preflight("run-1", PLAN)


def test_a_preflight_advises_no_option_for_a_host_that_nobody_has_named(door: Callable[[str], Door]) -> None:
    told = "control.recv(65536); say({'run': 'run-1', 'failed': [{'host': 'x', 'reason': 'which --allow-private %s would allow'}]})"

    assert [door(told % name).preflight("run-1", PLAN)[1] for name in ("a.test:80", "evil.test:80", "a.test:8080")] == [
        ["--allow-private a.test:80"],
        [],
        [],
    ]


def test_a_unix_socket_is_opened_as_the_user(door: Callable[[str], Door]) -> None:
    """Who asks the kernel (SO_PEERCRED) is told of the run's user, and what that one may not reach is not reached."""
    # Not in a directory of root's own, as pytest's is.
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as broker:
        path = Path(name, "broker")
        broker.bind(str(path))
        path.chmod(0o666)
        broker.listen()
        plan = a_plan(confinement=Confinement.SEALED, user=SOMEBODY, broker=Target(path=str(path)))
        answers = {}
        for mode in (0o755, 0o700):
            path.parent.chmod(mode)
            with pytest.raises(CannotSeal) as told:
                door(_ASKS).serve("run-1", _listening(), plan, "127.0.0.2", None)
            answers[mode] = "Permission denied" in str(told.value)
        peer, _ = broker.accept()
        with peer:
            _pid, *ids = struct.unpack("=3I", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            # SO_PEERGROUPS.
            groups = struct.unpack("=2I", peer.getsockopt(socket.SOL_SOCKET, 59, 8))
    assert answers == {0o755: False, 0o700: True}
    assert (ids, groups) == ([SOMEBODY.uid, SOMEBODY.gid], SOMEBODY.groups)
