"""What is done inside a run's own namespace, by the thread that lives there: mark, filter, address, look."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from ipaddress import IPv4Address

from sealnet.errors import KernelRefused, NotSealed
from sealnet.kernel import links, nfnetlink, sysctl
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.nft import Nft
from sealnet.model import names, ruleset
from sealnet.model.check import Side
from sealnet.model.plan import Seal

# TEST-NET-1 (RFC 5737): nobody's. A packet from the sandbox to it must go nowhere.
CANARY = IPv4Address("192.0.2.1")


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
        master_name=_name(link.master) if link.master else "",
        group=link.group,
        addresses=tuple(links.see_addresses(nl, link.ifindex)),
        sysctls=sysctl.told(link.specific),
    )


def _name(index: int) -> str:
    """A link's name in this thread's namespace; empty when it is gone, or in another."""
    with contextlib.suppress(OSError):
        return socket.if_indextoname(index)
    return ""


def mark(mark: str) -> None:
    with Netlink() as nl:
        nl.exchange([links.set_alias(links.LOOPBACK_INDEX, mark)])


def read_mark() -> str:
    with Netlink() as nl:
        lo = links.see(nl, "lo")
    return lo.alias if lo else ""


def add_filter(seal: Seal) -> None:
    text = ruleset.render_inside(gateway=seal.gateway, ports=seal.ports, ifname=names.SANDBOX_LINK)
    Nft().apply(text, f"add the filter inside netns {seal.netns}")
    fault, _sha256 = _see_filter(seal)
    if fault:
        raise NotSealed(f"cannot seal run {seal.run_id}: {fault}")
    with Netlink() as nl:
        nl.exchange([links.bring_up(links.LOOPBACK_INDEX), links.add_sink(family=socket.AF_INET)])
        # A host without IPv6 has no such route to add, and nothing to catch with it.
        with contextlib.suppress(KernelRefused):
            nl.exchange([links.add_sink(family=socket.AF_INET6)])


def set_up_sandbox(seal: Seal) -> None:
    if seal.subnet is None or seal.sandbox is None:
        raise ValueError("a severed run has no link")
    sysctl.set_link(names.SANDBOX_LINK)
    with Netlink() as nl:
        nl.exchange([links.quiet(links.SANDBOX_INDEX), links.add_address(links.SANDBOX_INDEX, seal.sandbox, seal.subnet.prefixlen)])


def bring_up_sandbox(seal: Seal) -> None:
    if seal.gateway is None:
        raise ValueError("a severed run has no link")
    with Netlink() as nl:
        gateway = links.add_neighbour(links.SANDBOX_INDEX, seal.gateway, names.mac(seal.run_id, end=0))
        nl.exchange([links.bring_up(links.SANDBOX_INDEX), gateway])


def see(seal: Seal) -> tuple[str, tuple[str, ...], Side, str | None, str]:
    with Netlink() as nl:
        found = links.see_all(nl)
        side = see_side(nl, names.SANDBOX_LINK) if seal.subnet is not None else Side(exists=False)
    mark = next((link.alias for link in found if link.name == "lo"), "")
    fault, sha256 = _see_filter(seal)
    return mark, tuple(link.name for link in found), side, fault, sha256


def _see_filter(seal: Seal) -> tuple[str | None, str]:
    """What is wrong with the filter, and its hash."""
    table = nfnetlink.see_table(ruleset.TABLE)
    rules = ruleset.INSIDE_RULES + len(seal.ports)
    if table is None:
        return f"the filter inside netns {seal.netns} is gone", ""
    if tuple(chain[:4] for chain in table.chains) != ruleset.INSIDE_CHAINS or table.chains[0].rules != rules:
        return f"the filter inside netns {seal.netns} is not as it was planned", table.sha256
    return None, table.sha256


# On a host without /etc/protocols libnftables 1.0.6 tells numbers (the file is of netbase, which nothing else here needs).
_PROTOCOLS = {"1": "icmp", "2": "igmp", "6": "tcp", "17": "udp", "47": "gre", "58": "ipv6-icmp", "132": "sctp"}


def tried(probed: Mapping[tuple[str, str, int], int]) -> list[tuple[str, str, int, int]]:
    nft, found = Nft(), []
    for name in ("tried", "tried6"):
        for entry in nft.elements(f"{ruleset.FAMILY} {ruleset.TABLE} {name}", "list what was tried"):
            element = entry["elem"]
            address, protocol, port = element["val"]["concat"]
            protocol = _PROTOCOLS.get(str(protocol), protocol)
            packets = int(element.get("counter", {}).get("packets", 0))
            # The tally is of the payload's attempts alone; to flush a proof's out of it would cost a grace period of RCU (14 ms).
            packets -= probed.get((str(address), str(protocol), int(port)), 0)
            if packets > 0:
                found.append((str(address), str(protocol), int(port), packets))
    return sorted(found, key=lambda row: (-row[3], row))
