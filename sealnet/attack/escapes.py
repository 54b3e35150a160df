"""What the payload tries: a program of its own, run in the sandbox (and outside, as the control) with nothing but the standard library.

Reads a JSON list of [name, way, arguments...] from standard input, prints one JSON object a line: {name, got, code, ms}. `code` is `ok`
where something answered or the deed was done, `sent` where only the other end can tell, the errno's name where the kernel refused, and
`bug` where this program is wrong. No deed leaves anything: a child does it, or it is undone, or a file is only opened for writing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import http.client
import json
import os
import pty
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

_ANSWER_S, _TIMEOUT_S = 3.0, 0.5
_SENT, _BROKEN = "sent", 255
# Documentation addresses (RFC 5737, RFC 3849).
_ADDRESS, _NETWORK = "192.0.2.77", "203.0.113.0"

# By architecture; the same number everywhere from 424 on.
_X86 = {"clone": 56, "bpf": 321, "perf_event_open": 298, "keyctl": 250, "open_by_handle_at": 304, "userfaultfd": 323}
_ARM = {"clone": 220, "bpf": 280, "perf_event_open": 241, "keyctl": 219, "open_by_handle_at": 265, "userfaultfd": 282}
_NUMBERS = {
    **(_ARM if os.uname().machine == "aarch64" else _X86),
    "io_uring_setup": 425,
    "fsopen": 430,
    "pidfd_open": 434,
    "clone3": 435,
    "pidfd_getfd": 438,
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _syscall(name: str, *arguments: Any) -> int:
    words = (word if isinstance(word, (bytes, ctypes.Array)) else ctypes.c_long(word) for word in arguments)
    return _check(int(_libc.syscall(ctypes.c_long(_NUMBERS[name]), *words)))


def _got_fd(name: str, *arguments: Any) -> str:
    os.close(_syscall(name, *arguments))
    return "got a descriptor"


def _in_child(deed: Callable[..., str]) -> Callable[..., str]:
    """For what would change this process: done in a child, whose errno is ours."""

    @wraps(deed)
    def done(*arguments: Any) -> str:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = _BROKEN
            try:
                os.write(write, deed(*arguments).encode())
                status = 0
            except OSError as error:
                status = error.errno or _BROKEN
            finally:
                os._exit(status)
        os.close(write)
        with open(read, encoding="utf-8") as pipe:
            told = pipe.read()
        _raise_status(pid)
        return told

    return done


def _raise_status(pid: int) -> None:
    """The errno that a child ended with; another end of it is this program's fault and no refusal."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0 or status == _BROKEN:
        raise RuntimeError(f"a child of the attempt ended with {status}")
    if status:
        raise OSError(status, os.strerror(status))


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """A directory to try something in. That there is none is no refusal of what is tried."""
    try:
        place = tempfile.mkdtemp()
    except OSError as error:
        raise RuntimeError(f"no scratch directory: {error.strerror}") from error
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


# Connections


def _http(address: str, port: int) -> str:
    connection = http.client.HTTPConnection(address, port, timeout=_ANSWER_S)
    connection.request("GET", "/")
    answer = connection.getresponse()
    if answer.status != 200:
        raise OSError(errno.EPROTO, f"{answer.status} {answer.reason}")
    return f"{answer.status} {answer.reason}"


def _target(address: str, port: int) -> tuple[Any, Any]:
    """The family and address of a numeric address, `%link` included."""
    family, _kind, _protocol, _name, target = socket.getaddrinfo(address, port, flags=socket.AI_NUMERICHOST)[0]
    return family, target


