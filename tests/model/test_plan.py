"""Plans that cannot be invalid, the places that may be mounted on, and the bwrap options that a profile may use."""

from __future__ import annotations

import dataclasses
import os
import re
from ipaddress import IPv4Address
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealnet.errors import UsageError
from sealnet.model import names
from sealnet.model.plan import Bind, Seal, bind, mount_point, profile, profile_places, require_own_places
from sealnet.model.policy import Confinement
from tests.model.build import SUBNET, a_plan, sealed, severed

FEW = settings(max_examples=50)


# Plans


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run_id": "Run"}, "cannot use run id 'Run'"),
        ({"argv": ()}, "cannot run: no command was given"),
        ({"argv": ("",)}, "cannot run: no command was given"),
        ({"argv": ("true", "a\0b")}, "an argument has a NUL byte"),
        ({"environment": {"A": "x\0--bind\0/\0/mnt"}}, "NUL byte"),
        ({"lease_port": 0}, "cannot use --lease-port 0: a TCP port is 1 to 65535"),
        ({"lease_port": 8080, "confinement": Confinement.SEVERED}, "cannot make a severed run: its broker and hosts make it sealed"),
        ({"lease_port": 8080, "confinement": Confinement.OPEN}, "cannot make a open run: its broker and hosts make it sealed"),
        ({"confinement": Confinement.SEALED}, "cannot make a sealed run: its broker and hosts make it severed"),
        ({"timeout_s": 0.0}, "cannot use --timeout 0: it is a number of seconds, more than 0"),
        ({"timeout_s": -1.5}, "cannot use --timeout -1.5"),
        ({"timeout_s": float("inf")}, "cannot use --timeout inf"),
        ({"timeout_s": float("nan")}, "cannot use --timeout nan"),
        ({"grace_s": -1.0}, "cannot use --grace -1: it is a number of seconds, 0 or more"),
        ({"grace_s": float("inf")}, "cannot use --grace inf"),
        ({"grace_s": float("nan")}, "cannot use --grace nan"),
        ({"fallback": "open"}, "cannot use --fallback open: the only one is 'sever'"),
        ({"on_tamper": "ignore"}, "cannot use --on-tamper ignore: it is restore or kill"),
    ],
)
def test_an_invalid_plan_cannot_be_made(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        a_plan(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lease_port": 1},
        {"lease_port": 65535},
        {"timeout_s": 0.001},
        {"grace_s": 0.0},
        {"fallback": "sever"},
        {"on_tamper": "kill"},
        {"argv": ("a", "", "\n")},
    ],
)
def test_a_valid_one_can(changes: dict[str, Any]) -> None:
    plan = a_plan(**changes)

    assert changes.items() <= dataclasses.asdict(plan).items()


def test_a_plan_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_plan().run_id = "other"  # type: ignore[misc]


# Seals


def test_a_sealed_run_has_the_first_address_outside_and_the_second_inside() -> None:
    seal = sealed()

    assert (seal.gateway, seal.sandbox) == (IPv4Address("198.18.0.1"), IPv4Address("198.18.0.2"))
    assert seal.broker_url == "http://198.18.0.1:8080"
    assert (seal.ifname, seal.netns) == (names.ifname("run-1"), names.netns("run-1"))


def test_a_severed_run_has_no_address_and_no_broker() -> None:
    seal = severed()

    assert (seal.gateway, seal.sandbox, seal.broker_url) == (None, None, None)


