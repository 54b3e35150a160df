"""What nf_tables really holds of one table, read from the kernel itself: a second opinion beside libnftables.

Sources: include/uapi/linux/netfilter/{nfnetlink,nf_tables}.h. A dump of one table's chains and rules costs the same however many
elements its sets have (libnftables 1.0.6 reads all of them: 19 ms at 2,000).
"""

from __future__ import annotations

import errno
import hashlib
import struct
from typing import NamedTuple

from sealnet.errors import KernelRefused
from sealnet.kernel import netlink

_NETLINK_NETFILTER, _SUBSYSTEM = 12, 10 << 8
_NEWCHAIN, _GETCHAIN, _GETRULE, _NEWSETELEM, _GETSETELEM = 3, 4, 7, 12, 13
_NFPROTO_INET = 1
_DROP = 0
# NFTA_SET_ELEM_LIST_ELEMENTS.
_ELEMENTS = 3


class Chain(NamedTuple):
    """A chain as the kernel tells it: `hook`, `priority` and `drops` (the policy) are None for one that is only jumped to."""

    name: str
    hook: int | None
    priority: int | None
    drops: bool | None
    rules: int


class Table(NamedTuple):
    """One table: its chains, and the SHA-256 over chains and rules as the kernel holds them (handles and counters left out)."""

    chains: tuple[Chain, ...]
    sha256: str


def _body(*attributes: bytes) -> bytes:
    return struct.pack("=BBH", _NFPROTO_INET, 0, 0) + b"".join(attributes)


def see_table(nl: netlink.Netlink, name: str) -> Table | None:
    """The `inet` table of that name in the socket's namespace; None if it has no chain at all."""
    # NFTA_CHAIN_TABLE and NFTA_RULE_TABLE are both 1. A kernel that ignores the filter tells of other tables, too.
    table = netlink.attribute(1, name)
    chains = _dump(nl, _GETCHAIN, table, f"read the chains of table inet {name}")
    rules = _dump(nl, _GETRULE, table, f"read the rules of table inet {name}")
    if not chains:
        return None
    digest, seen = hashlib.sha256(), []
    for chain in chains:
        chain_name = chain[3]
        hook = netlink.attributes(chain[4], 0) if 4 in chain else {}
        # NFTA_CHAIN_NAME 3, _HOOK 4 (1 hooknum, 2 priority), _POLICY 5, _TYPE 7.
        policy = chain.get(5)
        expressions = [rule[4] for rule in rules if rule.get(2) == chain_name]
        for part in (chain_name, hook.get(1, b""), hook.get(2, b""), policy or b"", chain.get(7, b""), *expressions):
            digest.update(struct.pack(">I", len(part)) + part)
        seen.append(
            Chain(
                name=chain_name.rstrip(b"\0").decode(),
                hook=struct.unpack(">I", hook[1])[0] if 1 in hook else None,
                priority=struct.unpack(">i", hook[2])[0] if 2 in hook else None,
                drops=struct.unpack(">I", policy)[0] == _DROP if policy else None,
                rules=len(expressions),
            )
        )
    return Table(tuple(seen), digest.hexdigest())


def _dump(nl: netlink.Netlink, kind: int, table: bytes, what: str) -> list[dict[int, bytes]]:
    try:
        datagrams = nl.dump(netlink.Message(_SUBSYSTEM | kind, 0, _body(table), what))
    except KernelRefused as error:
        if error.errno == errno.ENOENT:
            return []
        raise
    found = []
    for datagram in datagrams:
        for message, _flags, _sequence, body in netlink.messages(datagram):
            if message & 0xFF00 == _SUBSYSTEM and body[0] == _NFPROTO_INET:
                attributes = netlink.attributes(body, 4)
                if attributes.get(1) == table[4 : 4 + len(attributes[1])]:
                    found.append(attributes)
    return found


class HostChain(NamedTuple):
    """A chain of anybody's. `hook`, `priority` and `drops` are None for one that is only jumped to; numbers are the kernel's own."""

    family: int
    table: str
    name: str
    kind: str
    hook: int | None
    priority: int | None
    drops: bool | None


