"""Puts back what somebody has changed about a live run: each step makes it what was planned, never more, and may be repeated."""

from __future__ import annotations

import contextlib
import errno
import socket
from ipaddress import IPv4Address

from sealnet.errors import KernelRefused
from sealnet.kernel import links, netlink, routes, sysctl
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.nft import Nft
from sealnet.kernel.within import CANARY
from sealnet.model import names, ruleset
from sealnet.model.plan import Seal


def put_back_side(nl: Netlink, name: str, address: IPv4Address, prefix_length: int) -> None:
    """One end of the link as it was set up: settings first, up last. Raises KernelRefused when the link is gone."""
    link = links.see(nl, name)
    if link is None:
        raise KernelRefused(f"cannot put link {name} back: {name} is gone", errno=errno.ENODEV)
    sysctl.set_link(name)
    nl.exchange([links.quiet(link.ifindex)])
    if link.master:
        nl.exchange([links.release(link.ifindex)])
    with contextlib.suppress(KernelRefused):
        # EEXIST mostly; what is missing is found by whoever looks again.
        nl.exchange([links.add_address(link.ifindex, address, prefix_length)])
    if not link.up:
        nl.exchange([links.bring_up(link.ifindex)])


def put_back_sandbox(seal: Seal) -> None:
    """The sandbox's end. Called by a thread in the run's namespace."""
    if seal.subnet is None or seal.sandbox is None:
        raise ValueError("a severed run has no link")
    with Netlink() as nl:
        put_back_side(nl, names.SANDBOX_LINK, seal.sandbox, seal.subnet.prefixlen)


def put_back_filter(seal: Seal) -> None:
    """The filter inside, in one transaction in place of what is there; the tally of what was tried begins anew."""
    text = ruleset.render_inside(gateway=seal.gateway, ports=seal.ports, ifname=names.SANDBOX_LINK)
    Nft().apply(ruleset.REPLACE + text, f"put back the filter inside netns {seal.netns}")


def put_back_sink() -> None:
    """lo up, and `default dev lo` in place of what leads elsewhere."""
    with Netlink() as nl:
        nl.exchange([links.bring_up(links.LOOPBACK_INDEX)])
        nl.exchange([links.add_sink(family=socket.AF_INET)._replace(flags=netlink.CREATE | netlink.REPLACE)])
        # A host without IPv6 has no such route.
        with contextlib.suppress(KernelRefused):
            nl.exchange([links.add_sink(family=socket.AF_INET6)._replace(flags=netlink.CREATE | netlink.REPLACE)])


def see_sink() -> str | None:
    """Where a packet to a stranger would go, when that is not lo; None when it is."""
    with Netlink() as nl:
        found = routes.lookup(nl, destination=CANARY)
    return None if found.kind == "unicast" and found.oif == links.LOOPBACK_INDEX and found.gateway is None else str(found)
