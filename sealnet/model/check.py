"""What was planned against what the kernel tells: pure comparison, each difference in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sealnet.model.plan import Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question put to the kernel. `ok` is None where it could not be asked: inconclusive."""

    name: str
    kind: str
    asked: str
    expected: str
    found: str
    ok: bool | None
    took_ms: float
    control: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _NAMES}, "took_ms": round(self.took_ms, 3)}

    def __str__(self) -> str:
        beside = ", beside nothing that answered" if self.kind == "negative" and self.ok is None and self.control is None else ""
        return f"{self.name}: {self.asked}: expected {self.expected}, found {self.found}{beside}"


_NAMES = tuple(item.name for item in fields(Check))


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One end of the link as the kernel tells it; `exists` is False when there is none."""

    exists: bool
    up: bool = False
    carrier: bool = False
    mac: str = ""
    master: int = 0
    master_name: str = ""
    group: int = 0
    addresses: tuple[str, ...] = ()
    sysctls: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything of one seal that can be read back. A gate or filter `fault` is the words for what is wrong with it."""

    netns_inode: int | None
    mark: str
    host: Side
    inside: Side
    links_inside: tuple[str, ...]
    gate_fault: str | None
    filter_fault: str | None
    rulesets: Mapping[str, str]


class Fault(NamedTuple):
    """One way in which what is there is not what was planned. `kind` is the name of the event that tells of it."""

    kind: str
    text: str


# What a network manager does to a link that it takes.
OF_THE_LINK = frozenset(("link-down", "link-changed", "enslaved", "address-lost", "address-added", "ipv6-back", "sysctl-changed"))


def read_back(seal: Seal, faults: Sequence[str], *, took_ms: float) -> Check:
    """That everything read back is as it was planned; `faults` are the differences."""
    asked = "namespace, links, addresses, settings and both rulesets" if seal.subnet is not None else "namespace, links and filter"
    found = "; ".join(faults) or "as planned"
    return Check(name="read-back", kind="state", asked=asked, expected="as planned", found=found, ok=not faults, took_ms=took_ms)


def told_once(checks: Sequence[Check]) -> list[str]:
    """Checks in words; those that found the same are told with the first of them, for one policy rule bends every route."""
    alike: dict[str, list[Check]] = {}
    for one in checks:
        alike.setdefault(one.found, []).append(one)
    return [f"{first}" + (f" (as does {', '.join(one.name for one in more)})" if more else "") for first, *more in alike.values()]


def differences(seal: Seal, seen: Seen, *, mark: str, sysctls: Mapping[str, str], macs: tuple[str, str], group: int) -> list[str]:
    """Each way in which what is there is not what was planned, in words; none when the seal is whole."""
    return [fault.text for fault in faults(seal, seen, mark=mark, sysctls=sysctls, macs=macs, group=group)]


def faults(seal: Seal, seen: Seen, *, mark: str, sysctls: Mapping[str, str], macs: tuple[str, str], group: int) -> list[Fault]:
    """The same as values."""
    found = []
    if seen.mark != mark:
        found.append(Fault("mark-changed", f"netns {seal.netns} is marked {seen.mark!r}, not {mark!r}"))
    if seen.filter_fault:
        found.append(Fault("filter-changed", seen.filter_fault))
    held = ", ".join(seen.links_inside)
    if seal.subnet is None:
        if seen.links_inside != ("lo",):
            found.append(Fault("link-added", f"netns {seal.netns} holds links {held}; a severed run has lo alone"))
        return found
    if seen.gate_fault:
        found.append(Fault("gate-changed" if seen.rulesets.get("gate") else "gate-lost", seen.gate_fault))
    ends = ((f"link {seal.ifname}", seen.host, seal.gateway, macs[0]), ("link eth0 of the sandbox", seen.inside, seal.sandbox, macs[1]))
    for name, side, address, mac in ends:
        found += _side_faults(name, side, f"{address}/{seal.subnet.prefixlen}", mac, sysctls)
    # Behind the ends: of one kind the first is told, and which link is gone says more than which are left.
    if set(seen.links_inside) != {"lo", "eth0"}:
        kind = "link-added" if set(seen.links_inside) > {"lo", "eth0"} else "link-gone"
        found.append(Fault(kind, f"netns {seal.netns} holds links {held}, not lo and eth0 alone"))
    if seen.host.exists and seen.host.group != group:
        found.append(Fault("link-changed", f"link {seal.ifname} is in group {seen.host.group:#x}, not {group:#x}"))
    return found


def _side_faults(name: str, side: Side, address: str, mac: str, sysctls: Mapping[str, str]) -> list[Fault]:
    if not side.exists:
        return [Fault("link-gone", f"{name} is gone")]
    found = []
    if not side.up:
        found.append(Fault("link-down", f"{name} is down"))
    if side.mac != mac:
        found.append(Fault("link-changed", f"{name} has MAC {side.mac}, not {mac}"))
    if side.master:
        found.append(Fault("enslaved", f"{name} is enslaved to link {side.master_name or side.master}"))
    if side.addresses != (address,):
        kind = "address-lost" if address not in side.addresses else "address-added"
        found.append(Fault(kind, f"{name} has address {', '.join(side.addresses) or 'none'}, not {address} alone"))
    for key, value in (side.sysctls or {}).items():
        if value != sysctls[key]:
            kind = "ipv6-back" if key.endswith("/disable_ipv6") else "sysctl-changed"
            found.append(Fault(kind, f"{name} has {key.rsplit('/', 1)[-1]} = {value}, not {sysctls[key]} ({key.split('/', 1)[0]})"))
    return found
