"""The run's veth pair and its addresses: as few netlink messages as the kernel allows, and what it says of them afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, ip_address
from typing import NamedTuple

from sealnet.errors import KernelRefused
from sealnet.kernel import netlink
from sealnet.kernel.netlink import Message, Netlink, attribute, nested

# linux/if_link.h, linux/if_addr.h, linux/veth.h
_ADDRESS, _IFNAME, _MASTER, _LINKINFO, _NET_NS_FD, _AF_SPEC, _IFALIAS, _GROUP, _NUM_TX, _NUM_RX = 1, 3, 10, 18, 28, 26, 20, 27, 31, 32
_PROP_LIST, _ALT_IFNAME, _EXT_MASK, _STATS64, _TARGET_NETNSID = 52, 53, 29, 23, 46
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_INET6_ADDR_GEN_MODE, _GEN_MODE_NONE = 8, 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_LABEL = 1, 2, 3
_RTA_OIF, _RTA_PREFSRC = 4, 7
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
_AF_INET, _AF_INET6 = 2, 10
_UP, _RUNNING = 0x1, 0x40
_ETHER = 6
_SKIP_STATISTICS = 1 << 3

# With 24 bits of chance below it.
_NOBODYS_GROUP = 0x5E << 24

LOOPBACK_INDEX, SANDBOX_INDEX = 1, 2


class Link(NamedTuple):
    """A link as the kernel tells it."""

    ifindex: int
    name: str
    up: bool
    running: bool
    mac: str
    group: int
    alias: str
    master: int
    altnames: tuple[str, ...]
    specific: bytes
    """IFLA_AF_SPEC: its settings (`sealnet.kernel.sysctl.told`)."""


def _header(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BxHiII", 0, 0, index, flags, change)


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def add_veth(nl: Netlink, *, name: str, mac: str, group: int, peer_name: str, peer_mac: str, netns_fd: int) -> int:
    """Create both ends in one request, the peer born inside the namespace of `netns_fd`, both down; the host end's index."""
    queues = attribute(_NUM_TX, 1) + attribute(_NUM_RX, 1)
    peer = _header(SANDBOX_INDEX) + attribute(_IFNAME, peer_name) + attribute(_ADDRESS, _mac(peer_mac)) + queues
    peer += attribute(_NET_NS_FD, netns_fd)
    body = _header() + attribute(_IFNAME, name) + attribute(_ADDRESS, _mac(mac)) + attribute(_GROUP, group) + queues
    # One queue each: the default is one for every possible CPU.
    body += nested(_LINKINFO, attribute(_INFO_KIND, "veth"), nested(_INFO_DATA, nested(_VETH_PEER, peer)))
    created = Message(netlink.NEWLINK, netlink.CREATE | netlink.EXCL, body, f"add link {name}")
    replies = nl.exchange([created, _get(name)])
    return _parse(next(reply.body for reply in replies if reply.kind == netlink.NEWLINK)).ifindex


def _get(name: str, netnsid: int | None = None) -> Message:
    # IFLA_IFNAME takes no more than IFNAMSIZ; a longer one can only be an altname.
    kind = _IFNAME if len(name) < 16 else _ALT_IFNAME
    body = _header() + attribute(_EXT_MASK, _SKIP_STATISTICS) + attribute(kind, name)
    if netnsid is not None:
        body += attribute(_TARGET_NETNSID, netnsid)
    return Message(netlink.GETLINK, 0, body, f"see link {name}")


def quiet(index: int, *, alias: str | None = None) -> Message:
    """Never make a link-local IPv6 address; carry `alias`."""
    inet6 = nested(_AF_INET6, struct.pack("=HHB3x", 5, _INET6_ADDR_GEN_MODE, _GEN_MODE_NONE))
    body = _header(index) + nested(_AF_SPEC, inet6)
    if alias is not None:
        body += attribute(_IFALIAS, alias.encode())
    return Message(netlink.SETLINK, 0, body, f"set up link {index}")


def set_alias(index: int, alias: str) -> Message:
    return Message(netlink.SETLINK, 0, _header(index) + attribute(_IFALIAS, alias.encode()), f"set the alias of link {index}")


def add_altname(index: int, altname: str) -> Message:
    body = _header(index) + nested(_PROP_LIST, attribute(_ALT_IFNAME, altname))
    return Message(netlink.NEWLINKPROP, netlink.CREATE | netlink.EXCL, body, f"add altname {altname}")


def add_address(index: int, address: IPv4Address, prefix_length: int) -> Message:
    body = struct.pack("=BBBBI", _AF_INET, prefix_length, 0, 0, index)
    body += attribute(_IFA_LOCAL, address.packed) + attribute(_IFA_ADDRESS, address.packed)
    return Message(netlink.NEWADDR, netlink.CREATE | netlink.EXCL, body, f"add address {address}/{prefix_length}")


