"""While a run lives others change what it stands on: it is seen, put back or the payload ended for it, and never open meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sealnet
from sealnet.guard import Guard
from sealnet.kernel.watch import Watch
from sealnet.model import ruleset
from tests.lab import LAN_HOST, LAN_PEER, SEALNET, Host, wait_for

pytestmark = pytest.mark.root

LEASE = ("--lease-port", "8080")

Tamper = Callable[[Host, dict[str, Any]], None]


def events(host: Host, run_id: str) -> list[str]:
    record = host.record(run_id)
    return [event["event"] for event in record["events"]] if record else []


def details(host: Host, run_id: str) -> list[str]:
    record = host.record(run_id)
    return [event["detail"] for event in record["events"]] if record else []


def is_sealed(host: Host, run_id: str) -> bool:
    return host.sealnet("check", run_id).returncode == 0


def cpu_s(pid: int) -> float:
    """What a process has used of a processor so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def on_host(text: str) -> Tamper:
    """A command on the host; LINK and so on stand for the run's own."""

    def tamper(host: Host, record: dict[str, Any]) -> None:
        host.run(*_words(text, record))

    return tamper


def inside(text: str) -> Tamper:
    def tamper(host: Host, record: dict[str, Any]) -> None:
        host.inside(record["run_id"], *_words(text, record))

    return tamper


def _words(text: str, record: dict[str, Any]) -> list[str]:
    lease = ruleset.lease_element(record["ifname"], record["sandbox"], record["gateway"], 8080)
    text = text.replace("LINK", record["ifname"]).replace("GATEWAY", record["gateway"] or "").replace("LEASE", lease)
    return ["nft", text.removeprefix("nft ")] if text.startswith("nft ") else text.split()


RESTORED = [
    pytest.param(on_host("nft flush ruleset"), "gate-restored", id="flush-ruleset"),
    pytest.param(on_host("nft delete table inet sealnet"), "gate-restored", id="delete-gate"),
    pytest.param(on_host("nft insert rule inet sealnet gate accept"), "gate-restored", id="open-gate"),
    pytest.param(on_host("nft delete element inet sealnet leases { LEASE }"), "lease-restored", id="delete-lease"),
    pytest.param(on_host("nft delete element inet sealnet gateways { GATEWAY }"), "lease-restored", id="delete-gateway"),
    pytest.param(on_host("ip link set LINK down"), "link-down", id="link-down"),
    pytest.param(inside("ip link set eth0 down"), "link-down", id="eth0-down"),
    pytest.param(on_host("ip addr flush dev LINK"), "address-lost", id="address"),
    pytest.param(inside("ip addr flush dev eth0"), "address-lost", id="inner-address"),
    pytest.param(on_host("ip link set LINK master br0"), "enslaved", id="bridge"),
    pytest.param(on_host("sysctl -qw net.ipv4.conf.LINK.rp_filter=0"), "sysctl-changed", id="rp_filter"),
    pytest.param(on_host("sysctl -qw net.ipv4.conf.LINK.route_localnet=1"), "sysctl-changed", id="route_localnet"),
    pytest.param(inside("sysctl -qw net.ipv4.conf.eth0.accept_local=1"), "sysctl-changed", id="accept_local"),
    pytest.param(on_host("sysctl -qw net.ipv6.conf.LINK.disable_ipv6=0"), "ipv6-back", id="ipv6"),
    pytest.param(inside("sysctl -qw net.ipv6.conf.eth0.disable_ipv6=0"), "ipv6-back", id="inner-ipv6"),
    pytest.param(inside("nft flush ruleset"), "filter-changed", id="inner-filter"),
    pytest.param(inside("nft insert rule inet sealnet output accept"), "filter-changed", id="inner-rule"),
    pytest.param(inside("ip route replace default via GATEWAY"), "sink-changed", id="inner-route"),
    pytest.param(inside("ip link set lo down"), "sink-changed", id="inner-lo"),
]
STAYS = [
    pytest.param(on_host("ip rule add to 198.18.0.0/15 prohibit"), "route-changed", id="rule"),
    pytest.param(on_host("ip route add blackhole 198.18.0.2/32"), "route-changed", id="route"),
    pytest.param(on_host("ip link set LINK address 02:00:5e:00:53:01"), "link-changed", id="mac"),
    pytest.param(inside("ip link add wg0 type bridge"), "link-added", id="inner-link"),
    pytest.param(on_host("ip link del LINK"), "link-gone", id="link"),
]


