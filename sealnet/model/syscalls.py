"""What a payload may ask of the kernel: the system calls it may make, by name and by argument.

An allow-list, as container engines keep one: a call that is not named here is answered ENOSYS, so that a libc takes its fallback for older
kernels, and a call invented tomorrow is refused. What is left out has its reason beside `ABSENT`, `PRIVILEGED` or `INSPECTED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from errno import EAFNOSUPPORT, ENOSYS, EPERM, EPROTONOSUPPORT
from termios import TIOCCONS, TIOCLINUX, TIOCSETD, TIOCSTI
from typing import NamedTuple

ALLOW = 0
DEFAULT = ENOSYS

# The kernel itself looks at no more of an argument judged here (unshare refuses what has more), so the high half of a register is the
# payload's to fill and must not count: AF_VSOCK | 1 << 32 is AF_VSOCK, and musl sign-extends half of all ioctl requests.
LOW_32 = 0xFFFFFFFF


class Check(NamedTuple):
    """True when the low 32 bits of the argument, masked, are one of the values."""

    argument: int
    values: tuple[int, ...]
    mask: int = LOW_32


class Rule(NamedTuple):
    """`answer` (`ALLOW` or an errno) holds when every check does."""

    answer: int
    checks: tuple[Check, ...]


class Inspected(NamedTuple):
    """A system call that is judged by its arguments: the first rule that holds, else `otherwise`."""

    rules: tuple[Rule, ...]
    otherwise: int


class Policy(NamedTuple):
    """`allowed` and `refused` (EPERM) by name alone, `inspected` by argument, `DEFAULT` for the rest."""

    allowed: frozenset[str]
    refused: frozenset[str]
    inspected: Mapping[str, Inspected]


def _names(*groups: str) -> frozenset[str]:
    return frozenset(" ".join(groups).split())


# Of 64-bit x86 and arm alike; each has some that the other lacks.
ORDINARY = _names(
    # files and directories: what takes a mode is for INSPECTED to say
    """
    access cachestat chdir chown close close_range copy_file_range dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate fchdir fchown
    fchownat fcntl fdatasync fgetxattr file_getattr file_setattr flistxattr flock fremovexattr fsetxattr fstat fstatfs fsync ftruncate
    futimesat getcwd getdents getdents64 getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch lchown lgetxattr
    link linkat listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat memfd_create memfd_secret mkdir mkdirat
    name_to_handle_at newfstatat
    pipe pipe2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr removexattrat rename
    renameat renameat2 rmdir sendfile setxattr setxattrat splice stat statfs statx symlink symlinkat sync sync_file_range syncfs tee
    truncate umask unlink unlinkat utime utimensat utimes vmsplice write writev
    io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 poll ppoll pselect6 select signalfd signalfd4
    """,
    # sockets, once made: what may be made is for INSPECTED to say
    """
    accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto setsockopt
    shutdown
    """,
    # System V and POSIX IPC: the namespace is private
    """
    mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd semctl semget semop semtimedop shmat
    shmctl shmdt shmget
    """,
    # memory
    """
    brk madvise map_shadow_stack membarrier mincore mlock mlock2 mlockall mmap mprotect mremap mseal msync munlock munlockall munmap
    pkey_alloc pkey_free pkey_mprotect process_madvise process_mrelease remap_file_pages
    """,
    # processes, threads, signals. setpriv's calls (capset, setgroups, setresuid, ...) are here too: it runs under the filter, and after it
    # no capability is left to use them with. fork and vfork take no flags.
    """
    arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv futex_wake get_robust_list
    getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getresgid getresuid getrlimit getrusage getsid gettid
    getuid ioprio_get ioprio_set kill pause pidfd_open pidfd_send_signal prctl prlimit64 restart_syscall rseq rseq_slice_yield rt_sigaction
    rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
    sched_setattr sched_setparam sched_setscheduler sched_yield set_robust_list set_tid_address setfsgid setfsuid setgid setgroups setpgid
    setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack tgkill tkill vfork wait4 waitid
    """,
    # A debugger sees what it could signal anyway: the pid namespace holds nothing but the payload and bwrap's init, which has no capability
    # and the same filter, and which only a payload of uid 0 may trace. pidfd_getfd grants no more than ptrace: a tracer can make its tracee
    # send the fd.
    """
    pidfd_getfd process_vm_readv process_vm_writev ptrace
    """,
    # Never called by a program: a tracer of the host plants them in its text, and a refusal would crash it.
    """
    uprobe uretprobe
    """,
    # A payload may confine itself further. Filters add up and the strictest answer wins, so none of its own can lift this one.
    """
    landlock_add_rule landlock_create_ruleset landlock_restrict_self seccomp
    """,
    # time and the system; adjtimex without its capability only reads
    """
    adjtimex alarm clock_adjtime clock_getres clock_gettime clock_nanosleep getitimer getrandom gettimeofday nanosleep setitimer sysinfo
    time timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times uname
    """,
)

# Left out, by name so that a test can tell a decision from an oversight; answered ENOSYS like a call that this file has never heard of.
ABSENT = _names(
    # io_uring opens sockets and files from the ring, where no filter sees them.
    "io_uring_enter io_uring_register io_uring_setup",
    # The flags of clone3 are in memory, which a filter cannot read. glibc and Go take ENOSYS as "use clone".
    "clone3",
    # Nor the mode of openat2, which INSPECTED must see. Callers take ENOSYS as "use openat".
    "openat2",
    # Key rings belong to the uid, not to a namespace: the payload would share the keys of every process of its user on the host.
    "add_key keyctl request_key",
    # Only of use with a descriptor of fanotify_init, which is PRIVILEGED.
    "fanotify_mark",
    # Segments of one's own, for 16-bit code: many kernel bugs, no user but old emulators.
    "modify_ldt get_thread_area set_thread_area",
    # What other security modules, mount tables and namespaces hold is the host's business; libmount falls back to /proc.
    "listmount listns lsm_get_self_attr lsm_list_modules lsm_set_self_attr statmount",
    # Numbers without a call behind them, or with one that nothing has used for decades.
    "_sysctl afs_syscall create_module epoll_ctl_old epoll_wait_old get_kernel_syms getpmsg nfsservctl putpmsg query_module security sysfs",
    "tuxcall uselib ustat vserver",
)

# Making a world of one's own: only with a user namespace, whose capabilities these ask for. Never over the seal's network namespace, which
# an older user namespace owns.
NAMESPACES = _names(
    "chroot fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree open_tree_attr pivot_root umount2",
    "setdomainname sethostname setns",
)

# Asks for a capability that the payload does not have. EPERM is the kernel's own answer; it is given before the code behind it is reached.
PRIVILEGED = NAMESPACES | _names(
    # the kernel itself, its log, its tracing, its clock, its disks
    "acct bpf clock_settime delete_module finit_module init_module ioperm iopl kexec_file_load kexec_load lookup_dcookie perf_event_open",
    "quotactl quotactl_fd reboot settimeofday swapoff swapon syslog vhangup",
    # any file of a file system by number, whatever the mount namespace hides; every file event of the machine
    "open_by_handle_at fanotify_init",
    # faults handled in user space hold kernel races open
    "userfaultfd",
    # order of kernel pointers; engines want CAP_SYS_PTRACE
    "kcmp",
    # which memory node serves others; engines want CAP_SYS_NICE, and libnuma takes EPERM as "no NUMA"
    "get_mempolicy mbind migrate_pages move_pages set_mempolicy set_mempolicy_home_node",
)

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. Not NEWTIME: in clone that bit is part of the exit signal.
CLONE_NEW = 0x7E020000
# CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM: all that unshare knows and that makes no namespace, so that a new kind is refused.
UNSHARE_PLAIN = 0x00050F00
# Spelled out: `import socket` costs more time than rendering the filter.
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_PACKET, SOCK_TYPE_MASK = 1, 2, 3, 10, 0xF
IPPROTO_ICMP, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_ICMPV6 = 1, 6, 17, 58
NETLINK_ROUTE = 0
# S_ISUID and S_ISGID. A program that a payload of uid 0 left with them in a directory of the host would make root of everyone there.
SET_ID = 0o6000
# What is refused to everybody else: S_ISUID alone. Directories that hand on their group are ordinary (git init --shared, chmod in one).
SET_UID = 0o4000
# O_CREAT and the bit of its own of O_TMPFILE; the other is O_DIRECTORY, which opendir sets too. The kernel itself looks at a mode by these:
# without them it is whatever the register held.
OPEN_NEW = 0o20000100


def _rule(answer: int, *checks: Check) -> Rule:
    return Rule(answer, checks)


def _only(check: Check, *, otherwise: int) -> Inspected:
    return Inspected((_rule(ALLOW, check),), otherwise)


def _mode(argument: int) -> Inspected:
    return _only(Check(argument, (0,), SET_ID), otherwise=EPERM)


def _mode_if_new(*, flags: int, mode: int) -> Inspected:
    return Inspected((_rule(ALLOW, Check(flags, (0,), OPEN_NEW)), _rule(ALLOW, Check(mode, (0,), SET_ID))), otherwise=EPERM)


_UNIX, _NETLINK, _INET = Check(0, (AF_UNIX,)), Check(0, (AF_NETLINK,)), Check(0, (AF_INET, AF_INET6))
_RAW, _PLAIN = Check(1, (SOCK_RAW, SOCK_PACKET), SOCK_TYPE_MASK), Check(1, (SOCK_STREAM, SOCK_DGRAM), SOCK_TYPE_MASK)
_PROTOCOLS = Check(2, (0, IPPROTO_ICMP, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_ICMPV6))

# In the order in which the filter compares the number: what is called most is first.
INSPECTED: Mapping[str, Inspected] = {
    "openat": _mode_if_new(flags=2, mode=3),
    "open": _mode_if_new(flags=1, mode=2),
    # Out: what reaches a peer past the network namespace (AF_VSOCK), and attack surface without use in one (AF_ALG, AF_XDP, SCTP, ...). Of
    # netlink, NETLINK_ROUTE is for getifaddrs and ip; libaudit, libudev and ss take EPROTONOSUPPORT as "not in this kernel", and so does Go
    # for MPTCP.
    "socket": Inspected(
        (
            _rule(ALLOW, _UNIX),
            _rule(ALLOW, _NETLINK, Check(2, (NETLINK_ROUTE,))),
            _rule(EPROTONOSUPPORT, _NETLINK),
            _rule(EPERM, _INET, _RAW),
            _rule(ALLOW, _INET, _PLAIN, _PROTOCOLS),
            _rule(EPROTONOSUPPORT, _INET),
        ),
        otherwise=EAFNOSUPPORT,
    ),
    "socketpair": _only(_UNIX, otherwise=EAFNOSUPPORT),
    # Typing into the caller's terminal, pasting into the console, taking the console's output, loading a line discipline.
    "ioctl": Inspected((_rule(EPERM, Check(1, (TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD))),), otherwise=ALLOW),
    # The flags come first on every architecture but s390, for which no filter is rendered.
    "clone": _only(Check(0, (0,), CLONE_NEW), otherwise=EPERM),
    "unshare": _only(Check(0, (0,), LOW_32 & ~UNSHARE_PLAIN), otherwise=EPERM),
    # PER_LINUX, PER_LINUX32, each with UNAME26 or not, and the question; not the flags that weaken address space layout.
    "personality": _only(Check(0, (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)), otherwise=EPERM),
    # A mode does not say whether it is of a file or of a directory, so for root a directory that hands on its group is refused as well. Of
    # mkdir the kernel ignores both bits.
    "chmod": _mode(1),
    "fchmod": _mode(1),
    "fchmodat": _mode(2),
    "fchmodat2": _mode(2),
    "creat": _mode(1),
    "mknod": _mode(1),
    "mknodat": _mode(2),
}


# Of a build, whose builder makes mounts and namespaces: everything but what leads past the network namespace. io_uring makes sockets
# where no filter sees it.
BUILDER: Mapping[str, Inspected] = {
    "socket": INSPECTED["socket"],
    "io_uring_setup": Inspected((), otherwise=ENOSYS),
}


def policy(*, allow_userns: bool, may_set_gid: bool = False) -> Policy:
    """The policy of one run; with `allow_userns` a payload may also make namespaces of every kind and build a file system view in them.

    `may_set_gid` is for a payload whose user and group are not root's. It has openat2, too, whose mode lies in memory where no filter
    sees it: what it could leave with that is setuid to itself, and newer programs (bwrap 0.12) do without the call no longer.
    """
    ordinary = ORDINARY | {"openat2"} if may_set_gid else ORDINARY
    inspected = {name: _without_set_gid(judged) if may_set_gid else judged for name, judged in INSPECTED.items()}
    if not allow_userns:
        return Policy(ordinary, PRIVILEGED, inspected)
    inspected = {name: judged for name, judged in inspected.items() if name not in ("clone", "unshare")}
    return Policy(ordinary | NAMESPACES | {"clone", "clone3", "unshare"}, PRIVILEGED - NAMESPACES, inspected)


def _without_set_gid(judged: Inspected) -> Inspected:
    rules = tuple(
        rule._replace(checks=tuple(check._replace(mask=SET_UID) if check.mask == SET_ID else check for check in rule.checks))
        for rule in judged.rules
    )
    return judged._replace(rules=rules)


def answer(policy: Policy, name: str, arguments: tuple[int, ...] = ()) -> int:
    """What a payload that calls `name` gets: `ALLOW` or an errno. The rendered filter is held to this."""
    if name in policy.inspected:
        judged = policy.inspected[name]
        for rule in judged.rules:
            if all(arguments[check.argument] & LOW_32 & check.mask in check.values for check in rule.checks):
                return rule.answer
        return judged.otherwise
    if name in policy.allowed:
        return ALLOW
    return EPERM if name in policy.refused else DEFAULT
