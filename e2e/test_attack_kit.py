"""`sealnet attack`: sealed nothing is reached, unsealed everything is, and a seal that is broken is told to be."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import SEALNET, Host, end, wait_for

pytestmark = pytest.mark.root

# In plain bwrap on a host with a neighbour and IPv6 every payload reaches these, and root's the others as well.
ANYBODY = (
    "gateway-tcp gateway-mapped gateway-udp lease-udp loopback loopback-by-link host-address host-address-by-link multicast broadcast "
    "broadcast-all dnat-neighbour dnat-loopback ipv6-loopback ipv6-address ipv6-link-local peer-broker peer-sandbox internet-tcp "
    "internet-udp internet-ipv6 metadata resolver neighbour unix-run unix-tmp unix-shown unix-abstract netlink-socket-of-netfilter "
    "netlink-socket-of-audit netlink-socket-of-sock_diag netlink-socket-of-device-events generic-netlink-socket signal inherited proc-root "
    "set-uid keyring ping-dgram"
).split()
ROOT = (
    "ping-raw as-peer raw-socket packet-socket raw-ipv6-socket set-link add-address add-route add-table host-net-namespace "
    "host-mnt-namespace peer-namespace ptrace pidfd-getfd mount-namespace mount-cgroup core_pattern ip_forward mount fsopen mknod "
    "open-by-handle capset"
).split()
# These too, where the kernel has them and lets root.
WHERE_THERE_ARE = (
    "vsock-socket xdp-socket mptcp-socket udp-lite-socket userns-unshare userns-clone userns-clone3 io-uring bpf perf userfaultfd tiocsti "
    "mtrr timer_list kcore modprobe"
)
# Never certain: off by default, of somebody else's, or without a node in bwrap's /dev.
UNCERTAIN = {
    "ping-dgram",
    "name",
    "unix-daemons",
    "add-tun",
    "leave-cgroup",
    "kmsg",
    "mem",
    "scm-rights",
    "sysrq-trigger",
    "default_smp_affinity",
    "keys",
}
# What a run that has lost both its filter and the gate still cannot reach: no route leads out of it.
BARE = {"gateway-tcp", "gateway-mapped", "gateway-udp", "lease-udp", "multicast", "broadcast", "broadcast-all"}
# A directory of the host's as it is, and not a view of it.
SHOW = """
    from sealnet import spawn
    from sealnet.model.view import Kind, Step
    whole = spawn.layout
    spawn.layout = lambda plan: (*whole(plan), Step(Kind.BIND, "{0}", "{0}"))
"""
PLACES = ("/var/lib", "/tmp", "/run")


@pytest.fixture(autouse=True)
def _nothing_is_left(host: Host) -> Iterator[None]:
    yield
    assert left() == []


def left() -> list[str]:
    return [f"{place}/{name}" for place in PLACES for name in os.listdir(place) if name.startswith("sealnet-attack-")]


Told = tuple[int, dict[str, Any], dict[str, str]]


def told(done: subprocess.CompletedProcess[str]) -> Told:
    """The status, the document, and each row's verdict."""
    assert done.stdout, done.stderr
    shown = json.loads(done.stdout)
    return done.returncode, shown, {row["name"]: row["verdict"] for row in shown["rows"]}


def attack(host: Host, *argv: str) -> Told:
    return told(host.sealnet("attack", "--json", *argv))


def lose(host: Host, script: str) -> Told:
    """The same, as root's payload, with a sealnet that `script` has changed."""
    program = f"{textwrap.dedent(script)}\nfrom sealnet.cli import main\nmain()"
    done = host.run(sys.executable, "-I", "-c", program, "attack", "--json", "--user", "root", check=False)
    # Somebody has had his hand on the gate, so it would be refused from now on.
    host.run("nft", "delete", "table", "inet", "sealnet")
    return told(done)