def _set_options(sock: socket.socket, options: dict[str, Any]) -> None:
    if device := options.get("device"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    if options.get("foreign"):
        sock.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT: the one option with which a foreign source address is really sent.
    if source := options.get("source"):
        sock.bind((source, 0))
    if options.get("broadcast"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    if interface := options.get("interface"):
        sock.setsockopt(socket.SOL_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))


def _tcp(address: str, port: int, **options: Any) -> str:
    family, target = _target(address, port)
    with socket.socket(family, socket.SOCK_STREAM, options.get("protocol", 0)) as sock:
        sock.settimeout(_TIMEOUT_S)
        _set_options(sock, options)
        sock.connect(target)
    return "connected"


def _udp(address: str, port: int, token: str, **options: Any) -> str:
    family, target = _target(address, port)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        _set_options(sock, options)
        sock.sendto(token.encode(), target)
    return _SENT


def _ping(address: str, kind: int, token: str) -> str:
    """An ICMP echo request, by a ping or a raw socket."""
    packet = b"\x08\0\0\0\0\0\0\1" + token.encode() + bytes(len(token) % 2)
    total = sum(struct.unpack(f"!{len(packet) // 2}H", packet))
    total = (total >> 16) + (total & 0xFFFF)
    packet = packet[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + packet[4:]
    with socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP) as sock:
        sock.sendto(packet, (address, 0))
    return _SENT


def _name(name: str) -> str:
    return str(socket.getaddrinfo(name, 443)[0][4][0])


def _unix(*paths: str) -> str:
    """The first of these sockets that answers."""
    refused: OSError | None = None
    for path in paths:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(_TIMEOUT_S)
                sock.connect("\0" + path[1:] if path.startswith("@") else path)
            return f"connected to {path}"
        except OSError as error:
            refused = error
    raise refused or OSError(errno.ENOENT, os.strerror(errno.ENOENT))


def _socket(family: int, kind: int, protocol: int) -> str:
    with socket.socket(family, kind, protocol):
        return "got the socket"


# The own network namespace


def _netlink(protocol: int, message: bytes) -> None:
    """Send one request (or batch) and raise what the kernel answers."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.send(message)
        code = -int(struct.unpack_from("=i", sock.recv(65536), 16)[0])
    if code:
        raise OSError(code, os.strerror(code))


def _request(kind: int, flags: int, body: bytes, sequence: int = 1) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def _set_link() -> str:
    """RTM_NEWLINK: lo up, which is what the deeds after this need where they are allowed."""
    _netlink(0, _request(16, 5, struct.pack("=BxHiII", 0, 0, 1, 1, 1)))
    return "set lo up"


def _add_address() -> str:
    """RTM_NEWADDR on lo."""
    address = socket.inet_aton(_ADDRESS)
    _netlink(0, _request(20, 0x605, struct.pack("=BBBBI", 2, 32, 0, 0, 1) + _attribute(1, address) + _attribute(2, address)))
    return f"added {_ADDRESS}"


def _add_route() -> str:
    """RTM_NEWROUTE over lo, in the main table."""
    body = struct.pack("=BBBBBBBBI", 2, 24, 0, 0, 254, 4, 253, 1, 0)
    _netlink(0, _request(24, 0x605, body + _attribute(1, socket.inet_aton(_NETWORK)) + _attribute(4, struct.pack("=I", 1))))
    return f"added a route to {_NETWORK}/24"


def _add_table() -> str:
    """NFT_MSG_NEWTABLE in a batch: who may add a table may delete the filter's."""
    table = struct.pack("!BBH", 1, 0, 0) + _attribute(1, b"sealnet-attack\0")
    batch = struct.pack("!BBH", 0, 0, 10)
    _netlink(12, _request(16, 1, batch) + _request(10 << 8, 0x405, table, 2) + _request(17, 1, batch, 3))
    return "added an nftables table"


def _add_tun() -> str:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"sealtun0", 0x1001))
    finally:
        os.close(tun)
    return "made a link"


# Namespaces and what belongs to others


@_in_child
def _unshare(flags: int) -> str:
    _check(_libc.unshare(ctypes.c_int(flags)))
    return "made one"


def _end_of(pid: int) -> str:
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "made one"


def _clone(flags: int) -> str:
    return _end_of(_syscall("clone", flags | signal.SIGCHLD, 0, 0, 0, 0))


def _clone3(flags: int) -> str:
    arguments = ctypes.create_string_buffer(struct.pack("=QQQQQQQQ", flags, 0, 0, 0, signal.SIGCHLD, 0, 0, 0))
    return _end_of(_syscall("clone3", arguments, 64))


def _own_pids() -> list[str]:
    return ["self", *filter(str.isdigit, os.listdir("/proc"))]


