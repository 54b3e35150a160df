"""The doors that a system call opens: other socket families, the own network, other processes and namespaces, the kernel's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sealnet.attack.ends import Ends
from sealnet.attack.ways import By, Place, Way
from sealnet.kernel import libc

_STREAM, _DGRAM, _RAW, _SEQPACKET, _DCCP = 1, 2, 3, 5, 6
_INET, _INET6, _NETLINK = 2, 10, 16
_CLONE_NEWUSER = 0x1000_0000

# Family, type and protocol, the kernel's name in /proc/net/protocols (None: always there), and whose payload gets it in plain bwrap.
_SOCKETS = (
    ("raw socket (forged headers, ICMP)", _INET, _RAW, 1, None, By.ROOT),
    ("raw IPv6 socket (router advertisements)", _INET6, _RAW, 58, "RAWv6", By.ROOT),
    ("packet socket (ARP, frames of any kind)", 17, _RAW, 0, "PACKET", By.ROOT),
    ("vsock socket (the hypervisor)", 40, _STREAM, 0, "AF_VSOCK", By.USER),
    ("XDP socket", 44, _RAW, 0, "XDP", By.ROOT),
    ("MPTCP socket", _INET, _STREAM, 262, "MPTCP", By.USER),
    ("UDP-Lite socket", _INET, _DGRAM, 136, "UDP-Lite", By.USER),
    ("SCTP socket", _INET, _STREAM, 132, "SCTP", By.USER),
    ("DCCP socket", _INET, _DCCP, 33, "DCCP", By.USER),
    ("AF_ALG socket (the kernel's cryptography)", 38, _SEQPACKET, 0, "ALG", By.USER),
    ("Bluetooth socket", 31, _RAW, 1, "HCI", By.ROOT),
    ("CAN socket", 29, _RAW, 1, "CAN_RAW", By.ROOT),
    ("TIPC socket", 30, _DGRAM, 0, "TIPC", By.USER),
    ("SMC socket", 43, _STREAM, 0, "SMC", By.USER),
    ("RDS socket", 21, _SEQPACKET, 0, "RDS", By.USER),
    ("IPsec key socket", 15, _RAW, 2, "KEY", By.ROOT),
    ("LLC socket", 26, _DGRAM, 0, "LLC", By.ROOT),
    ("KCM socket", 41, _DGRAM, 0, "KCM", By.USER),
    ("QRTR socket", 42, _DGRAM, 0, "QIPCRTR", By.USER),
    ("RxRPC socket", 33, _DGRAM, 2, "RXRPC", By.USER),
    ("PPP socket", 24, _STREAM, 0, "PPPOE", By.ROOT),
    ("netlink socket of netfilter", _NETLINK, _RAW, 12, None, By.USER),
    ("netlink socket of audit", _NETLINK, _RAW, 9, None, By.USER),
    ("netlink socket of sock_diag", _NETLINK, _RAW, 4, None, By.USER),
    ("netlink socket of device events", _NETLINK, _RAW, 15, None, By.USER),
    ("generic netlink socket", _NETLINK, _RAW, 16, None, By.USER),
)
_READ, _WRITE = os.O_RDONLY, os.O_WRONLY
# There is none, this kernel shuts it to root as well, or there is nothing in it.
_NO_FILE = ("ENOENT", "ENXIO", "EPERM", "EIO", "ENODATA", "EAGAIN", "EPIPE")
_KERNEL_FILES = (
    ("/proc/sys/kernel/core_pattern", _WRITE, By.ROOT),
    ("/proc/sys/kernel/modprobe", _WRITE, By.ROOT),
    ("/proc/sys/net/ipv4/ip_forward", _WRITE, By.ROOT),
    ("/proc/mtrr", _WRITE, By.ROOT),
    ("/proc/kcore", _READ, By.ROOT),
    ("/proc/timer_list", _READ, By.ROOT),
    # What bwrap itself makes read-only, and what may be empty.
    ("/proc/sysrq-trigger", _WRITE, By.NOBODY),
    ("/proc/irq/default_smp_affinity", _WRITE, By.NOBODY),
    ("/proc/keys", _READ, By.NOBODY),
    # Where bwrap's /dev has none.
    ("/dev/kmsg", _READ, By.NOBODY),
    ("/dev/mem", _READ, By.NOBODY),
)


def ways(ends: Ends, place: Place) -> Iterator[Way]:
    yield from _socket_families()
    yield from _own_namespace()
    yield from _processes(ends, place)
    yield from _kernel(ends)


def _deed(
    group: str, name: str, tried: str, *attempt: Any, lacking: tuple[str, ...] = (), absent: str | None = None, plain: By = By.ROOT
) -> Way:
    """It is its own oracle: root does it outside, in namespaces that are thrown away."""
    return Way(name=name, group=group, tried=tried, attempt=attempt, absent=absent, lacking=frozenset(lacking), apart=True, plain=plain)


def _socket_families() -> Iterator[Way]:
    """Only what this kernel has now: trying another as root would load its module for good."""
    there = {line.split()[0] for line in Path("/proc/net/protocols").read_text().splitlines() if line.strip()}
    for label, family, kind, protocol, known, plain in _SOCKETS:
        name = label.partition(" (")[0].lower().replace(" ", "-")
        absent = f"this kernel has no {known} now" if known is not None and known not in there else None
        yield _deed("socket families", name, label, "socket", family, kind, protocol, absent=absent, plain=plain)


def _own_namespace() -> Iterator[Way]:
    """The order matters outside the seal: a route wants a link that is up."""
    deed = partial(_deed, "its own network")
    yield deed("set-link", "setting a link up", "set-link")
    yield deed("add-address", "adding an address", "add-address")
    yield deed("add-route", "adding a route", "add-route")
    yield deed("add-table", "changing the nftables ruleset", "add-table")
    # bwrap's /dev has no tun.
    yield deed("add-tun", "a tun link", "add-tun", lacking=("ENOENT", "ENODEV", "ENXIO"), plain=By.NOBODY)


def _processes(ends: Ends, place: Place) -> Iterator[Way]:
    deed = partial(_deed, "processes and namespaces")
    for kind, flag, label in (("net", libc.CLONE_NEWNET, "network"), ("mnt", libc.CLONE_NEWNS, "mount")):
        inode = Path(f"/proc/self/ns/{kind}").stat().st_ino
        yield deed(f"host-{kind}-namespace", f"the host's {label} namespace through /proc", "setns", kind, flag, inode)
    inode = place.peer.netns_inode
    yield deed("peer-namespace", "another run's network namespace through /proc", "setns", "net", libc.CLONE_NEWNET, inode)
    secret = f"{ends.directory('/run')}/secret"
    Path(secret).write_text("seen", encoding="ascii")
    yield deed("proc-root", "a file of the host's through /proc/PID/root", "read-elsewhere", secret, "seen", plain=By.USER)
    pid, started = ends.victim(place.user)
    yield deed("signal", "signalling a process of its user outside", "signal", pid, started, plain=By.USER)
    yield deed("ptrace", "tracing a process of its user outside", "trace", pid, started)
    yield deed("pidfd-getfd", "taking a descriptor of a process outside", "take-fd", pid, started)
    yield deed("inherited", "descriptors that were left open", "inherited", plain=By.USER)
    yield deed("scm-rights", "descriptors sent to it", absent="it has no socket by which anybody could send it one")
    for way in ("unshare", "clone", "clone3"):
        tried = f"a user namespace of its own ({way})"
        yield deed(f"userns-{way}", tried, way, _CLONE_NEWUSER, lacking=("ENOSPC", "EPERM", "EUSERS"))
    yield deed("mount-namespace", "a mount namespace of its own", "unshare", libc.CLONE_NEWNS)
    # bwrap's --ro-bind / shows the tree read-only.
    yield deed("leave-cgroup", "leaving its cgroup", "leave-cgroup", lacking=("ENOENT",), plain=By.NOBODY)
    yield deed("mount-cgroup", "mounting the cgroup tree", "mount", "cgroup2", "cgroup.procs", lacking=("ENODEV", "EBUSY"))


def _kernel(ends: Ends) -> Iterator[Way]:
    deed = partial(_deed, "the kernel")
    for path, flags, plain in _KERNEL_FILES:
        tried = f"{'writing' if flags == _WRITE else 'reading'} {path}"
        yield deed(path.rpartition("/")[2], tried, "open", path, flags, lacking=_NO_FILE, plain=plain)
    yield deed("capset", "taking a capability back (capset)", "take-capability")
    yield deed("mount", "mounting", "mount", "tmpfs", "")
    yield deed("fsopen", "opening a file system (fsopen)", "fsopen")
    yield deed("mknod", "making a device node", "make-device")
    yield deed("set-uid", "a set-uid program", "set-uid", plain=By.USER)
    yield deed("tiocsti", "typing into a terminal (TIOCSTI)", "type-into-terminal", lacking=("EIO",))
    yield _by_handle(ends)
    yield deed("keyring", "the key ring of its user", "keyring", plain=By.USER)
    yield deed("io-uring", "an io_uring (sockets that no filter sees)", "io-uring", lacking=("EPERM",))
    yield deed("bpf", "bpf(2)", "bpf", lacking=("EPERM",))
    yield deed("perf", "perf_event_open(2)", "perf", lacking=("EPERM", "EACCES", "ENOENT", "EOPNOTSUPP"))
    yield deed("userfaultfd", "userfaultfd(2)", "userfaultfd", lacking=("EPERM",))


def _by_handle(ends: Ends) -> Way:
    """A file below a directory that is closed, by its number."""
    directory = ends.directory("/var/lib")
    closed = f"{directory}/closed"
    os.mkdir(closed, 0o700)
    Path(f"{closed}/file").write_text("seen", encoding="ascii")
    absent, handle = None, b""
    try:
        handle = libc.file_handle(f"{closed}/file")
    except OSError as error:
        absent = f"its file system has no handles: {error.strerror}"
    return _deed("the kernel", "open-by-handle", "a closed file by its handle", "by-handle", directory, handle.hex(), absent=absent)
