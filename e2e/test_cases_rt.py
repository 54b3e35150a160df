"""Field cases of addresses, routes and policy rules: which /30 a run gets, and what becomes of it when the routes change."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from tests.lab import LAN_PEER, PATIENCE, Host, Probe

pytestmark = pytest.mark.root

LEASE = ("--lease-port", "8080")
TEN = "10.0.0.0/8"


@pytest.fixture
def ten(host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host with a broker and a pool of 10/8 alone: what these cases are about."""
    use_pool(host, monkeypatch, TEN)
    host.broker(8080)
    return host


def use_pool(host: Host, monkeypatch: pytest.MonkeyPatch, *pool: str) -> None:
    config = host.directory / "config.toml"
    config.write_text(f"pool = {json.dumps(pool)}\n")
    monkeypatch.setenv("SEALNET_CONFIG", str(config))


def ip(host: Host, *commands: str) -> None:
    """Each command as one words, `route add ...`."""
    for command in commands:
        host.run("ip", *command.split())


def chosen(host: Host) -> IPv4Network:
    """What a run would get now."""
    shown = host.sealnet("run", *LEASE, "--dry-run", "--json", "--", "true")
    assert shown.returncode == 0, shown.stderr
    return IPv4Network(json.loads(shown.stdout)["subnet"])


def subnet(record: dict[str, Any]) -> IPv4Network:
    return IPv4Network(record["subnet"])


def start(host: Host, run_id: str) -> tuple[Probe, dict[str, Any]]:
    """A sealed probe whose connection to its broker works, by the link that the record names."""
    probe = host.probe_run(run_id, *LEASE)
    record = host.record(run_id)
    assert record is not None
    assert probe.ask(("tcp", record["gateway"], 8080)) == ["answered"]
    way = json.loads(host.run("ip", "-j", "route", "get", record["sandbox"], "from", record["gateway"]).stdout)
    assert [found["dev"] for found in way] == [record["ifname"]]
    return probe, record


def refused(host: Host, run_id: str) -> str:
    """What sealnet says to a run that it must refuse; nothing of it ran."""
    done = host.sealnet("run", "--run-id", run_id, *LEASE, "--", "touch", "ran")
    assert done.returncode == 125, done.stderr
    assert not Path("ran").exists()
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("sealnet: cannot ")
    assert host.left_over() == []
    return done.stderr


@pytest.mark.parametrize(
    ("commands", "taken"),
    [
        ((f"route add 10.0.0.0/9 via {LAN_PEER} table 75", "rule add pref 100 lookup 75"), "10.0.0.0/9"),
        ((f"route add 10.0.0.0/9 via {LAN_PEER} table 75",), "10.0.0.0/9"),
        ((f"route add 10.1.0.0/30 via {LAN_PEER} table 4000000000",), "10.1.0.0/30"),
        (("addr add 10.1.0.1/32 dev lo",), "10.1.0.1/32"),
        (("tuntap add tun0 mode tun", "addr add 10.1.0.1/24 dev tun0", "link set tun0 up"), "10.1.0.0/24"),
        # A tunnel that is down has no route, and comes up later.
        (("tuntap add tun0 mode tun", "addr add 10.1.0.1/24 dev tun0"), "10.1.0.0/24"),
        (("link add mac0 link lan0 type macvlan", "addr add 10.1.0.1/24 dev mac0", "link set mac0 up"), "10.1.0.0/24"),
    ],
    ids=["side-table", "no-rule", "high-table", "loopback", "tun", "tun-down", "macvlan"],
)
def test_a_prefix_in_use_anywhere_is_not_given_out(ten: Host, commands: tuple[str, ...], taken: str) -> None:
    """RT-01, https://github.com/Sanne/incus-spawn/pull/268"""
    # Without the other's prefix it would have been the first choice.
    assert chosen(ten).overlaps(IPv4Network(taken))
    ip(ten, *commands)
    ten.settled()

    probe, record = start(ten, "rt01")

    assert not subnet(record).overlaps(IPv4Network(taken))
    assert subnet(record).subnet_of(IPv4Network(TEN))
    assert ten.sealnet("check", "rt01").returncode == 0
    assert probe.end() == 0


