"""A firewall of the host's own that drops a lease is named by table and chain, and the command that is told lets the run in."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from sealnet import caller, prove, request
from sealnet import launch as launching
from sealnet.errors import KernelRefused, NoBroker, SealnetError
from sealnet.kernel import firewall, netlink
from sealnet.kernel.host import Host
from sealnet.kernel.nft import Nft
from sealnet.launch import launch
from sealnet.model.config import Config
from sealnet.model.plan import Seal
from sealnet.records import State
from sealnet.running import Streams
from tests import lab

pytestmark = pytest.mark.root


class Place:
    """A host with a broker, on which a run is launched."""

    def __init__(self, host: lab.Host) -> None:
        self.host = host
        self.state = State(host.state)
        self.state.prepare()
        self.kernel = Host(self.state.path, self.state.tag)

    def arrange(self, *commands: str) -> None:
        """Change the host as its owner would."""
        for command in commands:
            self.host.run(*shlex.split(command))
        self.host.settled()

    def refused(self, port: int = 8080) -> NoBroker:
        """The error of a run that does not reach its broker; nothing is left of the run or the search."""
        with pytest.raises(NoBroker) as caught:
            self.run(port)
        self.host.assert_clean()
        return caught.value

    def run(self, port: int = 8080) -> int:
        # The cgroup tree is the machine's own: the run id must be nobody else's.
        plan = request.plan(["true"], run_id=caller.new_run_id(), lease_port=port, cwd=str(self.host.directory))
        with launch(plan, host=self.kernel, state=self.state, config=Config(), streams=Streams()) as run:
            run.release()
            return run.wait(60)


@pytest.fixture
def place(host: lab.Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(launching, "_PREFLIGHT_S", 0.2)
    with socket.create_server(("0.0.0.0", 8080)):
        made = Place(host)
        yield made
        made.kernel.close()


def base(family: str, hook: str, priority: str, *, policy: str = "accept", rule: str = "", chain: str = "ours") -> tuple[str, ...]:
    head = f"nft add chain {family} theirs {chain}"
    kept = (f"nft add table {family} theirs", f"{head} '{{ type filter hook {hook} priority {priority}; policy {policy}; }}'")
    return (*kept, f"nft add rule {family} theirs {chain} {rule}") if rule else kept


JUMPED = (*base("inet", "input", "filter"), "nft add chain inet theirs below", "nft add rule inet theirs below tcp dport 1-9999 reject")
# name: what the host's owner has done, and what the error says of it.
FIREWALLS: dict[str, tuple[tuple[str, ...], str]] = {
    "policy, inet": (base("inet", "input", "filter", policy="drop"), "table inet theirs, chain ours drops it (policy)"),
    "policy, ip": (base("ip", "input", "filter", policy="drop"), "table ip theirs, chain ours drops it (policy)"),
    "reject": (base("inet", "input", "10", rule="reject with tcp reset"), "table inet theirs, chain ours drops it (reject)"),
    "a jumped chain": (
        (*JUMPED, "nft add rule inet theirs ours jump below"),
        "table inet theirs, chain below drops it (reject)",
    ),
    "a verdict map": (
        (*JUMPED, "nft add rule inet theirs ours tcp dport vmap '{ 8080 : goto below }'"),
        "table inet theirs, chain below drops it (reject)",
    ),
    "prerouting": (base("inet", "prerouting", "-400", rule="ip daddr 198.18.0.0/15 drop"), "table inet theirs, chain ours drops it (drop)"),
    "before the gate": (base("ip", "prerouting", "-500", rule="tcp dport 8080 drop"), "table ip theirs, chain ours drops it (drop)"),
    "output": (base("inet", "output", "filter", policy="drop"), "table inet theirs, chain ours drops what the broker answers (policy)"),
    "iptables, policy": (("iptables -P INPUT DROP",), "table ip filter, chain INPUT drops it (policy)"),
    "iptables, reject": (
        ("iptables -N theirs", "iptables -A theirs -p tcp -j REJECT", "iptables -A INPUT -j theirs"),
        "table ip filter, chain theirs drops it (reject)",
    ),
    "iptables, raw": (("iptables -t raw -A PREROUTING -i seal+ -j DROP",), "table ip raw, chain PREROUTING drops it (drop)"),
}
NAMES = [pytest.param(name, marks=pytest.mark.tool("iptables")) if "iptables" in name else name for name in FIREWALLS]


@pytest.mark.parametrize("name", NAMES)
def test_the_chain_that_drops_a_lease_is_named_and_what_is_told_lets_it_in(place: Place, name: str) -> None:
    commands, told = FIREWALLS[name]
    # Others that only could drop are not named.
    place.arrange(*commands, "nft add table inet other", "nft add chain inet other in '{ type filter hook input priority 50; }'")
    place.arrange("nft add rule inet other in tcp dport 9 drop")

    error = place.refused()
    hint = error.hint or ""
    place.arrange(hint.removeprefix("let it in: "))

    assert error.message.endswith(f"; {told}")
    assert hint.startswith("let it in: ")
    assert place.run() == 0
    place.host.assert_clean()


def test_what_drops_on_both_ways_is_all_named(place: Place) -> None:
    place.arrange(
        *base("inet", "input", "filter", rule="tcp dport 8080 reject with tcp reset"),
        *base("inet", "output", "filter", rule="tcp sport 8080 drop", chain="out"),
    )

    told = place.refused().message

    # The reset that the first sends is dropped by the second.
    assert "chain ours drops it (reject); table inet theirs, chain out drops what the broker answers (drop)" in told


def test_a_broker_that_does_not_accept_is_not_blamed_on_a_firewall(place: Place) -> None:
    place.arrange(*base("inet", "input", "filter", rule="tcp dport 9 drop"))
    place.host.run("sysctl", "-q", "net.ipv4.tcp_syncookies=0")
    place.host.settled()
    with socket.socket() as full:
        full.bind(("0.0.0.0", 8081))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", 8081))
        error = place.refused(8081)
        for one in waiting:
            one.close()

    assert "though it listens, and no rule of this host's nftables drops it" in error.message
    assert "ss -ltnp sport = :8081" in (error.hint or "")


def test_a_broker_on_the_gateway_alone_is_kept_from_its_run_by_a_firewall_only(place: Place) -> None:
    with socket.socket() as broker:
        broker.setsockopt(socket.IPPROTO_IP, 15, 1)  # IP_FREEBIND: the gateway is there with the run
        broker.bind(("198.18.0.1", 8081))
        broker.listen()
        works = place.run(8081)
        place.arrange(*base("inet", "input", "filter", policy="drop"))

        told = place.refused(8081).message

    assert works == 0
    assert told.endswith("; table inet theirs, chain ours drops it (policy)")


def no_trace(self: Nft, text: str, what: str) -> None:
    if "flags owner" in text:
        raise KernelRefused(f"cannot {what}: Operation not supported", errno=95)
    _apply(self, text, what)


_apply = Nft.apply


@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_can_be_traced_the_chains_that_could_drop_are_named(place: Place, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Nft, "apply", no_trace)
    commands, told = FIREWALLS[name]
    place.arrange("nft add table inet calm", "nft add chain inet calm in '{ type filter hook input priority 50; }'", *commands)

    message = place.refused().message

    how = re.search(r"\((\w+)\)", told)
    assert how is not None
    table = told.partition(",")[0]
    assert re.search(rf"; {table}, chain (ours|INPUT|PREROUTING) may drop .* \({how[1]}\)$", message)
    assert "calm" not in message
    assert "table inet sealnet" not in message


@pytest.mark.tool("iptables-legacy")
def test_the_old_iptables_is_suspected_where_no_chain_of_nftables_drops(place: Place) -> None:
    place.arrange(*base("inet", "input", "filter", rule="tcp dport 9 drop"), "iptables-legacy -P INPUT DROP")

    error = place.refused()
    hint = error.hint or ""
    place.arrange(hint.removeprefix("let it in: "))

    assert error.message.endswith("; a rule of iptables-legacy may drop it (table filter)")
    assert place.run() == 0


def test_a_packet_that_is_left_to_a_program_is_told_as_such() -> None:
    """The kernel's message, for kernels that can queue: this one may not."""
    verdict = netlink.nested(5, netlink.attribute(1, struct.pack(">I", 7 << 16 | 0x8000 | 3)))
    body = struct.pack("=BBH", 1, 0, 0) + netlink.attribute(1, "theirs") + netlink.attribute(2, "ours") + verdict
    datagram = struct.pack("=IHHII", 16 + len(body), 10 << 8 | 17, 0, 0, 0) + body
    kernel, listener = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with kernel, listener:
        kernel.send(datagram)
        (step,) = firewall._told(listener)

    assert (step.family, step.table, step.chain, step.how) == ("inet", "theirs", "ours", "queue")


