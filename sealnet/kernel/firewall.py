"""Who on this host drops a lease's packets: nf_tables' own trace of one more try, or a list of the chains that could.

Sources: include/uapi/linux/netfilter/nf_tables.h, nf_tables_trace.c. The trace is exact, policies included, and changes no verdict.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from sealnet.errors import CannotSeal, KernelRefused
from sealnet.kernel import netlink
from sealnet.kernel.nft import Nft
from sealnet.model import firewall, ruleset
from sealnet.model.firewall import Blame, Dropper

_NETLINK_NETFILTER, _SUBSYSTEM = 12, 10 << 8
_GETCHAIN, _GETRULE, _TRACE = 4, 7, 17
_SOL_NETLINK, _ADD_MEMBERSHIP, _TRACE_GROUP = 270, 1, 9
_RCVBUFFORCE, _ROOM = 33, 4 << 20
_FAMILIES = {1: "inet", 2: "ip"}
_PREROUTING, _INPUT, _OUTPUT = 0, 1, 3
_DROP, _QUEUE = 0, 3
_JUMP, _GOTO = -3, -4
# The legacy iptables' tables of this namespace, one a line.
_LEGACY = Path("/proc/thread-self/net/ip_tables_names")


def blame(ifname: str, port: int, probe: Callable[[], bool]) -> Blame:
    """Why `probe`, which tries the lease of that link once and tells whether it was answered, is not: never an error of its own."""
    try:
        droppers, answered = _trace(ifname, port, probe)
    except CannotSeal:
        # No trace: a kernel before 5.12 has no owned tables, and one that nobody takes away must not be made.
        with contextlib.suppress(KernelRefused):
            return Blame(suspects(), traced=False, legacy=_legacy())
        return Blame((), traced=False, legacy=_legacy())
    return Blame(droppers, traced=True, answered=answered, legacy=_legacy())


def _legacy() -> tuple[str, ...]:
    try:
        return tuple(sorted(set(_LEGACY.read_text(encoding="ascii").split()) & firewall.XT_TABLES))
    except OSError:
        return ()


def _trace(ifname: str, port: int, probe: Callable[[], bool]) -> tuple[tuple[Dropper, ...], bool]:
    nft, table = Nft(), firewall.trace_table(ifname)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER) as listener:
        # A big firewall tells of each packet at a hundred rules.
        listener.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _ROOM)
        listener.bind((0, 0))
        listener.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _TRACE_GROUP)
        nft.apply(firewall.render_trace(ifname, port), f"trace the lease of link {ifname}")
        try:
            answered = probe()
        finally:
            nft.apply(f"delete table inet {table}", f"remove table inet {table}")
        # The kernel told of each packet while it was sent, so all of it is here.
        steps = list(_told(listener))
    # A trace that somebody else asked for is told as well; ours passed our own chain.
    own = {step.packet: step.chain == "answers" for step in steps if step.table == table}
    found = {_dropper(step, answers=own[step.packet]): None for step in steps if step.how and step.packet in own}
    return tuple(sorted(found, key=lambda one: one.answers)), answered


class _Step(NamedTuple):
    """What became of a packet at one rule or policy; `how` is empty where it went on."""

    packet: bytes
    family: str
    table: str
    chain: str
    how: str
    handle: bytes | None


def _told(listener: socket.socket) -> Iterator[_Step]:
    while True:
        try:
            datagram = listener.recv(1 << 16, socket.MSG_DONTWAIT)
        except OSError as error:
            # More was told than there is room for, or others are traced as well: what has room is still to be read.
            if error.errno == errno.ENOBUFS:
                continue
            return
        for kind, _flags, _sequence, body in netlink.messages(datagram):
            if kind == _SUBSYSTEM | _TRACE and body[0] in _FAMILIES:
                # NFTA_TRACE_TABLE 1, _CHAIN 2, _RULE_HANDLE 3, _VERDICT 5 (NFTA_VERDICT_CODE 1), _ID 6, _POLICY 16.
                told = netlink.attributes(body, 4)
                how = ""
                if 16 in told and _number(told[16]) == _DROP:
                    how = "policy"
                elif 5 in told:
                    how = {_DROP: "drop", _QUEUE: "queue"}.get(_number(netlink.attributes(told[5], 0)[1]) & 0xFF, "")
                yield _Step(told.get(6, b""), _FAMILIES[body[0]], _text(told.get(1)), _text(told.get(2)), how, told.get(3))


def _dropper(step: _Step, *, answers: bool) -> Dropper:
    how = step.how
    with netlink.Netlink(_NETLINK_NETFILTER) as nl, contextlib.suppress(KernelRefused):
        family = next(number for number, name in _FAMILIES.items() if name == step.family)
        if how == "drop" and step.handle is not None:
            asked = (netlink.attribute(1, step.table), netlink.attribute(2, step.chain), netlink.attribute(3, step.handle))
            message = netlink.Message(_SUBSYSTEM | _GETRULE, 0, _body(family, *asked), "read a rule")
            rules = [netlink.attributes(reply.body, 4) for reply in nl.exchange([message])]
            if any(_is_reject(name, data) for rule in rules for name, data in _expressions(rule)):
                how = "reject"
        chains = {_text(chain.get(3)) for number, chain in _dump(nl, _GETCHAIN) if (number, _text(chain.get(1))) == (family, step.table)}
        return Dropper(step.family, step.table, step.chain, how, answers, firewall.is_iptables(step.family, step.table, chains))
    return Dropper(step.family, step.table, step.chain, how, answers)


def suspects() -> tuple[Dropper, ...]:
    """Every base chain on a lease's way that could drop: by its policy, or by a rule of its own or of a chain that it leads to."""
    with netlink.Netlink(_NETLINK_NETFILTER) as nl:
        chains = _dump(nl, _GETCHAIN)
        rules = _dump(nl, _GETRULE)
    names: dict[tuple[int, str], set[str]] = {}
    for family, chain in chains:
        names.setdefault((family, _text(chain.get(1))), set()).add(_text(chain.get(3)))
    found = []
    for family, chain in chains:
        table, name = _text(chain.get(1)), _text(chain.get(3))
        # NFTA_CHAIN_HOOK 4 (NFTA_HOOK_HOOKNUM 1), _POLICY 5, _TYPE 7.
        hook = _number(netlink.attributes(chain[4], 0)[1]) if 4 in chain else None
        if hook not in (_PREROUTING, _INPUT, _OUTPUT) or (family, table) == (1, ruleset.TABLE) or _text(chain.get(7)) == "nat":
            continue
        mine = [rule for number, rule in rules if (number, _text(rule.get(1))) == (family, table)]
        how = "policy" if 5 in chain and _number(chain[5]) == _DROP else _verdict(mine, name, names[family, table])
        if how:
            iptables = firewall.is_iptables(_FAMILIES[family], table, names[family, table])
            found.append(Dropper(_FAMILIES[family], table, name, how, hook == _OUTPUT, iptables))
    return tuple(sorted(found, key=lambda one: one.answers))


