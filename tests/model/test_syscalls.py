"""The system call policy: every name decided once, every argument by its low half."""

from __future__ import annotations

import errno
import os
import socket
import termios
from errno import EPERM

import pytest

from sealnet.model.syscalls import ABSENT, ALLOW, CLONE_NEW, INSPECTED, NAMESPACES, ORDINARY, Policy, answer, policy

SEALED = policy(allow_userns=False)
WITH_USERNS = policy(allow_userns=True)
HIGH = 0xDEADBEEF << 32
MPTCP, SCTP, UDPLITE = 262, 132, 136
# Which argument is the mode; of open and openat, which ones are the flags and the mode.
MODE = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
FLAGS_AND_MODE = {"open": (1, 2), "openat": (2, 3)}
SET_ID_MODES = [0o4000, 0o2000, 0o4755, 0o2755, 0o6777, 0o104711, 0xFFFFFFFF]
PLAIN_MODES = [0, 0o600, 0o755, 0o1777, 0o100644, 0o171777, 0xFFFFFFFF & ~0o6000]


@pytest.mark.parametrize("asked", [SEALED, WITH_USERNS])
def test_a_name_is_decided_in_one_place_only(asked: Policy) -> None:
    assert not asked.allowed & asked.refused
    assert not asked.allowed & set(asked.inspected)
    assert not asked.refused & set(asked.inspected)


def test_what_is_left_out_is_in_no_list() -> None:
    assert not ABSENT & (SEALED.allowed | SEALED.refused | set(SEALED.inspected))


def test_a_call_nobody_has_heard_of_does_not_exist() -> None:
    assert answer(SEALED, "invented_tomorrow") == errno.ENOSYS


def test_clone3_does_not_exist_so_that_libcs_use_clone() -> None:
    assert answer(SEALED, "clone3") == errno.ENOSYS


@pytest.mark.parametrize(
    "name", ["mount", "setns", "bpf", "perf_event_open", "init_module", "open_by_handle_at", "userfaultfd", "chroot", "syslog"]
)
def test_a_privileged_call_is_refused(name: str) -> None:
    assert answer(SEALED, name) == errno.EPERM


@pytest.mark.parametrize(
    "name", ["capset", "setgroups", "setresuid", "setresgid", "prctl", "execve", "ptrace", "seccomp", "landlock_restrict_self"]
)
def test_a_call_that_setpriv_or_a_debugger_or_a_self_confiner_needs_is_allowed(name: str) -> None:
    assert answer(SEALED, name) == ALLOW


@pytest.mark.parametrize(
    ("family", "kind", "protocol", "expected"),
    [
        (socket.AF_UNIX, socket.SOCK_STREAM, 0, ALLOW),
        (socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, ALLOW),
        (socket.AF_INET, socket.SOCK_STREAM, 0, ALLOW),
        (socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP, ALLOW),
        (socket.AF_INET6, socket.SOCK_DGRAM, socket.IPPROTO_UDP, ALLOW),
        (socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP, ALLOW),
        (socket.AF_INET6, socket.SOCK_DGRAM, socket.IPPROTO_ICMPV6, ALLOW),
        (socket.AF_NETLINK, socket.SOCK_RAW, 0, ALLOW),
        (socket.AF_NETLINK, socket.SOCK_RAW, 4, errno.EPROTONOSUPPORT),
        (socket.AF_NETLINK, socket.SOCK_DGRAM, 16, errno.EPROTONOSUPPORT),
        (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP, errno.EPERM),
        (socket.AF_INET6, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW, errno.EPERM),
        (socket.AF_INET, 10, 0x300, errno.EPERM),
        (socket.AF_INET, socket.SOCK_STREAM, MPTCP, errno.EPROTONOSUPPORT),
        (socket.AF_INET, socket.SOCK_STREAM, SCTP, errno.EPROTONOSUPPORT),
        (socket.AF_INET6, socket.SOCK_SEQPACKET, SCTP, errno.EPROTONOSUPPORT),
        (socket.AF_INET, socket.SOCK_SEQPACKET, 0, errno.EPROTONOSUPPORT),
        (socket.AF_INET, socket.SOCK_DGRAM, UDPLITE, errno.EPROTONOSUPPORT),
        *((family, socket.SOCK_DGRAM, 0, errno.EAFNOSUPPORT) for family in range(64) if family not in (1, 2, 10, 16)),
        (0xFFFFFFFF, socket.SOCK_DGRAM, 0, errno.EAFNOSUPPORT),
    ],
)
@pytest.mark.parametrize("garbage", [0, HIGH])
def test_a_socket_is_judged_by_family_type_and_protocol(family: int, kind: int, protocol: int, garbage: int, expected: int) -> None:
    assert answer(SEALED, "socket", (family | garbage, kind | garbage, protocol | garbage)) == expected
    assert answer(WITH_USERNS, "socket", (family | garbage, kind | garbage, protocol | garbage)) == expected


def test_a_socket_pair_is_of_unix_sockets() -> None:
    assert answer(SEALED, "socketpair", (socket.AF_UNIX | HIGH,)) == ALLOW
    assert answer(SEALED, "socketpair", (socket.AF_INET,)) == errno.EAFNOSUPPORT
    assert answer(SEALED, "socketpair", (30,)) == errno.EAFNOSUPPORT


@pytest.mark.parametrize("request_", [termios.TIOCSTI, termios.TIOCLINUX, termios.TIOCCONS, termios.TIOCSETD])
@pytest.mark.parametrize("garbage", [0, HIGH])
def test_an_ioctl_into_the_terminal_of_the_caller_is_refused(request_: int, garbage: int) -> None:
    assert answer(SEALED, "ioctl", (0, request_ | garbage)) == errno.EPERM