@pytest.mark.parametrize("half", [{"subnet": SUBNET}, {"lease_port": 8080}])
def test_half_a_lease_is_a_bug(half: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a subnet goes with a lease port"):
        Seal(run_id="run-1", **half)


# Mount points


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/a", "/a"),
        ("/a/", "/a"),
        ("//a", "/a"),
        ("/a//b/../c/.", "/a/c"),
        ("/procs", "/procs"),
        ("/system/sys", "/system/sys"),
    ],
)
def test_a_mount_point_is_normalised(text: str, path: str) -> None:
    assert mount_point(text, "--tmpfs") == path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot use --tmpfs '': a destination is an absolute path"),
        ("a/b", "a destination is an absolute path"),
        ("/a\0--bind", "a destination is an absolute path"),
        ("/", "cannot use --tmpfs /: the root of the view stays"),
        ("//", "the root of the view stays"),
        ("/a/..", "the root of the view stays"),
        ("/proc", "cannot use --tmpfs /proc: /dev, /proc and /sys stay as they are in a run"),
        ("/proc/", "/dev, /proc and /sys stay"),
        ("//proc/sys", "/dev, /proc and /sys stay"),
        ("/a/../proc/self", "/dev, /proc and /sys stay"),
        ("/sys", "/dev, /proc and /sys stay"),
        ("/./sys/class/net", "/dev, /proc and /sys stay"),
        ("/dev", "/dev, /proc and /sys stay"),
    ],
)
def test_root_dev_proc_and_sys_are_never_mounted_on(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        mount_point(text, "--tmpfs")


@FEW
@given(st.lists(st.sampled_from(["/", "//", "a", ".", "..", "proc", "sys", "/proc", "/sys/"]), max_size=8).map("/".join))
def test_what_is_let_through_is_where_the_kernel_would_mount_it_and_nowhere_fixed(text: str) -> None:
    try:
        path = mount_point(text, "--bind")
    except UsageError:
        return

    walked: list[str] = []
    for part in text.split("/"):
        if part == "..":
            walked[-1:] = []
        elif part not in ("", "."):
            walked.append(part)
    assert path == "/" + "/".join(walked)
    assert walked[0] not in ("proc", "sys")


# Binds


@pytest.mark.parametrize(
    ("text", "source", "dest"),
    [
        ("/a", "/a", "/a"),
        ("/a:/b", "/a", "/b"),
        ("a", "/work/a", "/work/a"),
        (".", "/work", "/work"),
        ("../a:/b/", "/a", "/b"),
        ("/a:/b:c", "/a", "/b:c"),
        ("/a b\n:/c", "/a b\n", "/c"),
        ("/:/host", "/", "/host"),
        ("/proc/1:/one", "/proc/1", "/one"),
    ],
)
def test_a_bind_is_a_source_and_a_destination(text: str, source: str, dest: str) -> None:
    assert bind(text, writable=False, cwd="/work") == Bind(source=source, dest=dest, writable=False)


@pytest.mark.parametrize("text", ["", ":", ":/b", "/a:", "/a\0b", "/a:b", "/", "/a:/", "/proc", "/a:/proc", "/a:/sys/fs", "/sys/../proc"])
def test_what_is_no_bind_is_a_usage_error_that_names_the_option(text: str) -> None:
    for writable, option in ((True, "--bind"), (False, "--ro-bind")):
        with pytest.raises(UsageError, match=f"^cannot use {option} "):
            bind(text, writable=writable, cwd="/work")


# Profiles


@pytest.mark.parametrize("between", [b"\0", b"\n"])
def test_a_profile_is_separated_by_nul_or_newline(between: bytes) -> None:
    words = [b"--ro-bind", b"/opt/a b", b"/opt", b"--perms", b"0700", b"--dir", b"/x", b""]

    assert profile(between.join(words)) == tuple(word.decode() for word in words[:-1])


def test_an_empty_profile_has_no_arguments() -> None:
    assert profile(b"") == profile(b"\n\n") == profile(b"\0") == ()


def test_a_path_that_is_no_utf_8_reaches_bwrap_byte_by_byte() -> None:
    assert [os.fsencode(word) for word in profile(b"--dir\0/\xff\n\xc3\xa9")] == [b"--dir", b"/\xff\n\xc3\xa9"]


@pytest.mark.parametrize(
    "line", ["--bind / /", "--ro-bind-try /srv/image /", "--bind / /.", "--dev-bind /srv //", "--tmpfs /", "--bind / /usr/.."]
)
def test_a_profile_leaves_the_root_alone(line: str) -> None:
    """One over it would show the host's /dev, /run and /tmp, or take away what was mounted before."""
    with pytest.raises(UsageError, match="the root of the view stays"):
        profile("\n".join(line.split()).encode())


@pytest.mark.parametrize("dest", ["/work", "/work/a", "//work/b", "/work/../work/c"])
def test_a_profile_mounts_nothing_where_payloads_may_write(dest: str) -> None:
    """They could put a link in the way that leads bwrap elsewhere."""
    with pytest.raises(UsageError, match="payloads may write in /work, and could lead bwrap elsewhere"):
        profile(f"--tmpfs\n{dest}".encode(), shared=["/home/ann", "/work"])


def test_a_profile_mounts_beside_it() -> None:
    assert profile(b"--tmpfs\n/workshop", shared=["/work"]) == ("--tmpfs", "/workshop")


@pytest.mark.parametrize(
    "line",
    [
        "--share-net", "--unshare-net", "--unshare-all", "--unshare-user", "--userns 9", "--pidns 9", "--disable-userns",
        "--cap-add ALL", "--cap-drop ALL", "--seccomp 9", "--add-seccomp-fd 9", "--args 9", "--block-fd 9", "--userns-block-fd 9",
        "--sync-fd 9", "--info-fd 9", "--json-status-fd 9", "--file 9 /x", "--bind-data 9 /x", "--ro-bind-data 9 /x", "--bind-fd 9 /x",
        "--proc /proc", "--dev /dev", "--overlay-src /a", "--overlay /a /b /c", "--lock-file /x", "--as-pid-1",
        "--setenv A 1", "--unsetenv A", "--clearenv", "--uid 0", "--gid 0", "--exec-label x", "--file-label x", "--argv0 x",
        "--chdir /srv", "--", "-h", "true", "--ro-bind=/a /b", "--RO-BIND /a /b",
    ],
)  # fmt: skip
def test_an_option_that_could_weaken_the_seal_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match=r"cannot use .* in --bwrap-args") as caught:
        profile("\n".join(["--dir", "/x", *line.split()]).encode())

    assert caught.value.hint is None or "--ro-bind" in caught.value.hint