def test_the_default_pool_steps_around_a_vpn_as_well(host: Host) -> None:
    """RT-01, https://github.com/Sanne/incus-spawn/pull/268"""
    host.broker(8080)
    assert chosen(host).overlaps(IPv4Network("198.18.0.0/16"))
    ip(
        host,
        f"route add 198.18.0.0/16 via {LAN_PEER} table 75",
        "rule add pref 100 lookup 75",
        # Halves of everything are a default in disguise, and occupy nothing.
        f"route add 0.0.0.0/1 via {LAN_PEER}",
        f"route add 128.0.0.0/1 via {LAN_PEER}",
    )
    host.settled()

    probe, record = start(host, "rt01")

    assert subnet(record).subnet_of(IPv4Network("198.19.0.0/16"))
    assert probe.end() == 0


HIJACK = (f"route add default via {LAN_PEER} table 199", "rule add pref 99 to 10.0.0.0/8 lookup 199")


def test_a_rule_that_takes_the_replies_of_the_whole_pool_refuses_the_run(ten: Host) -> None:
    """RT-03, https://github.com/KBVE/kbve/pull/11031"""
    probe, _record = start(ten, "rt03-control")
    assert probe.end() == 0
    ip(ten, *HIJACK)
    ten.settled()

    said = refused(ten, "rt03")

    assert "99: from all to 10.0.0.0/8 lookup 199" in said
    assert "table 199" in said


@pytest.mark.parametrize("shadowed", ["10.0.0.0/8", "198.18.0.0/15", "198.18.0.0/24"])
def test_a_rule_that_takes_a_part_of_the_pool_is_refused_or_avoided(host: Host, shadowed: str) -> None:
    """RT-03, https://github.com/KBVE/kbve/pull/11031"""
    host.broker(8080)
    ip(host, f"route add default via {LAN_PEER} table 199", f"rule add pref 99 to {shadowed} lookup 199")
    host.settled()

    done = host.sealnet("run", *LEASE, "--", "curl", "-fsS", "http://broker.sealnet:8080/hello")

    if IPv4Network(shadowed).overlaps(IPv4Network("198.18.0.0/30")):
        assert (done.returncode, done.stdout) == (0, "/hello") or (done.returncode == 125 and "lookup 199" in done.stderr), done
    else:
        assert (done.returncode, done.stdout) == (0, "/hello"), done.stderr


def test_a_rule_that_takes_the_replies_later_is_told_by_check(ten: Host) -> None:
    """RT-03, https://github.com/KBVE/kbve/pull/11031"""
    ten.broker(8081)
    ten.broker(8080, netns="lan")
    probe, record = start(ten, "rt03-mid")
    assert ten.sealnet("check", "rt03-mid").returncode == 0

    ip(ten, *HIJACK)
    checked = ten.sealnet("check", "rt03-mid")
    told = json.loads(ten.sealnet("check", "rt03-mid", "--json").stdout)
    meanwhile = probe.ask(("tcp", record["gateway"], 8081), ("tcp", LAN_PEER, 8080))
    assert ten.probe().ask(("tcp", "127.0.0.1", 8081), ("tcp", LAN_PEER, 8080)) == ["answered"] * 2
    ip(ten, "rule del pref 99", "route flush table 199")
    again = ten.sealnet("check", "rt03-mid")

    assert checked.returncode == 1
    assert "table 199" in checked.stdout
    assert "99: from all to 10.0.0.0/8 lookup 199" in checked.stdout
    assert told["verdict"] == "broken"
    assert "answered" not in meanwhile
    assert again.returncode == 0, again.stdout
    assert probe.ask(("tcp", record["gateway"], 8080)) == ["answered"]
    assert probe.end() == 0


NULLS = ["blackhole", "prohibit", "unreachable"]


@pytest.mark.parametrize("kind", [*NULLS, "throw"])
def test_a_broad_null_route_of_the_main_table_loses_to_the_runs_own(ten: Host, kind: str) -> None:
    """RT-04, https://github.com/systemd/systemd/issues/19106: users keep such routes against leaks, below their VPN's."""
    ip(ten, f"route add {kind} 10.0.0.0/8 metric 4000")
    ten.settled()
    # It is in force.
    assert ten.run("ip", "route", "get", "10.1.0.2", check=False).returncode == 2

    probe, _record = start(ten, "rt04")

    assert probe.end() == 0


