"""What the kernel tells of changes: which of it concerns which run, judged by bytes, by the filter in the kernel, and on a live host."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealnet.kernel import listeners, netlink, notices, watch
from sealnet.kernel.netlink import attribute, nested
from sealnet.kernel.netns import Inside
from sealnet.kernel.notices import Watched, Watchlist
from sealnet.kernel.watch import REST_S, Watch
from sealnet.model import ruleset
from sealnet.model.plan import Seal
from tests.lab import Host, wait_for

ONE, TWO, NONE, BOTH = frozenset(["one"]), frozenset(["two"]), frozenset[str](), frozenset(["one", "two"])


def seal(run_id: str, subnet: str) -> Seal:
    return Seal(run_id=run_id, subnet=IPv4Network(subnet), lease_port=8080)


SEAL_ONE, SEAL_TWO = seal("one", "198.18.0.0/30"), seal("two", "198.18.0.8/30")
RUNS = [Watched.of(SEAL_ONE, 11), Watched.of(SEAL_TWO, 12)]

# As Linux 6.18 told them: `nft delete element inet sealnet leases { "sealabc" . 198.18.0.2 . 198.18.0.1 . 8080 }` begins with the first,
# every transaction ends with the second, `ip addr add 198.18.0.1/30 dev sealx` (index 3) begins with the third and ends with the fourth.
RECORDED_DELETION = "700000000e0a0000000000000000000001000008" + "0c0001007365616c6e657400" + "0b0002006c65617365730000"
RECORDED_GENERATION = "2c0000000f0a00000000000000000000000000020800010000000002" + "08000200000042ac080003006e667400"
RECORDED_ADDRESS = "500000001400000000000000000000000" + "21e80000300000008000100c612000108000200c61200010a0003007365616c"
RECORDED_ROUTE = "3c0000001800000000000000000000000" + "2200000ff02fe020000000008000f00ff00000008000100c612000108000700"


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def nft(kind: int, *attributes: bytes, family: int = 1) -> bytes:
    return message(10 << 8 | kind, struct.pack("=BBH", family, 0, 0) + b"".join(attributes))


def element(kind: int, set_name: str, *keys: bytes, table: str = ruleset.TABLE) -> bytes:
    listed = [nested(1, nested(1, attribute(1, key))) for key in keys]
    return nft(kind, attribute(1, table), attribute(2, set_name), nested(3, *listed))


def lease(of: Seal) -> bytes:
    return of.ifname.encode().ljust(16, b"\0") + of.sandbox.packed + of.gateway.packed + struct.pack(">HH", 8080, 0)


OURS, THEIRS = attribute(1, ruleset.TABLE), attribute(1, "filter")
NEW, GONE = 12, 14


@pytest.mark.parametrize(
    ("datagram", "concerned"),
    [
        (nft(2, OURS), BOTH),
        (nft(5, OURS), BOTH),
        (nft(6, OURS), BOTH),
        (nft(8, OURS), BOTH),
        (nft(11, OURS), BOTH),
        (nft(2, OURS, family=2), NONE),
        (nft(2, THEIRS), NONE),
        (nft(2, attribute(1, "sealnet2")), NONE),
        (nft(6, THEIRS, attribute(5, ruleset.TABLE)), NONE),
        (b"".join([nft(2, THEIRS), nft(2, OURS)]), BOTH),
        (b"".join([nft(2, THEIRS)] * 3), NONE),
        (element(GONE, "leases", lease(SEAL_ONE)), ONE),
        (element(GONE, "leases", lease(SEAL_TWO)), TWO),
        (element(GONE, "leases", lease(SEAL_ONE), lease(SEAL_TWO)), BOTH),
        (element(GONE, "leases", lease(seal("three", "198.18.0.4/30"))), NONE),
        (element(GONE, "gateways", SEAL_ONE.gateway.packed), ONE),
        (element(GONE, "gateways", IPv4Address("198.18.0.5").packed), NONE),
        (element(GONE, "leases", lease(SEAL_ONE), table="other"), NONE),
        (element(NEW, "leases", lease(SEAL_ONE)), NONE),
        # A renewal; and a lease that was added and taken away.
        (element(GONE, "leases", lease(SEAL_ONE)) + element(NEW, "leases", lease(SEAL_ONE)), NONE),
        (element(NEW, "leases", lease(SEAL_ONE)) + element(GONE, "leases", lease(SEAL_ONE)), ONE),
        (bytes.fromhex(RECORDED_GENERATION), NONE),
        (b"", NONE),
        (b"\0" * 64 + OURS, NONE),
        (nft(2, OURS)[:24], NONE),
    ],
)
def test_a_change_of_nf_tables_concerns_whose_table_or_element_it_is(datagram: bytes, concerned: frozenset[str]) -> None:
    assert Watchlist(RUNS).concerned_by_nft(datagram) == concerned


def test_a_recorded_deletion_is_of_our_table() -> None:
    head = bytes.fromhex(RECORDED_DELETION)
    key = b"sealabc".ljust(16, b"\0") + bytes((198, 18, 0, 2, 198, 18, 0, 1)) + struct.pack(">HH", 8080, 0)
    datagram = head + nested(3, nested(1, nested(1, attribute(1, key))))
    run = Watched("abc", "sealabc", 3, int(IPv4Address("198.18.0.0")))

    assert Watchlist([run]).concerned_by_nft(datagram) == {"abc"}
    assert Watchlist([run._replace(ifname="sealabd", subnet=run.subnet + 4)]).concerned_by_nft(datagram) == NONE


def link(kind: int, index: int) -> bytes:
    return message(kind, struct.pack("=BxHiII", 0, 1, index, 0, 0) + attribute(3, "sealx"))


def address(kind: int, index: int) -> bytes:
    return message(kind, struct.pack("=BBBBI", 2, 30, 0, 0, index) + attribute(1, b"\xc6\x12\0\x01"))


def netconf(index: int) -> bytes:
    return message(80, struct.pack("=Bxxx", 2) + attribute(1, index) + attribute(2, 0))


def route(prefix: str, *, family: int = 2) -> bytes:
    network = IPv4Network(prefix)
    destination = attribute(1, network.network_address.packed) if network.prefixlen else b""
    return message(24, struct.pack("=8BI", family, network.prefixlen, 0, 0, 254, 3, 0, 1, 0) + attribute(15, 254) + destination)


ROUTED = [
    (link(netlink.NEWLINK, 11), ONE),
    (link(netlink.DELLINK, 12), TWO),
    (link(netlink.NEWLINK, 13), NONE),
    (address(netlink.NEWADDR, 11), ONE),
    (address(netlink.DELADDR, 12), TWO),
    (address(netlink.DELADDR, 3), NONE),
    (netconf(11), ONE),
    (netconf(13), NONE),
    (netconf(0xFFFF_FFFF), NONE),
    (message(netlink.NEWRULE, struct.pack("=8BI", 2, 0, 0, 0, 0, 0, 0, 1, 0)), BOTH),
    (message(netlink.DELRULE, struct.pack("=8BI", 2, 0, 0, 0, 0, 0, 0, 1, 0)), BOTH),
    (route("0.0.0.0/0"), BOTH),
    (route("198.0.0.0/8"), BOTH),
    (route("198.18.0.0/29"), ONE),
    (route("198.18.0.0/30"), ONE),
    (route("198.18.0.2/32"), ONE),
    (route("198.18.0.3/32"), ONE),
    (route("198.18.0.10/31"), TWO),
    (route("198.18.0.4/30"), NONE),
    (route("198.18.0.4/32"), NONE),
    (route("198.18.0.12/30"), NONE),
    (route("172.17.0.0/16"), NONE),
    (b"", NONE),
    (link(netlink.NEWLINK, 11)[:20], NONE),
]


@pytest.mark.parametrize(("datagram", "concerned"), ROUTED)
def test_a_change_of_links_addresses_routes_and_rules_concerns_whose_it_is(datagram: bytes, concerned: frozenset[str]) -> None:
    assert Watchlist(RUNS).concerned_by_route(datagram) == concerned


def test_recorded_changes_are_told_apart_by_index_and_destination() -> None:
    run = Watched("abc", "sealx", 3, int(IPv4Address("198.18.0.0")))

    for text in (RECORDED_ADDRESS, RECORDED_ROUTE):
        datagram = bytes.fromhex(text)
        assert Watchlist([run]).concerned_by_route(datagram) == {"abc"}
        assert Watchlist([run._replace(ifindex=4, subnet=run.subnet + 4)]).concerned_by_route(datagram) == NONE


# The filter, which the kernel itself runs


def passes(program: list[notices.Instruction], datagrams: list[bytes]) -> list[bool]:
    """Which of the datagrams a socket receives behind the filter."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with near, far:
        far.setblocking(False)
        listeners.attach(far, program)
        told = []
        for datagram in datagrams:
            near.send(datagram)
            try:
                told.append(far.recv(1 << 16) == datagram)
            except BlockingIOError:
                told.append(False)
        return told


