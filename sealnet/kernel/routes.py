"""What the host routes: every IPv4 range in use, the kernel's own route lookup, and the policy rules.

Sources: rtnetlink(7), include/uapi/linux/{rtnetlink,if_addr,fib_rules}.h; the answers of ip(8) are the tests' oracle.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import NamedTuple

from sealnet.errors import CannotSeal, KernelRefused
from sealnet.kernel.netlink import (
    DELADDR,
    DELROUTE,
    GETADDR,
    GETROUTE,
    GETRULE,
    NEWADDR,
    NEWROUTE,
    NEWRULE,
    Message,
    Netlink,
    attribute,
    attributes,
    messages,
    stretches,
)
from sealnet.model.names import LINK_PREFIX
from sealnet.model.subnets import Occupant

RESOLV_CONF = "/etc/resolv.conf"
# What systemd-resolved forwards to when /etc/resolv.conf only names its stub.
UPSTREAMS = "/run/systemd/resolve/resolv.conf"

_RTMSG = struct.Struct("=8BI")
_ROUTE = struct.Struct("=IH 11xB5xBI 2xH4x 2xH4s")
"""Of a nlmsghdr its length and type, of the rtmsg dst_len, type and flags, then the kinds of the first two attributes and what is in the
second: the kernel begins every IPv4 route but a default with RTA_TABLE and RTA_DST."""
_IFADDRMSG = struct.Struct("=4BI")
_IFADDR = struct.Struct("=xBBxI 2xH4s")
"""Of an ifaddrmsg prefixlen, flags and index, and its first attribute, which is IFA_ADDRESS."""
_NEXTHOP = struct.Struct("=HBBi")
_KIND = struct.Struct("=H")
_U32 = struct.Struct("=I")

# struct rtmsg, kinds of routes and attributes (linux/rtnetlink.h).
_KINDS = ("none", "unicast", "local", "broadcast", "anycast", "multicast", "blackhole", "unreachable", "prohibit", "throw", "nat")
_UNICAST = 1
_NULL = frozenset(map(_KINDS.index, ("blackhole", "unreachable", "prohibit", "throw")))
_DST, _SRC, _IIF, _OIF, _GATEWAY, _MULTIPATH, _TABLE, _VIA, _UID, _IP_PROTO, _SPORT, _NH_ID = 1, 2, 3, 4, 5, 9, 15, 18, 25, 27, 28, 30
_LOOKUP_TABLE, _CLONED = 0x1000, 0x200
_TABLES = {253: "default", 254: "main", 255: "local"}

# struct ifaddrmsg (linux/if_addr.h).
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_NOPREFIXROUTE = 0x200

# What begins an address's attribute, as a word: RTA_TABLE and RTA_DST of a route, IFA_ADDRESS of an address.
_ROUTE_SHAPE = {
    7: int.from_bytes(struct.pack("=HH", 8, _TABLE), sys.byteorder),
    9: int.from_bytes(struct.pack("=HH", 8, _DST), sys.byteorder),
}
_ADDRESS_SHAPE = {6: int.from_bytes(struct.pack("=HH", 8, _IFA_ADDRESS), sys.byteorder)}

# struct fib_rule_hdr (linux/fib_rules.h).
_ACTIONS = {1: "lookup", 2: "goto", 3: "nop", 6: "blackhole", 7: "unreachable", 8: "prohibit"}
_FRA_DST, _FRA_SRC, _FRA_IIF, _FRA_GOTO, _FRA_PRIORITY, _FRA_FWMARK, _FRA_SUPPRESS_GROUP, _FRA_SUPPRESS_LENGTH = 1, 2, 3, 4, 6, 10, 13, 14
_FRA_TABLE, _FRA_FWMASK, _FRA_OIF, _FRA_L3MDEV, _FRA_UIDS, _FRA_IP_PROTO, _FRA_SPORTS, _FRA_DPORTS = 15, 16, 17, 19, 20, 22, 23, 24
_LOOKUP, _INVERT = 1, 0x2
_REFUSING = {"blackhole": "EINVAL", "unreachable": "ENETUNREACH", "prohibit": "EACCES"}
_PROTOCOLS: dict[int | None, str] = {1: "icmp", 6: "tcp", 17: "udp"}
_ALL = 0xFFFF_FFFF

# A route broader than this is a default in disguise: VPN clients route 0/1 and 128/1, or everything but the private ranges, piece by piece.
_BROADEST = 8
# Fewer messages than this are looked at one by one.
_STRETCH = 4


def see_taken(
    netlink: Netlink, blocks: frozenset[int] = frozenset(), *, resolv_conf: str | Path = RESOLV_CONF, upstreams: str | Path = UPSTREAMS
) -> list[Occupant]:
    """Every IPv4 range in use on this host: the routes of all tables, the local addresses, the resolvers.

    Tables that no rule refers to count: a VPN client may add its rule later. What lies within one of the runs' `blocks` is that run's own
    link and is left out, so that a thousand runs cost little. The name of a link is looked up when a `why` is shown, by the thread that
    shows it.
    """
    return [*_routes(netlink, blocks), *_addresses(netlink, blocks), *see_resolvers(resolv_conf, upstreams)]


def see_others(netlink: Netlink, blocks: frozenset[int]) -> list[Occupant]:
    """The routes and addresses as `see_taken` tells them, but in a run's block (its /30, by number) only what is of a run's link is left
    out: what somebody else has there counts when that run has gone."""
    return [*_routes(netlink, blocks, is_runs=_is_runs), *_addresses(netlink, blocks, is_runs=_is_runs)]


def see_resolvers(resolv_conf: str | Path = RESOLV_CONF, upstreams: str | Path = UPSTREAMS) -> list[Occupant]:
    return _resolvers(Path(resolv_conf), Path(upstreams))


def _link(index: int) -> str | None:
    """A link's name in the calling thread's namespace; None where it is gone, and with it whatever was of it."""
    with contextlib.suppress(OSError):
        return socket.if_indextoname(index)
    return None


def _is_runs(index: int) -> bool:
    # A null route, or one of several hops, is of no one link (0), and so of no run's.
    return index != 0 and (_link(index) or LINK_PREFIX).startswith(LINK_PREFIX)


def has_changed(kind: int, body: bytes, blocks: frozenset[int], known: Set[tuple[int, int]]) -> bool:
    """Whether a notification makes another answer of `see_others`, which was of the ranges `known`. `blocks` as they are now."""
    is_deletion = kind in (DELROUTE, DELADDR)
    if kind in (NEWROUTE, DELROUTE):
        bits, route, flags = body[1], body[7], _U32.unpack_from(body, 8)[0]
        if bits < _BROADEST or (route in _NULL and bits < 30) or flags & _CLONED:
            return False
        found = attributes(body, _RTMSG.size)
        index = _u32(found.get(_OIF))
    elif kind in (NEWADDR, DELADDR):
        bits, index, found = body[1], _IFADDRMSG.unpack_from(body)[4], attributes(body, _IFADDRMSG.size)
    else:
        return False
    # A null route, or one of several hops, is of no one link.
    name = _link(index) if index else ""
    # RTA_DST and IFA_ADDRESS are both 1; an address whose far end is 0.0.0.0 has none.
    first = int.from_bytes(found.get(_DST, bytes(4)), "big")
    if name is None or (name.startswith(LINK_PREFIX) and bits >= 30 and first >> 2 in blocks):
        return is_deletion and (first & ~(_ALL >> bits), first | _ALL >> bits) in known
    return True


def _routes(netlink: Netlink, blocks: frozenset[int], is_runs: Callable[[int], bool] | None = None) -> list[Occupant]:
    taken: list[Occupant] = []
    unpack, size = _ROUTE.unpack_from, _ROUTE.size
    for datagram in netlink.dump(Message(GETROUTE, 0, _RTMSG.pack(socket.AF_INET, *[0] * 8), "list the routes")):
        # Unrolled, since a host may have 100,000 routes.
        for begin, end in _others(datagram, _ROUTE_SHAPE, frozenset() if is_runs else blocks):
            # What is shorter is NLMSG_DONE or a default.
            if end - begin < size:
                continue
            _length, message, bits, kind, flags, first_attribute, second_attribute, destination = unpack(datagram, begin)
            # A null route as narrow as a run's own would win over it; a broader one loses to it. A cloned one is a cache entry.
            if message == NEWROUTE and bits >= _BROADEST and (kind not in _NULL or bits >= 30) and not flags & _CLONED:
                if first_attribute != _TABLE or second_attribute != _DST:
                    destination = attributes(datagram[begin:end], 16 + _RTMSG.size)[_DST]
                first = int.from_bytes(destination, "big")
                if bits < 30 or first >> 2 not in blocks or (is_runs and not is_runs(_u32(attributes(datagram[begin:end], 28).get(_OIF)))):
                    taken.append(Occupant(first, first | _ALL >> bits, _Route(datagram[begin:end])))
    return taken


def _others(datagram: bytes, shape: Mapping[int, int], blocks: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Where each message of a datagram begins and ends, but those of runs' `blocks`: a thousand runs have 4,000, of a few kinds and
    lengths, so only some words of a stretch of them are looked at.

    Those have the words of `shape` (by place), an address of a block in the word behind the last of these, and a prefix length that is no
    broader than a block.
    """
    place = max(shape) + 1
    for offset, words, width in stretches(datagram):
        length, is_long = 4 * width, len(words) >= _STRETCH * width
        if blocks and is_long and width > place and all(set(words[at::width]) == {word} for at, word in shape.items()):
            # Of an rtmsg and an ifaddrmsg the second byte is the prefix length.
            heads = words[4::width].tolist()
            narrow = {head for head in set(heads) if _U32.pack(head)[1] >= 30}
            addresses = array("I", words[place::width].tobytes())
            if sys.byteorder == "little":
                addresses.byteswap()
            each = zip(range(offset, offset + 4 * len(words), length), heads, addresses, strict=True)
            yield from [(begin, begin + length) for begin, head, address in each if address >> 2 not in blocks or head not in narrow]
        else:
            for begin in range(offset, offset + 4 * len(words), length):
                yield begin, begin + length


