"""The rendered filter: instruction by instruction against the policy, and in a real bwrap against this kernel."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import seccomp

from sealnet.errors import CannotSeal
from sealnet.kernel.seccomp import ARCHITECTURES, INSTRUCTION, render_builder_filter, render_filter
from sealnet.model.syscalls import ABSENT, INSPECTED, LOW_32, ORDINARY, PRIVILEGED, answer, policy

HIGH = 0xDEADBEEF << 32
X32 = 0x40000000
KILL_PROCESS = 0x80000000
MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS
# Calls that architectures as young as arm64 were not given.
OLD = {"chmod", "creat", "mknod", "open"}


def token(machine: str) -> int:
    return int(ARCHITECTURES[machine]) & 0xFFFFFFFF


@cache
def instructions(program: bytes) -> list[tuple[int, int, int, int]]:
    return list(INSTRUCTION.iter_unpack(program))


def verdict(program: bytes, arch: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel would return for one call: 0, an errno, or KILL_PROCESS."""
    return verdict_and_cost(program, arch, number, arguments)[0]


def verdict_and_cost(program: bytes, arch: int, number: int, arguments: tuple[int, ...]) -> tuple[int, int]:
    """And the number of instructions that it takes. The few that occur, after bpf(4)."""
    words = [number & 0xFFFFFFFF, arch, 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
    code = instructions(program)
    accumulator = at = 0
    for cost in itertools.count(1):
        opcode, if_true, if_false, k = code[at]
        at += 1
        match opcode:
            case 0x20:
                accumulator = words[k // 4]
            case 0x54:
                accumulator &= k
            case 0x05:
                at += k
            case 0x15:
                at += if_true if accumulator == k else if_false
            case 0x25:
                at += if_true if accumulator > k else if_false
            case 0x35:
                at += if_true if accumulator >= k else if_false
            case 0x06:
                return KILL_PROCESS if k == KILL_PROCESS else 0 if k == 0x7FFF0000 else k & 0xFFFF, cost
            case _:
                raise AssertionError(f"an instruction that bpf(4) does not have: {opcode:#x}")
    raise AssertionError("no end")


def names_by_number(machine: str) -> dict[int, str]:
    arch = seccomp.Arch(ARCHITECTURES[machine])
    found = {}
    for number in range(600):
        try:
            found[number] = seccomp.resolve_syscall(arch, number).decode()
        except ValueError:
            continue
    return found


@pytest.fixture(params=itertools.product(ARCHITECTURES, (False, True)), ids=lambda p: f"{p[0]}-{'userns' if p[1] else 'sealed'}")
def rendered(request: pytest.FixtureRequest) -> tuple[str, bool, bytes]:
    machine, allow_userns = request.param
    return machine, allow_userns, render_filter(allow_userns=allow_userns, machine=machine)


def test_every_number_is_answered_as_the_policy_says(rendered: tuple[str, bool, bytes]) -> None:
    machine, allow_userns, program = rendered
    asked = policy(allow_userns=allow_userns)
    names = names_by_number(machine)
    assert len(names) > 300

    for number in [*range(600), 0x3FFFFFFF, 0xFFFFFFFF]:
        name = names.get(number, "nothing")
        if name not in asked.inspected:
            assert verdict(program, token(machine), number) == answer(asked, name), name


def test_every_argument_is_answered_as_the_policy_says(rendered: tuple[str, bool, bytes]) -> None:
    machine, allow_userns, program = rendered
    asked = policy(allow_userns=allow_userns)
    numbers = {name: number for number, name in names_by_number(machine).items()}
    assert set(asked.inspected) - set(numbers) == (OLD if machine == "aarch64" else set())

    for name, judged in asked.inspected.items():
        if name not in numbers:
            continue
        tried: list[set[int]] = [set(), set(), set(), set()]
        for check in itertools.chain.from_iterable(rule.checks for rule in judged.rules):
            masked = [1 << bit for bit in range(32) if check.mask != LOW_32 and check.mask >> bit & 1]
            for value in (*check.values, *masked, *(1 << bit for bit in range(0, 32, len(judged.rules))), 0, 40, 0xFFFFFFFF):
                tried[check.argument] |= {value, value ^ 1, value | 0x80000, value | HIGH}
        for arguments in itertools.product(*(sorted(values) or [0] for values in tried)):
            assert verdict(program, token(machine), numbers[name], arguments) == answer(asked, name, arguments), (name, arguments)


def test_an_open_costs_a_few_instructions(rendered: tuple[str, bool, bytes]) -> None:
    machine, _, program = rendered
    numbers = {name: number for number, name in names_by_number(machine).items()}

    for name, making in (("openat", (0, 0, os.O_CREAT, 0o644)), ("open", (0, os.O_CREAT, 0o644))):
        if name in numbers:
            assert verdict_and_cost(program, token(machine), numbers[name], ()) <= (0, 9)
            assert verdict_and_cost(program, token(machine), numbers[name], making) <= (0, 12)


def test_an_entry_point_of_another_architecture_ends_the_process_whatever_the_number(rendered: tuple[str, bool, bytes]) -> None:
    machine, _, program = rendered
    foreign = {int(getattr(seccomp.Arch, name)) & 0xFFFFFFFF for name in ("X86", "X86_64", "ARM", "AARCH64")} - {token(machine)}

    for arch, number in itertools.product(foreign, range(600)):
        assert verdict(program, arch, number, (socket.AF_UNIX,)) == KILL_PROCESS


def test_an_x32_number_ends_the_process() -> None:
    program = render_filter(allow_userns=False, machine="x86_64")

    for number in (*range(600), 0x3FFFFFFE):
        assert verdict(program, token("x86_64"), X32 | number, (socket.AF_UNIX,)) == KILL_PROCESS


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_builder_may_do_all_but_leave_its_network(machine: str) -> None:
    program, own = render_builder_filter(machine), token(machine)
    numbers = {name: number for number, name in names_by_number(machine).items()}
    new_net, vsock = 0x40000000, 40

    refused = {
        ("socket", (vsock, socket.SOCK_STREAM)): errno.EAFNOSUPPORT,
        ("socket", (vsock | HIGH, socket.SOCK_STREAM)): errno.EAFNOSUPPORT,
        ("socket", (socket.AF_PACKET, socket.SOCK_RAW)): errno.EAFNOSUPPORT,
        ("socket", (socket.AF_INET, socket.SOCK_RAW, 1)): errno.EPERM,
        ("io_uring_setup", ()): errno.ENOSYS,
    }
    allowed = [("socket", (socket.AF_INET, socket.SOCK_STREAM)), ("clone", (new_net | 17,)), ("unshare", (new_net,)), ("mount", ())]

    assert {call: verdict(program, own, numbers[call[0]], call[1]) for call in refused} == refused
    assert [verdict(program, own, numbers[name], arguments) for name, arguments in allowed] == [0] * len(allowed)
    for foreign in {int(getattr(seccomp.Arch, name)) & 0xFFFFFFFF for name in ("X86", "X86_64", "ARM", "AARCH64")} - {own}:
        assert verdict(program, foreign, numbers["mount"]) == KILL_PROCESS
    if machine == "x86_64":
        assert verdict(program, own, X32 | numbers["socket"], (vsock, socket.SOCK_STREAM)) == KILL_PROCESS


def test_the_program_is_the_same_in_every_process() -> None:
    render = "import sys; from sealnet.kernel.seccomp import render_filter; sys.stdout.buffer.write(render_filter(allow_userns=False))"

    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run([sys.executable, "-c", render], env=environment, capture_output=True, check=True).stdout == render_filter(
            allow_userns=False
        )


def test_the_program_fits_the_kernel(rendered: tuple[str, bool, bytes]) -> None:
    _, _, program = rendered

    assert 0 < len(instructions(program)) <= MAX_INSTRUCTIONS


def test_every_call_that_this_libseccomp_knows_was_decided_on() -> None:
    known = set(names_by_number("x86_64").values()) | set(names_by_number("aarch64").values())

    assert known - ORDINARY - PRIVILEGED - ABSENT - set(INSPECTED) == set()


def test_a_name_of_the_policy_is_a_call_of_some_architecture() -> None:
    """A misspelt name would be skipped in silence, and its call refused."""
    newer_than_libseccomp = {
        "file_getattr",
        "file_setattr",
        "getxattrat",
        "listmount",
        "listns",
        "listxattrat",
        "lsm_get_self_attr",
        "lsm_list_modules",
    }
    newer_than_libseccomp |= {
        "lsm_set_self_attr",
        "mseal",
        "open_tree_attr",
        "removexattrat",
        "rseq_slice_yield",
        "setxattrat",
        "statmount",
        "uprobe",
        "uretprobe",
    }
    arch = seccomp.Arch(seccomp.Arch.NATIVE)

    unknown = {name for name in ORDINARY | PRIVILEGED | ABSENT | set(INSPECTED) if seccomp.resolve_syscall(arch, name) == -1}
    assert unknown <= newer_than_libseccomp


def test_a_machine_of_another_calling_convention_gets_no_filter() -> None:
    with pytest.raises(CannotSeal, match="s390x"):
        render_filter(allow_userns=False, machine="s390x")


# From here on: real processes under bwrap. Only what the filter does differs between a run and its control.

NOBODY = 65534
SETPRIV = ["setpriv", "--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]
PROBE = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def outcome(call):
    if (child := os.fork()) == 0:
        # As registers: all 64 bits of each argument reach the filter. Text is passed by address.
        words = (ctypes.c_char_p(word.encode("latin-1")) if isinstance(word, str) else ctypes.c_ulong(word) for word in call)
        result = libc.syscall(*words)
        os._exit(0 if result >= 0 else ctypes.get_errno())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps([outcome(call) for call in json.loads(sys.argv[1])]))
"""


def sandbox(
    argv: list[str], *, program: bytes | None, bwrap_args: tuple[str, ...] = (), uid: int = NOBODY
) -> subprocess.CompletedProcess[str]:
    command = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--chdir", "/tmp"]
    for directory in ("/tmp", "/dev/shm"):
        command += ["--perms", "1777", "--tmpfs", directory]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--cap-drop", "ALL"]
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        command += ["--cap-add", capability]
    command += bwrap_args
    read, write = os.pipe()
    with open(read, "rb") as source:
        with open(write, "wb") as sink:
            sink.write(program or b"")
        if program is not None:
            command += ["--seccomp", str(read)]
        return subprocess.run(
            # Without SHELL some programs (tmux) start the shell of the user's entry, and nobody's is nologin.
            [*command, *SETPRIV, f"--reuid={uid}", f"--regid={uid}", "env", "HOME=/tmp", "SHELL=/bin/sh", *argv],
            pass_fds=(source.fileno(),),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def outcomes(calls: list[list[int]], *, program: bytes | None) -> list[int]:
    """For each system call made with exactly these words: 0, its errno, or minus the signal that ended the caller."""
    done = sandbox(["/usr/bin/python3", "-c", PROBE, json.dumps(calls)], program=program)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


Call = list[int | str]


def left_on_host(calls: dict[str, Call], directory: Path, *, program: bytes | None) -> tuple[dict[str, int], set[str]]:
    """The outcome of each call by a uid 0 in this directory of the host, where 9 is open on "fchmod", and what has a set-id bit then."""
    directory.mkdir()
    for name in ("chmod", "fchmod", "fchmodat", "fchmodat2"):
        (directory / name).touch()
    probe = ["bash", "-euc", 'exec 9<fchmod; exec /usr/bin/python3 -c "$@"', "bash", PROBE, json.dumps(list(calls.values()))]
    done = sandbox(probe, program=program, uid=0, bwrap_args=writable(directory))
    assert done.returncode == 0, done.stderr
    return dict(zip(calls, json.loads(done.stdout), strict=True)), set_id(directory)


def writable(directory: Path) -> tuple[str, ...]:
    return ("--bind", str(directory), "/mnt", "--chdir", "/mnt")


def set_id(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID)}


def number(name: str) -> int:
    return int(seccomp.resolve_syscall(seccomp.Arch(seccomp.Arch.NATIVE), name))


@pytest.fixture(scope="module")
def sealed() -> bytes:
    return render_filter(allow_userns=False)


SOCKETS_REFUSED = {
    "vsock": (socket.AF_VSOCK, socket.SOCK_STREAM, 0, errno.EAFNOSUPPORT),
    "packet": (socket.AF_PACKET, socket.SOCK_DGRAM, 0, errno.EAFNOSUPPORT),
    "alg": (socket.AF_ALG, socket.SOCK_SEQPACKET, 0, errno.EAFNOSUPPORT),
    "netfilter netlink": (socket.AF_NETLINK, socket.SOCK_RAW, 12, errno.EPROTONOSUPPORT),
    "sock_diag netlink": (socket.AF_NETLINK, socket.SOCK_RAW, 4, errno.EPROTONOSUPPORT),
    "raw": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP, errno.EPERM),
    "mptcp": (socket.AF_INET, socket.SOCK_STREAM, 262, errno.EPROTONOSUPPORT),
    "udplite": (socket.AF_INET6, socket.SOCK_DGRAM, 136, errno.EPROTONOSUPPORT),
}
SOCKETS_ALLOWED = [
    (socket.AF_UNIX, socket.SOCK_STREAM, 0),
    (socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0),
    (socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, socket.IPPROTO_UDP),
    (socket.AF_NETLINK, socket.SOCK_RAW, 0),
]


@pytest.mark.root
@pytest.mark.tool("bwrap")
@pytest.mark.parametrize("garbage", [0, 1 << 32, HIGH], ids=["clean", "bit 32", "garbage"])
def test_the_kernel_makes_no_other_sockets(sealed: bytes, garbage: int) -> None:
    refused = [[number("socket"), *(word | garbage for word in case[:3])] for case in SOCKETS_REFUSED.values()]
    allowed = [[number("socket"), *(word | garbage for word in case)] for case in SOCKETS_ALLOWED]

    seen = outcomes(refused + allowed, program=sealed)
    without = outcomes(refused + allowed, program=None)

    assert dict(zip(SOCKETS_REFUSED, seen, strict=False)) == {name: case[3] for name, case in SOCKETS_REFUSED.items()}
    assert seen[len(refused) :] == without[len(refused) :] == [0] * len(allowed)
    # The control: this kernel has most of what is refused, and takes the same words for it.
    assert without[: len(refused)].count(0) >= 3


@pytest.mark.root
@pytest.mark.tool("bwrap")
def test_the_kernel_makes_no_namespace(sealed: bytes) -> None:
    clone_newuser = 0x10000000
    calls = [
        [number("clone"), clone_newuser | signal.SIGCHLD, 0, 0, 0, 0],
        [number("clone"), HIGH | clone_newuser | signal.SIGCHLD, 0, 0, 0, 0],
        [number("unshare"), clone_newuser],
    ]

    assert outcomes(calls, program=sealed) == [errno.EPERM] * 3
    assert outcomes(calls, program=None) == [0] * 3
    assert outcomes(calls, program=render_filter(allow_userns=True)) == [0] * 3


@pytest.mark.root
@pytest.mark.tool("bwrap")
def test_the_kernel_unshares_what_is_no_namespace(sealed: bytes) -> None:
    unshare_fs_and_files = 0x600

    assert outcomes([[number("unshare"), unshare_fs_and_files], [number("clone"), signal.SIGCHLD, 0, 0, 0, 0]], program=sealed) == [0, 0]


@pytest.mark.root
@pytest.mark.tool("bwrap")
def test_what_is_left_out_does_not_exist(sealed: bytes) -> None:
    calls = [[number(name), 0, 0, 0, 0, 0] for name in ("io_uring_setup", "clone3", "keyctl", "add_key")]

    assert outcomes(calls, program=sealed) == [errno.ENOSYS] * len(calls)
    assert errno.ENOSYS not in outcomes(calls, program=None)


@pytest.mark.root
@pytest.mark.tool("bwrap")
def test_privileged_calls_are_refused_even_where_the_kernel_would_look_at_them(sealed: bytes) -> None:
    calls = [[number(name), 0, 0, 0, 0, 0] for name in ("bpf", "userfaultfd", "kcmp", "get_mempolicy", "perf_event_open", "mount", "setns")]

    assert outcomes(calls, program=sealed) == [errno.EPERM] * len(calls)
    assert set(outcomes(calls, program=None)) - {errno.EPERM}


@pytest.mark.root
@pytest.mark.tool("bwrap")
def test_nothing_is_typed_into_a_terminal(sealed: bytes) -> None:
    tell = f"""
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ioctl.argtypes = [ctypes.c_ulong, ctypes.c_ulong, ctypes.c_char_p]
os.setsid()
terminal = os.open(os.ttyname(os.openpty()[1]), os.O_RDWR)
def ask(request): return 0 if libc.ioctl(terminal, request, b"x" * 64) == 0 else ctypes.get_errno()
print(json.dumps([ask({termios.TIOCSTI}), ask({termios.TIOCSTI | HIGH}), ask({termios.TIOCSETD}), ask({termios.TCGETS | HIGH})]))
"""

    seen = sandbox(["/usr/bin/python3", "-c", tell], program=sealed)
    without = sandbox(["/usr/bin/python3", "-c", tell], program=None)

    assert json.loads(seen.stdout) == [errno.EPERM, errno.EPERM, errno.EPERM, 0], seen.stderr
    # EIO where the kernel itself has TIOCSTI off (dev.tty.legacy_tiocsti).
    assert json.loads(without.stdout)[:2] in ([0, 0], [errno.EIO, errno.EIO]), without.stderr


HERE = -100  # AT_FDCWD
NEW = os.O_CREAT | os.O_WRONLY


def calls_with_mode(mode: int, garbage: int) -> dict[str, Call]:
    """By the name of what it changes or makes, the call; of those that this architecture has."""
    mode |= garbage
    calls: dict[str, tuple[str, Call]] = {
        "chmod": ("chmod", ["chmod", mode]),
        "fchmod": ("fchmod", [9 | garbage, mode]),
        "fchmodat": ("fchmodat", [HERE, "fchmodat", mode]),
        "fchmodat2": ("fchmodat2", [HERE, "fchmodat2", mode, 0]),
        "creat": ("creat", ["creat", mode]),
        "open": ("open", ["open", NEW | garbage, mode]),
        "openat": ("openat", [HERE, "openat", NEW | garbage, mode]),
        "unnamed": ("openat", [HERE, ".", os.O_TMPFILE | os.O_WRONLY | garbage, mode]),
        "mknod": ("mknod", ["mknod", mode | stat.S_IFREG, 0]),
        "mknodat": ("mknodat", [HERE, "mknodat", mode | stat.S_IFREG, 0]),
    }
    return {name: [number(call), *words] for name, (call, words) in calls.items() if number(call) >= 0}


@pytest.mark.root
@pytest.mark.tool("bwrap")
@pytest.mark.parametrize("garbage", [0, 1 << 32, HIGH], ids=["clean", "bit 32", "garbage"])
@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6777], ids=oct)
def test_the_kernel_sets_no_id(sealed: bytes, tmp_path: Path, mode: int, garbage: int) -> None:
    calls = calls_with_mode(mode, garbage)

    seen, left = left_on_host(calls, tmp_path / "sealed", program=sealed)
    without, control = left_on_host(calls, tmp_path / "control", program=None)

    assert seen == dict.fromkeys(calls, errno.EPERM)
    assert left == set()
    # Linux 6.6 brought fchmodat2.
    new = {name for name in ("fchmodat2",) if without.get(name) == errno.ENOSYS}
    assert {name: outcome for name, outcome in without.items() if name not in new} == dict.fromkeys(set(calls) - new, 0)
    assert control == set(calls) - new - {"unnamed"}


@pytest.mark.root
@pytest.mark.tool("bwrap")
@pytest.mark.parametrize("garbage", [0, HIGH], ids=["clean", "garbage"])
def test_the_kernel_takes_every_other_mode(sealed: bytes, tmp_path: Path, garbage: int) -> None:
    calls = calls_with_mode(0o1755, garbage)
    stale = 0o6777 | garbage
    opens: dict[str, Call] = {
        "file": [number("openat"), HERE, "chmod", os.O_RDWR | os.O_CLOEXEC | garbage, stale],
        "directory": [number("openat"), HERE, ".", os.O_DIRECTORY | garbage, stale],
        "path": [number("openat"), HERE, ".", os.O_PATH | garbage, stale],
    }

    seen, _ = left_on_host(calls | opens, tmp_path / "sealed", program=sealed)
    without, _ = left_on_host(calls | opens, tmp_path / "control", program=None)

    assert seen == without
    assert set(seen.values()) - ({errno.ENOSYS} if seen.get("fchmodat2") else set()) == {0}


@pytest.mark.root
@pytest.mark.tool("bwrap")
def test_openat2_does_not_exist(sealed: bytes, tmp_path: Path) -> None:
    how = struct.pack("=QQQ", NEW, 0o4755, 0).decode("latin-1")
    calls: dict[str, Call] = {"openat2": [number("openat2"), HERE, "openat2", how, len(how)]}

    assert left_on_host(calls, tmp_path / "sealed", program=sealed) == ({"openat2": errno.ENOSYS}, set())
    assert left_on_host(calls, tmp_path / "control", program=None) == ({"openat2": 0}, {"openat2"})


@pytest.mark.root
@pytest.mark.tool("bwrap")
@pytest.mark.tool("git")
@pytest.mark.parametrize(
    "command",
    [
        "chmod u+s file",
        "install -m 4755 /usr/bin/env file",
        "cp -p /usr/bin/passwd .",
        "tar cf - -C /usr/bin passwd | tar xf -",
        "mkdir d; chmod g+s d",
        "git init -q --shared r",
        "perl -e 'umask 0; use Fcntl; sysopen F, q(new), O_CREAT | O_WRONLY, 04755 or exit 1'",
    ],
)
@pytest.mark.parametrize("allow_userns", [False, True])
def test_no_program_of_uid_0_leaves_a_set_id_bit(tmp_path: Path, command: str, allow_userns: bool) -> None:
    for name in ("sealed", "control"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()

    argv = ["bash", "-eu", "-o", "pipefail", "-c", command]
    program = render_filter(allow_userns=allow_userns)
    refused = sandbox(argv, program=program, uid=0, bwrap_args=writable(tmp_path / "sealed"))
    control = sandbox(argv, program=None, uid=0, bwrap_args=writable(tmp_path / "control"))

    assert refused.returncode != 0
    assert set_id(tmp_path / "sealed") == set()
    assert control.returncode == 0, control.stderr
    assert set_id(tmp_path / "control")


INT_0X80 = """
import ctypes, mmap, sys
# push %rbx; mov $number, %eax; mov $argument, %ebx; int $0x80; pop %rbx; ret
code = b"\\x53\\xb8" + int(sys.argv[1]).to_bytes(4, "little") + b"\\xbb" + int(sys.argv[2]).to_bytes(4, "little") + b"\\xcd\\x80\\x5b\\xc3"
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""


# Not skipped elsewhere: these entry points are x86's.
if os.uname().machine == "x86_64":

    @pytest.mark.root
    @pytest.mark.tool("bwrap")
    @pytest.mark.parametrize("call", [(20, 0), (41, 1)], ids=["getpid", "dup, whose number is that of a 64-bit socket(AF_UNIX)"])
    def test_a_32_bit_call_ends_the_process(sealed: bytes, call: tuple[int, int]) -> None:
        argv = ["/usr/bin/python3", "-c", INT_0X80, *map(str, call)]

        seen = sandbox(argv, program=sealed)
        without = sandbox(argv, program=None)

        if without.returncode == 128 + signal.SIGSEGV:  # A kernel without 32-bit entry point.
            assert seen.returncode == without.returncode
        else:
            assert int(without.stdout) > 0
            assert (seen.returncode, seen.stdout) == (128 + signal.SIGSYS, "")

    @pytest.mark.root
    @pytest.mark.tool("bwrap")
    def test_an_x32_call_ends_the_process(sealed: bytes) -> None:
        calls = [[X32 | number("getpid")], [X32 | number("socket"), socket.AF_UNIX, socket.SOCK_STREAM, 0]]

        assert outcomes(calls, program=sealed) == [-signal.SIGSYS] * 2
        assert set(outcomes(calls, program=None)) <= {0, errno.ENOSYS}


def script(text: str) -> list[str]:
    return ["bash", "-euc", text]


JAVA = """
class Hello {
    public static void main(String[] words) throws Exception {
        Thread thread = new Thread(() -> System.out.println("done"));
        thread.start();
        thread.join();
    }
}
"""
POOL = """
import multiprocessing, subprocess, threading
def run(word): print(subprocess.run(["echo", word], capture_output=True, text=True).stdout)
with multiprocessing.get_context("fork").Pool(2) as pool: word, = pool.map(str, ["done"])
thread = threading.Thread(target=run, args=(word,)); thread.start(); thread.join()
"""
TALK = """
import asyncio, sys
async def echo(reader, writer):
    writer.write(await reader.read(100)); writer.close()
async def main():
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await child.communicate(b"x"))[0] == b"x"
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"done"); writer.write_eof()
    print((await reader.read()).decode())
asyncio.run(main())
"""
TEMPORARY = """
import os, shutil, tempfile
with tempfile.TemporaryFile() as unnamed, tempfile.NamedTemporaryFile() as named, tempfile.TemporaryDirectory(dir=".") as directory:
    shutil.copy2(named.name, directory); os.makedirs(directory + "/a/b", mode=0o1770); os.mkfifo(directory + "/fifo")
print("done")
"""
WHEEL = """
import zipfile
with zipfile.ZipFile("a-1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("a.py", "print('done')")
    wheel.writestr("a-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: a\\nVersion: 1\\n")
    wheel.writestr("a-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr("a-1.dist-info/entry_points.txt", "[console_scripts]\\na = a:__name__\\n")
    wheel.writestr("a-1.dist-info/RECORD", "")
"""
FORK = """
const { fork } = require("child_process"), { Worker } = require("worker_threads");
if (process.send) { process.send("done"); process.disconnect(); }
else fork("/tmp/fork.js").on("message", said => new Worker("", { eval: true }).on("exit", () => console.log(said)));
"""
PROGRAMS = {
    "setpriv": script(
        "grep -q '^Seccomp:.2' /proc/self/status; grep -q '^CapBnd:.0*$' /proc/self/status; grep -q '^CapEff:.0*$' /proc/self/status;"
        "echo done"
    ),
    "python multiprocessing": ["/usr/bin/python3", "-c", POOL],
    "python asyncio": ["/usr/bin/python3", "-c", TALK],
    "python tempfile": ["/usr/bin/python3", "-c", TEMPORARY],
    "pip": script(
        f"cat > w.py <<'END'{WHEEL}END\n/usr/bin/python3 w.py; /usr/bin/python3 -m venv --without-pip v;"
        "/usr/bin/python3 -m pip install -q --no-index --target t ./a-1-py3-none-any.whl; test -x t/bin/a;"
        "PYTHONPATH=t v/bin/python -m a"
    ),
    "node": script(f"cat > fork.js <<'END'{FORK}END\nnode fork.js"),
    "git": script(
        "git init -q r; cd r; echo x > f; git add f; git -c user.name=n -c user.email=e commit -qm m; git status; git gc -q;"
        "git clone -q . ../c; echo done"
    ),
    "ssh": script("ssh -V; ssh-keygen -q -t ed25519 -N '' -f k; echo done"),
    "job control": script(
        "set -m; sleep 60 & kill -STOP %1; kill -CONT %1; kill %1; wait %1 || true; (exit 3) | cat; timeout 5 true; echo done"
    ),
    "gcc": script("echo 'int main(void) { return 7; }' > a.c; gcc -O2 -o a a.c; ./a && exit 1 || test $? = 7; echo done"),
    "java": script(f"cat > Hello.java <<'END'{JAVA}END\njava Hello.java"),
    "strace": script("strace -f -o t sh -c 'true; true'; grep -q execve t; echo done"),
    "gdb": script("gdb -batch -ex starti -ex stepi -ex 'info registers pc' -ex continue --args /bin/echo done"),
    "perl": ["perl", "-e", 'if (fork) { wait; print "done\n" }'],
    "ip": script("ip -o addr show dev lo; ip route; echo done"),
    "sqlite": script("sqlite3 d 'pragma journal_mode = wal; create table t (x); insert into t values (1);'; sqlite3 d vacuum; echo done"),
    "dpkg-deb": script(
        "mkdir -p p/DEBIAN p/usr/bin; echo true > p/usr/bin/a; chmod 755 p p/* p/usr/bin p/usr/bin/a;"
        "printf 'Package: a\\nVersion: 1\\nArchitecture: all\\nMaintainer: a\\nDescription: a\\n' > p/DEBIAN/control;"
        "dpkg-deb -b p a.deb; dpkg-deb -x a.deb x; x/usr/bin/a; echo done"
    ),
    "copies": script(
        "cp -p /etc/hosts h; cp /usr/bin/passwd plain; install -m 755 /usr/bin/passwd p; install -d -m 1777 d/e; mkdir m t; mkfifo f;"
        "cp -a d m; chmod -R u=rwX,go= d; tar cpf - h p d m | tar xpf - -C t;"
        "test \"$(stat -c %a t/d/e t/m/d/e t/p plain | xargs)\" = '700 1777 755 755'; echo done"
    ),
    "apt": script("apt-get --version; apt-cache policy bash; dpkg -l bash; echo done"),
    "tmux": script("tmux -L s new-session -d 'tmux -L s wait-for -S up; cat'; tmux -L s wait-for up; tmux -L s kill-server; echo done"),
    "tools": script(
        "seq 9 | xargs -P 4 -n 1 true; tar cf - /etc/hosts | tar tf -; cp -a /etc/hosts h;"
        "sort --parallel 2 h; setarch --uname-2.6 true; echo done"
    ),
}
NEEDS = {
    "python multiprocessing": "python3",
    "python asyncio": "python3",
    "python tempfile": "python3",
    "sqlite": "sqlite3",
    "copies": "tar",
    "pip": "pip3",
    "job control": "bash",
    "apt": "apt-get",
    "tools": "tar",
}


# Large, and tried only where they are installed anyway.
OPTIONAL = {"gdb", "java"}
TRIED = [name for name in PROGRAMS if name not in OPTIONAL or shutil.which(name)]


@pytest.mark.root
@pytest.mark.tool("bwrap")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.tool(NEEDS.get(name, name))) for name in TRIED])
@pytest.mark.parametrize("uid", [NOBODY, 0])
def test_an_ordinary_program_works(sealed: bytes, name: str, uid: int) -> None:
    done = sandbox(PROGRAMS[name], program=sealed, uid=uid)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout, done.stdout + done.stderr


