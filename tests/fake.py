"""A kernel that keeps all it was told as one value and prints it as text; it fails, and lies on read-back, where it is told to."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, TypeVar

from sealnet.errors import CannotSeal, CannotTearDown, KernelRefused
from sealnet.kernel import sysctl
from sealnet.model import names, ruleset
from sealnet.model.check import Check, Seen, Side
from sealnet.model.plan import Seal

TAG = "fd01:2a"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One end of a veth pair, or a stranger's link."""

    mac: str
    up: bool = False
    group: int = 0
    alias: str = ""
    altname: str = ""
    master: int = 0
    addresses: tuple[str, ...] = ()
    sysctls: Mapping[str, str] = field(default_factory=dict)
    peer: int | None = None
    """The namespace that the other end, eth0, is in."""

    def text(self, name: str) -> str:
        words = [name, "up" if self.up else "down", self.mac, *self.addresses]
        words += [f"group {self.group:#x}"] if self.group else []
        words += [f"master {self.master}"] if self.master else []
        words += [f"altname {self.altname}"] if self.altname else []
        return " ".join(words) + (f' "{self.alias}"' if self.alias else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Netns:
    """A namespace; it goes away when neither a name nor a handle nor a process holds it."""

    mark: str = ""
    lo_up: bool = False
    filter: str | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    handles: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything there is."""

    gate: str | None = None
    leases: Mapping[tuple[str, str, str, int], float] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    names: Mapping[str, int] = field(default_factory=dict)
    namespaces: Mapping[int, Netns] = field(default_factory=dict)
    cgroups: Mapping[str, str | None] = field(default_factory=dict)
    processes: Mapping[int, tuple[int, str | None]] = field(default_factory=dict)
    """pid: (namespace, cgroup)."""
    listening: frozenset[int] = frozenset()
    shadowed: bool = False
    now: float = 0.0


class Inside:
    """A handle of a namespace."""

    def __init__(self, kernel: FakeKernel, inode: int) -> None:
        self.inode = inode
        self._kernel: FakeKernel | None = kernel
        kernel.change_netns(inode, handles=kernel.world.namespaces[inode].handles + 1)

    def close(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.change_netns(self.inode, handles=kernel.world.namespaces[self.inode].handles - 1)


def _call(method: F) -> F:
    """A request to the kernel: it is counted, and may be the one that fails."""
    name = method.__name__

    @functools.wraps(method)
    def counted(self: FakeKernel, *arguments: Any, **options: Any) -> Any:
        number = len(self.calls)
        self.calls.append(name)
        fails = number in self.fail_at or name in self.fail_in
        if fails and not self.late:
            raise self.error(name)
        result = method(self, *arguments, **options)
        if fails:
            raise self.error(name)
        return result

    return counted  # type: ignore[return-value]


def refusal(name: str) -> Exception:
    return KernelRefused(f"cannot {name}: {os.strerror(errno.EPERM)}", errno=errno.EPERM)


class FakeKernel:
    """Implements `sealnet.seal.Kernel`, and what the launch asks of the host beside.

    `fail_at` (numbers of calls, from 0) and `fail_in` (names of calls) raise `error`, before the call does anything or, when `late`,
    after all of it. `lie` changes what `see` tells, `lie_on_routes` what `check_routes` does.
    """

    def __init__(self, *, fail_at: Collection[int] = (), fail_in: Collection[str] = (), late: bool = False) -> None:
        self.tag = TAG
        self.world = World()
        self.calls: list[str] = []
        self.fail_at, self.fail_in, self.late = fail_at, fail_in, late
        self.error: Callable[[str], Exception] = refusal
        self.lie: Callable[[Seen], Seen] = lambda seen: seen
        self.lie_on_routes: Callable[[list[Check]], list[Check]] = lambda checks: checks
        self._inodes = iter(range(4026532001, 4026533000))

    # The world as text

    def text(self) -> str:
        world, lines = self.world, []
        if world.gate is not None:
            lines.append("gate" if world.gate == ruleset.GATE_TABLE else "gate, changed")
        lines += [f"lease {ifname} {sandbox} -> {gateway}:{port}" for ifname, sandbox, gateway, port in sorted(self._leases())]
        lines += [f"link {link.text(name)}" for name, link in sorted(world.links.items())]
        for inode, netns in sorted(world.namespaces.items()):
            named = sorted(name for name, held in world.names.items() if held == inode)
            lines.append(f'netns {" ".join(named) or "without a name"} "{netns.mark}" {netns.handles} handles')
            lines.append(f"  lo {'up' if netns.lo_up else 'down'}")
            lines += [] if netns.filter is None else ["  filter " + (" | ".join(_accepted(netns.filter)) or "without rules")]
            lines += [f"  {link.text(name)}" for name, link in sorted(netns.links.items())]
        lines += [f"cgroup {run_id} {owner or 'of nobody'}" for run_id, owner in sorted(world.cgroups.items())]
        lines += [f"process {pid} in cgroup {group or '/'}" for pid, (_inode, group) in sorted(world.processes.items())]
        return "".join(line + "\n" for line in lines)

    @property
    def left(self) -> str:
        """The world without the gate, which is static and stays."""
        return "".join(line for line in self.text().splitlines(keepends=True) if line != "gate\n")

    # Changing it

    def change(self, **changes: Any) -> None:
        self.world = replace(self.world, **changes)
        self._collect()

    def change_netns(self, inode: int, **changes: Any) -> None:
        self.change(namespaces={**self.world.namespaces, inode: replace(self.world.namespaces[inode], **changes)})

    def change_link(self, name: str, **changes: Any) -> None:
        self.change(links={**self.world.links, name: replace(self.world.links[name], **changes)})

    def change_eth0(self, inode: int, **changes: Any) -> None:
        links = self.world.namespaces[inode].links
        self.change_netns(inode, links={**links, "eth0": replace(links["eth0"], **changes)})

    def new_netns(self, **what: Any) -> int:
        inode = next(self._inodes)
        # Nothing holds it yet, so it is not collected before the caller does.
        self.world = replace(self.world, namespaces={**self.world.namespaces, inode: Netns(**what)})
        return inode

    def _collect(self) -> None:
        """A namespace that nothing holds goes away, and with it the link whose other end is in it."""
        world = self.world
        held = {*world.names.values(), *(inode for inode, _group in world.processes.values())}
        live = {inode: netns for inode, netns in world.namespaces.items() if inode in held or netns.handles}
        links = {name: link for name, link in world.links.items() if link.peer is None or link.peer in live}
        self.world = replace(world, namespaces=live, links=links)

    def _leases(self) -> dict[tuple[str, str, str, int], float]:
        return {key: ends for key, ends in self.world.leases.items() if ends > self.world.now}

    # Building

    @_call
    def add_gate(self) -> str:
        gate = self.world.gate
        if gate is not None and gate != ruleset.GATE_TABLE and self._leases():
            raise CannotSeal("cannot use the gate: table inet sealnet has been changed by somebody, and leases of live runs stand in it")
        if gate != ruleset.GATE_TABLE:
            self.change(gate=ruleset.GATE_TABLE, leases={})
        return _sha256(ruleset.GATE_TABLE)

    @_call
    def add_netns(self, seal: Seal, born: Callable[[Inside], None] | None = None) -> Inside:
        if seal.netns in self.world.names:
            raise CannotSeal(f"cannot add netns {seal.netns}: one of that name exists and is not this run's")
        inode = self.new_netns(mark=names.mark(seal.run_id, self.tag))
        inside = Inside(self, inode)
        if born is not None:
            born(inside)
        self.change(names={**self.world.names, seal.netns: inode})
        return inside

    @_call
    def add_filter(self, seal: Seal, inside: Inside) -> None:
        text = ruleset.render_inside(gateway=seal.gateway, ports=seal.ports, ifname=names.SANDBOX_LINK)
        self.change_netns(inside.inode, filter=text, lo_up=True)

    @_call
    def add_link(self, seal: Seal, inside: Inside, alias: str) -> int:
        if seal.subnet is None:
            raise ValueError("a severed run has no link")
        if seal.ifname in self.world.links:
            raise KernelRefused(f"cannot add link {seal.ifname}: {os.strerror(errno.EEXIST)}", errno=errno.EEXIST)
        length = seal.subnet.prefixlen
        host = Link(
            mac=names.mac(seal.run_id, end=0),
            group=names.LINK_GROUP,
            alias=names.link_alias(seal.run_id, self.tag, alias),
            altname=seal.netns,
            addresses=(f"{seal.gateway}/{length}",),
            sysctls=sysctl.expected(),
            peer=inside.inode,
        )
        eth0 = Link(mac=names.mac(seal.run_id, end=1), addresses=(f"{seal.sandbox}/{length}",), sysctls=sysctl.expected())
        self.change_netns(inside.inode, links={**self.world.namespaces[inside.inode].links, names.SANDBOX_LINK: eth0})
        self.change(links={**self.world.links, seal.ifname: host})
        return 10 + len(self.world.links)

    @_call
    def bring_up(self, seal: Seal, inside: Inside, index: int) -> None:
        self.change_link(seal.ifname, up=True)
        self.change_eth0(inside.inode, up=True)

    @_call
    def grant(self, seal: Seal, *, ttl_s: int) -> bool:
        if seal.subnet is None:
            return False
        lost = self.world.gate is None
        if lost:
            self.change(gate=ruleset.GATE_TABLE, leases={})
        self.change(leases={**self.world.leases, _lease(seal): self.world.now + ttl_s})
        return lost

    @_call
    def add_cgroup(self, run_id: str) -> Path:
        if run_id in self.world.cgroups:
            raise CannotSeal(f"cannot add cgroup {run_id}: {os.strerror(errno.EEXIST)}")
        self.change(cgroups={**self.world.cgroups, run_id: self.tag})
        return Path("/cgroup") / run_id

    # Looking

    @_call
    def see(self, seal: Seal, inside: Inside) -> Seen:
        netns, gate = self.world.namespaces[inside.inode], self.world.gate
        planned = ruleset.render_inside(gateway=seal.gateway, ports=seal.ports, ifname=names.SANDBOX_LINK)
        rulesets = {"inside": _sha256(netns.filter)}
        host = eth0 = Side(exists=False)
        gate_fault = filter_fault = None
        if netns.filter != planned:
            what = "is gone" if netns.filter is None else "is not as it was planned"
            filter_fault = f"the filter inside netns {seal.netns} {what}"
        if seal.subnet is not None:
            host, eth0 = _side(self.world.links.get(seal.ifname)), _side(netns.links.get(names.SANDBOX_LINK))
            rulesets["gate"] = _sha256(gate)
            if gate != ruleset.GATE_TABLE:
                gate_fault = "the gate is gone" if gate is None else "the gate has been changed"
                gate_fault += " (table inet sealnet)"
        return self.lie(
            Seen(
                netns_inode=inside.inode,
                mark=netns.mark,
                host=host,
                inside=eth0,
                links_inside=("lo", *netns.links),
                gate_fault=gate_fault,
                filter_fault=filter_fault,
                rulesets=rulesets,
            )
        )

    @_call
    def check_routes(self, seal: Seal) -> list[Check]:
        if seal.subnet is None or seal.ifname not in self.world.links:
            return []
        way, wrong = f"unicast dev {seal.ifname}", "prohibited"
        asked = [("route-to-sandbox", way), *[("route-of-broker", way)] * (seal.lease_port in self.world.listening)]
        asked += [("route-to-gateway", "local"), ("route-to-canary", "a refusal")]
        checks = []
        for name, expected in asked:
            # A rule in front of the subnet also fails the kernel's own look back along the way that a packet came (rp_filter).
            ok = not (self.world.shadowed and name != "route-to-canary")
            checks.append(_check(name, "state", "ip route get", expected, expected if ok else wrong, ok=ok))
        return self.lie_on_routes(checks)

    @_call
    def has_lease(self, seal: Seal) -> bool:
        return _lease(seal) in self._leases()

    @_call
    def has_gateway(self, seal: Seal) -> bool:
        return _lease(seal) in self._leases()

    @_call
    def see_sink(self, inside: Inside) -> str | None:
        return None if self.world.namespaces[inside.inode].lo_up else "Network is unreachable"

    @_call
    def see_settings(self, seal: Seal, inside: Inside) -> list[dict[str, str]]:
        if seal.subnet is None:
            return []
        ends = (self.world.links.get(seal.ifname), self.world.namespaces[inside.inode].links.get(names.SANDBOX_LINK))
        return [dict(end.sysctls) if end else {} for end in ends]

    # Putting back

    @_call
    def restore_gate(self, *, ttl_s: int) -> None:
        if self.world.gate != ruleset.GATE_TABLE:
            kept = {} if self.world.gate is None else dict.fromkeys(self._leases(), self.world.now + ttl_s)
            self.change(gate=ruleset.GATE_TABLE, leases=kept)

    @_call
    def restore_filter(self, seal: Seal, inside: Inside) -> None:
        text = ruleset.render_inside(gateway=seal.gateway, ports=seal.ports, ifname=names.SANDBOX_LINK)
        self.change_netns(inside.inode, filter=text)

    @_call
    def restore_link(self, seal: Seal, inside: Inside) -> None:
        ends = (self.world.links.get(seal.ifname), self.world.namespaces[inside.inode].links.get(names.SANDBOX_LINK))
        for end, address, change in (
            (ends[0], f"{seal.gateway}/30", lambda **changes: self.change_link(seal.ifname, **changes)),
            (ends[1], f"{seal.sandbox}/30", lambda **changes: self.change_eth0(inside.inode, **changes)),
        ):
            if end is None:
                raise KernelRefused("cannot put the link back: it is gone", errno=errno.ENODEV)
            kept = end.addresses if address in end.addresses else (*end.addresses, address)
            change(up=True, master=0, addresses=kept, sysctls=sysctl.expected())

    @_call
    def restore_sink(self, inside: Inside) -> None:
        self.change_netns(inside.inode, lo_up=True)

    @_call
    def sandbox_of(self, ifname: str) -> IPv4Address | None:
        return next((IPv4Address(key[1]) for key in self._leases() if key[0] == ifname), None)

    @_call
    def join(self, run_id: str, hint: int | None = None) -> Inside | None:
        named = self.world.names.get(names.netns(run_id))
        own = [inode for inode, netns in self.world.namespaces.items() if netns.mark == names.mark(run_id, self.tag)]
        return Inside(self, named if named in own else own[0]) if own else None

    @_call
    def traces(self) -> set[str]:
        found = {names.run_of_alias(link.alias, self.tag) for link in self.world.links.values()}
        found |= {names.run_of_alias(self.world.namespaces[inode].mark, self.tag) for inode in self.world.names.values()}
        found |= {run_id for run_id, owner in self.world.cgroups.items() if owner == self.tag}
        return {run_id for run_id in found if run_id}

    # Ending

    @_call
    def kill(self, run_id: str, inside: Inside | None) -> None:
        group = run_id if self.world.cgroups.get(run_id) == self.tag else None
        live = {
            pid: place
            for pid, place in self.world.processes.items()
            if (group is None or place[1] != group) and (inside is None or place[0] != inside.inode)
        }
        self.change(processes=live)

    @_call
    def settle(self, sandbox: IPv4Address | None) -> None:
        pass

    @_call
    def revoke(self, seal: Seal) -> None:
        self.change(leases={key: ends for key, ends in self.world.leases.items() if key[0] != seal.ifname})

    @_call
    def withdraw(self, seal: Seal, ports: Sequence[int]) -> None:
        self.change(leases={key: ends for key, ends in self.world.leases.items() if key != _lease(seal) or key[3] not in ports})

    @_call
    def remove_link(self, run_id: str) -> None:
        links, altname = self.world.links, names.netns(run_id)
        by_altname = next((name for name, link in links.items() if link.altname == altname), None)
        name = names.ifname(run_id) if names.ifname(run_id) in links else by_altname
        if name is None:
            return
        link = links[name]
        # One that was made and not yet marked is told by its MAC; a mark of another state directory says that it is not ours.
        unmarked = not link.alias.startswith("sealnet ") and link.mac == names.mac(run_id, end=0)
        if unmarked or names.run_of_alias(link.alias, self.tag) == run_id:
            if link.peer is not None:
                inside = self.world.namespaces[link.peer].links
                self.change_netns(link.peer, links={end: link for end, link in inside.items() if end != names.SANDBOX_LINK})
            self.change(links={other: link for other, link in links.items() if other != name})

    @_call
    def remove_netns(self, run_id: str, *, inode: int | None = None, everywhere: bool = False) -> None:
        named = self.world.names.get(names.netns(run_id))
        if named is not None and (named == inode or self.world.namespaces[named].mark == names.mark(run_id, self.tag)):
            self.change(names={name: held for name, held in self.world.names.items() if name != names.netns(run_id)})

    @_call
    def remove_cgroup(self, run_id: str) -> None:
        # One that nobody has marked is what a death between its making and its marking leaves.
        if self.world.cgroups.get(run_id) not in (self.tag, None):
            return
        if any(group == run_id for _inode, group in self.world.processes.values()):
            raise CannotTearDown(f"cannot remove cgroup {run_id}: {os.strerror(errno.EBUSY)}")
        self.change(cgroups={other: owner for other, owner in self.world.cgroups.items() if other != run_id})


def _lease(seal: Seal) -> tuple[str, str, str, int]:
    return seal.ifname, str(seal.sandbox), str(seal.gateway), seal.lease_port or 0


def _sha256(text: str | None) -> str:
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def _accepted(text: str) -> list[str]:
    return [line.strip().removesuffix(" accept") for line in text.splitlines() if line.endswith(" accept")]


def _side(link: Link | None) -> Side:
    if link is None:
        return Side(exists=False)
    return Side(
        exists=True,
        up=link.up,
        carrier=link.up,
        mac=link.mac,
        master=link.master,
        master_name="br0" if link.master else "",
        group=link.group,
        addresses=link.addresses,
        sysctls=dict(link.sysctls),
    )


def _check(name: str, kind: str, asked: str, expected: str, found: str, *, ok: bool, control: str | None = None) -> Check:
    return Check(name=name, kind=kind, asked=asked, expected=expected, found=found, ok=ok, took_ms=0.0, control=control)