def see_broad(netlink: Netlink) -> list[str]:
    """The routes that count as defaults and are none: those of a VPN client that routes 0/1 and 128/1, in words."""
    found = []
    for datagram in netlink.dump(Message(GETROUTE, 0, _RTMSG.pack(socket.AF_INET, *[0] * 8), "list the routes")):
        offset = 0
        while offset + _ROUTE.size <= len(datagram):
            length, message, bits, kind, *_ = _ROUTE.unpack_from(datagram, offset)
            if message == NEWROUTE and 0 < bits < _BROADEST and kind == _UNICAST:
                found.append(str(_Route(datagram[offset : offset + length])))
            offset += (length + 3) & ~3
    return found


class _Route(bytes):
    """One route as it came; text only when it is reported."""

    __slots__ = ()

    def __str__(self) -> str:
        _length, _message, bits, kind, *_ = _ROUTE.unpack_from(self)
        found = attributes(self, 16 + _RTMSG.size)
        words = [] if kind == _UNICAST else [_kind(kind)]
        words.append(f"{IPv4Address(found[_DST])}/{bits}")
        words += ["nhid", str(_u32(found[_NH_ID]))] if _NH_ID in found else []
        words += _hops(found[_MULTIPATH]) if _MULTIPATH in found else _hop(found, 0 if kind in _NULL else _u32(found.get(_OIF)))
        return f"{' '.join(words)}, table {_table(_u32(found[_TABLE]))}"