@pytest.mark.root
@pytest.mark.tool("bwrap")
def test_a_sandbox_inside_the_sandbox_needs_leave() -> None:
    nested = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--dev-bind", "/", "/", "--tmpfs", "/mnt", "echo", "done"]

    assert sandbox(nested, program=render_filter(allow_userns=True)).stdout == "done\n"
    assert sandbox(nested, program=None).stdout == "done\n"
    refused = sandbox(nested, program=render_filter(allow_userns=False))
    assert (refused.returncode, refused.stdout) == (1, "")


# Tells what becomes of a way to a daemon's socket: one end of a pair, connected again.
_PAIRS = """
import errno, socket, sys
from sealnet.kernel import identity, seccomp
from sealnet.model.plan import User

if sys.argv[1] == "door":
    user = User(name="door", uid=65533, gid=65533, groups=(), home="/", shell="/bin/false")
    identity.assume(user, seccomp.render_door_filter(), outlives_starter=True)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    try:
        end, _other = socket.socketpair(socket.AF_UNIX, kind)
        end.connect(f"\\0{sys.argv[2]}.{int(kind)}")
        print("connected")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


@pytest.mark.root
def test_a_door_reaches_no_daemon_by_one_end_of_a_pair() -> None:
    name, told = f"sealnet-test-{os.getpid()}", {}
    with ExitStack() as daemons:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            daemon = daemons.enter_context(socket.socket(socket.AF_UNIX, kind))
            # An abstract one is open to everybody.
            daemon.bind(f"\0{name}.{int(kind)}")
            if kind != socket.SOCK_DGRAM:
                daemon.listen()

        for who in ("root", "door"):
            done = subprocess.run([sys.executable, "-I", "-c", _PAIRS, who, name], capture_output=True, text=True, check=True, timeout=30)
            told[who] = done.stdout.split()

    assert told["root"] == ["EISCONN", "connected", "EISCONN"]
    assert told["door"] == ["EISCONN", "EAFNOSUPPORT", "EAFNOSUPPORT"]
