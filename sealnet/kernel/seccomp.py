"""The system call policy as a classic-BPF program, in the form that bwrap's `--seccomp` reads."""

from __future__ import annotations

import os
import struct
from errno import EPERM
from functools import cache

from sealnet.errors import CannotSeal
from sealnet.model import doorcalls
from sealnet.model.plan import User
from sealnet.model.syscalls import ALLOW, BUILDER, DEFAULT, LOW_32, Inspected, Policy, Rule, policy

try:
    import seccomp
except ImportError as e:
    raise CannotSeal(
        "cannot make a system call filter: libseccomp's Python binding is missing", hint="apt-get install python3-seccomp"
    ) from e

# Little-endian, the flags of clone first, open's flags as in asm-generic, no call that hides the arguments of socket in memory.
ARCHITECTURES = {"x86_64": seccomp.Arch.X86_64, "aarch64": seccomp.Arch.AARCH64}

# linux/filter.h and linux/seccomp.h: one instruction, its codes, and where `struct seccomp_data` has its fields.
INSTRUCTION = struct.Struct("=HBBI")
LOAD, AND, JUMP, JUMP_IF_EQUAL, RETURN = 0x20, 0x54, 0x05, 0x15, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000

Code = list[tuple[int, int, int, int]]


@cache  # 3 ms a time, which a worker need not spend on every launch.
def render_filter(*, allow_userns: bool, may_set_gid: bool = False, machine: str | None = None) -> bytes:
    """The program for this machine (or for one named as `uname -m` does). The same bytes every time for one libseccomp.

    libseccomp decides by name. Calls that are judged by argument are decided ahead of it, by code made here: libseccomp promises no order
    among rules that overlap (seccomp/libseccomp#148), and has no way to say "any other value" of the low half of a register.

    Raises `CannotSeal` on an architecture whose calling convention the policy was not written for.
    """
    return _render(policy(allow_userns=allow_userns, may_set_gid=may_set_gid), machine)


def render_door_filter(machine: str | None = None) -> bytes:
    """The program of a door. Raises `CannotSeal` like `render_filter`."""
    return _render(doorcalls.POLICY, machine)


def render_builder_filter(machine: str | None = None) -> bytes:
    """The program of a build's builder and of all its children. Raises `CannotSeal` like `render_filter`."""
    return _render(Policy(frozenset(), frozenset(), BUILDER), machine, otherwise=seccomp.ALLOW)


def _render(wanted: Policy, machine: str | None, *, otherwise: int | None = None) -> bytes:
    machine = machine or os.uname().machine
    if machine not in ARCHITECTURES or (machine == os.uname().machine and not _is_native(ARCHITECTURES[machine])):
        raise CannotSeal(f"cannot render seccomp filter for {machine}: only {', '.join(ARCHITECTURES)} with a 64-bit python are known")
    arch = seccomp.Arch(ARCHITECTURES[machine])

    head: Code = []
    for name in wanted.inspected:
        if (number := _number(arch, name)) is not None:
            judge = _judge(wanted.inspected[name])
            head += [(JUMP_IF_EQUAL, 0, len(judge), number), *judge]
    # Of another architecture the number means another call, so none of the above may answer it.
    token = ARCHITECTURES[machine] & LOW_32
    head = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_IF_EQUAL, 1, 0, token), (JUMP, 0, 0, len(head) + 1), (LOAD, 0, 0, NUMBER), *head]

    return b"".join(INSTRUCTION.pack(*one) for one in head) + _by_name(arch, wanted.allowed, wanted.refused, otherwise)


def filter_for(user: User, *, allow_userns: bool) -> bytes:
    """The program of a payload that runs as `user`."""
    return render_filter(allow_userns=allow_userns, may_set_gid=0 not in (user.uid, user.gid, *user.groups))


def _by_name(arch: seccomp.Arch, allowed: frozenset[str], refused: frozenset[str], otherwise: int | None) -> bytes:
    rules = seccomp.SyscallFilter(seccomp.ERRNO(DEFAULT) if otherwise is None else otherwise)
    if not _is_native(int(arch)):
        rules.remove_arch(seccomp.Arch(seccomp.Arch.NATIVE))
        rules.add_arch(arch)
    # A foreign entry point (int 0x80, x32) ends the process. An errno would keep the seal as well, but a 32-bit program could not even
    # exit: musl's _exit retries for ever.
    rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
    # A binary tree over the numbers, not a list.
    rules.set_attr(seccomp.Attr.CTL_OPTIMIZE, 2)
    for action, names in ((seccomp.ALLOW, allowed), (seccomp.ERRNO(EPERM), refused)):
        for name in sorted(names):
            # A name that this architecture or this libseccomp does not know stays out of the list and gets the default answer.
            if _number(arch, name) is not None:
                rules.add_rule(action, name)
    with open(os.memfd_create("seccomp"), "r+b") as program:
        rules.export_bpf(program)
        program.seek(0)
        return program.read()


def _is_native(token: int) -> bool:
    return bool(seccomp.system_arch() == token & LOW_32)  # The binding gives one signed, the other not.


def _number(arch: seccomp.Arch, name: str) -> int | None:
    number: int = seccomp.resolve_syscall(arch, name)
    return number if number >= 0 else None


def _judge(judged: Inspected) -> Code:
    code = [_return(judged.otherwise)]
    for rule in reversed(judged.rules):
        code = _first(rule) + code
    return code


def _first(rule: Rule) -> Code:
    """Returns the rule's answer if it holds and else falls through. Only the low word of an argument is ever loaded."""
    code = [_return(rule.answer)]
    for check in reversed(rule.checks):
        masked: Code = [] if check.mask == LOW_32 else [(AND, 0, 0, check.mask)]
        last, *others = reversed(check.values)
        equal: Code = [(JUMP_IF_EQUAL, 0, len(code), last)]
        for value in others:
            equal.insert(0, (JUMP_IF_EQUAL, len(equal), 0, value))
        code = [(LOAD, 0, 0, ARGUMENTS + 8 * check.argument), *masked, *equal, *code]
    return code


def _return(answer: int) -> tuple[int, int, int, int]:
    return (RETURN, 0, 0, RET_ALLOW if answer == ALLOW else RET_ERRNO | answer)