def bring_up(index: int) -> Message:
    return Message(netlink.NEWLINK, 0, _header(index, _UP, _UP), f"bring up link {index}")


def release(index: int) -> Message:
    """Take a link out of its bridge or bond; nothing changes when it is in none."""
    return Message(netlink.SETLINK, 0, _header(index) + attribute(_MASTER, 0), f"release link {index} from its master")


def add_neighbour(index: int, address: IPv4Address, mac: str) -> Message:
    """Who is at the other end, for good: ARP need not ask.

    The kernel counts all others, of all namespaces together, and takes no more than net.ipv4.neigh.default.gc_thresh3 (1,024): the two ends
    of 512 runs. The next connection would time out.
    """
    # ndmsg: family, padding, index, state, flags, type.
    body = struct.pack("=BxxxiHBB", _AF_INET, index, _NUD_PERMANENT, 0, 0)
    body += attribute(_NDA_DST, address.packed) + attribute(_NDA_LLADDR, _mac(mac))
    return Message(netlink.NEWNEIGH, netlink.CREATE | netlink.REPLACE, body, f"add neighbour {address}")


def add_sink(*, family: int) -> Message:
    """`ip route add default dev lo`, for IPv4 (2) or IPv6 (10).

    The source is given, for a severed namespace has no address but lo's, and an answer to 0.0.0.0 would be lost.
    """
    # rtmsg: family, dst_len, src_len, tos, table main, protocol static, scope link (IPv4) or universe, unicast.
    body = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 254, 4, 253 if family == _AF_INET else 0, 1, 0) + attribute(_RTA_OIF, LOOPBACK_INDEX)
    body += attribute(_RTA_PREFSRC, bytes((127, 0, 0, 1)) if family == _AF_INET else bytes(15) + b"\1")
    return Message(netlink.NEWROUTE, netlink.CREATE | netlink.EXCL, body, "add the sink route (default dev lo)")


def remove(nl: Netlink, index: int, name: str) -> None:
    """Delete a link (and with it its peer). Succeeds if it is gone."""
    try:
        nl.exchange([Message(netlink.DELLINK, 0, _header(index), f"remove link {name}")])
    except KernelRefused as error:
        if error.errno != errno.ENODEV:
            raise


def remove_together(nl: Netlink, found: Sequence[tuple[int, str]]) -> None:
    """Delete links, given by index and name, in one request, which waits for RCU once; those that are gone already are left out.

    The kernel knows links that go together by their group, so they are put into one that nobody else has.
    """
    group = attribute(_GROUP, _NOBODYS_GROUP | int.from_bytes(os.urandom(3), "big"))
    with contextlib.suppress(KernelRefused):
        # One that is gone is refused, and the kernel goes on to the next.
        nl.exchange([Message(netlink.SETLINK, 0, _header(index) + group, f"set the group of link {name}") for index, name in found])
    try:
        nl.exchange([Message(netlink.DELLINK, 0, _header() + group, f"remove links {', '.join(name for _index, name in found)}")])
    except KernelRefused as error:
        if error.errno != errno.ENODEV:
            raise


def see_both(nl: Netlink, name: str, other: str, netnsid: int) -> tuple[Link | None, Link | None]:
    """`see` of two links in one request: the second is in the namespace that the socket's knows by `netnsid`."""
    try:
        replies = nl.exchange([_get(name), _get(other, netnsid)])
    except KernelRefused as error:
        if error.errno != errno.ENODEV:
            raise
        return see(nl, name), see(nl, other, netnsid=netnsid)
    first, second = (_parse(reply.body) for reply in replies if reply.kind == netlink.NEWLINK)
    return first, second


def see(nl: Netlink, name: str, *, netnsid: int | None = None) -> Link | None:
    """In the socket's namespace, or in the one that this knows by `netnsid` (Linux 4.15): nobody has to enter that."""
    try:
        replies = nl.exchange([_get(name, netnsid)])
    except KernelRefused as error:
        if error.errno == errno.ENODEV:
            return None
        raise
    return next(_parse(reply.body) for reply in replies if reply.kind == netlink.NEWLINK)


def netnsid(nl: Netlink, fd: int) -> int | None:
    """The number by which the socket's namespace knows the one of `fd` (a link between the two gives it one); None: it has none."""
    # struct rtgenmsg, padded; NETNSA_NSID 1, NETNSA_FD 3 (linux/net_namespace.h).
    replies = nl.exchange([Message(netlink.GETNSID, 0, bytes(4) + attribute(3, fd), "look up the number of a network namespace")])
    known = next(netlink.attributes(reply.body, 4)[1] for reply in replies if reply.kind == netlink.NEWNSID)
    number: int = struct.unpack("=i", known)[0]
    return number if number >= 0 else None


