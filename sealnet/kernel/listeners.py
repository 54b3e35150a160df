"""Netlink sockets that hear of changes: in the calling thread's network namespace, or in any number of others at once."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

from sealnet.errors import KernelRefused
from sealnet.kernel import libc, links
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.notices import Instruction
from sealnet.kernel.ownthread import OwnThread

ROUTE, _NETFILTER = 0, 12
# RTNLGRP_ (linux/rtnetlink.h): LINK, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_IFINFO, IPV4_NETCONF. A run's link has no IPv6.
HOST_GROUPS = (1, 5, 7, 8, 9, 12, 24)
# In the run's own namespace IPV6_ROUTE, IPV6_RULE and IPV6_NETCONF as well: nobody has anything to change there.
_INSIDE_GROUPS = (*HOST_GROUPS, 11, 19, 25)
_NFNLGRP_NFTABLES = 7
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 26, 33
_SOL_NETLINK, _LISTEN_ALL_NSID = 270, 8
_QUEUE_BYTES = 1 << 20
# libnftables can use no descriptor from here on, so these leave the lower ones to it.
_HIGH = 1024

Ancillary = Sequence[tuple[int, int, bytes]]
# Room for the number of a namespace, as `socket.recvmsg` takes it.
ANCILLARY_BYTES = socket.CMSG_SPACE(4)


def listen(protocol: int, groups: Sequence[int], program: Sequence[Instruction] = ()) -> socket.socket:
    """One that hears these groups, where there is a `program` only what that lets pass."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol) as low:
        if program:
            attach(low, program)
            _widen(low)
        low.bind((0, sum(1 << group - 1 for group in groups)))
        fd = low.fileno()
        # A process that may not have as many descriptors keeps the lower one.
        with contextlib.suppress(OSError):
            return socket.socket(fileno=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH))
        return socket.socket(fileno=low.detach())


def listen_nft(program: Sequence[Instruction] = ()) -> socket.socket:
    return listen(_NETFILTER, (_NFNLGRP_NFTABLES,), program)


def listen_inside() -> list[socket.socket]:
    """Called by a thread in a run's namespace."""
    return [listen(ROUTE, _INSIDE_GROUPS), listen_nft()]


def attach(sock: socket.socket, program: Sequence[Instruction]) -> None:
    """SO_ATTACH_FILTER (socket(7)); it takes the place of the one before."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    # struct sock_fprog: the number of instructions and where they are.
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))


def _widen(sock: socket.socket) -> None:
    # In a container root may not have more than the host's limit.
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _QUEUE_BYTES)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _QUEUE_BYTES)


class Everywhere:
    """Two sockets that hear of every namespace that was added, and of no other.

    For each change the kernel goes through everybody who listens, in whatever namespace: with two sockets in each of a thousand a launch
    spent 3 ms on that. By NETLINK_LISTEN_ALL_NSID (netlink(7), Linux 4.2) a socket hears its own namespace and those that this one has a
    number for. So these two are in one of their own, where nothing happens, and only what is added has a number there.
    """

    def __init__(self) -> None:
        """Raises OSError: EPERM without CAP_NET_BROADCAST."""
        self._runs: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._last = 0
        thread = OwnThread("sealnet-listen")
        try:
            self.sockets, self._netlink = thread.call(_open_apart)
        finally:
            thread.end()

    def add(self, run_id: str, fd: int) -> None:
        """Hear of the namespace that `fd` refers to from now on. Raises OSError."""
        self._last += 1
        try:
            number = links.add_netnsid(self._netlink, fd, self._last)
        except KernelRefused as error:
            raise OSError(error.errno, os.strerror(error.errno)) from error
        self.remove(run_id)
        self._runs[number], self._numbers[run_id] = run_id, number

    def remove(self, run_id: str) -> None:
        """Succeeds if it was not added. The kernel forgets the number with the namespace."""
        number = self._numbers.pop(run_id, None)
        # It may be another's by now, who has been added with the same namespace.
        if number is not None and self._runs.get(number) == run_id:
            del self._runs[number]

    def concerned(self, ancillary: Ancillary) -> frozenset[str]:
        """The run that a datagram is about, by what came beside it."""
        for level, kind, data in ancillary:
            if (level, kind) == (_SOL_NETLINK, _LISTEN_ALL_NSID):
                run_id = self._runs.get(struct.unpack("=i", data)[0])
                return frozenset() if run_id is None else frozenset([run_id])
        return frozenset()

    @property
    def all(self) -> frozenset[str]:
        return frozenset(self._numbers)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self._netlink.close()


def _open_apart() -> tuple[list[socket.socket], Netlink]:
    """Called by a thread of its own, which moves to a new namespace."""
    with contextlib.ExitStack() as opened:
        libc.unshare(libc.CLONE_NEWNET)
        sockets = listen_inside()
        for sock in sockets:
            opened.callback(sock.close)
        for sock in sockets:
            sock.setsockopt(_SOL_NETLINK, _LISTEN_ALL_NSID, 1)
            _widen(sock)
        netlink = Netlink()
        opened.pop_all()
        return sockets, netlink
