"""What the payload's file system is put together from, in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sealnet.model.plan import Bind
from sealnet.model.view import Kind, Step, cwd_is_bound, layout, replaces_programs
from tests.golden import assert_golden
from tests.model.build import a_plan

GOLDEN = Path(__file__).with_name("golden")

PLAN = a_plan(
    cwd="/home/ann/work",
    binds=(
        Bind(source="/opt/data", dest="/data", writable=False),
        Bind(source="/etc/motd", dest="/etc/motd", writable=False),
        Bind(source="/var/cache/pip", dest="/tmp/cache", writable=True),
    ),
    tmpfs=("/scratch", "/home/ann/work/tmp"),
)


def test_the_steps_are_word_for_word_what_was_signed() -> None:
    assert_golden(GOLDEN / "severed-root.view", "".join(f"{step}\n" for step in layout(a_plan())))
    assert_golden(GOLDEN / "sealed-nobody.view", "".join(f"{step}\n" for step in layout(PLAN)))


def test_the_read_only_root_is_first_and_what_was_asked_for_is_last() -> None:
    steps = layout(PLAN)

    assert steps[0] == Step(Kind.VIEW, "/", "/")
    assert [step.dest for step in steps[-6:]] == ["/home/ann/work", "/data", "/etc/motd", "/tmp/cache", "/scratch", "/home/ann/work/tmp"]


def test_only_what_may_be_written_is_the_real_thing() -> None:
    real = {step.dest: step.source for step in layout(PLAN) if step.kind is Kind.BIND}

    assert real == {"/home/ann/work": "/home/ann/work", "/tmp/cache": "/var/cache/pip"}


@pytest.mark.parametrize("private", ["/tmp", "/var/tmp", "/run"])
def test_the_payload_has_a_place_of_its_own_where_sockets_are(private: str) -> None:
    assert [step.kind for step in layout(PLAN) if step.dest == private] == [Kind.TMPFS]


@pytest.mark.parametrize("cwd", ["/", "/etc", "/home", "/tmp", "/run", "/var", "/var/tmp", "/usr", "/dev", "/proc", "/sys"])
def test_a_system_directory_is_entered_and_never_made_writable(cwd: str) -> None:
    assert not cwd_is_bound(cwd)
    assert layout(a_plan(cwd=cwd)) == layout(a_plan())


@pytest.mark.parametrize("cwd", ["/proc/1", "/proc/sys/kernel", "/sys/kernel", "/sys/fs/cgroup/unified"])
def test_a_directory_below_proc_or_sys_is_never_bound(cwd: str) -> None:
    """`--bind /sys/kernel` is refused, so a working directory must not do it either."""
    assert not cwd_is_bound(cwd)


@pytest.mark.parametrize("cwd", ["/home/ann", "/srv/build", "/tmp/build", "/root", "/processed", "/sysroot"])
def test_any_other_working_directory_is_the_payloads_to_write(cwd: str) -> None:
    assert cwd_is_bound(cwd)
    assert Step(Kind.BIND, cwd, cwd, sockets=False) in layout(replace(PLAN, cwd=cwd))


@pytest.mark.parametrize(
    ("options", "replaces"),
    [
        ({}, False),
        ({"binds": (Bind(source="/srv/tools", dest="/mnt/tools", writable=False),)}, False),
        # What stands at its own place is the host's.
        ({"binds": (Bind(source="/usr/local", dest="/usr/local", writable=True),)}, False),
        ({"binds": (Bind(source="/srv/image/usr", dest="/usr", writable=False),)}, True),
        ({"binds": (Bind(source="/srv/preload", dest="/etc/ld.so.preload", writable=False),)}, True),
        ({"tmpfs": ("/scratch", "/var/tmp/x")}, False),
        ({"tmpfs": ("/lib",)}, True),
        ({"bwrap_args": ("--tmpfs", "/opt/x")}, True),
        ({"bwrap_args": ("--hostname", "box")}, False),
    ],
)
def test_what_may_stand_where_roots_programs_are_is_known(options: dict[str, Any], replaces: bool) -> None:
    assert replaces_programs(a_plan(**options)) is replaces
