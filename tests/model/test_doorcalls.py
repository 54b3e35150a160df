"""What a door may ask of the kernel."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import termios

import pytest

from sealnet.model.doorcalls import POLICY
from sealnet.model.syscalls import ABSENT, ALLOW, answer

THREAD = 0x3D0F00


def test_a_name_is_decided_in_one_place_only() -> None:
    assert not POLICY.allowed & POLICY.refused
    assert not (POLICY.allowed | POLICY.refused) & set(POLICY.inspected)
    assert not POLICY.allowed & ABSENT


@pytest.mark.parametrize(
    "name",
    "kill tgkill tkill rt_tgsigqueueinfo pidfd_send_signal timer_create execve execveat fork vfork ptrace "
    "mount setns unshare bpf io_uring_setup clone3 unlink rename mkdir chmod symlink listen prctl "
    "seccomp process_vm_readv memfd_create keyctl setuid openat2 truncate".split(),
)
def test_it_makes_and_signals_no_process_and_makes_no_file(name: str) -> None:
    assert answer(POLICY, name) != ALLOW


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("openat", (0, 0, os.O_RDONLY | os.O_CLOEXEC), ALLOW),
        ("openat", (0, 0, os.O_WRONLY), errno.EACCES),
        ("openat", (0, 0, os.O_RDWR), errno.EACCES),
        ("openat", (0, 0, os.O_CREAT), errno.EACCES),
        ("openat", (0, 0, os.O_TRUNC), errno.EACCES),
        ("openat", (0, 0, os.O_TMPFILE), errno.EACCES),
        ("open", (0, os.O_WRONLY), errno.EACCES),
        ("socket", (socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0), ALLOW),
        ("socket", (socket.AF_INET6, socket.SOCK_DGRAM, socket.IPPROTO_UDP), ALLOW),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 0), ALLOW),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 12), errno.EAFNOSUPPORT),
        ("socket", (socket.AF_UNIX, socket.SOCK_STREAM, 0), errno.EAFNOSUPPORT),
        ("socket", (socket.AF_INET, socket.SOCK_RAW, 1), errno.EAFNOSUPPORT),
        ("socket", (socket.AF_PACKET, socket.SOCK_RAW, 0), errno.EAFNOSUPPORT),
        ("socket", (40, socket.SOCK_STREAM, 0), errno.EAFNOSUPPORT),
        ("fcntl", (0, fcntl.F_SETFL, os.O_NONBLOCK), ALLOW),
        ("fcntl", (0, fcntl.F_SETOWN, 1), errno.EINVAL),
        ("fcntl", (0, fcntl.F_SETSIG, 9), errno.EINVAL),
        # F_SETOWN_EX.
        ("fcntl", (0, 15, 0), errno.EINVAL),
        ("ioctl", (0, termios.FIONBIO, 0), ALLOW),
        # FIOSETOWN, SIOCSPGRP.
        ("ioctl", (0, 0x8901, 0), errno.ENOTTY),
        ("ioctl", (0, 0x8902, 0), errno.ENOTTY),
        ("ioctl", (0, termios.TIOCSTI, 0), errno.ENOTTY),
        ("ioctl", (0, termios.TIOCSCTTY, 0), errno.ENOTTY),
        ("clone", (THREAD,), ALLOW),
        ("clone", (17,), errno.EPERM),
        ("clone", (THREAD | 0x40000000,), errno.EPERM),
    ],
)
def test_calls_that_are_judged_by_argument(name: str, arguments: tuple[int, ...], expected: int) -> None:
    assert answer(POLICY, name, arguments) == expected