def _hop(found: dict[int, bytes], oif: int) -> list[str]:
    """`via ADDRESS`, or the link where there is no gateway."""
    if _GATEWAY in found:
        return ["via", str(IPv4Address(found[_GATEWAY]))]
    if _VIA in found:
        # struct rtvia: the family, then the address of it.
        family = int.from_bytes(found[_VIA][:2], sys.byteorder)
        return ["via", "inet6" if family == socket.AF_INET6 else str(family), socket.inet_ntop(family, found[_VIA][2:])]
    return ["dev", _name(oif)] if oif else []


def _hops(body: bytes) -> list[str]:
    """Each struct rtnexthop of RTA_MULTIPATH."""
    words, offset = [], 0
    while offset + _NEXTHOP.size <= len(body):
        length, _flags, _weight, oif = _NEXTHOP.unpack_from(body, offset)
        if length < _NEXTHOP.size:
            break
        words += ["nexthop", *_hop(attributes(body[offset : offset + length], _NEXTHOP.size), oif)]
        offset += (length + 3) & ~3
    return words


def _addresses(netlink: Netlink, blocks: frozenset[int], is_runs: Callable[[int], bool] | None = None) -> list[Occupant]:
    taken: list[Occupant] = []
    for datagram in netlink.dump(Message(GETADDR, 0, _IFADDRMSG.pack(socket.AF_INET, 0, 0, 0, 0), "list the addresses")):
        for begin, end in _others(datagram, _ADDRESS_SHAPE, frozenset() if is_runs else blocks):
            if _KIND.unpack_from(datagram, begin + 4)[0] != NEWADDR:
                continue
            body = datagram[begin + 16 : end]
            bits, short_flags, index, first_attribute, address = _IFADDR.unpack_from(body)
            # IFA_ADDRESS is the far end of a point-to-point link, else the same as IFA_LOCAL.
            in_run = first_attribute == _IFA_ADDRESS and bits >= 30 and int.from_bytes(address, "big") >> 2 in blocks
            if in_run and (is_runs is None or is_runs(index)):
                continue
            found = attributes(body, _IFADDRMSG.size)
            near, far = (int.from_bytes(found.get(end, address), "big") for end in (_IFA_LOCAL, _IFA_ADDRESS))
            # The network of an address is a route only while its link is up, yet it is in use; unless it was told to be no route.
            whole = bits >= _BROADEST and not (short_flags | _u32(found.get(_IFA_FLAGS))) & _IFA_F_NOPREFIXROUTE
            hosts = _ALL >> bits if whole else 0
            why = _Address(near, far, bits, index)
            taken.append(Occupant(far & ~hosts, far | hosts, why))
            if near | hosts != far | hosts:
                taken.append(Occupant(near, near, why))
    return taken


