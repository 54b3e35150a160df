"""What is done inside a run's own namespace, by the thread that lives there: mark, filter, address, look."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, ip_address

from sealnet.errors import KernelRefused, NotSealed
from sealnet.kernel import links, nfnetlink, sysctl
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.netns import Inside
from sealnet.kernel.nft import Nft
from sealnet.model import names, ruleset
from sealnet.model.check import Side
from sealnet.model.plan import Seal
from sealnet.model.tally import Attempts

# TEST-NET-1 (RFC 5737): nobody's. A packet from the sandbox to it must go nowhere.
CANARY = IPv4Address("192.0.2.1")


class Sockets:
    """Netlink sockets of one namespace, and nftables there until `nft` is dropped: for any thread, wherever that lives."""

    def __init__(self) -> None:
        """Called by a thread in the namespace."""
        self.route, self.netfilter = Netlink(), nfnetlink.connect()
        self.nft: Nft | None = None

    def close(self) -> None:
        self.nft = None
        self.route.close()
        self.netfilter.close()


@contextlib.contextmanager
def sockets(inside: Inside) -> Iterator[Sockets]:
    """Those that are kept of a namespace, else such as are closed again."""
    if isinstance(inside.kept, Sockets):
        yield inside.kept
        return
    made = inside.call(Sockets)
    try:
        yield made
    finally:
        made.close()


def begin(mark: str, *, is_linked: bool) -> Sockets:
    """Called by the thread that has made a namespace: it is marked, and its links to come are quiet from their birth on."""
    made = Sockets()
    try:
        made.route.exchange([links.set_alias(links.LOOPBACK_INDEX, mark)])
        if is_linked:
            sysctl.set_link("default")
        made.nft = Nft()
    except BaseException:
        made.close()
        raise
    return made


def see_side(nl: Netlink, name: str) -> Side:
    link = links.see(nl, name)
    if link is None:
        return Side(exists=False)
    return Side(
        exists=True,
        up=link.up,
        carrier=link.running,
        mac=link.mac,
        master=link.master,
        master_name=_name(nl, link.master) if link.master else "",
        group=link.group,
        addresses=tuple(links.see_addresses(nl, link.ifindex)),
        sysctls=sysctl.told(link.specific),
    )


def _name(nl: Netlink, index: int) -> str:
    """A link's name; empty when it is gone, or in another namespace."""
    return next((link.name for link in links.see_all(nl) if link.ifindex == index), "")


def read_mark() -> str:
    with Netlink() as nl:
        lo = links.see(nl, "lo")
    return lo.alias if lo else ""


def add_filter(inside: Inside, seal: Seal) -> None:
    text = ruleset.render_inside(gateway=seal.gateway, ports=seal.ports, ifname=names.SANDBOX_LINK)
    with sockets(inside) as own:
        nft, own.nft = own.nft or inside.call(Nft), None
        nft.apply(text, f"add the filter inside netns {seal.netns}")
        fault, _sha256 = _see_filter(own, seal)
        if fault:
            raise NotSealed(f"cannot seal run {seal.run_id}: {fault}")
        own.route.exchange([links.bring_up(links.LOOPBACK_INDEX), links.add_sink(family=socket.AF_INET)])
        # A host without IPv6 has no such route to add, and nothing to catch with it.
        with contextlib.suppress(KernelRefused):
            own.route.exchange([links.add_sink(family=socket.AF_INET6)])


def set_up_sandbox(inside: Inside, seal: Seal) -> None:
    """Its settings it has by `begin`; that it has is read back."""
    if seal.subnet is None or seal.sandbox is None:
        raise ValueError("a severed run has no link")
    with sockets(inside) as own:
        own.route.exchange([links.quiet(links.SANDBOX_INDEX), links.add_address(links.SANDBOX_INDEX, seal.sandbox, seal.subnet.prefixlen)])


def bring_up_sandbox(inside: Inside, seal: Seal) -> None:
    if seal.gateway is None:
        raise ValueError("a severed run has no link")
    with sockets(inside) as own:
        gateway = links.add_neighbour(links.SANDBOX_INDEX, seal.gateway, names.mac(seal.run_id, end=0))
        own.route.exchange([links.bring_up(links.SANDBOX_INDEX), gateway])


def see(inside: Inside, seal: Seal) -> tuple[str, tuple[str, ...], Side, str | None, str]:
    with sockets(inside) as own:
        found = links.see_all(own.route)
        side = see_side(own.route, names.SANDBOX_LINK) if seal.subnet is not None else Side(exists=False)
        fault, sha256 = _see_filter(own, seal)
    mark = next((link.alias for link in found if link.name == "lo"), "")
    return mark, tuple(link.name for link in found), side, fault, sha256


def _see_filter(own: Sockets, seal: Seal) -> tuple[str | None, str]:
    """What is wrong with the filter, and its hash."""
    table = nfnetlink.see_table(own.netfilter, ruleset.TABLE)
    rules = ruleset.INSIDE_RULES + len(seal.ports)
    if table is None:
        return f"the filter inside netns {seal.netns} is gone", ""
    if tuple(chain[:4] for chain in table.chains) != ruleset.INSIDE_CHAINS or table.chains[0].rules != rules:
        return f"the filter inside netns {seal.netns} is not as it was planned", table.sha256
    return None, table.sha256


_PROTOCOLS = {1: "icmp", 2: "igmp", 6: "tcp", 17: "udp", 47: "gre", 58: "ipv6-icmp", 132: "sctp"}


def tried(inside: Inside, probed: Mapping[tuple[str, str, int], int]) -> Attempts:
    found = []
    with sockets(inside) as own:
        tallied = [(size, nfnetlink.counted(own.netfilter, ruleset.TABLE, name)) for size, name in ((4, "tried"), (16, "tried6"))]
    for size, elements in tallied:
        for key, packets in elements:
            # A concatenation in kernel form: each part fills 32-bit words.
            address, number, port = str(ip_address(key[:size])), key[size], int.from_bytes(key[size + 4 : size + 6], "big")
            protocol = _PROTOCOLS.get(number, str(number))
            # The tally is of the payload's attempts alone; to flush a proof's out of it would cost a grace period of RCU (14 ms).
            left = packets - probed.get((address, protocol, port), 0)
            if left > 0:
                found.append((address, protocol, port, left))
    # Before any is left out: those of proofs take the room of others.
    is_full = any(len(elements) >= ruleset.TALLY for _size, elements in tallied)
    return Attempts(tuple(sorted(found, key=lambda row: (-row[3], row))), is_full)
