"""Which of the kernel's change notifications concern a run: pure judgement of their bytes, and the same as a filter in the kernel.

Sources: include/uapi/linux/{rtnetlink,if_link,if_addr,netconf,filter}.h, linux/netfilter/nf_tables.h. rtnetlink tells one message a
datagram; nf_tables batches those of one transaction, so of a datagram with several messages the filter can judge none.
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address
from typing import NamedTuple

from sealnet.kernel import netlink
from sealnet.model import ruleset
from sealnet.model.plan import Seal

_NFPROTO_INET, _SUBSYSTEM = 1, 10
_NEWSETELEM, _DELSETELEM = 12, 14
# The attribute with the table's name is the first of every message but NFT_MSG_NEWGEN: 1 in NFTA_TABLE_, _CHAIN_, _RULE_, _SET_, ...
_TABLE = netlink.attribute(1, ruleset.TABLE)
_AF_INET = 2
_BLOCK_BITS = 30
# A filter is at most 4096 instructions (BPF_MAXINSNS): each range takes four, of links and of subnets.
_MOST_RANGES = 400

_WORD, _HALF, _BYTE, _LENGTH = 0x20, 0x28, 0x30, 0x80
_AND, _SHIFT_LEFT, _ADD_X, _OR_X, _TO_X, _SET_X = 0x54, 0x64, 0x0C, 0x4C, 0x07, 0x01
_JUMP, _EQUAL, _EQUAL_X, _ABOVE, _AT_LEAST, _RETURN = 0x05, 0x15, 0x1D, 0x25, 0x35, 0x06
_KEEP, _DROP = (_RETURN, 0, 0, 0xFFFF_FFFF), (_RETURN, 0, 0, 0)

Instruction = tuple[int, int, int, int]
EVERYTHING: list[Instruction] = [_KEEP]


class Watched(NamedTuple):
    """What tells that a notification of the host's namespace is about a run: its link, its subnet (as a number), its gateway."""

    run_id: str
    ifname: str
    ifindex: int
    subnet: int

    @classmethod
    def of(cls, seal: Seal, ifindex: int) -> Watched:
        if seal.subnet is None:
            raise ValueError("a severed run has nothing on the host")
        return cls(seal.run_id, seal.ifname, ifindex, int(seal.subnet.network_address))


