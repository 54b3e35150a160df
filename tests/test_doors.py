"""The privileged side of the doors: what a door is given, and what of it comes back."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sealnet import doors
from sealnet.errors import CannotSeal, UsageError
from sealnet.model.authority import Entry
from sealnet.model.config import DOOR_USER
from sealnet.model.plan import User
from sealnet.model.policy import Confinement
from tests.lab import wait_for
from tests.model.build import a_plan

pytestmark = pytest.mark.root

PAYLOAD = User(name="somebody", uid=65531, gid=65530, groups=(), home="/", shell="/bin/sh")
USER = doors.account(DOOR_USER, PAYLOAD)
PLAN = a_plan(confinement=Confinement.ALLOWLIST, allow=(Entry("a.test", 80),))


@pytest.mark.parametrize(
    ("named", "shell", "why"),
    [
        ("0", "/bin/sh", "it is root, or of its group"),
        ("root", "/bin/sh", "it is root, or of its group"),
        ("somebody", "/bin/sh", "it is the user of the run's payload"),
        ("65531", "/bin/sh", "it is the user of the run's payload"),
        ("nobody", "/usr/sbin/nologin", "that uid stands for users without a name of their own"),
        ("person", "/bin/bash", r"somebody may log in as person \(its shell is /bin/bash\)"),
        ("person", "", r"somebody may log in as person \(its shell is /bin/sh\)"),
        ("wheel", "/bin/false", "it is root, or of its group"),
    ],
)
def test_a_user_that_is_anybodys_is_none_for_doors(monkeypatch: pytest.MonkeyPatch, named: str, shell: str, why: str) -> None:
    known = {"root": (0, 0), "somebody": (65531, 65530), "nobody": (65534, 65534), "person": (1000, 1000), "wheel": (7, 0)}
    accounts = [pwd.struct_passwd((name, "x", uid, gid, "", "/", shell)) for name, (uid, gid) in known.items()]
    monkeypatch.setattr(pwd, "getpwnam", lambda name: next(one for one in accounts if one.pw_name == name))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: next(one for one in accounts if one.pw_uid == uid))

    with pytest.raises(UsageError, match=f"cannot use door_user {named}: {why}") as caught:
        doors.account(named, PAYLOAD)
    assert caught.value.hint is not None


def test_a_user_of_doors_is_a_uid_of_nobodys_or_an_account_without_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwnam", lambda name: pwd.struct_passwd((name, "x", 990, 991, "", "/", "/usr/sbin/nologin")))

    assert (USER.uid, USER.gid, USER.groups) == (65533, 65533, ())
    found = doors.account("doors", PAYLOAD)
    assert (found.uid, found.gid) == (990, 991)


def test_doors_of_two_gateways_listen_at_one_port_and_a_port_of_anothers_is_left_out() -> None:
    ports = [29400, 29401]
    with contextlib.ExitStack() as held:
        first, other = (held.enter_context(doors.listen("relay", gateway, ports).socket) for gateway in ("127.0.0.1", "127.0.0.2"))
        second = held.enter_context(doors.listen("proxy", "127.0.0.1", ports).socket)

        assert [sock.getsockname() for sock in (first, other, second)] == [("127.0.0.1", 29400), ("127.0.0.2", 29400), ("127.0.0.1", 29401)]
        with pytest.raises(CannotSeal, match=r"cannot listen at 127.0.0.1 for a door: others listen at each port of 29400-29401"):
            doors.listen("proxy", "127.0.0.1", ports)


def test_a_door_has_no_descriptor_of_the_callers(capfd: pytest.CaptureFixture[str]) -> None:
    door = doors.Door(USER)
    try:
        with pytest.raises(CannotSeal, match="it is not served"):
            door.preflight("nobody", PLAN)
        directory = f"/proc/{door.process.pid}/fd"
        held = {name: os.readlink(f"{directory}/{name}") for name in os.listdir(directory)}
    finally:
        door.close()

    assert (held["0"], held["1"]) == ("/dev/null", "/dev/null")
    assert held["2"].startswith("pipe:")
    assert {link.partition(":")[0] for name, link in held.items() if int(name) > 2} == {"socket", "anon_inode"}
    assert capfd.readouterr().err == ""


def test_what_a_door_says_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    door = doors.Door(replace(USER, uid=0))
    try:
        with pytest.raises(CannotSeal, match="its process has ended"):
            door.preflight("nobody", PLAN)
    finally:
        door.close()

    assert capfd.readouterr().err == "usage: sealnet.door UID GID FD [MEETING]\n"


def test_a_flood_for_the_callers_terminal_is_short_and_printable(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "door"
    other.write_text("#!/bin/sh\nwhile :; do printf '\\033]0;title\\007\\n' >&2 || exit; done\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(other))

    door = doors.Door(USER)
    try:
        wait_for(lambda: door.process.poll() is None and said_by(door) > 1 << 20, what="a megabyte")
    finally:
        door.close()

    assert capfd.readouterr().err.splitlines() == ["\\x1b]0;title\\x07"] * 100


def said_by(door: doors.Door) -> int:
    """How much it has written, to anywhere."""
    return int(Path(f"/proc/{door.process.pid}/io").read_text().partition("wchar: ")[2].split()[0])