def _verdict(rules: list[dict[int, bytes]], chain: str, chains: set[str]) -> str:
    """`drop` or `reject` where a rule says so that packets of the chain may come to; one table's rules."""
    waiting, known = [chain], {chain}
    while waiting:
        name = waiting.pop()
        for rule in rules:
            if _text(rule.get(2)) != name:
                continue
            for expression, data in _expressions(rule):
                if _is_reject(expression, data):
                    return "reject"
                # A verdict map leads to any of its table's chains. NFTA_LOOKUP_DREG 3, NFT_REG_VERDICT 0.
                leads = set(chains) if expression == "lookup" and 3 in data and _number(data[3]) == 0 else set()
                if expression == "immediate":
                    # NFTA_IMMEDIATE_DATA 2, NFTA_DATA_VERDICT 2, NFTA_VERDICT_CODE 1, _CHAIN 2.
                    verdict = netlink.attributes(netlink.attributes(data.get(2, b""), 0).get(2, b""), 0)
                    code = struct.unpack(">i", verdict[1])[0] if 1 in verdict else None
                    if code == _DROP:
                        return "drop"
                    leads = {_text(verdict.get(2))} if code in (_JUMP, _GOTO) else leads
                waiting += leads - known
                known |= leads
    return ""


def _body(family: int, *attributes: bytes) -> bytes:
    return struct.pack("=BBH", family, 0, 0) + b"".join(attributes)


def _dump(nl: netlink.Netlink, kind: int) -> list[tuple[int, dict[int, bytes]]]:
    """(family, attributes) of every chain or rule of the families that see IPv4."""
    datagrams = nl.dump(netlink.Message(_SUBSYSTEM | kind, 0, _body(0), "read the host's nftables"))
    answers = (message for datagram in datagrams for message in netlink.messages(datagram))
    return [(body[0], netlink.attributes(body, 4)) for told, _flags, _seq, body in answers if told >> 8 == 10 and body[0] in _FAMILIES]


def _expressions(rule: dict[int, bytes]) -> Iterator[tuple[str, dict[int, bytes]]]:
    """(name, attributes) of each expression of a rule: NFTA_RULE_EXPRESSIONS 4, a list of NFTA_EXPR_NAME 1 and _DATA 2."""
    listed, offset = rule.get(4, b""), 0
    while offset + 4 <= len(listed):
        length = max(4, struct.unpack_from("=H", listed, offset)[0])
        expression = netlink.attributes(listed[offset + 4 : offset + length], 0)
        yield _text(expression.get(1)), netlink.attributes(expression.get(2, b""), 0)
        offset += (length + 3) & ~3


def _is_reject(name: str, data: dict[int, bytes]) -> bool:
    # iptables-nft keeps REJECT as an xt target: NFTA_TARGET_NAME 1.
    return name == "reject" or (name == "target" and _text(data.get(1)) == "REJECT")


def _text(data: bytes | None) -> str:
    return os.fsdecode((data or b"").rstrip(b"\0"))


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")