class Watchlist:
    """The runs whose notifications are looked for."""

    def __init__(self, runs: Iterable[Watched] = ()) -> None:
        # By subnet.
        self.runs: list[Watched] = []
        self._by_id: dict[str, Watched] = {}
        self._by_index: dict[int, str] = {}
        self._by_key: dict[bytes, str] = {}
        for run in runs:
            self.add(run)

    def add(self, run: Watched) -> None:
        self.remove(run.run_id)
        insort(self.runs, run, key=_subnet)
        self._by_id[run.run_id] = run
        self._by_index[run.ifindex] = run.run_id
        self._by_key |= dict.fromkeys(_keys(run), run.run_id)

    def remove(self, run_id: str) -> None:
        """Succeeds if it is not there."""
        run = self._by_id.pop(run_id, None)
        if run is None:
            return
        self.runs.remove(run)
        self._by_index.pop(run.ifindex, None)
        for key in _keys(run):
            self._by_key.pop(key, None)

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._by_id

    @property
    def all(self) -> frozenset[str]:
        return frozenset(self._by_id)

    def concerned_by_nft(self, datagram: bytes) -> frozenset[str]:
        """The runs to look at after a datagram of NFNLGRP_NFTABLES.

        Elements concern the runs whose link or gateway they name, once they are gone: a lease that was renewed is added in the same
        transaction. Whatever else happens to the table is about all runs.
        """
        # Somebody else's transaction may be of 100,000 elements.
        if _TABLE not in datagram:
            return frozenset()
        gone: set[str] = set()
        for kind, _flags, _sequence, body in netlink.messages(datagram):
            if kind >> 8 != _SUBSYSTEM or body[:1] != bytes([_NFPROTO_INET]) or body[4 : 4 + len(_TABLE)] != _TABLE:
                continue
            if kind & 0xFF == _DELSETELEM:
                gone |= self._named(body)
            elif kind & 0xFF == _NEWSETELEM:
                gone -= self._named(body)
            else:
                return self.all
        return frozenset(gone)

    def _named(self, body: bytes) -> set[str]:
        """The runs that the elements of a message name."""
        # NFTA_SET_ELEM_LIST_ELEMENTS 3, in each NFTA_SET_ELEM_KEY 1, in that NFTA_DATA_VALUE 1: an interface takes 16 bytes of a key.
        keys = (
            netlink.attributes(netlink.attributes(element, 0).get(1, b""), 0).get(1, b"")
            for element in _each(netlink.attributes(body, 4).get(3, b""))
        )
        found = (self._by_key.get(key if len(key) == 4 else key[:16]) for key in keys)
        return {run_id for run_id in found if run_id is not None}

    def concerned_by_route(self, datagram: bytes) -> frozenset[str]:
        """The runs to look at after a datagram of rtnetlink's: about their links, a route that their addresses match, or any rule."""
        found: set[str] = set()
        for kind, _flags, _sequence, body in netlink.messages(datagram):
            if kind in (netlink.NEWRULE, netlink.DELRULE):
                return self.all
            if kind in (netlink.NEWROUTE, netlink.DELROUTE):
                found |= self._routed(body)
                continue
            # struct ifinfomsg and ifaddrmsg have the index in the same place; a netconfmsg has it in its first attribute.
            offset = 8 if kind in (netlink.NEWNETCONF, netlink.DELNETCONF) else 4
            if len(body) >= offset + 4:
                run_id = self._by_index.get(struct.unpack_from("=I", body, offset)[0])
                found |= {run_id} if run_id is not None else set()
        return frozenset(found)

    def _routed(self, body: bytes) -> set[str]:
        """The runs that have an address in the route's destination."""
        if body[0] != _AF_INET:
            return set()
        bits = body[1]
        # RTA_DST 1; a default route has none.
        first = int.from_bytes(netlink.attributes(body, 12).get(1, bytes(4)), "big")
        low, high = first & ~3, first | 0xFFFF_FFFF >> bits
        return {run.run_id for run in self.runs[bisect_left(self.runs, low, key=_subnet) : bisect_right(self.runs, high, key=_subnet)]}

    def route_filter(self) -> list[Instruction]:
        """Of rtnetlink's datagrams lets pass what `concerned_by_route` may answer to, and little else, with any number of runs.

        Links and subnets are numbered one after the other, so those of a thousand runs are a few ranges.
        """
        indexes = _one_of(ranges(run.ifindex for run in self.runs))
        # In blocks of a /30, for those that lie beside each other to be one range.
        subnets = _one_of(ranges(run.subnet >> 2 for run in self.runs), shift=2)
        # Offsets: nlmsg_type 4, the body 16.
        in_attribute, in_body = _load_word(24), _load_word(20)
        return [
            (_HALF, 0, 0, 4),
            (_EQUAL, 1, 0, _as_loaded_half(netlink.NEWRULE)),
            (_EQUAL, 0, 1, _as_loaded_half(netlink.DELRULE)),
            _KEEP,
            (_EQUAL, 1, 0, _as_loaded_half(netlink.NEWROUTE)),
            (_EQUAL, 0, 1, _as_loaded_half(netlink.DELROUTE)),
            (_JUMP, 0, 0, 3 + len(in_attribute) + len(in_body) + len(indexes)),
            (_EQUAL, 1, 0, _as_loaded_half(netlink.NEWNETCONF)),
            (_EQUAL, 0, 1 + len(in_attribute), _as_loaded_half(netlink.DELNETCONF)),
            *in_attribute,
            (_JUMP, 0, 0, len(in_body)),
            *in_body,
            *indexes,
            # A route broader than a run's own subnet passes; of others RTA_DST is the second attribute, after RTA_TABLE.
            (_BYTE, 0, 0, 17),
            (_AT_LEAST, 1, 0, _BLOCK_BITS),
            _KEEP,
            (_WORD, 0, 0, 40),
            (_AND, 0, 0, 0xFFFF_FFFC),
            *subnets,
        ]


