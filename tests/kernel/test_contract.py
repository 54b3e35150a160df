"""What the seal may rely on, asked of the real kernel and of the fake alike, so that the fake cannot drift."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Protocol

import pytest

from sealnet import caller
from sealnet import seal as sealing
from sealnet.errors import CannotSeal, CannotTearDown, KernelRefused, SealnetError
from sealnet.kernel import cgroup, sysctl
from sealnet.kernel.host import Host
from sealnet.model import check, names, ruleset
from sealnet.model.check import Seen
from sealnet.model.plan import Seal
from sealnet.records import State
from tests import lab
from tests.crash import descriptors
from tests.fake import FakeKernel, Link
from tests.model import build

# The cgroup tree is the machine's own, also for a throw-away host: the run id must be nobody else's.
RUN = caller.new_run_id()
SEALED, SEVERED = build.sealed(RUN), build.severed(RUN)
LINK, ETH0 = f"link {names.ifname(RUN)}", "link eth0 of the sandbox"
FOREIGN_MAC = "02:00:5e:00:53:01"
FOREIGN_TAG = "fd99:63"


class Bench(Protocol):
    """A kernel, and the hands of somebody else on it."""

    kernel: Any

    def links(self) -> dict[str, str]: ...
    def netns_names(self) -> list[str]: ...
    def cgroups(self) -> list[str]: ...
    def clean_up(self) -> None: ...

    def stranger_link(self, name: str, *, mac: str, altname: str | None = None, alias: str | None = None) -> None: ...
    def stranger_netns(self, name: str) -> None: ...
    def stranger_cgroup(self, *, tag: str | None) -> None: ...
    def rename_link(self, name: str, to: str) -> None: ...
    def spawn(self) -> Callable[[], bool]: ...
    def listen(self, port: int) -> None: ...
    def let_pass(self, seconds: float, over: Callable[[], bool]) -> None: ...

    def flush_address(self) -> None: ...
    def add_address(self) -> None: ...
    def flush_inner_address(self) -> None: ...
    def link_down(self) -> None: ...
    def eth0_down(self) -> None: ...
    def enslave(self) -> None: ...
    def change_mac(self) -> None: ...
    def change_group(self) -> None: ...
    def flip_forwarding(self) -> None: ...
    def flip_rp_filter(self) -> None: ...
    def remove_link(self) -> None: ...
    def add_inner_link(self) -> None: ...
    def flush_filter(self) -> None: ...
    def delete_filter(self) -> None: ...
    def delete_gate(self) -> None: ...
    def add_gate_rule(self) -> None: ...
    def change_mark(self) -> None: ...
    def shadow_the_subnet(self) -> None: ...


class FakeBench:
    def __init__(self) -> None:
        self.kernel = FakeKernel()
        self._pids = iter(range(100, 200))

    def links(self) -> dict[str, str]:
        return {name: link.mac for name, link in self.kernel.world.links.items()}

    def netns_names(self) -> list[str]:
        return sorted(self.kernel.world.names)

    def cgroups(self) -> list[str]:
        return sorted(self.kernel.world.cgroups)

    def clean_up(self) -> None:
        assert all(netns.handles == 0 for netns in self.kernel.world.namespaces.values())

    def stranger_link(self, name: str, *, mac: str, altname: str | None = None, alias: str | None = None) -> None:
        self.kernel.change(links={**self.kernel.world.links, name: Link(mac=mac, altname=altname or "", alias=alias or "")})

    def stranger_netns(self, name: str) -> None:
        self.kernel.change(names={**self.kernel.world.names, name: self.kernel.new_netns()})

    def stranger_cgroup(self, *, tag: str | None) -> None:
        self.kernel.change(cgroups={**self.kernel.world.cgroups, RUN: tag})

    def rename_link(self, name: str, to: str) -> None:
        self.kernel.change(links={to if was == name else was: link for was, link in self.kernel.world.links.items()})

    def spawn(self) -> Callable[[], bool]:
        pid, inode = next(self._pids), self.kernel.world.names[SEALED.netns]
        group = RUN if RUN in self.kernel.world.cgroups else None
        self.kernel.change(processes={**self.kernel.world.processes, pid: (inode, group)})
        return lambda: pid in self.kernel.world.processes

    def listen(self, port: int) -> None:
        self.kernel.change(listening=self.kernel.world.listening | {port})

    def let_pass(self, seconds: float, over: Callable[[], bool]) -> None:
        self.kernel.change(now=self.kernel.world.now + seconds)
        assert over()

    # Tampering

    def _inode(self) -> int:
        return self.kernel.world.names[SEALED.netns]

    def flush_address(self) -> None:
        self.kernel.change_link(SEALED.ifname, addresses=())

    def add_address(self) -> None:
        self.kernel.change_link(SEALED.ifname, addresses=("198.18.0.1/30", "192.0.2.9/32"))

    def flush_inner_address(self) -> None:
        self.kernel.change_eth0(self._inode(), addresses=())

    def link_down(self) -> None:
        self.kernel.change_link(SEALED.ifname, up=False)

    def eth0_down(self) -> None:
        self.kernel.change_eth0(self._inode(), up=False)

    def enslave(self) -> None:
        self.kernel.change_link(SEALED.ifname, master=9)

    def change_mac(self) -> None:
        self.kernel.change_link(SEALED.ifname, mac=FOREIGN_MAC)

    def change_group(self) -> None:
        self.kernel.change_link(SEALED.ifname, group=0)

    def _flip(self, key: str, value: str) -> None:
        self.kernel.change_link(SEALED.ifname, sysctls={**sysctl.expected(), key: value})

    def flip_forwarding(self) -> None:
        self._flip("ipv4/conf/{link}/forwarding", "1")

    def flip_rp_filter(self) -> None:
        self._flip("ipv4/conf/{link}/rp_filter", "0")

    def remove_link(self) -> None:
        self.kernel.change_netns(self._inode(), links={})
        self.kernel.change(links={})

    def add_inner_link(self) -> None:
        links = self.kernel.world.namespaces[self._inode()].links
        self.kernel.change_netns(self._inode(), links={**links, "br0": Link(mac=FOREIGN_MAC)})

    def flush_filter(self) -> None:
        self.kernel.change_netns(self._inode(), filter="")

    def delete_filter(self) -> None:
        self.kernel.change_netns(self._inode(), filter=None)

    def delete_gate(self) -> None:
        self.kernel.change(gate=None, leases={})

    def add_gate_rule(self) -> None:
        self.kernel.change(gate=ruleset.GATE_TABLE + "accept")

    def change_mark(self) -> None:
        self.kernel.change_netns(self._inode(), mark="mine")

    def shadow_the_subnet(self) -> None:
        self.kernel.change(shadowed=True)


class RealBench:
    def __init__(self, host: lab.Host) -> None:
        self.host = host
        state = State(host.state)
        state.prepare()
        self.kernel = Host(state.path, state.tag)
        self._undo = contextlib.ExitStack()
        # Where it makes them depends on the cgroup that this process is in.
        self._cgroup = self.kernel.add_cgroup(RUN)
        self.kernel.remove_cgroup(RUN)

    def ip(self, *words: str) -> str:
        return self.host.run("ip", *words).stdout

    def nft(self, *words: str) -> None:
        self.host.run("nft", *words)

    def inside(self, *words: str) -> None:
        self.ip("netns", "exec", SEALED.netns, *words)

    def links(self) -> dict[str, str]:
        return {link["ifname"]: link["address"] for link in json.loads(self.ip("-j", "link")) if link["ifname"] not in ("lo", "lan0")}

    def netns_names(self) -> list[str]:
        return sorted(name for name in os.listdir("/run/netns") if name != "lan")

    def cgroups(self) -> list[str]:
        return [RUN] if self._cgroup.exists() else []

    def clean_up(self) -> None:
        self._undo.close()
        self.kernel.close()

    def stranger_link(self, name: str, *, mac: str, altname: str | None = None, alias: str | None = None) -> None:
        self.ip("link", "add", name, "address", mac, "type", "bridge")
        self._undo.callback(self.host.run, "ip", "link", "del", name, check=False)
        if altname:
            self.ip("link", "property", "add", "dev", name, "altname", altname)
        if alias:
            self.ip("link", "set", name, "alias", alias)

    def stranger_netns(self, name: str) -> None:
        self.ip("netns", "add", name)
        self._undo.callback(self.ip, "netns", "del", name)

    def stranger_cgroup(self, *, tag: str | None) -> None:
        self._cgroup.mkdir(parents=True)
        if tag is not None:
            os.setxattr(self._cgroup, "trusted.sealnet", tag.encode())
        self._undo.callback(cgroup.remove, self._cgroup)

    def rename_link(self, name: str, to: str) -> None:
        self.ip("link", "set", name, "down", "name", to)

    def spawn(self) -> Callable[[], bool]:
        argv = ["ip", "netns", "exec", SEALED.netns, "sleep", "60"]
        if self._cgroup.exists():
            argv = ["sh", "-c", 'echo 0 >"$0/cgroup.procs"; exec "$@"', str(self._cgroup), *argv]
        process = self.host.spawn(*argv)
        lab.wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", what="it sleeps in the namespace")
        return lambda: process.poll() is None

    def listen(self, port: int) -> None:
        self._undo.enter_context(socket.create_server(("0.0.0.0", port)))

    def let_pass(self, seconds: float, over: Callable[[], bool]) -> None:
        lab.wait_for(over, timeout_s=seconds + 5)

    # Tampering

    def flush_address(self) -> None:
        self.ip("addr", "flush", "dev", SEALED.ifname)

    def add_address(self) -> None:
        self.ip("addr", "add", "192.0.2.9/32", "dev", SEALED.ifname)

    def flush_inner_address(self) -> None:
        self.inside("ip", "addr", "flush", "dev", "eth0")

    def link_down(self) -> None:
        self.ip("link", "set", SEALED.ifname, "down")

    def eth0_down(self) -> None:
        self.inside("ip", "link", "set", "eth0", "down")

    def enslave(self) -> None:
        self.ip("link", "add", "br0", "type", "bridge")
        self._undo.callback(self.ip, "link", "del", "br0")
        self.ip("link", "set", SEALED.ifname, "master", "br0")

    def change_mac(self) -> None:
        self.ip("link", "set", SEALED.ifname, "address", FOREIGN_MAC)

    def change_group(self) -> None:
        self.ip("link", "set", SEALED.ifname, "group", "0")

    def flip_forwarding(self) -> None:
        # Not on the link itself: this is what others do, and what it does to the link.
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        self._undo.callback(Path("/proc/sys/net/ipv4/ip_forward").write_text, "0")

    def flip_rp_filter(self) -> None:
        Path(f"/proc/sys/net/ipv4/conf/{SEALED.ifname}/rp_filter").write_text("0")

    def remove_link(self) -> None:
        self.ip("link", "del", SEALED.ifname)

    def add_inner_link(self) -> None:
        self.inside("ip", "link", "add", "br0", "type", "bridge")

    def flush_filter(self) -> None:
        self.inside("nft", "flush", "table", "inet", "sealnet")

    def delete_filter(self) -> None:
        self.inside("nft", "flush", "ruleset")

    def delete_gate(self) -> None:
        self.nft("flush", "ruleset")

    def add_gate_rule(self) -> None:
        self.nft("insert", "rule", "inet", "sealnet", "input", "accept")

    def change_mark(self) -> None:
        self.inside("ip", "link", "set", "lo", "alias", "mine")
        self._undo.callback(self.ip, "netns", "del", SEALED.netns)

    def shadow_the_subnet(self) -> None:
        rule = ("to", "198.18.0.0/15", "prohibit", "pref", "100")
        self.ip("rule", "add", *rule)
        self._undo.callback(self.ip, "rule", "del", *rule)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.root)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made: Bench = FakeBench() if request.param == "fake" else RealBench(request.getfixturevalue("host"))
    try:
        yield made
    finally:
        # First what is the run's, while it can still be told by its own marks.
        with contextlib.suppress(SealnetError):
            take_away(made.kernel)
        made.clean_up()


def take_away(kernel: Any) -> None:
    sealing.teardown(kernel, SEVERED, inside=kernel.join(RUN), release=lambda _run_id: None)


@contextlib.contextmanager
def applied(bench: Bench, seal: Seal) -> Iterator[Any]:
    """A seal that stands; its handle is closed at the end, its pieces are left for the test to take away."""
    inside = sealing.apply(bench.kernel, seal, alias="nobody: true", sysctls=sysctl.expected()).inside
    try:
        yield inside
    finally:
        inside.close()


def differences(kernel: Any, seal: Seal, seen: Seen) -> list[str]:
    macs = names.mac(RUN, end=0), names.mac(RUN, end=1)
    mark = names.mark(RUN, kernel.tag)
    return check.differences(seal, seen, mark=mark, sysctls=sysctl.expected(), macs=macs, group=names.LINK_GROUP)


@pytest.mark.parametrize("kernel", [FakeKernel, Host])
def test_both_answer_to_everything_that_the_seal_asks(kernel: type) -> None:
    asked = {name: method for name, method in vars(sealing.Kernel).items() if inspect.isfunction(method) and not name.startswith("_")}

    for name, method in asked.items():
        planned, found = (inspect.signature(each).parameters.values() for each in (method, getattr(kernel, name)))
        assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in planned], name
    assert len(asked) > 15


# Building


def test_a_seal_that_was_built_step_by_step_has_no_difference(bench: Bench) -> None:
    kernel = bench.kernel

    kernel.add_gate()
    inside = kernel.add_netns(SEALED)
    kernel.add_filter(SEALED, inside)
    index = kernel.add_link(SEALED, inside, "nobody: true")
    kernel.bring_up(SEALED, inside, index)
    seen = kernel.see(SEALED, inside)
    inside.close()

    assert differences(kernel, SEALED, seen) == []
    assert seen.host.carrier
    assert seen.inside.carrier
    assert seen.netns_inode == inside.inode
    assert bench.links() == {SEALED.ifname: names.mac(RUN, end=0)}
    assert bench.netns_names() == [SEALED.netns]


def test_a_severed_seal_has_no_difference_and_no_link(bench: Bench) -> None:
    with applied(bench, SEVERED) as inside:
        seen = bench.kernel.see(SEVERED, inside)

    assert differences(bench.kernel, SEVERED, seen) == []
    assert (seen.host.exists, seen.inside.exists, seen.links_inside) == (False, False, ("lo",))
    assert bench.links() == {}


def test_a_link_is_down_until_it_is_brought_up(bench: Bench) -> None:
    kernel = bench.kernel
    kernel.add_gate()
    inside = kernel.add_netns(SEALED)
    kernel.add_filter(SEALED, inside)

    kernel.add_link(SEALED, inside, "x")
    seen = kernel.see(SEALED, inside)
    inside.close()

    assert differences(kernel, SEALED, seen) == [f"{LINK} is down", f"{ETH0} is down"]


def test_the_gate_may_be_added_again_and_stays_the_same(bench: Bench) -> None:
    first = bench.kernel.add_gate()
    with applied(bench, SEALED) as inside:
        bench.kernel.grant(SEALED, ttl_s=90)

        assert bench.kernel.add_gate() == first
        assert bench.kernel.see(SEALED, inside).rulesets["gate"] == first
        assert bench.kernel.has_lease(SEALED)


def test_a_gate_that_somebody_changed_is_put_up_anew_when_no_lease_stands_in_it(bench: Bench) -> None:
    first = bench.kernel.add_gate()
    bench.add_gate_rule()

    assert bench.kernel.add_gate() == first
    with applied(bench, SEALED) as inside:
        assert differences(bench.kernel, SEALED, bench.kernel.see(SEALED, inside)) == []


def test_a_gate_that_somebody_changed_is_refused_while_a_lease_stands_in_it(bench: Bench) -> None:
    with applied(bench, SEALED):
        bench.kernel.grant(SEALED, ttl_s=90)
        bench.add_gate_rule()

        with pytest.raises(CannotSeal, match="cannot use the gate: table inet sealnet has been changed by somebody"):
            bench.kernel.add_gate()

        assert bench.kernel.has_lease(SEALED)


def test_a_run_whose_netns_name_is_taken_is_refused_and_leaves_the_name_alone(bench: Bench) -> None:
    bench.stranger_netns(SEALED.netns)

    with pytest.raises(CannotSeal, match=f"cannot add netns {SEALED.netns}: one of that name exists"):
        bench.kernel.add_netns(SEALED)

    assert bench.netns_names() == [SEALED.netns]


def test_a_run_whose_link_name_is_taken_is_refused_and_leaves_the_link_alone(bench: Bench) -> None:
    bench.stranger_link(SEALED.ifname, mac=FOREIGN_MAC)

    with pytest.raises(KernelRefused, match=f"cannot add link {SEALED.ifname}: File exists"):
        sealing.apply(bench.kernel, SEALED, alias="x", sysctls=sysctl.expected())

    assert bench.links() == {SEALED.ifname: FOREIGN_MAC}
    assert bench.netns_names() == []


def test_a_cgroup_is_made_once(bench: Bench) -> None:
    assert bench.kernel.add_cgroup(RUN).name == RUN

    with pytest.raises(CannotSeal, match=r"cannot add cgroup .*: File exists"):
        bench.kernel.add_cgroup(RUN)
    assert bench.cgroups() == [RUN]


# Leases and probes


def test_a_lease_is_there_from_its_grant_to_its_revocation(bench: Bench) -> None:
    with applied(bench, SEALED):
        kernel = bench.kernel
        before = kernel.has_lease(SEALED), kernel.sandbox_of(SEALED.ifname)

        restored = [kernel.grant(SEALED, ttl_s=90), kernel.grant(SEALED, ttl_s=90)]
        granted = kernel.has_lease(SEALED), kernel.sandbox_of(SEALED.ifname)
        kernel.revoke(SEALED)
        kernel.revoke(SEALED)

        assert before == (False, None)
        assert restored == [False, False]
        assert granted == (True, IPv4Address("198.18.0.2"))
        assert not kernel.has_lease(SEALED)


def test_a_lease_is_revoked_by_its_link_alone(bench: Bench) -> None:
    with applied(bench, SEALED):
        bench.kernel.grant(SEALED, ttl_s=90)

        bench.kernel.revoke(SEVERED)

        assert not bench.kernel.has_lease(SEALED)


def test_a_lease_is_withdrawn_by_its_port(bench: Bench) -> None:
    with applied(bench, SEALED):
        bench.kernel.grant(SEALED, ttl_s=90)

        bench.kernel.withdraw(SEALED, [1])
        assert bench.kernel.has_lease(SEALED)
        bench.kernel.withdraw(SEALED, SEALED.ports)
        bench.kernel.withdraw(SEALED, SEALED.ports)

        assert not bench.kernel.has_lease(SEALED)


def test_a_lease_that_nobody_renews_runs_out(bench: Bench) -> None:
    with applied(bench, SEALED):
        bench.kernel.grant(SEALED, ttl_s=1)
        assert bench.kernel.has_lease(SEALED)

        bench.let_pass(1, lambda: not bench.kernel.has_lease(SEALED))


def test_a_renewal_puts_a_gate_back_that_somebody_removed(bench: Bench) -> None:
    with applied(bench, SEALED) as inside:
        bench.kernel.grant(SEALED, ttl_s=90)
        bench.delete_gate()
        assert not bench.kernel.has_lease(SEALED)

        assert bench.kernel.grant(SEALED, ttl_s=90)

        assert bench.kernel.has_lease(SEALED)
        assert differences(bench.kernel, SEALED, bench.kernel.see(SEALED, inside)) == []


def test_nothing_is_leased_to_a_severed_run_or_without_a_gate(bench: Bench) -> None:
    assert not bench.kernel.grant(SEVERED, ttl_s=90)
    bench.kernel.revoke(SEALED)
    bench.kernel.revoke(SEVERED)
    assert bench.kernel.sandbox_of(SEALED.ifname) is None


def test_the_routes_of_a_seal_lead_where_they_must(bench: Bench) -> None:
    bench.listen(8080)
    with applied(bench, SEALED):
        checks = bench.kernel.check_routes(SEALED)

    assert [one.name for one in checks] == ["route-to-sandbox", "route-of-broker", "route-to-gateway", "route-to-canary"]
    assert all(one.ok for one in checks)


def test_a_rule_that_shadows_the_subnet_is_seen_by_the_route_checks(bench: Bench) -> None:
    with applied(bench, SEALED):
        bench.shadow_the_subnet()

        wrong = [one.name for one in bench.kernel.check_routes(SEALED) if not one.ok]

    assert wrong == ["route-to-sandbox", "route-to-gateway"]


# Tampering


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        ("flush_address", [f"{LINK} has address none, not 198.18.0.1/30 alone"]),
        ("add_address", [f"{LINK} has address 198.18.0.1/30, 192.0.2.9/32, not 198.18.0.1/30 alone"]),
        ("flush_inner_address", [f"{ETH0} has address none, not 198.18.0.2/30 alone"]),
        ("link_down", [f"{LINK} is down"]),
        ("eth0_down", [f"{ETH0} is down"]),
        ("enslave", [f"{LINK} is enslaved to link br0"]),
        ("change_mac", [f"{LINK} has MAC {FOREIGN_MAC}, not {names.mac(RUN, end=0)}"]),
        ("change_group", [f"{LINK} is in group 0x0, not 0x5ea1"]),
        ("flip_forwarding", [f"{LINK} has forwarding = 1, not 0 (ipv4)"]),
        ("flip_rp_filter", [f"{LINK} has rp_filter = 0, not 1 (ipv4)"]),
        ("remove_link", [f"{LINK} is gone", f"{ETH0} is gone", f"netns {SEALED.netns} holds links lo, not lo and eth0 alone"]),
        ("add_inner_link", [f"netns {SEALED.netns} holds links lo, eth0, br0, not lo and eth0 alone"]),
        ("flush_filter", [f"the filter inside netns {SEALED.netns} is not as it was planned"]),
        ("delete_filter", [f"the filter inside netns {SEALED.netns} is gone"]),
        ("delete_gate", ["the gate is gone (table inet sealnet)"]),
        ("add_gate_rule", ["the gate has been changed (table inet sealnet)"]),
        ("change_mark", [f"netns {SEALED.netns} is marked 'mine', not 'sealnet {RUN} TAG'"]),
    ],
)
def test_what_somebody_did_to_a_seal_is_told_and_nothing_else(bench: Bench, tamper: str, told: list[str]) -> None:
    with applied(bench, SEALED) as inside:
        before = differences(bench.kernel, SEALED, bench.kernel.see(SEALED, inside))

        getattr(bench, tamper)()

        seen = differences(bench.kernel, SEALED, bench.kernel.see(SEALED, inside))
    assert before == []
    assert [text.replace(bench.kernel.tag, "TAG") for text in seen] == told


@pytest.mark.parametrize(
    ("tamper", "restore"),
    [
        ("flush_address", "restore_link"),
        ("flush_inner_address", "restore_link"),
        ("link_down", "restore_link"),
        ("eth0_down", "restore_link"),
        ("enslave", "restore_link"),
        ("flip_forwarding", "restore_link"),
        ("flip_rp_filter", "restore_link"),
        ("flush_filter", "restore_filter"),
        ("delete_filter", "restore_filter"),
        ("delete_gate", "restore_gate"),
        ("add_gate_rule", "restore_gate"),
    ],
)
def test_what_somebody_did_is_put_back_as_it_was_and_putting_it_back_again_changes_nothing(bench: Bench, tamper: str, restore: str) -> None:
    with applied(bench, SEALED) as inside:
        kernel = bench.kernel
        kernel.grant(SEALED, ttl_s=90)
        before = kernel.see(SEALED, inside)
        arguments = {"restore_gate": (), "restore_filter": (SEALED, inside), "restore_link": (SEALED, inside)}[restore]
        options = {"ttl_s": 90} if restore == "restore_gate" else {}
        getattr(bench, tamper)()
        changed = differences(kernel, SEALED, kernel.see(SEALED, inside))

        for _ in range(2):
            getattr(kernel, restore)(*arguments, **options)

        after = kernel.see(SEALED, inside)
        assert len(changed) == 1
        assert differences(kernel, SEALED, after) == []
        assert after.rulesets == before.rulesets
        assert kernel.see_sink(inside) is None
        assert kernel.see_settings(SEALED, inside) == [sysctl.expected()] * 2
        # Only what was lost with its whole table is not in it again: a lease is for its own run to grant.
        assert kernel.has_lease(SEALED) == kernel.has_gateway(SEALED) == (tamper != "delete_gate")


def test_a_link_that_is_gone_cannot_be_put_back(bench: Bench) -> None:
    with applied(bench, SEALED) as inside:
        bench.remove_link()

        with pytest.raises(KernelRefused, match="gone"):
            bench.kernel.restore_link(SEALED, inside)


# Taking away


def test_everything_is_taken_away_and_taking_it_away_again_succeeds(bench: Bench) -> None:
    bench.kernel.add_cgroup(RUN)
    with applied(bench, SEALED):
        bench.kernel.grant(SEALED, ttl_s=90)

    for _ in range(2):
        bench.kernel.kill(RUN, None)
        bench.kernel.settle(SEALED.sandbox)
        bench.kernel.settle(None)
        bench.kernel.revoke(SEALED)
        bench.kernel.remove_link(RUN)
        bench.kernel.remove_netns(RUN)
        bench.kernel.remove_netns(RUN, everywhere=True)
        bench.kernel.remove_cgroup(RUN)

        assert (bench.links(), bench.netns_names(), bench.cgroups()) == ({}, [], [])
        assert bench.kernel.join(RUN) is None
        assert bench.kernel.traces() == set()


def test_a_link_takes_its_other_end_with_it(bench: Bench) -> None:
    with applied(bench, SEALED) as inside:
        bench.kernel.remove_link(RUN)

        assert bench.kernel.see(SEALED, inside).links_inside == ("lo",)


def test_every_process_of_a_run_is_ended_in_its_cgroup_and_in_its_namespace(bench: Bench) -> None:
    with applied(bench, SEVERED) as inside:
        strayed = bench.spawn()
        bench.kernel.add_cgroup(RUN)
        member = bench.spawn()

        bench.kernel.kill(RUN, None)
        lab.wait_for(lambda: not member(), what="the member of the cgroup has ended")
        assert strayed()
        bench.kernel.kill(RUN, inside)
        lab.wait_for(lambda: not strayed(), what="the process in the namespace has ended")


def test_a_namespace_is_found_by_name_or_by_a_process_in_it(bench: Bench) -> None:
    with applied(bench, SEVERED) as inside:
        bench.spawn()
        by_name = bench.kernel.join(RUN)
        bench.kernel.remove_netns(RUN)
        by_process, by_hint = bench.kernel.join(RUN), bench.kernel.join(RUN, inside.inode)
        for handle in (by_name, by_process, by_hint):
            handle.close()
            assert handle.inode == inside.inode

        bench.kernel.kill(RUN, inside)


def test_what_is_left_of_a_run_is_found_by_each_of_its_traces(bench: Bench) -> None:
    kernel = bench.kernel
    kernel.add_cgroup(RUN)
    assert kernel.traces() == {RUN}
    kernel.remove_cgroup(RUN)
    with applied(bench, SEALED):
        assert kernel.traces() == {RUN}
        kernel.remove_netns(RUN)
        assert kernel.traces() == {RUN}
        kernel.remove_link(RUN)
        assert kernel.traces() == set()


def test_a_link_that_was_renamed_is_found_by_its_other_name(bench: Bench) -> None:
    with applied(bench, SEALED):
        bench.rename_link(SEALED.ifname, "eth7")

        bench.kernel.remove_link(RUN)

        assert bench.links() == {}


def test_a_link_whose_mac_was_changed_is_still_the_runs(bench: Bench) -> None:
    with applied(bench, SEALED):
        bench.change_mac()

        bench.kernel.remove_link(RUN)

        assert bench.links() == {}


# Strangers


@pytest.mark.parametrize(
    ("name", "altname", "alias"),
    [
        (SEALED.ifname, None, None),
        (SEALED.ifname, SEALED.netns, None),
        ("eth7", SEALED.netns, None),
        (SEALED.ifname, None, "sealnet is what I call it"),
        (SEALED.ifname, None, f"sealnet {RUN} {FOREIGN_TAG} root: sh"),
    ],
)
def test_a_strangers_link_is_left_alone(bench: Bench, name: str, altname: str | None, alias: str | None) -> None:
    bench.stranger_link(name, mac=FOREIGN_MAC, altname=altname, alias=alias)

    bench.kernel.remove_link(RUN)
    take_away(bench.kernel)

    assert bench.links() == {name: FOREIGN_MAC}
    assert bench.kernel.traces() == set()


def test_the_link_of_another_state_directorys_run_of_the_same_id_is_left_alone(bench: Bench) -> None:
    """Its MAC is the same, for that comes from the run id; its mark says whose it is."""
    bench.stranger_link(SEALED.ifname, mac=names.mac(RUN, end=0), alias=f"sealnet {RUN} {FOREIGN_TAG} root: sh")

    bench.kernel.remove_link(RUN)

    assert bench.links() == {SEALED.ifname: names.mac(RUN, end=0)}


def test_a_strangers_netns_is_left_alone(bench: Bench) -> None:
    bench.stranger_netns(SEALED.netns)

    bench.kernel.remove_netns(RUN)
    bench.kernel.remove_netns(RUN, everywhere=True)
    take_away(bench.kernel)

    assert bench.netns_names() == [SEALED.netns]
    assert bench.kernel.join(RUN) is None
    assert bench.kernel.traces() == set()


def test_an_empty_cgroup_that_was_never_marked_is_taken_away(bench: Bench) -> None:
    bench.stranger_cgroup(tag=None)

    bench.kernel.kill(RUN, None)
    bench.kernel.remove_cgroup(RUN)

    assert bench.cgroups() == []
    bench.kernel.add_cgroup(RUN)
    take_away(bench.kernel)


def test_a_strangers_cgroup_is_left_alone(bench: Bench) -> None:
    bench.stranger_cgroup(tag=FOREIGN_TAG)

    bench.kernel.kill(RUN, None)
    bench.kernel.remove_cgroup(RUN)
    with pytest.raises(CannotSeal, match="File exists"):
        bench.kernel.add_cgroup(RUN)
    take_away(bench.kernel)

    assert bench.cgroups() == [RUN]
    assert bench.kernel.traces() == set()


def test_a_cgroup_with_somebody_in_it_is_not_removed(bench: Bench) -> None:
    with applied(bench, SEVERED):
        bench.kernel.add_cgroup(RUN)
        bench.spawn()

        with pytest.raises(CannotTearDown, match=r"cannot remove cgroup .*: Device or resource busy"):
            bench.kernel.remove_cgroup(RUN)


# What only the real one can show


@pytest.mark.root
@pytest.mark.parametrize("run_id", ["a", "abcdefg", "abcdefgh", "a" * 63])
def test_a_run_id_of_any_length_makes_an_altname_by_which_the_link_is_found(host: lab.Host, run_id: str) -> None:
    """A name that fits IFNAMSIZ is asked for in another attribute than a longer one."""
    bench = RealBench(host)
    seal = build.sealed(run_id)
    sealing.apply(bench.kernel, seal, alias="x", sysctls=sysctl.expected()).inside.close()
    bench.rename_link(seal.ifname, "eth7")

    bench.kernel.remove_link(run_id)
    bench.kernel.remove_netns(run_id)

    assert bench.links() == {}
    bench.clean_up()


@pytest.mark.root
def test_whoever_looks_for_a_namespace_keeps_no_descriptor_of_the_others(host: lab.Host) -> None:
    """The LAN peer's is one that it passes over, found or not."""
    host.spawn("ip", "netns", "exec", "lan", "sleep", "60")
    bench = RealBench(host)
    with applied(bench, SEVERED):
        before = descriptors()

        bench.kernel.join(RUN).close()
        found = descriptors()
        bench.kernel.remove_netns(RUN)
        assert bench.kernel.join(caller.new_run_id()) is None
        missed = descriptors()

    bench.clean_up()
    assert found - before == set()
    assert missed - before == set()


