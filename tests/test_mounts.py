"""Which mounts make up the payload's view."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealnet.kernel.mounts import PRIVATE, Mount, _as, _kinds, below, beneath, is_shown, parse_mountinfo
from sealnet.model.plan import User

STAGE = "/run/sealnet/stage"


def escaped(path: str) -> str:
    """As the kernel writes it (fs/proc_namespace.c, show_mountinfo: space, tab, newline and backslash)."""
    return "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in path)


def line(target: str, *, fstype: str = "ext4", optional: str = "shared:1 ") -> str:
    return f"36 35 98:0 / {escaped(target)} rw,noatime {optional}- {fstype} /dev/root rw,errors=continue\n"


def layers(found: list[Mount], source: str, stage: str) -> list[str]:
    """What a view shows: an overlay for each."""
    return [source, *(mount.target for mount in below(found, source, stage) if is_shown(mount))]


# mountinfo


def test_the_example_of_proc_5_is_read() -> None:
    text = "36 35 98:0 /mnt1 /mnt/parent rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"

    assert parse_mountinfo(text) == [Mount("98:0", "/mnt/parent", "ext3", "rw,noatime")]


@pytest.mark.parametrize("optional", ["", "shared:1 ", "shared:7 master:1 propagate_from:2 ", "unbindable "])
def test_any_number_of_optional_fields_is_passed_over(optional: str) -> None:
    assert parse_mountinfo(line("/a", optional=optional)) == [Mount("98:0", "/a", "ext4", "rw,noatime")]


def test_this_machines_own_mounts_are_read() -> None:
    found = parse_mountinfo(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))

    assert "/" in [mount.target for mount in found]
    assert "proc" in [mount.fstype for mount in found]


@settings(max_examples=60)
@given(st.lists(st.text(alphabet="a/ \t\n\\-é014", max_size=12).map("/".__add__), max_size=4))
def test_whatever_a_mount_point_is_called_it_is_read_as_it_is(targets: list[str]) -> None:
    text = "".join(map(line, targets))

    assert [mount.target for mount in parse_mountinfo(text)] == targets


@pytest.mark.parametrize("char", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_only_a_newline_ends_a_line(char: str) -> None:
    """The kernel does not escape these, and whoever may mount a FUSE file system may use them."""
    text = line(f"/home/ann/a{char}b") + line("/srv")

    assert [mount.target for mount in parse_mountinfo(text)] == [f"/home/ann/a{char}b", "/srv"]


# Paths


@pytest.mark.parametrize(
    ("path", "above", "expected"),
    [
        ("/a", "/a", True),
        ("/a/b", "/a", True),
        ("/a/b", "/a/", True),
        ("/a", "/", True),
        ("/", "/", True),
        ("/ab", "/a", False),
        ("/", "/a", False),
    ],
)
def test_beneath_goes_by_whole_names(path: str, above: str, expected: bool) -> None:
    assert beneath(path, above) is expected


# Layers


def mounts(*targets: str, fstype: str = "ext4") -> list[Mount]:
    return [Mount("8:1", target, fstype) for target in targets]


def test_the_source_is_the_first_layer_and_each_mount_below_it_another() -> None:
    found = layers(mounts("/", "/usr/local", "/home", "/home/ann", "/usr"), "/", STAGE)

    assert found == ["/", "/home", "/home/ann", "/usr", "/usr/local"]


def test_a_layer_stands_after_the_one_that_it_lies_in() -> None:
    found = layers(mounts("/", "/a/b/c", "/a-b", "/a/b", "/a"), "/", STAGE)

    assert all(found.index(above) < found.index(below) for below in found for above in found if below != above and beneath(below, above))


def test_mounts_stacked_on_one_place_are_one_layer() -> None:
    assert layers(mounts("/", "/srv", "/srv", "/"), "/", STAGE) == ["/", "/srv"]


def test_what_lies_elsewhere_is_no_layer() -> None:
    assert layers(mounts("/", "/srv", "/srv/a", "/srv-b", "/opt"), "/srv", STAGE) == ["/srv", "/srv/a"]


@pytest.mark.parametrize("fstype", ["proc", "sysfs", "cgroup2", "devtmpfs", "bpf", "tracefs", "mqueue", "nsfs", "autofs"])
def test_a_view_of_the_kernel_is_not_shown(fstype: str) -> None:
    hidden, control = mounts("/opt/kernel", fstype=fstype), mounts("/opt/files")

    assert layers([*mounts("/"), *hidden, *control], "/", STAGE) == ["/", "/opt/files"]


@pytest.mark.parametrize("private", PRIVATE)
def test_what_the_payload_has_a_private_one_of_is_not_shown(private: str) -> None:
    assert layers(mounts("/", private, f"{private}/below", f"{private}-not"), "/", STAGE) == ["/", f"{private}-not"]


def test_a_private_place_is_shown_when_it_is_what_was_asked_for() -> None:
    assert layers(mounts("/", "/tmp", "/tmp/data", "/tmp/data/b"), "/tmp/data", STAGE) == ["/tmp/data", "/tmp/data/b"]


@pytest.mark.parametrize("hidden", ["/var/lib/docker/overlay2/x/merged", "/var/lib/containerd", "/var/lib/kubelet/pods/y"])
def test_another_engines_storage_is_not_shown(hidden: str) -> None:
    assert layers(mounts("/", hidden, "/var/lib/dockery"), "/", STAGE) == ["/", "/var/lib/dockery"]


def test_the_stage_never_shows_itself() -> None:
    assert layers(mounts("/", "/srv/state/stage", "/srv/state/stage/view1"), "/srv", "/srv/state/stage") == ["/srv"]


@pytest.mark.root
def test_nobody_is_told_what_stands_where_it_may_not_look() -> None:
    nobody = User(name="alice", uid=65531, gid=65531, groups=(), home="/", shell="/bin/sh")
    groups = os.getgroups()
    with tempfile.TemporaryDirectory(dir="/run") as closed:
        (Path(closed) / "file").touch()
        asked = [("/to", f"{closed}/file"), ("/there", "/etc/passwd"), ("/none", f"{closed}/none")]

        with _as(nobody):
            theirs = _kinds(asked)
        ours = _kinds(asked)

    assert theirs == {"/to": True, "/there": False, "/none": True}
    assert ours == {"/to": False, "/there": False, "/none": True}
    assert os.getgroups() == groups
