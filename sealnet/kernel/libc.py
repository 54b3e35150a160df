"""The system calls that Python 3.11 does not wrap: namespaces and mounts, with the kernel's own names."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Sequence

CLONE_FS, CLONE_NEWNS, CLONE_NEWNET = 0x200, 0x0002_0000, 0x4000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
# The same numbers on every architecture.
_FSOPEN, _FSCONFIG, _FSMOUNT, _OPENAT2 = 430, 431, 432, 437
# glibc's own change every thread: (setgroups, setresuid, setresgid).
_IDENTITY = {
    "x86_64": (116, 117, 119),
    **dict.fromkeys(("aarch64", "riscv64", "loongarch64"), (159, 147, 149)),
    "ppc64le": (81, 164, 169),
    "s390x": (206, 208, 210),
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
# What does nothing but set a number: to let other threads run meanwhile, and wait for them, takes longer than that by far.
_at_once = ctypes.PyDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def unshare(flags: int) -> None:
    """unshare(2), for the calling thread alone."""
    _check(_libc.unshare(ctypes.c_int(flags)))


def setns(fd: int, kind: int) -> None:
    """setns(2), for the calling thread alone."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)))


def mount(source: str, target: str, fstype: str | None, flags: int = 0, data: str | None = None) -> None:
    """mount(2)."""
    encoded = [os.fsencode(text) if text is not None else None for text in (source, target, fstype, data)]
    _check(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def open_in_root(root: int, path: str, flags: int) -> int:
    """openat2(2) with `root` for what absolute paths and links mean by `/` (Linux 5.6)."""
    encoded = os.fsencode(path)
    # RESOLVE_NO_MAGICLINKS 0x02, RESOLVE_IN_ROOT 0x10.
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, 0x02 | 0x10)
    fd = _libc.syscall(ctypes.c_long(_OPENAT2), ctypes.c_int(root), encoded, how, ctypes.c_size_t(len(how)))
    _check(fd)
    return int(fd)


def file_system(fd: int) -> int:
    """The magic number of the file system that a file is on: fstatfs(2), whose f_type is a long, on s390x an int."""
    found = ctypes.create_string_buffer(512)
    _check(_libc.fstatfs(ctypes.c_int(fd), found))
    return int(struct.unpack_from("=I" if os.uname().machine == "s390x" else "@l", found)[0])


def set_file_identity(uid: int, gid: int, groups: Sequence[int]) -> None:
    """As whom the calling thread, and no other, opens files: setfsuid(2), setfsgid(2) and the bare setgroups(2).

    The kernel takes CAP_DAC_OVERRIDE and its like away with a uid other than 0, and gives them back with 0.
    """
    _set_groups(groups)
    _libc.setfsgid(ctypes.c_uint(gid))
    _libc.setfsuid(ctypes.c_uint(uid))


def file_identity() -> tuple[int, int]:
    """As whom the calling thread opens files and sockets: (uid, gid)."""
    # No id: what they return is who it is. They tell of no failure.
    nobody = ctypes.c_uint(0xFFFFFFFF)
    return int(_libc.setfsuid(nobody)) & 0xFFFFFFFF, int(_libc.setfsgid(nobody)) & 0xFFFFFFFF


def set_effective_group(gid: int) -> None:
    """Whose group the calling thread, and no other, has."""
    keep = ctypes.c_uint(0xFFFFFFFF)
    _check(_libc.syscall(ctypes.c_long(_identity_calls()[2]), keep, ctypes.c_uint(gid), keep))