def add_netnsid(nl: Netlink, fd: int, number: int) -> int:
    """Give the namespace of `fd` this number in the socket's; where it has one already, that. It is gone with the namespace."""
    asked = bytes(4) + attribute(1, number) + attribute(3, fd)
    try:
        nl.exchange([Message(netlink.NEWNSID, 0, asked, "give a network namespace a number")])
    except KernelRefused as error:
        known = netnsid(nl, fd) if error.errno == errno.EEXIST else None
        if known is None:
            raise
        return known
    return number


def an_address(nl: Netlink, *, but: str) -> str | None:
    """The first IPv4 address of a link that is neither lo nor one whose name begins with `but`: a thousand runs have as many."""
    left_out = struct.pack("=H", _IFA_LABEL) + but.encode()
    for datagram in nl.dump(Message(netlink.GETADDR, 0, struct.pack("=BBBBI", _AF_INET, 0, 0, 0, 0), "list addresses")):
        for kind, _flags, _sequence, body in netlink.messages(datagram):
            # The label is the link's name, or begins with it.
            if kind == netlink.NEWADDR and left_out not in body and struct.unpack_from("=I", body, 4)[0] != LOOPBACK_INDEX:
                found = netlink.attributes(body, 8)
                return str(ip_address(found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS, b""))))
    return None


def see_all(nl: Netlink) -> list[Link]:
    """Every link of the socket's namespace."""
    body = _header() + attribute(_EXT_MASK, _SKIP_STATISTICS)
    return list(_links(nl.dump(Message(netlink.GETLINK, 0, body, "list links"))))


def see_counters(nl: Netlink, name: str) -> dict[str, int]:
    """Packets and bytes that a link received and sent; empty when it is gone."""
    try:
        replies = nl.exchange([Message(netlink.GETLINK, 0, _header() + attribute(_IFNAME, name), f"see link {name}")])
    except KernelRefused as error:
        if error.errno == errno.ENODEV:
            return {}
        raise
    found = netlink.attributes(next(reply.body for reply in replies if reply.kind == netlink.NEWLINK), 16)
    # struct rtnl_link_stats64 begins with these.
    return dict(zip(("rx_packets", "tx_packets", "rx_bytes", "tx_bytes"), struct.unpack_from("=4Q", found[_STATS64]), strict=True))


def _links(datagrams: list[bytes]) -> Iterator[Link]:
    for datagram in datagrams:
        for kind, _flags, _sequence, body in netlink.messages(datagram):
            if kind == netlink.NEWLINK:
                yield _parse(body)


def _parse(body: bytes) -> Link:
    index, flags = struct.unpack_from("=iI", body, 4)
    found = netlink.attributes(body, 16)
    text = {kind: found[kind].rstrip(b"\0").decode(errors="replace") for kind in (_IFNAME, _IFALIAS) if kind in found}
    return Link(
        ifindex=index,
        name=text.get(_IFNAME, ""),
        up=bool(flags & _UP),
        running=bool(flags & _RUNNING),
        mac=found.get(_ADDRESS, b"").hex(":"),
        group=struct.unpack("=I", found[_GROUP])[0] if _GROUP in found else 0,
        alias=text.get(_IFALIAS, ""),
        master=struct.unpack("=I", found[_MASTER])[0] if _MASTER in found else 0,
        altnames=tuple(_altnames(found.get(_PROP_LIST, b""))),
        specific=found.get(_AF_SPEC, b""),
    )


def _altnames(properties: bytes) -> Iterator[str]:
    # The attribute repeats within the list, so a dict would keep only one.
    offset = 0
    while offset + 4 <= len(properties):
        length, kind = struct.unpack_from("=HH", properties, offset)
        if length < 4:
            return
        if kind & 0x3FFF == _ALT_IFNAME:
            yield properties[offset + 4 : offset + length].rstrip(b"\0").decode(errors="replace")
        offset += (length + 3) & ~3


def see_addresses(nl: Netlink, index: int) -> list[str]:
    """`ADDRESS/LENGTH` of every IPv4 and IPv6 address of a link; none of one that is gone."""
    seen = []
    # The kernel leaves out the addresses of other links (netlink.Netlink asks for strictness): a thousand runs have a thousand.
    try:
        datagrams = nl.dump(Message(netlink.GETADDR, 0, struct.pack("=BBBBI", 0, 0, 0, 0, index), "list addresses"))
    except KernelRefused as error:
        if error.errno == errno.ENODEV:
            return []
        raise
    for datagram in datagrams:
        for kind, _flags, _sequence, body in netlink.messages(datagram):
            if kind != netlink.NEWADDR:
                continue
            family, length, _addr_flags, _scope, owner = struct.unpack_from("=BBBBI", body)
            found = netlink.attributes(body, 8)
            packed = found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS, b""))
            if owner == index and family in (_AF_INET, _AF_INET6):
                seen.append(f"{ip_address(packed)}/{length}")
    return seen