@pytest.mark.parametrize("user", ["nobody", "root"])
@pytest.mark.parametrize("where", [(), ("--lab",)], ids=["here", "lab"])
def test_a_sealed_payload_reaches_nothing(host: Host, user: str, where: tuple[str, ...]) -> None:
    status, shown, verdicts = attack(host, "--user", user, *where)

    assert {row["name"]: row["found"] for row in shown["rows"] if row["verdict"] in ("REACHED", "INCONCLUSIVE")} == {}
    assert (status, shown["verdict"], shown["sealed"], shown["broker"]) == (0, "sealed", True, True)
    assert shown["schema"] == "sealnet.attack/1"
    assert shown["kernel"] == os.uname().release
    assert len(verdicts) == len(shown["rows"]) >= 90
    assert shown["counts"] == {word: list(verdicts.values()).count(word) for word in shown["counts"]}
    assert {tuple(row) for row in shown["rows"]} == {("name", "group", "verdict", "tried", "found", "ms", "oracle")}
    assert all(row["oracle"] and not row["oracle"].startswith("NOT") for row in shown["rows"] if row["verdict"] == "BLOCKED")
    # What is judged here is what the control shows to be open.
    lacking = set() if where else {"ping-dgram", "dnat-neighbour", "dnat-loopback", "neighbour", "ipv6-address"}
    assert {name for name in (*ANYBODY, *ROOT) if verdicts[name] != "BLOCKED"} == lacking


@pytest.mark.parametrize(("options", "reached"), [((), [*ANYBODY, *ROOT]), (("--user", "nobody"), ANYBODY)], ids=["root", "nobody"])
def test_plain_bwrap_reaches_what_the_seal_blocks(host: Host, options: tuple[str, ...], reached: list[str]) -> None:
    """A row that can never be reached shows nothing: each has its place in one of the lists above."""
    status, shown, verdicts = attack(host, "--unsealed", "--lab", *options)

    assert {name: verdicts[name] for name in reached if verdicts[name] != "REACHED"} == {}
    assert (status, shown["verdict"], shown["sealed"]) == (0, "reaches", False)
    if not options:
        shut = {name for name, verdict in verdicts.items() if verdict not in ("REACHED", "NOT-APPLICABLE")}
        assert shut <= UNCERTAIN
        assert {verdicts[name] for name in WHERE_THERE_ARE.split()} <= {"REACHED", "NOT-APPLICABLE"}


def test_the_control_fails_where_a_row_that_must_be_reached_is_not(host: Host) -> None:
    """Somebody's firewall is in the way of plain bwrap: then a refusal is no merit of the seal's."""
    host.run("nft", "add table ip other; add chain ip other out { type filter hook output priority 0; }")
    host.run("nft", "add rule ip other out ip daddr 192.168.77.1 tcp flags syn drop")
    host.settled()

    status, shown, verdicts = attack(host, "--unsealed")
    sealed = attack(host)

    assert (status, shown["verdict"], verdicts["host-address"]) == (1, "inconclusive", "INCONCLUSIVE")
    assert (sealed[0], sealed[1]["verdict"], sealed[2]["host-address"]) == (1, "inconclusive", "INCONCLUSIVE")


def test_a_daemon_of_the_hosts_answers_only_where_the_seal_shows_it(host: Host) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/run/docker.sock")
    listener.listen(8)

    sealed, broken, unsealed = attack(host), lose(host, SHOW.format("/run")), attack(host, "--unsealed")

    listener.close()
    assert (sealed[0], sealed[2]["unix-daemons"]) == (0, "BLOCKED")
    assert (broken[0], broken[2]["unix-daemons"]) == (1, "REACHED")
    # It would be started where it listens through a socket unit.
    assert (unsealed[0], unsealed[2]["unix-daemons"]) == (0, "NOT-APPLICABLE")


@pytest.mark.parametrize("layer", ["gate", "filter"])
def test_one_layer_of_the_seal_is_enough(host: Host, layer: str) -> None:
    status, shown, _verdicts = attack(host, "--lab", "--without", layer)

    assert (status, shown["verdict"]) == (0, "sealed")


def test_a_broken_seal_is_told(host: Host) -> None:
    """Both rulesets are taken away before the payload starts."""
    status, shown, verdicts = attack(host, "--lab", "--without", "gate", "--without", "filter")

    assert (status, shown["verdict"]) == (1, "broken")
    assert {name for name, verdict in verdicts.items() if verdict == "REACHED"} == BARE | {"dnat-neighbour", "dnat-loopback"}
    assert shown["counts"]["INCONCLUSIVE"] == 0