@pytest.mark.root
def test_the_ends_of_a_link_know_each_other_for_good(host: lab.Host) -> None:
    """Neighbours that ARP finds out are counted, 1,024 of all namespaces together; permanent ones are not."""
    bench = RealBench(host)
    bench.listen(8080)
    with applied(bench, SEALED) as inside:
        bench.kernel.grant(SEALED, ttl_s=60)
        broker = inside.call(lab.connect, str(SEALED.gateway), 8080)

        outside = host.run("ip", "neighbour", "show", "dev", SEALED.ifname).stdout.split()
        within = host.inside(RUN, "ip", "neighbour", "show").stdout.split()
        sealing.teardown(bench.kernel, SEALED, inside=inside, release=lambda _run_id: None)

    bench.clean_up()
    assert broker == "connected"
    assert outside == [str(SEALED.sandbox), "lladdr", names.mac(RUN, end=1), "PERMANENT"]
    assert within == [str(SEALED.gateway), "dev", "eth0", "lladdr", names.mac(RUN, end=0), "PERMANENT"]


@pytest.mark.root
def test_a_stale_file_in_place_of_a_netns_name_is_replaced_and_removed(host: lab.Host) -> None:
    bench = RealBench(host)
    Path("/run/netns", SEALED.netns).touch()

    bench.kernel.add_netns(SEALED).close()
    named = bench.netns_names()
    bench.kernel.remove_netns(RUN)
    Path("/run/netns", SEALED.netns).touch()
    bench.kernel.remove_netns(RUN)

    assert named == [SEALED.netns]
    assert bench.netns_names() == []
    bench.clean_up()


@pytest.mark.root
@pytest.mark.parametrize("lost", ["unlink", "truncate"])
def test_a_gate_whose_keeper_died_before_it_was_written_down_is_used_all_the_same(host: lab.Host, lost: str) -> None:
    bench = RealBench(host)
    first = bench.kernel.add_gate()
    kept = host.state / "gate"
    kept.unlink() if lost == "unlink" else kept.write_text("")

    with applied(bench, SEALED):
        bench.kernel.grant(SEALED, ttl_s=90)

        assert bench.kernel.add_gate() == first
        assert bench.kernel.has_lease(SEALED)
    take_away(bench.kernel)
    bench.clean_up()