@pytest.fixture
def scene(host: Host) -> Host:
    """A broker, forbidden services here and on the LAN that listen, and a bridge of somebody's."""
    host.broker(8080)
    host.broker(8081)
    host.broker(8080, netns="lan")
    host.run("ip", "link", "add", "br0", "type", "bridge")
    host.settled()
    return host


def undo(host: Host) -> None:
    host.run("ip", "rule", "del", "to", "198.18.0.0/15", check=False)
    host.run("ip", "route", "del", "blackhole", "198.18.0.2/32", check=False)


@pytest.mark.parametrize(("tamper", "event"), RESTORED)
def test_what_somebody_changes_is_put_back_and_written_down(scene: Host, tamper: Tamper, event: str) -> None:
    probe = scene.probe_run("watched", *LEASE)
    record = scene.record("watched")
    gateway = record["gateway"]
    assert probe.ask(("tcp", gateway, 8080)) == ["answered"]

    tamper(scene, record)
    # Long before the next renewal, which is 30 s away.
    wait_for(lambda: events(scene, "watched"), timeout_s=15, what="an event is written down")
    wait_for(lambda: is_sealed(scene, "watched"), what="the seal is whole again")

    assert events(scene, "watched") == [event]
    assert details(scene, "watched")[0].endswith("it was put back")
    assert f"{event}: " in scene.sealnet("inspect", "watched").stdout
    assert wait_for(lambda: probe.ask(("tcp", gateway, 8080)) == ["answered"], what="the broker answers")
    assert scene.probe().ask(("tcp", gateway, 8081), ("tcp", LAN_PEER, 8080)) == ["answered"] * 2
    assert "answered" not in probe.ask(("tcp", gateway, 8081), ("tcp", LAN_HOST, 8081), ("tcp", LAN_PEER, 8080))
    assert probe.end() == 0


@pytest.mark.parametrize(("tamper", "event"), STAYS)
def test_what_cannot_be_put_back_is_written_down_and_the_payload_goes_on_shut_in(scene: Host, tamper: Tamper, event: str) -> None:
    probe = scene.probe_run("watched", *LEASE)
    record = scene.record("watched")

    tamper(scene, record)
    wait_for(lambda: events(scene, "watched"), timeout_s=15, what="an event is written down")
    elsewhere = probe.ask(("tcp", record["gateway"], 8081), ("tcp", LAN_HOST, 8081), ("tcp", LAN_PEER, 8080))
    undo(scene)

    assert events(scene, "watched") == [event]
    assert "it stays so" in details(scene, "watched")[0]
    assert scene.probe().ask(("tcp", LAN_HOST, 8081), ("tcp", LAN_PEER, 8080)) == ["answered"] * 2
    assert "answered" not in elsewhere
    assert probe.end() == 0


@pytest.mark.parametrize(("tamper", "event"), [*RESTORED, *STAYS])
def test_a_payload_is_ended_for_it_where_that_was_asked_for(scene: Host, tamper: Tamper, event: str) -> None:
    del event
    process = scene.spawn_run("watched", "sleep", "600", options=(*LEASE, "--on-tamper", "kill", "--report"))
    other = scene.spawn_run("other", "sleep", "600", options=LEASE)

    tamper(scene, scene.record("watched"))
    status = process.wait(60)
    said = process.stderr.read().splitlines()
    undo(scene)

    assert status == 137
    assert said[0].startswith("sealnet: ended run watched: ")
    assert any(line.startswith("killed-by-watch: the payload was ended: ") for line in said)
    # The one who did not ask for it goes on.
    assert other.poll() is None
    assert scene.sealnet("reap", "--all").returncode == 0


def test_a_run_that_nobody_touches_says_nothing_and_is_not_ended(scene: Host) -> None:
    done = scene.sealnet("run", *LEASE, "--on-tamper", "kill", "--", "sh", "-c", "sleep 1; curl -fsS http://broker.sealnet:8080/x")
    severed = scene.sealnet("run", "--on-tamper", "kill", "--", "sleep", "0.5")

    assert (done.returncode, done.stdout, done.stderr) == (0, "/x", "")
    assert (severed.returncode, severed.stderr) == (0, "")


def test_a_severed_run_is_watched_as_well(scene: Host) -> None:
    process = scene.spawn_run("watched", "sleep", "600")

    scene.inside("watched", "nft", "flush", "ruleset")
    wait_for(lambda: events(scene, "watched"), timeout_s=4, what="an event is written down")

    assert events(scene, "watched") == ["filter-changed"]
    assert is_sealed(scene, "watched")
    assert scene.sealnet("reap", "watched").returncode == 0
    assert process.wait(60) == 137