class _Address(NamedTuple):
    near: int
    far: int
    bits: int
    oif: int

    def __str__(self) -> str:
        peer = f" peer {IPv4Address(self.far)}" if self.far != self.near else ""
        return f"address {IPv4Address(self.near)}{peer}/{self.bits} on {_name(self.oif)}"


def _resolvers(resolv_conf: Path, upstreams: Path) -> list[Occupant]:
    servers = _nameservers(resolv_conf)
    if any(server >> 24 == 127 for server in servers):
        servers |= _nameservers(upstreams)
    return [Occupant(server, server, f"resolver {IPv4Address(server)}") for server in sorted(servers)]


def _nameservers(path: Path) -> set[int]:
    """The IPv4 name servers of a resolv.conf(5); none if there is no such file."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return set()
    except OSError as e:
        raise CannotSeal(f"cannot read resolvers {path}: {os.strerror(e.errno or 0)}") from e
    servers = set()
    for words in map(str.split, lines):
        if len(words) > 1 and words[0] == "nameserver":
            with contextlib.suppress(OSError):
                # As the C library reads it: 10.1 is 10.0.0.1.
                servers.add(int.from_bytes(socket.inet_aton(words[1]), "big"))
    return servers


class Found(NamedTuple):
    """The kernel's answer to a lookup: a kind of route, or the errno that refused it with its text."""

    kind: str
    """`unicast`, `local`, `broadcast`, `multicast`; or `EINVAL`, `EACCES`, `EHOSTUNREACH`, `ENETUNREACH`, ..."""
    oif: int = 0
    table: int = 0
    gateway: str | None = None
    refusal: str | None = None

    def __str__(self) -> str:
        if self.refusal:
            return self.refusal
        via = f" via {self.gateway}" if self.gateway else ""
        return f"{self.kind}{via} dev {_name(self.oif)}, table {_table(self.table)}"


# What makes the kernel answer so (fib_props[] in net/ipv4/fib_semantics.c, fib4_rule_action() in fib_rules.c).
_REFUSALS = {
    errno.EINVAL: "blackhole",
    errno.EACCES: "prohibit",
    errno.EHOSTUNREACH: "unreachable, or not to be forwarded",
    errno.ENETUNREACH: "unreachable by rule, no route, or the source is no address of this host",
    errno.EXDEV: "the source does not belong behind this link",
}


