"""A second opinion on a seal: links, addresses, rules and routes as pyroute2 reads them, which shares no code with what built it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sealnet.kernel.within import CANARY
from sealnet.model import names
from sealnet.model.check import Check
from sealnet.model.plan import Seal

_LOCAL, _MAIN, _DEFAULT = 255, 254, 253
_RULES: dict[int, set[tuple[int, int]]] = {
    socket.AF_INET: {(0, _LOCAL), (32766, _MAIN), (32767, _DEFAULT)},
    socket.AF_INET6: {(0, _LOCAL), (32766, _MAIN)},
}
_UNICAST, _LOCAL_ROUTE = 1, 2
_CLONED = 0x200


def host_side(seal: Seal) -> list[Check]:
    """The host's end of the link, and the three ways that a packet of the run can take through the host."""
    if seal.subnet is None:
        return []
    with _netlink() as ipr:
        index = next(iter(ipr.link_lookup(ifname=seal.ifname)), 0)
        address = f"{seal.gateway}/{seal.subnet.prefixlen}"
        checks = [_state("second-link", f"link {seal.ifname}", f"up, no master, {address}", lambda: _link(ipr, index))]
        if not index:
            return checks
        ways = (
            ("second-route-to-sandbox", f"unicast dev {index}", {"dst": str(seal.sandbox), "src": str(seal.gateway)}),
            ("second-route-to-gateway", "local", {"dst": str(seal.gateway), "src": str(seal.sandbox), "iif": index}),
            ("second-route-to-canary", "a refusal", {"dst": str(CANARY), "src": str(seal.sandbox), "iif": index}),
        )
        for name, expected, lookup in ways:
            asked = "route get " + " ".join(f"{key} {value}" for key, value in lookup.items())
            checks.append(_state(name, asked, expected, lambda lookup=lookup: _route(ipr, lookup)))  # type: ignore[misc]
    return checks


def inside(seal: Seal) -> list[Check]:
    """In the run's namespace: its links, its rules, and no route but its own and the sink."""
    with _netlink() as ipr:
        own = ["lo", names.SANDBOX_LINK] if seal.subnet is not None else ["lo"]
        checks = [_state("second-links-inside", "links of the run", " ".join(own), lambda: _names(ipr))]
        if seal.subnet is not None:
            index = next(iter(ipr.link_lookup(ifname=names.SANDBOX_LINK)), 0)
            address = f"{seal.sandbox}/{seal.subnet.prefixlen}"
            wanted = f"up, no master, {address}"
            checks.append(_state("second-link-inside", f"link {names.SANDBOX_LINK} of the run", wanted, lambda: _link(ipr, index)))
        routes = {"default dev lo"} | ({f"{seal.subnet} dev {names.SANDBOX_LINK}"} if seal.subnet is not None else set())
        checks.append(_state("second-routes", "routes of the run", ", ".join(sorted(routes)), lambda: _routes(ipr, socket.AF_INET)))
        checks.append(_state("second-rules", "rules of the run", "the kernel's own", lambda: _rules(ipr, socket.AF_INET)))
        if os.path.exists("/proc/sys/net/ipv6"):
            checks.append(_state("second-routes-6", "IPv6 routes of the run", "default dev lo", lambda: _routes(ipr, socket.AF_INET6)))
            checks.append(_state("second-rules-6", "IPv6 rules of the run", "the kernel's own", lambda: _rules(ipr, socket.AF_INET6)))
    return checks


@contextmanager
def _netlink() -> Iterator[Any]:
    # 200 ms of imports, which only a check needs.
    from pyroute2 import IPRoute

    with IPRoute() as ipr:
        yield ipr


def _state(name: str, asked: str, expected: str, look: Callable[[], str]) -> Check:
    from pyroute2.netlink.exceptions import NetlinkError

    began = time.perf_counter()
    ok: bool | None
    try:
        found = look()
        ok = found == expected
    except (NetlinkError, OSError) as error:
        found, ok = f"not told: {error}", None
    return Check(
        name=name,
        kind="state",
        asked=f"pyroute2: {asked}",
        expected=expected,
        found=found,
        ok=ok,
        took_ms=(time.perf_counter() - began) * 1e3,
    )


def _link(ipr: Any, index: int) -> str:
    if not index:
        return "gone"
    link = ipr.get_links(index)[0]
    addresses = [
        f"{address.get_attr('IFA_LOCAL') or address.get_attr('IFA_ADDRESS')}/{address['prefixlen']}"
        for address in ipr.get_addr(index=index)
    ]
    master = link.get_attr("IFLA_MASTER")
    state = "up" if link["flags"] & 1 else "down"
    return f"{state}, {f'master {master}' if master else 'no master'}, {' '.join(sorted(addresses)) or 'no address'}"


def _names(ipr: Any) -> str:
    found = {link.get_attr("IFLA_IFNAME") for link in ipr.get_links()}
    return " ".join(sorted(found, key=lambda name: (name != "lo", name)))


def _route(ipr: Any, lookup: dict[str, Any]) -> str:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        route = ipr.route("get", **lookup)[0]
    except NetlinkError as error:
        return "a refusal" if error.code in _REFUSALS else f"errno {error.code}"
    if route["type"] == _LOCAL_ROUTE:
        return "local"
    if route["type"] != _UNICAST:
        return f"type {route['type']}"
    gateway = route.get_attr("RTA_GATEWAY")
    return f"unicast dev {route.get_attr('RTA_OIF')}{f' via {gateway}' if gateway else ''}"


# What `ip route get` is answered where no packet may go: EINVAL, ENETUNREACH, EHOSTUNREACH, EACCES, EXDEV.
_REFUSALS = frozenset((22, 101, 113, 13, 18))


def _routes(ipr: Any, family: int) -> str:
    """Every route that is none of the kernel's own local ones."""
    links = {link["index"]: link.get_attr("IFLA_IFNAME") for link in ipr.get_links()}
    found = set()
    for route in ipr.get_routes(family=family):
        if route.get_attr("RTA_TABLE", route["table"]) == _LOCAL or route["flags"] & _CLONED:
            continue
        if family == socket.AF_INET6 and route.get_attr("RTA_DST") == "::1":
            continue
        to = route.get_attr("RTA_DST")
        via = route.get_attr("RTA_GATEWAY")
        device = links.get(route.get_attr("RTA_OIF"), "?")
        found.add(_text(route, to, via, device))
    return ", ".join(sorted(found))


def _text(route: Any, to: str | None, via: str | None, device: str) -> str:
    kind = "" if route["type"] == _UNICAST else f" type {route['type']}"
    return f"{f'{to}/' + str(route['dst_len']) if to else 'default'}{f' via {via}' if via else ''} dev {device}{kind}"


def _rules(ipr: Any, family: int) -> str:
    """A rule without a selector is the kernel's own; whatever else there is, is told."""
    odd = []
    for rule in ipr.get_rules(family=family):
        priority = rule.get_attr("FRA_PRIORITY") or 0
        table = rule.get_attr("FRA_TABLE", rule["table"])
        plain = not any(rule[name] for name in ("src_len", "dst_len", "tos")) and rule.get_attr("FRA_FWMARK") is None
        if (priority, table) not in _RULES[family] or not plain:
            odd.append(f"{priority}: lookup {table}")
    return ", ".join(odd) or "the kernel's own"