@pytest.mark.parametrize("table", ["main", "75"])
@pytest.mark.parametrize("kind", [*NULLS, "throw"])
def test_a_null_route_as_narrow_as_the_runs_own_is_stepped_around(ten: Host, kind: str, table: str) -> None:
    """RT-04, https://github.com/systemd/systemd/issues/19106"""
    first = chosen(ten)
    ip(ten, f"route add {kind} {first} table {table}", "rule add pref 100 lookup 75")
    ten.settled()

    done = ten.sealnet("run", "--run-id", "rt04", *LEASE, "--", "curl", "-fsS", "http://broker.sealnet:8080/hello")

    if kind == "throw" and done.returncode == 0:
        assert done.stdout == "/hello"
        return
    assert done.returncode in (0, 125), done.stderr
    if done.returncode == 125:
        assert kind in done.stderr
    else:
        assert done.stdout == "/hello"
        probe, record = start(ten, "rt04-where")
        assert subnet(record) != first
        assert probe.end() == 0


@pytest.mark.parametrize("kind", NULLS)
def test_a_null_route_of_a_side_table_that_takes_the_replies_is_named(ten: Host, kind: str) -> None:
    """RT-04, https://github.com/systemd/systemd/issues/19106"""
    ip(ten, f"route add {kind} 10.0.0.0/8 table 75")
    # Nobody asks that table yet.
    probe, _record = start(ten, "rt04-control")
    assert probe.end() == 0
    ip(ten, "rule add pref 100 lookup 75")
    ten.settled()

    said = refused(ten, "rt04")

    assert kind in said
    assert "100: from all lookup 75" in said


def test_a_throw_route_of_a_side_table_is_fallen_through(ten: Host) -> None:
    """RT-04, https://github.com/systemd/systemd/issues/19106"""
    ip(ten, "route add throw 10.0.0.0/8 table 75", f"route add default via {LAN_PEER} table 75", "rule add pref 100 lookup 75")
    ten.settled()
    # Somebody else's address does go by that table.
    assert "table 75" in ten.run("ip", "route", "get", "192.0.2.7").stdout

    probe, _record = start(ten, "rt04")

    assert probe.end() == 0


@pytest.mark.parametrize("kind", NULLS)
def test_a_refusing_rule_is_named(ten: Host, kind: str) -> None:
    """RT-04, https://github.com/systemd/systemd/issues/19106"""
    probe, _record = start(ten, "rt04-control")
    assert probe.end() == 0
    ip(ten, f"rule add pref 100 to 10.0.0.0/8 {kind}")
    ten.settled()

    said = refused(ten, "rt04")

    assert f"100: from all to 10.0.0.0/8 {kind}" in said


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    result = function()
    return time.monotonic() - began, result


def test_a_pool_that_one_route_takes_is_said_at_once(ten: Host) -> None:
    """RT-07, https://github.com/bitwarden/server/issues/439 and https://github.com/ROCm/TheRock/issues/4926"""
    ip(ten, f"route add 10.0.0.0/8 via {LAN_PEER}")
    ten.settled()

    took_s, said = timed(lambda: ten.sealnet("run", *LEASE, "--", "touch", "ran"))

    assert said.returncode == 125
    assert took_s < 2 * PATIENCE
    assert said.stderr.startswith("sealnet: cannot allocate a /30 from 10.0.0.0/8")
    assert f"10.0.0.0/8 via {LAN_PEER}" in said.stderr
    assert "hint: " in said.stderr
    assert "Traceback" not in said.stderr
    assert not Path("ran").exists()
    assert ten.left_over() == []


def test_the_default_pool_does_not_need_ten(host: Host) -> None:
    """RT-07, https://github.com/bitwarden/server/issues/439"""
    host.broker(8080)
    ip(host, f"route add 10.0.0.0/8 via {LAN_PEER}")
    host.settled()

    probe, record = start(host, "rt07")

    assert subnet(record).subnet_of(IPv4Network("198.18.0.0/15"))
    assert probe.end() == 0