def set_effective_identity(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Who the calling thread, and no other, is to everybody that it meets: to files as above, and as the peer of a Unix socket.

    Its real and saved ids stay 0, so that it may come back, and nobody but root may signal or trace it.
    """
    _, setresuid, setresgid = _identity_calls()
    keep = ctypes.c_uint(0xFFFFFFFF)
    if uid == 0:
        _check(_libc.syscall(ctypes.c_long(setresuid), keep, ctypes.c_uint(0), keep))
    _set_groups(groups)
    _check(_libc.syscall(ctypes.c_long(setresgid), keep, ctypes.c_uint(gid), keep))
    _check(_libc.syscall(ctypes.c_long(setresuid), keep, ctypes.c_uint(uid), keep))


def _set_groups(groups: Sequence[int]) -> None:
    numbers = (ctypes.c_uint * max(1, len(groups)))(*groups)
    _check(_libc.syscall(ctypes.c_long(_identity_calls()[0]), ctypes.c_size_t(len(groups)), numbers))


def _identity_calls() -> tuple[int, int, int]:
    numbers = _IDENTITY.get(os.uname().machine)
    if numbers is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return numbers


def open_beneath(directory: int, path: str, flags: int) -> int:
    """openat2(2) that follows no symbolic link and never leaves `directory` (Linux 5.6). Raises OSError: ELOOP for a link on the way."""
    encoded = os.fsencode(path)
    # struct open_how: flags, mode, resolve (RESOLVE_NO_MAGICLINKS 0x02, _NO_SYMLINKS 0x04, _BENEATH 0x08).
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, 0x02 | 0x04 | 0x08)
    fd = _libc.syscall(ctypes.c_long(_OPENAT2), ctypes.c_int(directory), encoded, how, ctypes.c_size_t(len(how)))
    _check(fd)
    return int(fd)


def fsopen(fstype: str) -> int:
    """fsopen(2) (Linux 5.2): a context in which a file system of that type could be set up. ENODEV: there is none."""
    # FSOPEN_CLOEXEC 1.
    fd = _libc.syscall(ctypes.c_long(_FSOPEN), os.fsencode(fstype), ctypes.c_uint(1))
    _check(fd)
    return int(fd)


def detached(fstype: str) -> int:
    """fsmount(2) (Linux 5.2): a new file system of that type, mounted nowhere. It ends when the descriptor is closed."""
    context = fsopen(fstype)
    try:
        # FSCONFIG_CMD_CREATE 6, FSMOUNT_CLOEXEC 1.
        _check(_libc.syscall(ctypes.c_long(_FSCONFIG), ctypes.c_int(context), ctypes.c_uint(6), None, None, ctypes.c_int(0)))
        fd = _libc.syscall(ctypes.c_long(_FSMOUNT), ctypes.c_int(context), ctypes.c_uint(1), ctypes.c_uint(0))
        _check(fd)
        return int(fd)
    finally:
        os.close(context)


def use_one_arena() -> None:
    """mallopt(3), where the C library is glibc: threads that allocate much keep less, and what is free at the top is given back."""
    with contextlib.suppress(AttributeError):
        # M_ARENA_MAX -8, M_TRIM_THRESHOLD -1.
        _libc.mallopt(ctypes.c_int(-8), ctypes.c_int(1))
        _libc.mallopt(ctypes.c_int(-1), ctypes.c_int(1 << 16))


def give_back_memory() -> None:
    """malloc_trim(3), where the C library is glibc: what is free between what is in use."""
    with contextlib.suppress(AttributeError):
        _libc.malloc_trim(ctypes.c_size_t(0))


def socket_option(fd: int, level: int, option: int, buffer: bytearray) -> None:
    """getsockopt(2) with a buffer that also tells what is asked, which Python's own has no room for."""
    raw = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    size = ctypes.c_uint(len(buffer))
    _check(_libc.getsockopt(ctypes.c_int(fd), ctypes.c_int(level), ctypes.c_int(option), raw, ctypes.byref(size)))


def file_handle(path: str) -> bytes:
    """name_to_handle_at(2): what open_by_handle_at takes for `path`."""
    # struct file_handle: bytes (MAX_HANDLE_SZ at most), type, and the handle itself.
    buffer = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 8 + 128)
    mount_id = ctypes.c_int()
    _check(_libc.name_to_handle_at(ctypes.c_int(-100), os.fsencode(path), buffer, ctypes.byref(mount_id), ctypes.c_int(0)))
    return buffer.raw[: 8 + struct.unpack_from("=I", buffer.raw)[0]]


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)))


def prctl(option: int, argument: int, more: int = 0) -> None:
    """prctl(2), for the calling thread."""
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), ctypes.c_ulong(more), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def drop_bounds(last: int) -> None:
    """Empty the calling thread's bounding set, of capabilities 0 to `last`: PR_CAPBSET_DROP, prctl(2)."""
    for number in range(last + 1):
        _check(_at_once.prctl(ctypes.c_int(24), ctypes.c_ulong(number), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def drop_capabilities() -> None:
    """capset(2): permitted, effective and inheritable emptied, and with them ambient."""
    # struct __user_cap_header_struct (version 3, this thread), then two __user_cap_data_structs.
    _check(_libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)))


def ptrace(request: int, pid: int, data: int = 0) -> None:
    """ptrace(2), for the calling thread."""
    _check(_libc.ptrace(ctypes.c_long(request), ctypes.c_int(pid), ctypes.c_void_p(0), ctypes.c_void_p(data)))


def ptrace_event_message(pid: int) -> int:
    """ptrace(2), PTRACE_GETEVENTMSG: the new process's pid after a fork."""
    message = ctypes.c_ulong()
    _check(_libc.ptrace(ctypes.c_long(0x4201), ctypes.c_int(pid), ctypes.c_void_p(0), ctypes.byref(message)))
    return int(message.value)
