"""Policy routing: a WireGuard full tunnel as wg-quick makes it, VRFs, the rules of a mesh VPN, the local table moved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.hosts.machine import FORBIDDEN, LEASE, Machine
from tests.lab import LAN_PEER

_FAR = "10.99.0.1"


@contextlib.contextmanager
def tunnel(machine: Machine) -> Iterator[None]:
    """The LAN peer is the other end of a tunnel; `wg-quick up` is left to the test."""
    keys = [machine.run("wg", "genkey").stdout.strip() for _ in range(2)]
    public = [machine.run("wg", "pubkey", input=key).stdout.strip() for key in keys]
    directory = Path("/etc/wireguard")
    configuration = (
        f"[Interface]\nPrivateKey = {keys[0]}\nAddress = 10.99.0.2/32, fd99::2/128\n"
        f"[Peer]\nPublicKey = {public[1]}\nEndpoint = {LAN_PEER}:51820\nAllowedIPs = 0.0.0.0/0, ::/0\n"
    )
    directory.mkdir(exist_ok=True)
    with machine.file(f"{directory}/full0.conf", configuration), machine.undoing("wg-quick down full0", "ip -n lan link delete far0"):
        machine.run("ip", "-n", "lan", "link", "add", "far0", "type", "wireguard")
        machine.in_lan("wg", "set", "far0", "private-key", "/dev/stdin", "listen-port", "51820", "peer", public[0], "allowed-ips",
                       "10.99.0.2/32,fd99::2/128", input=keys[1])  # fmt: skip
        machine.run("ip", "-n", "lan", "addr", "add", f"{_FAR}/24", "dev", "far0")
        machine.run("ip", "-n", "lan", "link", "set", "far0", "up")
        yield


@pytest.mark.tool("wg-quick")
def test_a_full_tunnel_comes_and_goes_beside_a_run(machine: Machine) -> None:
    """Everything but the tunnel's own packets goes into it; a run's /30 is narrower, and its packets go nowhere."""
    targets = tuple((kind, _FAR, FORBIDDEN) for kind in ("tcp", "udp"))
    # wg-quick sets the one, the driver the other; neither is put back by them.
    theirs = {"net__ipv4__conf__all__src_valid_mark": "0", "net__ipv4__conf__all__send_redirects": "1"}
    with machine.sysctls(**theirs), tunnel(machine):
        clean = machine.looks()
        machine.control()
        first = machine.live("before-wg", targets=targets)

        machine.run("wg-quick", "up", "full0")
        first.sealed()
        machine.control(("lan", "tcp", _FAR))
        beside = machine.looks()
        second = machine.live("beside-wg", targets=targets)
        second.sealed()
        second.end()
        machine.same(beside)
        machine.run("wg-quick", "down", "full0")
        first.sealed()

        assert "suppress_prefixlength" in "".join(beside)
        assert first.refused() == []
        first.end()
        for name, value in theirs.items():
            Path("/proc/sys", name.replace("__", "/")).write_text(value)
        machine.same(clean)


def test_a_vrf_and_a_local_table_that_comes_later_are_no_way_out(machine: Machine) -> None:
    """As Documentation/networking/vrf.rst has it: the local table is asked after the VRFs."""
    # The kernel's own: systemd-networkd takes rules of anybody else's away.
    local = ("ip rule add pref 0 lookup local protocol kernel", "ip rule del pref 32765 lookup local")
    undo = (*local, "ip link del vrf0", "ip link del red0", "ip rule del pref 1000", "ip -6 rule del pref 1000")
    with machine.undoing(*undo):
        machine.control()
        live = machine.live("vrf")
        machine.run("ip", "link", "add", "vrf0", "type", "vrf", "table", "100")
        machine.run("ip", "link", "set", "vrf0", "up")
        machine.run("ip", "link", "add", "red0", "type", "bridge")
        machine.run("ip", "link", "set", "red0", "master", "vrf0", "up")
        machine.run("ip", "addr", "add", "198.18.0.1/24", "dev", "red0")
        live.sealed()
        machine.run("ip", "rule", "add", "pref", "32765", "lookup", "local")
        machine.run("ip", "rule", "del", "pref", "0")
        live.still()
        live.sealed()

        second = machine.live("beside-vrf")
        second.sealed()
        assert live.refused() == []
        machine.control()
        second.end()
        live.end()


# tailscale: router_linux.go, with an exit node.
_MESH = (
    "ip link add mesh0 type bridge",
    "ip link set mesh0 up",
    "ip addr add 100.64.0.7/32 dev mesh0",
    "ip route add 100.64.0.0/10 dev mesh0 table 52",
    "ip rule add pref 5210 fwmark 0x80000/0xff0000 lookup main",
    "ip rule add pref 5230 fwmark 0x80000/0xff0000 lookup default",
    "ip rule add pref 5250 fwmark 0x80000/0xff0000 unreachable",
    "ip rule add pref 5270 lookup 52",
)
_NO_MESH = (*(f"ip rule del pref {pref}" for pref in (5210, 5230, 5250, 5270)), "ip route flush table 52", "ip link del mesh0")


def test_the_rules_of_a_mesh_are_no_obstacle_and_its_exit_node_is_named(machine: Machine) -> None:
    with machine.undoing(*_NO_MESH):
        machine.control()
        live = machine.live("mesh")
        for command in _MESH:
            machine.run(*command.split())
        live.sealed()
        beside = machine.looks()
        second = machine.live("beside-mesh")
        second.sealed()
        second.end()
        machine.same(beside)

        # An exit node: table 52 has a default route, and is asked before main, so the broker's answers go there.
        machine.run(*"ip route add default dev mesh0 table 52".split())
        live.until("route-changed")
        live.silent()
        code, told = live.check()
        refused = machine.sealnet("run", *LEASE, "--", "true")
        machine.run(*"ip route del default dev mesh0 table 52".split())
        live.sealed()

        assert code == 1
        assert any("5270" in fault or "table 52" in fault for fault in told["faults"]), told
        assert refused.returncode == 125
        assert "cannot seal run" in refused.stderr
        assert "52" in refused.stderr
        # Its own exception for what is near (--exit-node-allow-lan-access) is the way to have both.
        machine.run(*"ip route add default dev mesh0 table 52".split())
        machine.run(*"ip route add throw 198.18.0.0/15 table 52".split())
        live.sealed()
        third = machine.live("throw")
        third.sealed()
        third.end()
        machine.run(*"ip route del default dev mesh0 table 52".split())
        machine.control()
        live.end()
