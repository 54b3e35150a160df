"""What is said of what a host must have, from what was seen of it."""

from __future__ import annotations

from typing import Any

import pytest

from sealnet.model.facts import ROOT_ONLY, WORKS, Facts, Feature, Row, Tool
from sealnet.model.requirements import requirements, version

OVERLAY = Feature(name="overlay", found=False, said="No such device", module="overlay")


def judged(**seen: Any) -> dict[str, Row]:
    given: dict[str, Any] = {"release": "6.1.0-18-amd64", "root": True, "state_path": "/run/sealnet", **seen}
    return {row.name: row for row in requirements(Facts(**given))}


def test_a_host_that_has_everything_is_ok_in_every_row() -> None:
    rows = judged(
        features=(Feature(name="overlay", found=True),),
        tools=(Tool(name="bwrap", package="bubblewrap", path="/usr/bin/bwrap", version="0.8.0", needed="0.8.0"),),
        max_net_namespaces=65536,
        max_user_namespaces=0,
        max_runs=4096,
        sysctls_writable=True,
    )

    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["overlay"].found == WORKS
    assert rows["bwrap"].found == "0.8.0 (/usr/bin/bwrap)"
    assert rows["user namespaces allowed"].found == "0; none is needed but for --allow-userns"


@pytest.mark.parametrize(
    ("release", "status"),
    [("6.18.44-fc-v657", "ok"), ("5.14.0-427.el9", "ok"), ("5.13.19", "note"), ("5.10.0-28-amd64", "note"), ("5.4.0-150", "warn")],
)
def test_the_kernel_is_judged_by_its_number(release: str, status: str) -> None:
    assert judged(release=release)["kernel"].status == status


@pytest.mark.parametrize(
    ("text", "numbers"), [("6.18.44-fc", (6, 18, 44)), ("0.8", (0, 8)), ("0.10.0", (0, 10, 0)), ("next", ()), ("", ())]
)
def test_a_version_is_its_leading_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version(text) == numbers


@pytest.mark.parametrize(
    ("seen", "fix"),
    [
        ({}, "modprobe overlay"),
        (
            {"modules": "of another kernel"},
            "reboot: overlay cannot be loaded, the modules on disk are of another kernel than the running 6.1.0-18-amd64",
        ),
        ({"modules": "none"}, "boot a kernel that has overlay: there is no module of the running one on disk"),
        ({"modules_disabled": True}, "have overlay loaded at boot: modules cannot be loaded any more (kernel.modules_disabled)"),
        ({"container": "/.dockerenv"}, "on the host, outside of this container: modprobe overlay"),
    ],
)
def test_a_module_that_is_missing_has_the_fix_that_can_work(seen: dict[str, Any], fix: str) -> None:
    row = judged(features=(OVERLAY,), **seen)["overlay"]

    assert (row.status, row.found, row.fix) == ("fail", "No such device", fix)


def test_what_no_module_brings_takes_another_kernel() -> None:
    row = judged(features=(Feature(name="openat2", found=False, said="Function not implemented"),))["openat2"]

    assert (row.status, row.fix) == ("fail", "boot a kernel that has it")


def test_what_could_not_be_looked_at_is_no_failure() -> None:
    row = judged(root=False, features=(Feature(name="veth", found=None, said=ROOT_ONLY),))["veth"]

    assert (row.status, row.found, row.fix) == ("note", ROOT_ONLY, "sudo sealnet doctor")


@pytest.mark.parametrize(
    ("path", "found", "status", "text"),
    [
        (None, None, "fail", "missing"),
        ("/usr/bin/bwrap", "0.7.0", "fail", "0.7.0 (/usr/bin/bwrap), needed 0.8.0"),
        ("/usr/bin/bwrap", "0.10.0", "ok", "0.10.0 (/usr/bin/bwrap)"),
        ("/usr/bin/bwrap", None, "ok", "/usr/bin/bwrap"),
    ],
)
def test_a_tool_is_there_and_new_enough_or_its_package_is_named(path: str | None, found: str | None, status: str, text: str) -> None:
    row = judged(tools=(Tool(name="bwrap", package="bubblewrap", path=path, version=found, needed="0.8.0"),))["bwrap"]

    assert (row.status, row.found) == (status, text)
    assert ("bubblewrap" in row.fix) is (status == "fail")


@pytest.mark.parametrize(
    ("seen", "name", "status", "found"),
    [
        ({"machine": "riscv64"}, "architecture", "fail", "riscv64, and the system-call policy is written for x86_64 and aarch64"),
        ({"root": False}, "privileges", "fail", "not root"),
        ({"lacking": ("CAP_NET_ADMIN", "CAP_SYS_ADMIN")}, "privileges", "fail", "this root lacks CAP_NET_ADMIN and CAP_SYS_ADMIN"),
        ({"sysctls_writable": False}, "/proc/sys/net", "fail", "read-only, and a link must be made quiet"),
        ({"container": "/.dockerenv"}, "container", "note", "nested in one (/.dockerenv)"),
        ({"max_net_namespaces": 0}, "network namespaces allowed", "fail", "none"),
        ({"max_net_namespaces": 100, "max_runs": 4096}, "network namespaces allowed", "warn", "100, and max_runs is 4096"),
        ({"modules_disabled": True}, "kernel modules", "note", "loading is disabled until the next boot (kernel.modules_disabled)"),
        ({"config_fault": "cannot use key 'x' in y"}, "configuration", "fail", "cannot use key 'x' in y"),
        ({"state_fault": "Read-only file system"}, "state directory", "fail", "/run/sealnet: Read-only file system"),
        ({"state_fault": "No space left on device"}, "state directory", "fail", "/run/sealnet: No space left on device"),
    ],
)
def test_what_is_lacking_is_told(seen: dict[str, Any], name: str, status: str, found: str) -> None:
    row = judged(**seen)[name]

    assert (row.status, row.found) == (status, found)
    assert row.does
