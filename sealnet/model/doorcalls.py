"""What a door may ask of the kernel: sockets of its own to the internet, those that it was handed, threads, and files to read.

No file to write, no program to run, no process to make or to signal, no Unix socket to reach: whoever takes a door over has a network and
nothing else, and of that no more than any user of the host. The doors of other runs have the same user.
"""

from __future__ import annotations

from errno import EACCES, EAFNOSUPPORT, EINVAL, ENOTTY, EPERM

from sealnet.model.syscalls import (
    AF_INET,
    AF_INET6,
    AF_NETLINK,
    AF_UNIX,
    ALLOW,
    CLONE_NEW,
    IPPROTO_TCP,
    IPPROTO_UDP,
    NETLINK_ROUTE,
    OPEN_NEW,
    SOCK_DGRAM,
    SOCK_STREAM,
    SOCK_TYPE_MASK,
    Check,
    Inspected,
    Policy,
    Rule,
)

_CLONE_THREAD = 0x10000
# Not F_SETOWN, F_SETSIG and their like, nor FIOSETOWN and SIOCSPGRP: they have the kernel send any signal to any process of the same user.
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GETPIPE_SZ.
_FCNTL = (0, 1, 2, 3, 4, 1030, 1031, 1032)
# TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, SIOCGIFNAME, SIOCGIFINDEX.
_IOCTL = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451, 0x8910, 0x8933)
# O_WRONLY, O_RDWR, O_TRUNC.
_WRITES = 0o3 | 0o1000 | OPEN_NEW

_ALLOWED = """
accept accept4 bind brk clock_getres clock_gettime clock_nanosleep close close_range connect dup epoll_create1 epoll_ctl epoll_pwait
epoll_pwait2 epoll_wait exit exit_group fstat fstatfs ftruncate futex futex_wait futex_wake getcwd getdents64 getegid geteuid getgid
getpeername getpid getrandom getsockname getsockopt gettid gettimeofday getuid lseek lstat madvise mmap mprotect mremap munmap
nanosleep newfstatat pipe2 poll ppoll pread64 pwrite64 read readlink readlinkat readv recvfrom recvmmsg recvmsg restart_syscall rseq
rt_sigaction rt_sigprocmask rt_sigreturn sched_getaffinity sched_yield sendmmsg sendmsg sendto set_robust_list setsockopt shutdown
sigaltstack splice stat statx sysinfo uname write writev
"""


def _reads_only(flags: int) -> Inspected:
    return Inspected((Rule(ALLOW, (Check(flags, (0,), _WRITES),)),), EACCES)


POLICY = Policy(
    allowed=frozenset(_ALLOWED.split()),
    refused=frozenset({"execve", "execveat", "fork", "ptrace", "vfork"}),
    inspected={
        "openat": _reads_only(1 + 1),
        "open": _reads_only(1),
        "socket": Inspected(
            (
                Rule(
                    ALLOW,
                    (
                        Check(0, (AF_INET, AF_INET6)),
                        Check(1, (SOCK_STREAM, SOCK_DGRAM), SOCK_TYPE_MASK),
                        Check(2, (0, IPPROTO_TCP, IPPROTO_UDP)),
                    ),
                ),
                # The kernel's own view of a route, for getaddrinfo(3) and for what is the host's own.
                Rule(ALLOW, (Check(0, (AF_NETLINK,)), Check(2, (NETLINK_ROUTE,)))),
            ),
            EAFNOSUPPORT,
        ),
        # The event loop wakes itself by one. One end of a pair of datagram sockets could be connected to a daemon's instead.
        "socketpair": Inspected((Rule(ALLOW, (Check(0, (AF_UNIX,)), Check(1, (SOCK_STREAM,), SOCK_TYPE_MASK))),), EAFNOSUPPORT),
        "fcntl": Inspected((Rule(ALLOW, (Check(1, _FCNTL),)),), EINVAL),
        "ioctl": Inspected((Rule(ALLOW, (Check(1, _IOCTL),)),), ENOTTY),
        # A thread, in the namespaces that there are.
        "clone": Inspected((Rule(ALLOW, (Check(0, (_CLONE_THREAD,), _CLONE_THREAD | CLONE_NEW),)),), EPERM),
    },
)