def test_two_thousand_routes_are_stepped_around_at_once(ten: Host) -> None:
    """RT-07, https://github.com/ROCm/TheRock/issues/4926"""
    # Half of them where the search begins, one after the other; half of them scattered.
    prefixes = [f"10.{1 + number // 256}.{number % 256}.0/24" for number in range(1000)]
    prefixes += [f"10.{number // 8}.{number % 8 * 32 + 7}.0/24" for number in range(160, 1160)]
    ten.run("ip", "-batch", "-", input="".join(f"route add {prefix} via {LAN_PEER}\n" for prefix in prefixes))
    ten.settled()

    took_s, done = timed(lambda: ten.sealnet("run", *LEASE, "--", "curl", "-fsS", "http://broker.sealnet:8080/hello"))
    probe, record = start(ten, "rt07")

    assert (done.returncode, done.stdout) == (0, "/hello")
    assert took_s < 2 * PATIENCE
    assert not any(subnet(record).overlaps(IPv4Network(prefix)) for prefix in prefixes)
    assert probe.end() == 0


@pytest.mark.parametrize("vpn", [False, True], ids=["plain", "vpn"])
@pytest.mark.parametrize("value", ["1", "2"], ids=["strict", "loose"])
def test_a_host_with_reverse_path_filtering_is_no_obstacle(ten: Host, value: str, vpn: bool) -> None:
    """RT-08, https://github.com/jamesmcm/vopono/pull/372 and https://github.com/containers/netavark/pull/962"""
    for name in ("all", "default"):
        Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text(value)
    if vpn:
        ip(ten, f"route add 10.0.0.0/9 via {LAN_PEER} table 75", "rule add pref 100 lookup 75")
    ten.settled()

    probe, record = start(ten, "rt08")

    assert subnet(record).overlaps(IPv4Network("10.0.0.0/9")) is not vpn
    assert ten.sealnet("check", "rt08").returncode == 0
    assert [Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").read_text().strip() for name in ("all", "default")] == [value] * 2
    assert probe.end() == 0


def routing(host: Host) -> set[str]:
    """Every rule and route, as what follows `ip rule del` or `ip route del`."""
    rules = {f"rule del pref {line.split(':')[0]}" for line in host.run("ip", "rule").stdout.splitlines()}
    routes = host.run("ip", "route", "show", "table", "all").stdout.splitlines()
    return rules | {f"route del {line.replace('linkdown', '').strip()}" for line in routes}


def test_another_manager_that_removes_rules_and_routes_gives_no_access(host: Host) -> None:
    """RT-10, https://github.com/netbirdio/netbird/issues/4578 and https://github.com/systemd/systemd/issues/22077"""
    # The worst neighbourhood: this host forwards, and beyond it stands somebody with the gateway's own address.
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    ip(host, f"route add default via {LAN_PEER}", "-n lan addr add 198.18.0.1/32 dev lo")
    host.broker(8080)
    host.broker(8080, netns="lan")
    host.broker(8081, netns="lan")
    host.settled()
    assert host.probe().ask(("tcp", "198.18.0.1", 8080), ("tcp", "198.18.0.1", 8081)) == ["answered"] * 2
    before = routing(host)
    probe, record = start(host, "rt10")
    gateway = record["gateway"]
    assert gateway == "198.18.0.1"
    assert host.sealnet("check", "rt10").returncode == 0

    added = routing(host) - before
    host.unattended("rt10")
    for command in sorted(added):
        host.run("ip", *command.split(), check=False)
    left = routing(host) - before
    checked = host.sealnet("check", "rt10")
    after = probe.ask(("tcp", gateway, 8080), ("tcp", gateway, 8081), ("tcp", LAN_PEER, 8080), ("udp", gateway, 8080))

    assert any(record["ifname"] in command for command in added)
    assert left == set()
    # All of this answers; to the gateway's own address it is only the kernel's check of sources that keeps this host from its replies.
    assert host.probe().ask(("tcp", LAN_PEER, 8080), ("tcp", LAN_PEER, 8081)) == ["answered"] * 2
    assert checked.returncode == 1
    assert "route-to-sandbox" in checked.stdout
    assert "answered" not in after
    assert probe.end() == 0
    reaped = host.sealnet("reap", "rt10")
    assert (reaped.returncode, reaped.stderr) == (0, "")


def test_a_run_without_its_routes_is_reaped(host: Host) -> None:
    """RT-10, https://github.com/systemd/systemd/issues/22077"""
    host.broker(8080)
    probe, record = start(host, "rt10-live")
    ip(host, f"route flush dev {record['ifname']} table all")

    reaped = host.sealnet("reap", "rt10-live")

    assert (reaped.returncode, reaped.stderr) == (0, "")
    assert host.left_over() == []
    assert probe.process.wait(60) == 137