# Connects to what is forbidden as fast as it can until it is told to end; tells what ever answered, and how often the broker did.
_HAMMER = """
    import select, socket, sys

    gateway, *forbidden = sys.argv[1:]
    answered, rounds, broker = set(), 0, 0
    print("hammering", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for target in [f"{gateway}:8080", *forbidden]:
            address, _, port = target.rpartition(":")
            try:
                socket.create_connection((address, int(port)), timeout=0.1).close()
                if target in forbidden:
                    answered.add(target)
                else:
                    broker += 1
            except OSError:
                pass
        rounds += 1
    socket.create_connection((gateway, 8080), timeout=5).close()
    print(rounds, broker, sorted(answered), flush=True)
"""


def test_it_is_never_open_while_things_are_taken_away_and_put_back(scene: Host) -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    scene.settled()
    forbidden = ("198.18.0.1:8081", f"{LAN_HOST}:8081", f"{LAN_PEER}:8080")
    command = ("/usr/bin/python3", "-c", textwrap.dedent(_HAMMER), "198.18.0.1", *forbidden)
    process = scene.spawn_run("watched", *command, options=LEASE, stdin=subprocess.PIPE)
    record = scene.record("watched")
    assert record["gateway"] == "198.18.0.1"
    assert process.stdout.readline() == "hammering\n"
    changes = ("nft flush ruleset", "ip link set LINK down", "ip addr flush dev LINK", "ip link set LINK master br0")

    for number, change in enumerate(changes, 1):
        on_host(change)(scene, record)
        wait_for(lambda number=number: len(events(scene, "watched")) >= number, what=f"{change} is seen")
        wait_for(lambda: is_sealed(scene, "watched"), what=f"{change} is put back")
    controls = scene.probe().ask(*(("tcp", *target.split(":")) for target in forbidden))
    process.stdin.write("\n")
    process.stdin.flush()
    rounds, broker, answered = process.stdout.readline().split(maxsplit=2)

    assert controls == ["answered"] * 3
    assert answered == "[]\n"
    assert int(rounds) > 20
    assert int(broker) > 10
    assert process.wait(60) == 0


def test_two_supervisors_and_more_put_one_gate_back(scene: Host) -> None:
    probes = {f"watched-{number}": scene.probe_run(f"watched-{number}", *LEASE) for number in range(4)}
    gateways = {run_id: scene.record(run_id)["gateway"] for run_id in probes}

    for _ in range(4):
        scene.run("nft", "flush", "ruleset")
        for run_id in probes:
            wait_for(lambda run_id=run_id: is_sealed(scene, run_id), what=f"{run_id} is sealed again")

    for run_id, probe in probes.items():
        assert probe.ask(("tcp", gateways[run_id], 8080)) == ["answered"]
        assert set(events(scene, run_id)) <= {"gate-restored", "lease-restored"}
        assert len(events(scene, run_id)) >= 4
    tables = json.loads(scene.run("nft", "-j", "list", "tables").stdout)["nftables"]
    assert [entry["table"]["name"] for entry in tables if "table" in entry] == ["sealnet"]
    assert [probe.end() for probe in probes.values()] == [0] * 4


def test_one_who_does_it_again_and_again_is_not_fought_for_ever(scene: Host) -> None:
    process = scene.spawn_run("watched", "sleep", "600", options=LEASE)
    ifname = scene.record("watched")["ifname"]

    def again() -> bool:
        scene.run("ip", "link", "set", ifname, "down")
        time.sleep(0.1)
        return "gave-up" in events(scene, "watched")

    wait_for(again, timeout_s=20, what="it gives up")
    scene.run("ip", "link", "set", ifname, "down")

    assert "state DOWN" in scene.run("ip", "link", "show", ifname).stdout
    assert len(events(scene, "watched")) <= 13
    assert scene.sealnet("reap", "watched").returncode == 0
    assert process.wait(60) == 137