def test_somebody_who_traces_too_is_not_mixed_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.arrange(
        *base("inet", "prerouting", "-450", rule="meta nftrace set 1", chain="trace"),
        *base("inet", "input", "filter", rule="udp dport 7 drop"),
        "nft add rule inet theirs ours tcp dport 8080 reject",
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as noise:
        real = prove.answers

        def answers(*arguments: Any, **options: Any) -> bool:
            noise.sendto(b"x", ("127.0.0.1", 7))
            return real(*arguments, **options)

        monkeypatch.setattr(prove, "answers", answers)
        message = place.refused().message

    assert message.count("drops it") == 1
    assert message.endswith("chain ours drops it (reject)")


def test_two_searches_at_once_do_not_meet(place: Place) -> None:
    place.arrange(*base("inet", "input", "filter", policy="drop"))

    found = []

    def inner() -> bool:
        found.append(place.host.run("nft", "list", "tables").stdout)
        return False

    def outer() -> bool:
        firewall.blame("sealbbbbbbbbbbb", 8080, inner)
        return False

    blame = firewall.blame("sealaaaaaaaaaaa", 8080, outer)

    assert "sealnet-trace-sealaaaaaaaaaaa" in found[0]
    assert "sealnet-trace-sealbbbbbbbbbbb" in found[0]
    assert (blame.traced, blame.droppers) == (True, ())
    place.host.assert_clean()


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_search_that_is_cut_short_leaves_no_table(place: Place, how: str) -> None:
    tables = place.host.run("nft", "list", "tables").stdout
    seen = place.host.directory / "seen"

    def cut() -> bool:
        seen.write_text(place.host.run("nft", "list", "tables").stdout)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError

    child = os.fork()
    if child == 0:
        try:
            firewall.blame("sealaaaaaaaaaaa", 8080, cut)
        except ZeroDivisionError:
            os._exit(3)
        os._exit(4)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert ended == (-signal.SIGKILL if how == "killed" else 3)
    assert "sealnet-trace-sealaaaaaaaaaaa" in seen.read_text()
    assert place.host.run("nft", "list", "tables").stdout == tables


@pytest.mark.parametrize(
    ("deed", "told"), [("addr flush dev {}", "has address none, not 198.18.0."), ("link set {} down", "is down")], ids=["address", "down"]
)
def test_a_link_that_a_network_manager_has_taken_is_named_and_no_firewall(
    place: Place, monkeypatch: pytest.MonkeyPatch, deed: str, told: str
) -> None:
    network = prove.network

    def taken(kernel: Host, seal: Seal, *arguments: Any, **options: Any) -> prove.Proof:
        place.host.run("ip", *deed.format(seal.ifname).split())
        return network(kernel, seal, *arguments, **options)

    assert place.run() == 0
    monkeypatch.setattr(prove, "network", taken)
    with pytest.raises(SealnetError) as caught:
        place.run()
    place.host.assert_clean()

    assert told in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("sealnet host install")