@_in_child
def _setns(kind: str, flag: int, inode: int) -> str:
    """The namespace of that inode, by any process or name that is to be seen."""
    paths = [f"/proc/{pid}/ns/{kind}" for pid in _own_pids()]
    if kind == "net" and os.path.isdir("/run/netns"):
        paths += [f"/run/netns/{name}" for name in os.listdir("/run/netns")]
    refused = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in paths:
        try:
            if os.stat(path).st_ino == inode:
                fd = os.open(path, os.O_RDONLY)
                if kind == "mnt":
                    # setns(2): not with a root and working directory that are shared.
                    _check(_libc.unshare(ctypes.c_int(0x200)))
                _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flag)))
                return f"joined it by {path}"
        except OSError as error:
            if error.errno != errno.ENOENT:
                refused = error
    raise refused


def _read_elsewhere(path: str, content: str) -> str:
    """A file of the host's by the root, or the working directory, of any process."""
    refused = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for way in (f"/proc/{pid}/{link}" for pid in _own_pids() for link in ("root", "cwd")):
        try:
            with open(way + path, encoding="utf-8") as file:
                if file.read() == content:
                    return f"read by {way}"
        except OSError as error:
            if error.errno == errno.EACCES:
                refused = error
    raise refused


def _same(pid: int, started: int) -> None:
    """Refuse unless the process of that number is the one that was meant, and not one of the sandbox's own."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            found = int(file.read().rpartition(")")[2].split()[19])
    except FileNotFoundError as error:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
    if found != started:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))


def _signal(pid: int, started: int) -> str:
    _same(pid, started)
    os.kill(pid, signal.SIGCONT)
    return "signalled it"


def _trace(pid: int, started: int) -> str:
    """PTRACE_ATTACH and PTRACE_DETACH."""
    _same(pid, started)
    _check(_libc.ptrace(ctypes.c_long(16), ctypes.c_long(pid), None, None))
    os.waitpid(pid, 0)
    _libc.ptrace(ctypes.c_long(17), ctypes.c_long(pid), None, None)
    return "traced it"


def _take_fd(pid: int, started: int) -> str:
    _same(pid, started)
    pidfd = os.pidfd_open(pid)
    try:
        return _got_fd("pidfd_getfd", pidfd, 0, 0)
    finally:
        os.close(pidfd)


def _inherited() -> str:
    """What is open beside the standard streams, the directory that is being read, and a library of this program's own."""
    # libffi 3.5 keeps the file open that it is mapped from.
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps}
    found = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            shown = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        own = ".so" in shown and shown in mapped and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        found += [f"{fd} {shown}"] if fd > 2 and not own else []
    if not found:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return f"has {', '.join(found)}"


# The kernel's own


def _open(path: str, flags: int) -> str:
    """For writing, without writing; what is to be read must have something to read. Masked files are /dev/null, which anybody may open."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3):
            raise OSError(errno.ENODATA, "it is /dev/null")
        if flags == os.O_RDONLY and not os.read(fd, 4096):
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
    finally:
        os.close(fd)
    return "opened it"


@_in_child
def _mount(kind: str, shows: str) -> str:
    """A file system of that kind; `shows` is opened in it for writing."""
    with _scratch() as place:
        _check(_libc.mount(b"none", os.fsencode(place), kind.encode(), ctypes.c_ulong(0), None))
        try:
            return _open(f"{place}/{shows}", os.O_WRONLY) if shows else "mounted it"
        finally:
            _libc.umount2(os.fsencode(place), 2)


@_in_child
def _leave_cgroup() -> str:
    """Move to the topmost cgroup that is to be seen."""
    with open("/sys/fs/cgroup/cgroup.procs", "w", encoding="ascii") as file:
        file.write("0")
    return "moved to the root cgroup"


def _by_handle(directory: str, handle: str) -> str:
    """open_by_handle_at(2), for a file of the host's whose handle was told."""
    at = os.open(directory if os.path.isdir(directory) else "/", os.O_RDONLY)
    try:
        return _got_fd("open_by_handle_at", at, ctypes.create_string_buffer(bytes.fromhex(handle)), os.O_RDONLY)
    finally:
        os.close(at)


def _set_uid() -> str:
    with _scratch() as place:
        path = f"{place}/program"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        os.chmod(path, 0o4755)  # noqa: S103 - whether it may is the question
        if not os.stat(path).st_mode & stat.S_ISUID:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    return "made one"


