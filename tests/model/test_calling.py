"""What a caller may ask of the worker, by who it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sealnet
from sealnet.errors import NotPermitted, UsageError
from sealnet.model import calling, idl
from sealnet.model.calling import Peer
from sealnet.model.plan import Bind
from tests.model.test_argv import SEALED

ROOT, ALICE = Peer(uid=0, gid=0, pid=9), Peer(uid=1000, gid=1000, pid=9)
RUN = idl.parse((Path(sealnet.__file__).parent / "worker" / "io.sealnet.Worker.varlink").read_text())


def asked(argv: tuple[str, ...] = ("true",), cwd: str = "/srv/job", **given: Any) -> dict[str, Any]:
    return calling.render(argv, given, cwd=cwd, environ={"PATH": "/bin"})


EVERY: dict[str, Any] = {
    "run_id": "a",
    "network": "sealed",
    "lease_port": 8080,
    "broker": "tcp:127.0.0.1:1",
    "allow": ("a.example",),
    "allow_private": ("b.example:1",),
    "allow_unenforced_egress": False,
    "broker_env": ("X",),
    "pass_env": ("Y*",),
    "set_env": [("A", "1")],
    "bind": ("/srv/a",),
    "ro_bind": ("/srv/b:/c",),
    "tmpfs": ("/t",),
    "chdir": "/",
    "user": "1000",
    "timeout_s": 1.5,
    "grace_s": 2,
    "fallback": "sever",
    "allow_userns": True,
    "preflight": False,
    "on_tamper": "kill",
}


def test_every_option_comes_over_as_it_was() -> None:
    request = asked(**EVERY, bwrap_args=b"--dir\n/x y\n")

    RUN.check(RUN.methods["Run"][0], request, "parameters")
    options = calling.options(ROOT, request)

    assert options == {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in EVERY.items()},
        "bwrap_args": b"--dir\0/x y\0",
    }


def test_what_is_no_option_is_a_bug() -> None:
    with pytest.raises(ValueError, match="colour"):
        asked(colour="red")


@given(st.dictionaries(st.sampled_from(sorted(EVERY)), st.none()))
def test_what_is_null_was_not_given(given: dict[str, None]) -> None:
    assert calling.options(ROOT, {**asked(), "options": given}) == {}


def test_who_is_not_root_runs_as_itself() -> None:
    assert calling.options(ALICE, asked())["user"] == "1000"
    assert calling.options(ALICE, asked(user="1000"))["user"] == "1000"
    assert calling.options(ROOT, asked(user="1000"))["user"] == "1000"
    assert "user" not in calling.options(ROOT, asked())


@pytest.mark.parametrize("user", ["0", "root", "1001", "01000", "+1000", " 1000", ""])
def test_who_is_not_root_runs_as_nobody_else(user: str) -> None:
    with pytest.raises(NotPermitted, match="cannot run as"):
        calling.options(ALICE, asked(user=user))


def test_a_profile_is_roots() -> None:
    with pytest.raises(NotPermitted, match="--bwrap-args"):
        calling.options(ALICE, asked(bwrap_args=b"--dir\0/x\0"))


@pytest.mark.parametrize("cwd", ["", "srv", "./srv", "/srv/", "/srv/../etc", "//srv"])
def test_the_working_directory_is_a_real_path(cwd: str) -> None:
    with pytest.raises(UsageError, match="working directory"):
        calling.options(ROOT, asked(cwd=cwd))


def test_there_is_an_end_to_what_one_may_ask_for() -> None:
    most = calling.MOST_FDS - 4

    assert calling.options(ROOT, asked(bind=("/a",) * most))["bind"]
    assert calling.options(ROOT, {**asked(tmpfs=("/t",) * 60, allow=("a.example",) * 1000), "output": "/" * 4096})["tmpfs"]
    for too_many in (
        asked(bind=("/a",) * most, ro_bind=("/b",)),
        asked(argv=("x",) * 65_537),
        {**asked(), "environ": dict.fromkeys(map(str, range(5000)), "")},
        asked(tmpfs=("/t",) * 61),
        asked(allow=("a.example",) * 1001),
        {**asked(), "output": "/" * 4097},
    ):
        with pytest.raises(UsageError):
            calling.options(ROOT, too_many)


def test_descriptors_are_counted() -> None:
    assert calling.fds_of(asked()) == 4
    assert calling.fds_of(asked(bind=("/a", "/b"), ro_bind=("/c",))) == 7


@pytest.mark.parametrize(
    "dest",
    [
        "/usr", "/usr/bin", "/usr/bin/setpriv", "/bin", "/sbin/x", "/lib", "/lib64", "/lib64/ld-linux-x86-64.so.2", "/etc", "/etc/passwd",
        "/etc/nsswitch.conf", "/etc/ld.so.preload", "/run", "/run/nscd", "/run/systemd/userdb/x", "/var", "/var/lib/sss/pipes",
        "/var/run/nscd",
        "/opt/lib", "/nix/store", "/boot", "/dev/x", "/var/tmpx",
    ],
)  # fmt: skip
def test_only_root_puts_something_into_the_systems_directories(dest: str) -> None:
    ours = replace(SEALED, binds=(Bind(source="/home/alice/evil", dest=dest, writable=False),), tmpfs=())
    empty = replace(SEALED, binds=(), tmpfs=(dest,))
    same = replace(SEALED, binds=(Bind(source=dest, dest=dest, writable=False),), tmpfs=())

    for plan in (ours, empty):
        with pytest.raises(NotPermitted, match="system's directories"):
            calling.require_own_places(plan, ALICE)
        calling.require_own_places(plan, ROOT)
    # What stands there already is what root's programs read anyway.
    calling.require_own_places(same, ALICE)


@pytest.mark.parametrize(
    "dest", ["/home/alice/x", "/mnt", "/srv/x", "/tmp/x", "/var/tmp/x", "/var/tmp", "/workspace", "/usrlocal", "/data/usr"]
)
def test_other_places_are_anybodys(dest: str) -> None:
    ours = replace(SEALED, binds=(Bind(source="/home/alice/own", dest=dest, writable=True),), tmpfs=(dest,))

    calling.require_own_places(ours, ALICE)


@pytest.mark.parametrize(
    ("peer", "owner", "may"), [(ROOT, 1000, True), (ROOT, 0, True), (ALICE, 1000, True), (ALICE, 1001, False), (ALICE, 0, False)]
)
def test_a_run_is_its_owners_and_roots(peer: Peer, owner: int, may: bool) -> None:
    assert peer.may_touch(owner) is may