@pytest.mark.parametrize("request_", [termios.TCGETS, termios.TIOCGWINSZ, termios.TIOCSPGRP, termios.FIONREAD, 0xFFFFFFFF80045430])
def test_any_other_ioctl_is_allowed(request_: int) -> None:
    assert answer(SEALED, "ioctl", (0, request_)) == ALLOW


@pytest.mark.parametrize("name", ["clone", "unshare"])
@pytest.mark.parametrize("bit", [bit for bit in range(32) if CLONE_NEW >> bit & 1])
def test_no_kind_of_namespace_is_made_without_leave(name: str, bit: int) -> None:
    assert answer(SEALED, name, (1 << bit,)) == errno.EPERM
    assert answer(SEALED, name, (1 << bit | HIGH | 17,)) == errno.EPERM
    assert answer(WITH_USERNS, name, (1 << bit,)) == ALLOW


def test_threads_are_cloned_and_file_tables_unshared() -> None:
    pthread_create = 0x3D0F00
    unshare_fs_and_files = 0x600

    assert answer(SEALED, "clone", (pthread_create,)) == ALLOW
    assert answer(SEALED, "unshare", (unshare_fs_and_files,)) == ALLOW


def test_a_namespace_of_time_or_of_a_kind_to_come_is_not_unshared() -> None:
    assert answer(SEALED, "unshare", (0x80,)) == errno.EPERM
    assert answer(SEALED, "unshare", (0x100000,)) == errno.EPERM


def test_only_plain_personalities_are_taken_on() -> None:
    assert answer(SEALED, "personality", (0xFFFFFFFF,)) == ALLOW
    assert answer(SEALED, "personality", (8,)) == ALLOW
    assert answer(SEALED, "personality", (0x0040000,)) == errno.EPERM


def words(given: dict[int, int], *, garbage: int) -> tuple[int, ...]:
    """Six registers: all ones, but for those given."""
    return tuple(given[at] | garbage if at in given else (1 << 64) - 1 for at in range(6))


@pytest.mark.parametrize("asked", [SEALED, WITH_USERNS])
@pytest.mark.parametrize("garbage", [0, HIGH])
@pytest.mark.parametrize("name", MODE)
def test_no_mode_sets_an_id(name: str, garbage: int, asked: Policy) -> None:
    for mode in SET_ID_MODES:
        assert answer(asked, name, words({MODE[name]: mode}, garbage=garbage)) == errno.EPERM, oct(mode)
    for mode in PLAIN_MODES:
        assert answer(asked, name, words({MODE[name]: mode}, garbage=garbage)) == ALLOW, oct(mode)


@pytest.mark.parametrize("garbage", [0, HIGH])
@pytest.mark.parametrize("name", FLAGS_AND_MODE)
def test_what_open_makes_sets_no_id(name: str, garbage: int) -> None:
    flags_at, mode_at = FLAGS_AND_MODE[name]

    for flags in (
        os.O_CREAT,
        os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC,
        os.O_TMPFILE | os.O_WRONLY,
        os.O_TMPFILE & ~os.O_DIRECTORY,
    ):
        for mode in SET_ID_MODES:
            assert answer(SEALED, name, words({flags_at: flags, mode_at: mode}, garbage=garbage)) == errno.EPERM
        for mode in PLAIN_MODES:
            assert answer(SEALED, name, words({flags_at: flags, mode_at: mode}, garbage=garbage)) == ALLOW


@pytest.mark.parametrize("garbage", [0, HIGH])
@pytest.mark.parametrize("name", FLAGS_AND_MODE)
def test_the_mode_of_an_open_that_makes_nothing_is_not_looked_at(name: str, garbage: int) -> None:
    flags_at, mode_at = FLAGS_AND_MODE[name]

    for flags in (os.O_RDONLY, os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, os.O_DIRECTORY, os.O_PATH | os.O_NOFOLLOW, 0o40000, 0o200000):
        for mode in SET_ID_MODES:
            assert answer(SEALED, name, words({flags_at: flags, mode_at: mode}, garbage=garbage)) == ALLOW


def test_openat2_whose_mode_is_in_memory_does_not_exist() -> None:
    assert answer(SEALED, "openat2") == answer(WITH_USERNS, "openat2") == errno.ENOSYS


def test_a_user_namespace_brings_the_mounting_calls_and_nothing_else() -> None:
    gained = WITH_USERNS.allowed - SEALED.allowed
    no_longer_inspected = set(INSPECTED) - set(WITH_USERNS.inspected)

    assert gained == NAMESPACES | {"clone", "clone3", "unshare"}
    assert no_longer_inspected == {"clone", "unshare"}
    assert SEALED.allowed == ORDINARY


def test_only_a_payload_of_roots_is_refused_a_group_that_directories_hand_on() -> None:
    root, other = policy(allow_userns=False), policy(allow_userns=False, may_set_gid=True)

    assert [answer(root, "fchmodat", (0, 0, mode)) for mode in (0o2755, 0o4755, 0o755)] == [EPERM, EPERM, ALLOW]
    assert [answer(other, "fchmodat", (0, 0, mode)) for mode in (0o2755, 0o4755, 0o755)] == [ALLOW, EPERM, ALLOW]
    assert (answer(root, "openat2"), answer(other, "openat2")) == (errno.ENOSYS, ALLOW)