def _subnet(run: Watched) -> int:
    return run.subnet


def _keys(run: Watched) -> list[bytes]:
    """What the elements of the gate's sets begin with: the name of its link, or its gateway."""
    return [run.ifname.encode().ljust(16, b"\0"), IPv4Address(run.subnet + 1).packed]


def nft_filter() -> list[Instruction]:
    """Of nf_tables' datagrams drops those of a single message that is not about sealnet's table."""
    low, high = (0, 1) if sys.byteorder == "little" else (3, 2)
    family, name = 16, 20
    words = struct.unpack(">3I", _TABLE)
    return [
        # The message's own length against the datagram's.
        (_BYTE, 0, 0, high),
        (_SHIFT_LEFT, 0, 0, 8),
        (_TO_X, 0, 0, 0),
        (_BYTE, 0, 0, low),
        (_ADD_X, 0, 0, 0),
        (_TO_X, 0, 0, 0),
        (_LENGTH, 0, 0, 0),
        (_EQUAL_X, 1, 0, 0),
        _KEEP,
        (_BYTE, 0, 0, family),
        (_EQUAL, 0, 6, _NFPROTO_INET),
        (_WORD, 0, 0, name),
        (_EQUAL, 0, 4, words[0]),
        (_WORD, 0, 0, name + 4),
        (_EQUAL, 0, 2, words[1]),
        (_WORD, 0, 0, name + 8),
        (_EQUAL, 1, 0, words[2]),
        _DROP,
        _KEEP,
    ]


def ranges(values: Iterable[int], most: int = _MOST_RANGES) -> list[tuple[int, int]]:
    """At most so many (first, last), in order, that cover the values and as few others as can be."""
    ordered = sorted(set(values))
    if not ordered:
        return []
    # Between two ranges lie the widest gaps.
    gaps = [at for at in range(1, len(ordered)) if ordered[at] > ordered[at - 1] + 1]
    gaps.sort(key=lambda at: ordered[at - 1] - ordered[at])
    cuts = sorted(gaps[: most - 1])
    return [(ordered[begin], ordered[end - 1]) for begin, end in zip([0, *cuts], [*cuts, len(ordered)], strict=True)]


def _one_of(found: Sequence[tuple[int, int]], *, shift: int = 0) -> list[Instruction]:
    # In order, so what is below one and was above those before it is in none. A jump reaches 255 instructions: each has its own returns.
    tests = [
        instruction
        for first, last in found
        for instruction in ((_AT_LEAST, 1, 0, first << shift), _DROP, (_ABOVE, 1, 0, (last + 1 << shift) - 1), _KEEP)
    ]
    return [*tests, _DROP]


def _load_word(offset: int) -> list[Instruction]:
    """A 32-bit number of host order, which a filter would load in network order."""
    if sys.byteorder == "big":
        return [(_WORD, 0, 0, offset)]
    program: list[Instruction] = [(_SET_X, 0, 0, 0)]
    for at in (3, 2, 1):
        program += [(_BYTE, 0, 0, offset + at), (_OR_X, 0, 0, 0), (_SHIFT_LEFT, 0, 0, 8), (_TO_X, 0, 0, 0)]
    return [*program, (_BYTE, 0, 0, offset), (_OR_X, 0, 0, 0)]


def _as_loaded_half(value: int) -> int:
    return int.from_bytes(struct.pack("=H", value), "big")


def _each(elements: bytes) -> Iterator[bytes]:
    """The body of each attribute; netlink.attributes() keeps the last of a kind."""
    offset = 0
    while offset + 4 <= len(elements):
        length = struct.unpack_from("=H", elements, offset)[0]
        if length < 4:
            return
        yield elements[offset + 4 : offset + length]
        offset += (length + 3) & ~3