@pytest.mark.timeout(400)
def test_what_sealnet_itself_does_is_no_tampering(scene: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty runs that start, renew their leases and end beside each other, any tampering being the end of them."""
    config = scene.directory / "config.toml"
    config.write_text("lease_ttl = 10\n")
    monkeypatch.setenv("SEALNET_CONFIG", str(config))
    watched = scene.probe_run("watched", *LEASE, "--on-tamper", "kill")
    command = [*SEALNET, "run", *LEASE, "--on-tamper", "kill", "--report", "--", "sleep"]

    waves = [scene.spawn(*command, str(number % 5)) for number in range(20)]
    statuses = [process.wait(120) for process in waves]
    said = [process.stderr.read() for process in waves]

    assert statuses == [0] * 20
    assert set(said) == {"tried        nothing beside its lease\n"}
    assert events(scene, "watched") == []
    assert watched.ask(("tcp", scene.record("watched")["gateway"], 8080)) == ["answered"]
    assert watched.end() == 0


def test_a_busy_host_is_no_tampering_and_costs_next_to_nothing(scene: Host) -> None:
    watched = scene.probe_run("watched", *LEASE, "--on-tamper", "kill")
    batch = scene.directory / "batch"
    batch.write_text(
        "".join(f"route add 172.16.{n // 250}.{n % 250}/32 dev lan0\n" for n in range(5000)) + "link set lan0 alias x\n" * 5000
    )
    rules = scene.directory / "rules"
    elements = ", ".join(f"10.9.{n // 250}.{n % 250}" for n in range(10_000))
    rules.write_text(f"add table ip t\nadd set ip t s {{ type ipv4_addr; }}\nadd element ip t s {{ {elements} }}\ndelete table ip t\n")
    wait_for(lambda: cpu_s(watched.process.pid), what="it has used something")
    before = cpu_s(watched.process.pid)

    for _ in range(5):
        scene.run("ip", "-batch", str(batch))
        scene.run("nft", "-f", str(rules))
        scene.run("ip", "route", "flush", "root", "172.16.0.0/12")
    used_s = cpu_s(watched.process.pid) - before

    # 100,000 changes and more; a look at each would be minutes.
    assert used_s < 1.0
    assert events(scene, "watched") == []
    assert watched.ask(("tcp", scene.record("watched")["gateway"], 8080)) == ["answered"]
    assert watched.end() == 0


def test_a_run_that_is_reaped_is_not_put_back(scene: Host) -> None:
    for number in range(5):
        process = scene.spawn_run(f"watched-{number}", "sleep", "600", options=LEASE)
        reaped = scene.sealnet("reap", f"watched-{number}")

        assert (reaped.returncode, reaped.stderr) == (0, "")
        assert process.wait(60) == 137
        assert process.stderr.read() == ""
    assert scene.left_over() == []


# The Python API


def test_wait_puts_back_and_tells(scene: Host) -> None:
    with sealnet.Sealer().launch(["sleep", "600"], lease_port=8080) as run:
        with pytest.raises(TimeoutError):
            run.wait(timeout_s=0.2)
        scene.run("nft", "flush", "ruleset")
        with pytest.raises(TimeoutError):
            run.wait(timeout_s=1.0)

        assert [event["event"] for event in run.record.events] == ["gate-restored"]
        assert run.killed is None
        assert is_sealed(scene, run.run_id)


def test_one_watch_serves_many_runs(scene: Host) -> None:
    """As a daemon does it that waits for none of them by itself."""
    sealer, watch = sealnet.Sealer(), Watch()
    with contextlib.ExitStack() as stack:
        stack.callback(watch.close)
        runs = {run.run_id: run for run in (stack.enter_context(sealer.launch(["sleep", "600"], lease_port=8080)) for _ in range(3))}
        guards = {run_id: Guard(run.host, run.claim, run.seal, run.inside, ttl_s=90, on_tamper="restore") for run_id, run in runs.items()}
        for guard in guards.values():
            guard.attach(watch)
            guard.look()
        first, *others = runs
        told: set[str] = set()

        def look() -> set[str]:
            for run_id in watch.take(time.monotonic()):
                guards[run_id].look()
                told.add(run_id)
            return told

        scene.run("ip", "link", "set", runs[first].seal.ifname, "down")
        wait_for(look, what="the first one's link")
        one = {run_id: [event["event"] for event in run.record.events] for run_id, run in runs.items()}
        scene.run("nft", "flush", "ruleset")
        wait_for(lambda: look() == set(runs), what="all of them")

        assert one == {first: ["link-down"], **{run_id: [] for run_id in others}}
        assert all(is_sealed(scene, run_id) for run_id in runs)


def test_run_ends_a_payload_whose_seal_was_changed_and_says_why(scene: Host) -> None:
    def tamper() -> None:
        scene.wait_running("watched")
        scene.run("nft", "flush", "ruleset")

    thread = threading.Thread(target=tamper)
    thread.start()
    done = sealnet.run(["sleep", "600"], run_id="watched", lease_port=8080, on_tamper="kill")
    thread.join()

    assert done.returncode == 137
    assert [event["event"] for event in done.events] == ["gate-lost", "killed-by-watch"]