@pytest.mark.parametrize("line", ["--ro-bind /a", "--ro-bind", "--tmpfs", "--perms 0700 --dir"])
def test_an_option_without_its_arguments_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match=r"in --bwrap-args: it takes [12] arguments"):
        profile("\n".join(line.split()).encode())


def test_an_argument_is_never_taken_for_an_option() -> None:
    words = ("--hostname", "--share-net", "--ro-bind", "--bind", "/x")

    assert profile("\n".join(words).encode()) == words


@pytest.mark.parametrize(
    "option", ["--bind /a", "--ro-bind-try /a", "--dev-bind /a", "--tmpfs", "--dir", "--symlink /a", "--chmod 0777", "--mqueue"]
)
def test_a_profile_leaves_proc_and_sys_alone(option: str) -> None:
    for dest in ("/proc", "/proc/sys", "/sys/fs/cgroup", "//proc", "/x/../proc", "proc"):
        with pytest.raises(UsageError, match=f"cannot use {option.split()[0]} in --bwrap-args: "):
            profile("\n".join([*option.split(), dest]).encode())


@pytest.mark.parametrize("option", ["--dev-bind", "--dev-bind-try"])
@pytest.mark.parametrize(
    "source", ["/", "/dev", "/dev/", "/dev/net/tun", "/dev/net/../vhost-vsock", "//dev/net/tun", "dev/net/tun", "/dev/kmem"]
)
def test_a_device_that_leads_out_of_the_seal_is_refused_however_it_is_spelled(option: str, source: str) -> None:
    with pytest.raises(UsageError, match="that device leads out of the seal"):
        profile("\n".join([option, source, "/x"]).encode())


def test_any_other_device_may_be_shown() -> None:
    assert profile(b"--dev-bind\n/dev/dri\n/dev/dri") == ("--dev-bind", "/dev/dri", "/dev/dri")


def test_a_profile_may_ask_for_what_is_in_force_anyway() -> None:
    words = (
        "--unshare-pid",
        "--new-session",
        "--die-with-parent",
        "--tmpfs",
        "/opt/a",
        "--ro-bind",
        "/etc/hosts",
        "/opt/b",
        "--perms",
        "0700",
    )

    assert profile("\n".join(words).encode()) == words
    assert profile_places(words) == [("/opt/a", ""), ("/opt/b", "/etc/hosts")]


def test_a_long_command_is_told_by_its_beginning() -> None:
    assert a_plan(argv=("x" * 4096,)).command == "x" * 4096
    assert a_plan(argv=("x" * 4000, "y" * 1_000_000)).command == f"{'x' * 4000} {'y' * 92}..."


def test_one_thing_stands_at_one_place() -> None:
    here, there = Bind(source="/a", dest="/mnt", writable=True), Bind(source="/b", dest="/mnt/b", writable=False)
    require_own_places([here, there], ["/mnt/c"])

    for binds, tmpfs in (([here, dataclasses.replace(there, dest="/mnt")], []), ([here, dataclasses.replace(here, writable=False)], [])):
        with pytest.raises(UsageError, match="at /mnt: one would hide the other"):
            require_own_places(binds, tmpfs)
    with pytest.raises(UsageError, match="cannot put --bind /a and --tmpfs at /mnt"):
        require_own_places([here], ["/mnt"])