def lookup(
    netlink: Netlink,
    *,
    destination: IPv4Address | str,
    source: IPv4Address | str | None = None,
    iif: int | None = None,
    uid: int | None = None,
    tcp_sport: int | None = None,
) -> Found:
    """Where the kernel would send a packet: the request of `ip route get`. With `iif` (an index), one that came in by that link.

    A refusal is an answer; KernelRefused is raised only for what is none, such as ENODEV for a link that is gone.
    """
    to = attribute(_DST, IPv4Address(destination).packed)
    body = _RTMSG.pack(socket.AF_INET, 32, 0 if source is None else 32, 0, 0, 0, 0, 0, _LOOKUP_TABLE) + to
    if source is not None:
        body += attribute(_SRC, IPv4Address(source).packed)
    if iif is not None:
        body += attribute(_IIF, iif)
    if uid is not None:
        body += attribute(_UID, uid)
    if tcp_sport is not None:
        body += attribute(_IP_PROTO, bytes([socket.IPPROTO_TCP])) + attribute(_SPORT, tcp_sport.to_bytes(2, "big"))
    try:
        replies = netlink.exchange([Message(GETROUTE, 0, body, f"look up the route to {destination}")])
    except KernelRefused as e:
        if e.errno not in _REFUSALS:
            raise
        return Found(errno.errorcode[e.errno], refusal=f"{os.strerror(e.errno)} ({_REFUSALS[e.errno]})")
    reply = next(reply.body for reply in replies if reply.kind == NEWROUTE)
    kind = _RTMSG.unpack_from(reply)[7]
    found = attributes(reply, _RTMSG.size)
    gateway = str(IPv4Address(found[_GATEWAY])) if _GATEWAY in found else None
    return Found(_kind(kind), _u32(found.get(_OIF)), _u32(found.get(_TABLE)), gateway)


def command(
    *,
    destination: IPv4Address | str,
    source: IPv4Address | str | None = None,
    iif: str | int | None = None,
    uid: int | None = None,
    tcp_sport: int | None = None,
) -> str:
    """The same lookup as a command that a person can repeat."""
    words = ["ip route get", str(destination)]
    if source is not None:
        words += ["from", str(source)]
    if iif is not None:
        words += ["iif", _name(iif) if isinstance(iif, int) else iif]
    if uid is not None:
        words += ["uid", str(uid)]
    if tcp_sport is not None:
        words += ["ipproto tcp sport", str(tcp_sport)]
    return " ".join(words)


class Rule(NamedTuple):
    """A policy rule. None is a selector that is not set; `table` is 0 where the action is not `lookup`."""

    priority: int
    action: str
    table: int
    inverted: bool = False
    source: IPv4Network | None = None
    destination: IPv4Network | None = None
    iif: str | None = None
    oif: str | None = None
    fwmark: tuple[int, int] | None = None
    tos: int = 0
    l3mdev: bool = False
    uids: tuple[int, int] | None = None
    protocol: int | None = None
    sports: tuple[int, int] | None = None
    dports: tuple[int, int] | None = None
    suppress_length: int | None = None
    suppress_group: int | None = None
    goto: int | None = None

    def __str__(self) -> str:
        """As `ip rule` prints it, without realms, tunnel ids and notes in brackets, and with the number of a table of one's own."""
        words = ["not"] if self.inverted else []
        words += ["from", _prefix(self.source) if self.source else "all"]
        words += ["to", _prefix(self.destination)] if self.destination else []
        words += ["tos", f"0x{self.tos:02x}"] if self.tos else []
        if self.fwmark:
            value, mask = self.fwmark
            words += ["fwmark", f"{value:#x}" if mask == _ALL else f"{value:#x}/{mask:#x}"]
        words += ["iif", self.iif] if self.iif else []
        words += ["oif", self.oif] if self.oif else []
        words += ["uidrange", "{}-{}".format(*self.uids)] if self.uids else []
        words += ["ipproto", _PROTOCOLS.get(self.protocol, f"ipproto-{self.protocol}")] if self.protocol else []
        words += ["sport", _ports(self.sports)] if self.sports else []
        words += ["dport", _ports(self.dports)] if self.dports else []
        if self.action != "lookup":
            words += [self.action, str(self.goto)] if self.goto else [self.action]
        else:
            words += ["lookup", "[l3mdev-table]" if self.l3mdev else _table(self.table)]
        words += ["suppress_prefixlength", str(self.suppress_length)] if self.suppress_length is not None else []
        words += ["suppress_ifgroup", str(self.suppress_group)] if self.suppress_group is not None else []
        return f"{self.priority}: {' '.join(words)}"

    def may_match(self, destination: IPv4Address, source: IPv4Address | None) -> bool:
        """False only where the addresses alone rule it out."""
        hit = self.destination is None or destination in self.destination
        hit = hit and (self.source is None or source is None or source in self.source)
        return hit or self.inverted