LOSSES = {
    # Somebody adds rules of his own: the run's filter lets all of TCP out, the host's gate lets it in.
    "lease": (
        """
        from sealnet.attack.kit import Kit
        from sealnet.kernel.nft import Nft
        def widen(self, run):
            run.inside.call(lambda: Nft().apply("insert rule inet sealnet output meta l4proto tcp accept", "widen it"))
            for chain in ("gate", "refuse"):
                Nft().apply(f"insert rule inet sealnet {chain} meta l4proto tcp accept", "widen it")
        Kit._rob = widen
        """,
        {"gateway-tcp", "gateway-mapped"},
    ),
    # The payload's alone: with the stand-in's gone as well, the proof refuses the run.
    "system calls": (
        """
        import struct
        from sealnet import spawn
        memory, allow = spawn._memory, struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)
        spawn._memory = lambda name, data: memory(name, allow if name == "seccomp" else data)
        """,
        {name for name in ANYBODY if "netlink" in name} | {"set-uid", "keyring"},
    ),
    "masks of /proc": (
        """
        from sealnet.model import argv
        argv._locked_down = lambda seen: []
        """,
        {"core_pattern", "ip_forward"},
    ),
    "view": (SHOW.format("/var/lib"), {"unix-shown"}),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_whatever_a_seal_has_lost_is_told(host: Host, lost: str) -> None:
    """The sandbox is whole but for one thing, so what is reached is what that thing is for."""
    script, expected = LOSSES[lost]

    status, shown, verdicts = lose(host, script)

    reached = {name for name, verdict in verdicts.items() if verdict == "REACHED"}
    assert (status, shown["verdict"]) == (1, "broken")
    assert expected <= reached <= expected | {*WHERE_THERE_ARE.split(), *UNCERTAIN}


def test_people_get_a_table_by_area_and_a_last_line_of_counts(host: Host) -> None:
    done = host.sealnet("attack")

    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0].split() == ["VERDICT", "TRIED", "FOUND", "AFTER", "ORACLE"]
    assert [line for line in lines if line.endswith(":")] == [
        *("this host:", "IPv6:", "other runs:", "beyond the host:", "Unix sockets:", "socket families:"),
        *("its own network:", "processes and namespaces:", "the kernel:"),
    ]
    assert lines[-1].startswith("sealed: ")
    assert " BLOCKED, 0 REACHED, 0 INCONCLUSIVE, " in lines[-1]
    assert done.stderr == ""


def test_the_last_lines_say_what_was_robbed_and_why_an_unsealed_success_is_one(host: Host) -> None:
    robbed, control = host.sealnet("attack", "--lab", "--without", "gate"), host.sealnet("attack", "--unsealed")

    assert (robbed.returncode, control.returncode) == (0, 0)
    assert robbed.stdout.splitlines()[-1].startswith("without the gate: sealed: ")
    assert control.stdout.splitlines()[-2].startswith("reaches: ")
    assert control.stdout.splitlines()[-1].startswith("the control holds: ")


@pytest.mark.parametrize("argv", [("--without", "gate"), ("--lab", "--unsealed", "--without", "filter")])
def test_a_seal_is_only_robbed_in_a_throw_away_host(host: Host, argv: tuple[str, ...]) -> None:
    done = host.sealnet("attack", *argv)

    assert done.returncode == 2
    assert "cannot use --without here" in done.stderr
    assert not Path("/run/sealnet").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_attack_that_is_ended_leaves_nothing(host: Host, signum: signal.Signals) -> None:
    """While its other ends are up."""
    process = host.spawn(*SEALNET, "attack", "--unsealed", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(left()) >= 4 or process.poll() is not None, what="its other ends are up")

    assert end(process, signum) == 128 + signum
    assert left() == []


def test_a_host_that_cannot_seal_is_refused_and_nothing_is_left(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for the second run alone."""
    Path("config.toml").write_text('pool = ["198.18.0.0/30"]\n')
    monkeypatch.setenv("SEALNET_CONFIG", str(Path("config.toml").absolute()))

    done = host.sealnet("attack", "--json")

    assert done.returncode == 125
    assert done.stderr.startswith("sealnet: cannot allocate a /30 from 198.18.0.0/30: ")
    assert done.stdout == ""


def test_a_lab_leaves_the_host_alone(host: Host) -> None:
    before = host.snapshot()

    assert attack(host, "--lab")[0] == 0

    assert host.snapshot() == before
    assert not Path("/run/sealnet").exists()