@_in_child
def _take_capability() -> str:
    """capset(2): CAP_NET_ADMIN, effective and permitted."""
    header, wanted = struct.pack("=Ii", 0x20080522, 0), struct.pack("=IIIIII", 1 << 12, 1 << 12, 0, 0, 0, 0)
    _check(_libc.capset(header, wanted))
    return "has CAP_NET_ADMIN"


def _make_device() -> str:
    """A node of /dev/null's number: who may make that may make any."""
    with _scratch() as place:
        os.mknod(f"{place}/node", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    return "made one"


def _type_into_terminal() -> str:
    """TIOCSTI into a controlling terminal (of our own: what is refused here is refused for the caller's)."""
    try:
        pid, master = pty.fork()
    except OSError as error:
        raise RuntimeError(f"no terminal to try it on: {error.strerror}") from error
    if pid == 0:
        status = 0
        try:
            fcntl.ioctl(0, termios.TIOCSTI, b"x")
        except OSError as error:
            status = error.errno or _BROKEN
        os._exit(status)
    try:
        _raise_status(pid)
    finally:
        os.close(master)
    return "typed into it"


def _keyring() -> str:
    """KEYCTL_GET_KEYRING_ID of the user's own, which belongs to the uid and not to a namespace."""
    return f"has key ring {_syscall('keyctl', 0, -4, 1):x}"


def _bpf() -> str:
    """BPF_MAP_CREATE: an array of one."""
    return _got_fd("bpf", 0, ctypes.create_string_buffer(struct.pack("=IIII", 2, 4, 4, 1), 72), 72)


def _perf() -> str:
    """The software clock of CPU 0, every process's."""
    return _got_fd("perf_event_open", ctypes.create_string_buffer(struct.pack("=IIQ", 1, 112, 0), 112), -1, 0, -1, 0)


def _io_uring() -> str:
    return _got_fd("io_uring_setup", 1, ctypes.create_string_buffer(120))


def _fsopen() -> str:
    return _got_fd("fsopen", ctypes.create_string_buffer(b"tmpfs"), 0)


def _userfaultfd() -> str:
    return _got_fd("userfaultfd", 0)


WAYS: dict[str, Callable[..., str]] = {
    "http": _http,
    "tcp": _tcp,
    "udp": _udp,
    "ping": _ping,
    "name": _name,
    "unix": _unix,
    "socket": _socket,
    "set-link": _set_link,
    "add-address": _add_address,
    "add-route": _add_route,
    "add-table": _add_table,
    "add-tun": _add_tun,
    "unshare": _unshare,
    "clone": _clone,
    "clone3": _clone3,
    "setns": _setns,
    "read-elsewhere": _read_elsewhere,
    "signal": _signal,
    "trace": _trace,
    "take-fd": _take_fd,
    "inherited": _inherited,
    "open": _open,
    "mount": _mount,
    "leave-cgroup": _leave_cgroup,
    "by-handle": _by_handle,
    "set-uid": _set_uid,
    "take-capability": _take_capability,
    "make-device": _make_device,
    "type-into-terminal": _type_into_terminal,
    "keyring": _keyring,
    "bpf": _bpf,
    "perf": _perf,
    "io-uring": _io_uring,
    "fsopen": _fsopen,
    "userfaultfd": _userfaultfd,
}


def attempt(way: str, arguments: list[Any]) -> tuple[str, str]:
    """What one attempt got, in words and as a code."""
    options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    try:
        got = WAYS[way](*arguments, **options)
    except TimeoutError:
        return "no answer", "ETIMEDOUT"
    except OSError as error:
        return error.strerror or str(error), errno.errorcode.get(error.errno or 0, type(error).__name__)
    except Exception as error:  # noqa: BLE001 - a fault of this program must not pass for a refusal, nor keep the other ways from being tried
        return f"{type(error).__name__}: {error}", "bug"
    return got, _SENT if got == _SENT else "ok"


def main() -> None:
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    for name, way, *arguments in json.load(sys.stdin):
        began = time.perf_counter()
        got, code = attempt(way, arguments)
        print(json.dumps({"name": name, "got": got, "code": code, "ms": (time.perf_counter() - began) * 1e3}), flush=True)


if __name__ == "__main__":
    main()