def see_chains() -> list[HostChain]:
    """Every chain of every table in the calling thread's namespace, without its rules. For who asks once, not for every run."""
    # NFPROTO_UNSPEC: of all families.
    body = struct.pack("=BBH", 0, 0, 0)
    with netlink.Netlink(_NETLINK_NETFILTER) as nl:
        datagrams = nl.dump(netlink.Message(_SUBSYSTEM | _GETCHAIN, 0, body, "read the chains of this host"))
    found = []
    for datagram in datagrams:
        for message, _flags, _sequence, body in netlink.messages(datagram):
            # What comes beside NFT_MSG_NEWCHAIN is the end of the dump.
            if message != _SUBSYSTEM | _NEWCHAIN:
                continue
            chain = netlink.attributes(body, 4)
            hook = netlink.attributes(chain[4], 0) if 4 in chain else {}
            table, name, kind = (chain.get(attribute, b"").rstrip(b"\0").decode(errors="replace") for attribute in (1, 3, 7))
            found.append(
                HostChain(
                    family=body[0],
                    table=table,
                    name=name,
                    kind=kind,
                    hook=struct.unpack(">I", hook[1])[0] if 1 in hook else None,
                    priority=struct.unpack(">i", hook[2])[0] if 2 in hook else None,
                    drops=struct.unpack(">I", chain[5])[0] == _DROP if 5 in chain else None,
                )
            )
    return found


def connect() -> netlink.Netlink:
    """In the calling thread's namespace. To close it waits for what a deletion has left to do, a grace period of RCU, so it is kept."""
    return netlink.Netlink(_NETLINK_NETFILTER)


def has_element(nl: netlink.Netlink, table: str, name: str, key: bytes) -> bool:
    """Whether a set holds an element of that key, in kernel form: the kernel looks one up, however many there are."""
    # NFTA_SET_ELEM_LIST_TABLE 1, _SET 2; within, NFTA_LIST_ELEM 1, NFTA_SET_ELEM_KEY 1, NFTA_DATA_VALUE 1.
    element = netlink.nested(1, netlink.nested(1, netlink.attribute(1, key)))
    body = _body(netlink.attribute(1, table), netlink.attribute(2, name), netlink.nested(_ELEMENTS, element))
    try:
        replies = nl.exchange([netlink.Message(_SUBSYSTEM | _GETSETELEM, 0, body, f"look into set {name} of table inet {table}")])
    except KernelRefused as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return any(reply.kind == _SUBSYSTEM | _NEWSETELEM and key in reply.body for reply in replies)


def set_mentions(nl: netlink.Netlink, table: str, name: str, data: bytes) -> bool:
    """Whether any element of a set holds these bytes (none: whether it has any); libnftables would list every set of the table."""
    # An empty set is told as an empty list.
    return any(data in body and attributes.get(_ELEMENTS) for body, attributes in _elements(nl, table, name))


def counted(nl: netlink.Netlink, table: str, name: str) -> list[tuple[bytes, int]]:
    """(key, packets) of each element of a set that counts; the key in kernel form. None where there is no such set."""
    found = []
    for _body, attributes in _elements(nl, table, name):
        for element in netlink.listed(attributes.get(_ELEMENTS, b"")):
            told = netlink.attributes(element, 0)
            # NFTA_SET_ELEM_KEY 1, NFTA_DATA_VALUE 1.
            key = netlink.attributes(told.get(1, b""), 0).get(1, b"")
            found.append((key, sum(map(_packets, _expressions(told)))))
    return found


def _expressions(element: dict[int, bytes]) -> list[bytes]:
    # NFTA_SET_ELEM_EXPR 7 is one, NFTA_SET_ELEM_EXPRESSIONS 11 (Linux 5.12) is a list.
    return [element[7]] if 7 in element else netlink.listed(element.get(11, b""))


def _packets(expression: bytes) -> int:
    # NFTA_EXPR_NAME 1, _DATA 2; NFTA_COUNTER_BYTES 1, _PACKETS 2.
    told = netlink.attributes(expression, 0)
    packets = netlink.attributes(told.get(2, b""), 0).get(2, b"") if told.get(1) == b"counter\0" else b""
    return int.from_bytes(packets, "big")


def _elements(nl: netlink.Netlink, table: str, name: str) -> list[tuple[bytes, dict[int, bytes]]]:
    # NFTA_SET_ELEM_LIST_TABLE 1, _SET 2.
    asked = _body(netlink.attribute(1, table), netlink.attribute(2, name))
    try:
        datagrams = nl.dump(netlink.Message(_SUBSYSTEM | _GETSETELEM, 0, asked, f"read set {name} of table inet {table}"))
    except KernelRefused as error:
        if error.errno == errno.ENOENT:
            return []
        raise
    # What comes beside it is the end of the dump.
    return [
        (body, netlink.attributes(body, 4))
        for datagram in datagrams
        for kind, _flags, _sequence, body in netlink.messages(datagram)
        if kind == _SUBSYSTEM | _NEWSETELEM
    ]