def bending(rules: Iterable[Rule], pool: Iterable[IPv4Network]) -> list[Rule]:
    """The rules beside the kernel's own three that can match a packet to or from a run of the pool, by address and link."""
    pool = list(pool)

    def touches(prefix: IPv4Network | None) -> bool:
        return prefix is None or any(prefix.overlaps(part) for part in pool)

    def by_link(name: str | None) -> bool:
        return name is None or name == "lo" or name.startswith(LINK_PREFIX)

    own = {(0, 255), (32766, 254), (32767, 253)}
    found = []
    for rule in rules:
        bare = rule == Rule(priority=rule.priority, action="lookup", table=rule.table)
        # A rule for VRFs matches packets of links that are in one.
        if (bare and (rule.priority, rule.table) in own) or rule.l3mdev:
            continue
        if rule.inverted or ((touches(rule.destination) and touches(rule.source)) and by_link(rule.iif) and by_link(rule.oif)):
            found.append(rule)
    return found


def see_rules(netlink: Netlink) -> list[Rule]:
    """Every IPv4 policy rule, in the order in which the kernel asks them."""
    rules = []
    for datagram in netlink.dump(Message(GETRULE, 0, _RTMSG.pack(socket.AF_INET, *[0] * 8), "list the policy rules")):
        rules += [_rule(body) for kind, _flags, _sequence, body in messages(datagram) if kind == NEWRULE]
    return rules


def _rule(body: bytes) -> Rule:
    _family, to_bits, from_bits, tos, _table8, _, _, action, flags = _RTMSG.unpack_from(body)
    found = attributes(body, _RTMSG.size)
    numbers = {kind: _u32(data) for kind, data in found.items() if len(data) == 4}
    # The kernel says "nothing suppressed" as -1.
    length, group = (None if numbers.get(kind, _ALL) == _ALL else numbers[kind] for kind in (_FRA_SUPPRESS_LENGTH, _FRA_SUPPRESS_GROUP))
    mark = (numbers.get(_FRA_FWMARK, 0), numbers.get(_FRA_FWMASK, 0))
    return Rule(
        priority=numbers.get(_FRA_PRIORITY, 0),
        action=_ACTIONS.get(action, str(action)),
        table=numbers.get(_FRA_TABLE, 0) if action == _LOOKUP else 0,
        inverted=bool(flags & _INVERT),
        source=IPv4Network((found[_FRA_SRC], from_bits)) if _FRA_SRC in found else None,
        destination=IPv4Network((found[_FRA_DST], to_bits)) if _FRA_DST in found else None,
        iif=_string(found.get(_FRA_IIF)),
        oif=_string(found.get(_FRA_OIF)),
        fwmark=mark if any(mark) else None,
        tos=tos,
        l3mdev=found.get(_FRA_L3MDEV, b"\0") != b"\0",
        uids=_pair("=II", found.get(_FRA_UIDS)),
        protocol=found[_FRA_IP_PROTO][0] if _FRA_IP_PROTO in found else None,
        sports=_pair("=HH", found.get(_FRA_SPORTS)),
        dports=_pair("=HH", found.get(_FRA_DPORTS)),
        suppress_length=length,
        suppress_group=group,
        goto=numbers.get(_FRA_GOTO),
    )


def suspects(rules: Iterable[Rule], found: Found, *, destination: IPv4Address | str, source: IPv4Address | str | None = None) -> list[Rule]:
    """The rules that can have led a lookup to `found`, first asked first: by their addresses, and by table or kind of refusal."""
    to, origin = IPv4Address(destination), IPv4Address(source) if source else None
    return [
        rule
        for rule in rules
        if rule.may_match(to, origin)
        and (
            rule.table == found.table
            if not found.refusal
            else _REFUSING.get(rule.action) == found.kind or (rule.action == "lookup" and rule.table not in _TABLES)
        )
    ]


def _u32(data: bytes | None) -> int:
    return int(_U32.unpack_from(data)[0]) if data else 0


def _pair(layout: str, data: bytes | None) -> tuple[int, int] | None:
    if not data:
        return None
    low, high = struct.unpack(layout, data)
    return low, high


def _string(data: bytes | None) -> str | None:
    return data.rstrip(b"\0").decode(errors="replace") if data else None


def _kind(number: int) -> str:
    return _KINDS[number] if number < len(_KINDS) else str(number)


def _table(number: int) -> str:
    return _TABLES.get(number, str(number))


def _name(index: int) -> str:
    """The link's name now; its index when it is gone."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return f"if{index}"


def _prefix(prefix: IPv4Network) -> str:
    return str(prefix.network_address) if prefix.prefixlen == 32 else str(prefix)


def _ports(span: tuple[int, int]) -> str:
    low, high = span
    return str(low) if low == high else f"{low}-{high}"