def test_the_filter_lets_what_concerns_a_run_pass_and_drops_strangers_links_addresses_and_routes() -> None:
    datagrams = [datagram for datagram, _concerned in ROUTED if len(datagram) > 20]

    passed = passes(Watchlist(RUNS).route_filter(), datagrams)

    concerned = [bool(Watchlist(RUNS).concerned_by_route(datagram)) for datagram in datagrams]
    # What is broader than a run's own subnet is left to the judgement.
    broad = [datagram for datagram, let_by, right in zip(datagrams, passed, concerned, strict=True) if let_by and not right]
    assert broad == [route("172.17.0.0/16")]
    assert [right for let_by, right in zip(passed, concerned, strict=True) if right and not let_by] == []


@pytest.mark.parametrize("count", [1, 399, 401, 5000])
def test_the_filter_of_very_many_runs_drops_strangers_links_and_routes_as_well(count: int) -> None:
    base = int(IPv4Address("198.18.0.0"))
    # Apart, so that each is a range of its own where there are few.
    runs = [Watched(f"r{number}", f"seal{number}", 1000 + 3 * number, base + 8 * number) for number in range(count)]
    first, last = runs[0], runs[-1]
    theirs = [link(netlink.NEWLINK, index) for index in (1, first.ifindex - 1, last.ifindex + 1, 0x7FFF_FFFF)]
    theirs += [route(f"{IPv4Address(of)}/32") for of in (base - 1, last.subnet + 4, 0, 0xFFFF_FFFF)]
    ours = [link(netlink.NEWLINK, run.ifindex) for run in runs[:: max(1, count // 50)]] + [link(netlink.DELLINK, last.ifindex)]
    ours += [route(f"{IPv4Address(run.subnet + 3)}/32") for run in (first, last)]

    passed = passes(Watchlist(runs).route_filter(), [*theirs, *ours])

    assert passed == [False] * len(theirs) + [True] * len(ours)


@given(values=st.lists(st.integers(0, 2000), max_size=200), most=st.integers(1, 20))
def test_ranges_cover_every_value_and_are_few_and_apart(values: list[int], most: int) -> None:
    found = notices.ranges(values, most)

    assert all(any(first <= value <= last for first, last in found) for value in values)
    assert len(found) <= most
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(found))
    assert all(first in values and last in values for first, last in found)
    covered = set(itertools.chain.from_iterable(range(first, last + 1) for first, last in found))
    assert len(found) == most or covered == set(values)


def test_the_filter_drops_single_changes_of_other_tables() -> None:
    ours = [nft(2, OURS), nft(8, OURS, attribute(2, "gate")), element(GONE, "leases", lease(SEAL_ONE)), nft(2, THEIRS) + nft(2, OURS)]
    theirs = [nft(2, THEIRS), nft(8, THEIRS), nft(2, OURS, family=2), nft(2, attribute(1, "sealnet2")), bytes.fromhex(RECORDED_GENERATION)]
    # What is one transaction of several is left to the judgement.
    several = nft(2, THEIRS) + nft(2, THEIRS)

    passed = passes(notices.nft_filter(), [*ours, *theirs, several])

    assert passed == [True] * len(ours) + [False] * len(theirs) + [True]


# On a live host


@pytest.fixture
def inside(host: Host) -> Iterator[Inside]:
    with Inside.new("watched") as inside:
        yield inside


@pytest.fixture(params=[False, True], ids=["one", "many"])
def watched(request: pytest.FixtureRequest, host: Host, inside: Inside) -> Iterator[Watch]:
    """Two runs' host links, the first with a namespace of its own, and the gate with both leases; nothing is pending.

    As a run's own Watch is, and as a worker's, which listens to the runs' namespaces from elsewhere.
    """
    for of in (SEAL_ONE, SEAL_TWO):
        host.run("ip", "link", "add", of.ifname, "type", "bridge")
        host.run("ip", "addr", "add", f"{of.gateway}/30", "dev", of.ifname)
        host.run("ip", "link", "set", of.ifname, "up")
    leases = "".join(ruleset.render_lease(of.ifname, of.sandbox, of.gateway, 8080, ttl_s=90) for of in (SEAL_ONE, SEAL_TWO))
    host.run("nft", ruleset.render_gate() + leases)
    made = Watch(many=request.param)
    with Inside.new("other") as other:
        for of, where in ((SEAL_ONE, inside), (SEAL_TWO, other)):
            made.add(of, where, json.loads(host.run("ip", "-j", "link", "show", of.ifname).stdout)[0]["ifindex"])
        made.settle()
        settle(made)
        yield made
        made.close()
    host.run("nft", "delete", "table", "inet", "sealnet")
    for of in (SEAL_ONE, SEAL_TWO):
        host.run("ip", "link", "del", of.ifname, check=False)


def is_readable(made: Watch, timeout_s: float = 0.0) -> bool:
    return bool(select.select([made.fd], [], [], timeout_s)[0])


def settle(made: Watch) -> frozenset[str]:
    """Everything that is told until nothing comes any more."""
    found: frozenset[str] = NONE
    now = time.monotonic() + REST_S
    while True:
        found |= made.take(now)
        if made.rests_until is None and not is_readable(made):
            return found
        now += REST_S


@pytest.mark.root
@pytest.mark.parametrize(
    ("commands", "concerned"),
    [
        (["nft flush ruleset", "nft add table inet sealnet"], BOTH),
        (["nft insert rule inet sealnet gate accept"], BOTH),
        (["nft delete element inet sealnet leases { LEASE1 }"], ONE),
        (["nft delete element inet sealnet gateways { 198.18.0.9 }"], TWO),
        (["nft flush set inet sealnet leases"], BOTH),
        (["ip link set LINK1 down"], ONE),
        (["ip addr flush dev LINK2"], TWO),
        (["ip link set LINK2 name other", "ip link set other name LINK2"], TWO),
        (["ip link set LINK1 address 02:00:5e:00:53:01"], ONE),
        (["ip link del LINK1"], ONE),
        (["sysctl -w net.ipv4.conf.LINK1.rp_filter=1"], ONE),
        (["sysctl -w net.ipv4.conf.LINK2.forwarding=1"], TWO),
        (["sysctl -w net.ipv6.conf.LINK1.disable_ipv6=1", "sysctl -w net.ipv6.conf.LINK1.disable_ipv6=0"], ONE),
        (["ip rule add to 198.18.0.0/15 lookup 99", "ip rule del to 198.18.0.0/15 lookup 99"], BOTH),
        (["ip route add 198.18.0.2/32 dev lan0", "ip route del 198.18.0.2/32 dev lan0"], ONE),
        (["ip route add 198.18.0.0/16 dev lan0", "ip route del 198.18.0.0/16 dev lan0"], BOTH),
        (["nsenter ip link set lo up"], ONE),
        (["nsenter nft add table inet sealnet"], ONE),
        (["nsenter ip -6 rule add from ::1 lookup 99"], ONE),
        # Somebody else's business.
        (["ip route add 172.20.0.0/16 dev lan0", "ip route del 172.20.0.0/16 dev lan0"], NONE),
        (["ip link add d0 type bridge", "ip link set d0 up", "ip addr add 198.18.0.5/30 dev d0", "ip link del d0"], NONE),
        (["nft add table ip nat", "nft add chain ip nat post", "nft delete table ip nat"], NONE),
        (["nft add table inet sealnet2", "nft delete table inet sealnet2"], NONE),
        (["nft RENEWAL"], NONE),
        (["true"], NONE),
    ],
    ids=lambda value: value[0].replace(" ", "_") if isinstance(value, list) else "",
)
def test_a_change_wakes_those_whom_it_concerns_and_nobody_else(
    host: Host, watched: Watch, inside: Inside, commands: list[str], concerned: frozenset[str]
) -> None:
    words = {"LINK1": SEAL_ONE.ifname, "LINK2": SEAL_TWO.ifname}
    words["LEASE1"] = ruleset.lease_element(SEAL_ONE.ifname, SEAL_ONE.sandbox, SEAL_ONE.gateway, 8080)
    words["RENEWAL"] = ruleset.render_lease(SEAL_ONE.ifname, SEAL_ONE.sandbox, SEAL_ONE.gateway, 8080, ttl_s=90)

    for command in commands:
        for word, text in words.items():
            command = command.replace(word, text)
        argv = ["nft", command.removeprefix("nft ")] if command.startswith("nft ") else command.split()
        if argv[0] == "nsenter":
            argv = ["nsenter", f"--net=/proc/self/fd/{inside.fd}", *argv[1:]]
        host.run(*argv, pass_fds=(inside.fd,))

    assert settle(watched) == concerned


@pytest.mark.root
def test_whoever_is_not_watched_any_more_is_not_told_of(host: Host, watched: Watch, inside: Inside) -> None:
    watched.remove("one")
    watched.remove("one")

    host.run("ip", "link", "set", SEAL_ONE.ifname, "down")
    host.run("nsenter", f"--net=/proc/self/fd/{inside.fd}", "ip", "link", "set", "lo", "up", pass_fds=(inside.fd,))
    first = settle(watched)
    host.run("ip", "link", "set", SEAL_TWO.ifname, "down")
    second = settle(watched)
    watched.remove("two")
    host.run("nft", "insert rule inet sealnet gate accept")

    assert first == NONE
    assert second == TWO
    assert settle(watched) == NONE


@pytest.mark.root
def test_notifications_that_were_lost_count_as_about_everything(host: Host, watched: Watch) -> None:
    batch = host.directory / "batch"
    batch.write_text(f"link set {SEAL_ONE.ifname} alias x\n" * 4000)

    host.run("ip", "-batch", str(batch))

    assert settle(watched) == BOTH


@pytest.mark.root
def test_notifications_of_a_runs_namespace_that_were_lost_are_not_passed_over(host: Host, watched: Watch, inside: Inside) -> None:
    batch = host.directory / "batch"
    batch.write_text("link set lo up\nlink set lo down\n" * 2000)

    host.run("nsenter", f"--net=/proc/self/fd/{inside.fd}", "ip", "-batch", str(batch), pass_fds=(inside.fd,))

    # Two sockets for all cannot tell whose it was.
    assert settle(watched) in (ONE, BOTH)


def refuse() -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.root
@pytest.mark.parametrize("refused", [False, True])
def test_who_watches_many_hears_of_their_namespaces_and_of_no_other(host: Host, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """By two sockets for them all; by two in each where it may not have such (CAP_NET_BROADCAST)."""
    if refused:
        monkeypatch.setattr(watch, "Everywhere", refuse)
    made, opened = Watch(many=True), []
    with contextlib.ExitStack() as held:
        held.callback(made.close)
        spaces = {run_id: held.enter_context(Inside.new(run_id)) for run_id in ("a", "b", "c", "never")}
        for run_id in ("a", "b", "c"):
            made.add(Seal(run_id=run_id), spaces[run_id], None)
            opened.append(len(os.listdir("/proc/self/fd")))
        settle(made)

        def told(*changed: str) -> frozenset[str]:
            for run_id, state in itertools.product(changed, ("up", "down")):
                fd = spaces[run_id].fd
                host.run("nsenter", f"--net=/proc/self/fd/{fd}", "ip", "link", "set", "lo", state, pass_fds=(fd,))
            return settle(made)

        assert told("never") == NONE
        assert told("a", "c") == {"a", "c"}
        made.remove("c")
        made.remove("c")
        assert told("c") == NONE
        made.add(Seal(run_id="again"), spaces["c"], None)
        assert told("c") == {"again"}
        spaces.pop("b").close()
        assert settle(made) <= {"b"}
    assert opened[-1] - opened[0] == (4 if refused else 0)


@pytest.mark.root
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("fails", [1, 2])
def test_a_run_that_cannot_be_watched_leaves_nothing_and_the_next_one_is(monkeypatch: pytest.MonkeyPatch, many: bool, fails: int) -> None:
    """epoll_ctl(2) refuses one of its sockets: memory, or fs.epoll.max_user_watches."""

    class Refusing:
        def __init__(self, sources: select.epoll) -> None:
            self.sources, self.left = sources, fails

        def register(self, fd: int, events: int) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.sources.register(fd, events)

        def __getattr__(self, name: str) -> object:
            return getattr(self.sources, name)

    made = Watch(many=many)
    monkeypatch.setattr(made, "_sources", Refusing(made._sources))
    with contextlib.ExitStack() as held:
        held.callback(made.close)
        one, other = (held.enter_context(Inside.new(run_id)) for run_id in ("one", "other"))
        before = os.listdir("/proc/self/fd")

        with pytest.raises(OSError, match="No space"):
            made.add(Seal(run_id="one"), one, None)
        assert os.listdir("/proc/self/fd") == before
        made.add(Seal(run_id="other"), other, None)
        subprocess.run(["nsenter", f"--net=/proc/self/fd/{other.fd}", "ip", "link", "set", "lo", "up"], check=True, pass_fds=(other.fd,))
        assert settle(made) == {"other"}
        made.remove("one")


@pytest.mark.root
def test_of_two_names_for_one_namespace_the_later_is_told_until_it_is_removed() -> None:
    with Inside.new("shared") as inside:
        everywhere = listeners.Everywhere()
        everywhere.add("one", inside.fd)
        everywhere.add("two", inside.fd)
        told = [(270, 8, struct.pack("=i", 1))]

        assert everywhere.concerned(told) == {"two"}
        everywhere.remove("one")
        assert everywhere.concerned(told) == {"two"}
        assert everywhere.all == {"two"}
        everywhere.remove("two")
        everywhere.remove("two")
        assert everywhere.concerned(told) == everywhere.all == NONE
        everywhere.close()


@pytest.mark.root
def test_a_watch_rests_after_it_was_told_something_and_misses_nothing(host: Host, watched: Watch) -> None:
    host.run("ip", "link", "set", SEAL_ONE.ifname, "down")
    assert is_readable(watched, 5.0)
    now = time.monotonic()

    first = watched.take(now)
    until = watched.rests_until
    host.run("ip", "link", "set", SEAL_TWO.ifname, "down")
    resting = is_readable(watched), watched.take(now)
    assert until is not None
    second = watched.take(until)

    assert first == ONE
    assert until == now + REST_S
    assert resting == (False, NONE)
    assert second == TWO


LINKS = "".join(itertools.repeat("link set lan0 alias x\n", 10_000))
ROUTES = "".join(f"route add 172.16.{n // 250}.{n % 250}/32 dev lan0\n" for n in range(10_000))
ELEMENTS = f"""add table ip t
add set ip t s {{ type ipv4_addr; }}
add element ip t s {{ {", ".join(f"10.9.{n // 250}.{n % 250}" for n in range(10_000))} }}
delete table ip t
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("argv", "batch"),
    [(("ip", "-batch"), LINKS), (("ip", "-batch"), ROUTES), (("nft", "-f"), ELEMENTS)],
    ids=["links", "routes", "elements"],
)
def test_ten_thousand_changes_of_others_wake_nobody_who_watches(host: Host, watched: Watch, argv: tuple[str, ...], batch: str) -> None:
    file = host.directory / "batch"
    file.write_text(batch)
    used, woken, found = time.process_time(), 0, NONE

    process = subprocess.Popen([*argv, str(file)])
    while process.poll() is None or is_readable(watched):
        woken += is_readable(watched, 0.02)
        found |= watched.take(time.monotonic())
    used = time.process_time() - used
    host.run("ip", "route", "flush", "root", "172.16.0.0/12")
    settle(watched)
    host.run("ip", "link", "set", SEAL_ONE.ifname, "down")

    assert process.returncode == 0
    assert found == NONE
    # Only the pieces of one great transaction come through the filter, and are read at most each REST_S.
    assert woken < 100
    assert used < 1.0
    assert wait_for(lambda: watched.take(time.monotonic() + REST_S) or None) == ONE
