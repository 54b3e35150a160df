"""What the host routes, compared with what ip(8) says about the same throw-away host."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealnet.errors import CannotSeal, KernelRefused, PoolExhausted
from sealnet.kernel import netlink, routes
from sealnet.kernel.netlink import Message, Netlink
from sealnet.kernel.netns import Inside
from sealnet.model.subnets import DEFAULT_POOL, Occupant, first_free

TEN = (IPv4Network("10.0.0.0/8"),)
NOWHERE = Path("/nonexistent")

pytestmark = [pytest.mark.root, pytest.mark.tool("ip")]


def blocks(*prefixes: str) -> frozenset[int]:
    return frozenset(int(IPv4Network(prefix).network_address) >> 2 for prefix in prefixes)


class Host:
    """A network namespace with a LAN, 192.168.77.1/24 on lan0."""

    def __init__(self, inside: Inside) -> None:
        self.inside = inside
        self.netlink = inside.call(Netlink)
        self.batch("link set lo up", "link add lan0 type veth peer name lan1", "link set lan1 up", "link set lan0 up")
        self.batch("address add 192.168.77.1/24 dev lan0")

    def ip(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        argv = ["ip", *" ".join(words).split()]
        return self.inside.call(lambda: subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60))

    def batch(self, *commands: str) -> None:
        done = self.ip("-batch -", text="\n".join(commands))
        assert done.returncode == 0, done.stderr

    def json(self, *words: str) -> Any:
        return json.loads(self.ip("-json", *words).stdout)

    def index(self, link: str) -> int:
        return self.inside.call(socket.if_nametoindex, link)

    def taken(self, resolv_conf: Path = NOWHERE, *, runs: frozenset[int] = frozenset()) -> list[Occupant]:
        return routes.see_taken(self.netlink, runs, resolv_conf=resolv_conf, upstreams=NOWHERE)

    def whys(self, prefix: str) -> list[str]:
        """What is said of the ranges that overlap a prefix."""
        around = IPv4Network(prefix)
        return [self.text(o) for o in self.taken() if o.first <= int(around[-1]) and o.last >= int(around[0])]

    def text(self, value: object) -> str:
        return self.inside.call(str, value.why if isinstance(value, Occupant) else value)

    def free(self, pool: tuple[IPv4Network, ...] = TEN, resolv_conf: Path = NOWHERE) -> str:
        return str(first_free(pool, self.taken(resolv_conf), frozenset(), max_runs=9))

    def refusal(self, pool: tuple[IPv4Network, ...], taken: list[Occupant], runs: frozenset[int] = frozenset()) -> str:
        with pytest.raises(PoolExhausted) as caught:
            self.inside.call(lambda: first_free(pool, taken, runs, max_runs=9))
        return caught.value.message


@pytest.fixture
def host() -> Iterator[Host]:
    with Inside.new("host") as inside:
        made = Host(inside)
        yield made
        made.netlink.close()


def ranges(taken: list[Occupant]) -> set[tuple[int, int]]:
    return {(occupant.first, occupant.last) for occupant in taken}


def span(prefix: str) -> tuple[int, int]:
    network = IPv4Network(prefix)
    return int(network[0]), int(network[-1])


def test_an_idle_host_gives_the_first_prefix(host: Host) -> None:
    assert host.free(DEFAULT_POOL) == "198.18.0.0/30"
    assert host.free(TEN) == "10.1.0.0/30"


def test_routes_of_all_kinds_are_what_ip_lists(host: Host) -> None:
    host.batch(
        "route add default via 192.168.77.2",
        "route add 0.0.0.0/1 via 192.168.77.2",
        "route add 10.0.0.0/9 via 192.168.77.2 table 75",
        "route add 10.128.0.0/16 via 192.168.77.2 metric 50",
        "route add 10.128.0.0/16 via 192.168.77.3 metric 60",
        "route add 10.129.0.0/16 via inet6 fe80::1 dev lan0",
        "route add 10.130.0.0/16 dev lan0 scope link table 4000000000",
        "route add local 10.131.0.0/16 dev lo",
        "route add broadcast 10.132.0.255 dev lan0 table 7",
        "route add 10.133.0.0/16 nexthop via 192.168.77.2 nexthop via 192.168.77.3 weight 3",
        "route add 10.134.0.1/32 via 192.168.77.2 tos 0x10",
        "nexthop add id 5 via 192.168.77.2 dev lan0",
        "nexthop add id 6 via 192.168.77.3 dev lan0",
        "nexthop add id 7 group 5/6",
        "route add 10.135.0.0/16 nhid 5",
        "route add 10.136.0.0/16 nhid 7 table 8",
        "route add 10.138.0.0/16 via 192.168.77.2 mtu 1300 src 192.168.77.1",
        "route add blackhole 10.200.0.0/16",
    )

    listed = [r["dst"] for r in host.json("-4 -d route show table all") if r["type"] != "blackhole" and r["dst"] != "default"]

    assert len(listed) > 15
    assert ranges(host.taken()) == {span(dst) for dst in listed if dst != "0.0.0.0/1"} | {span("192.168.77.0/24"), span("127.0.0.0/8")}


def test_a_dump_is_what_pyroute2_makes_of_it(host: Host) -> None:
    pyroute2 = pytest.importorskip("pyroute2")
    host.batch(*(f"route add 10.{n}.0.0/{16 + n % 17} dev lan0 table {100 + n % 7}" for n in range(200)))

    def ask() -> set[tuple[int, int]]:
        with pyroute2.IPRoute() as ipr:
            found = ipr.get_routes(family=socket.AF_INET)
            return {span(f"{r.get_attr('RTA_DST')}/{r['dst_len']}") for r in found if r["dst_len"] >= 8}

    assert len(host.taken()) > 200
    assert ranges(host.taken()) == host.inside.call(ask) | {span("192.168.77.0/24"), span("127.0.0.0/8")}


@pytest.mark.parametrize(
    ("route", "why"),
    [
        ("10.0.0.0/8 via 192.168.77.2 table 75", "10.0.0.0/8 via 192.168.77.2, table 75"),
        ("10.0.0.0/8 dev lan0", "10.0.0.0/8 dev lan0, table main"),
        ("local 10.0.0.0/8 dev lo", "local 10.0.0.0/8 dev lo, table local"),
        ("10.0.0.0/8 via inet6 fe80::1 dev lan0", "10.0.0.0/8 via inet6 fe80::1, table main"),
        (
            "10.0.0.0/8 nexthop via 192.168.77.2 nexthop dev lan0",
            "10.0.0.0/8 nexthop via 192.168.77.2 nexthop dev lan0, table main",
        ),
        ("10.0.0.0/8 nhid 5", "10.0.0.0/8 nhid 5 via 192.168.77.2, table main"),
        ("10.0.0.0/8 encap ip id 5 dst 1.2.3.4 via 192.168.77.9 dev lan0", "10.0.0.0/8 via 192.168.77.9, table main"),
        ("blackhole 10.1.0.0/30", "blackhole 10.1.0.0/30, table main"),
    ],
)
def test_a_route_is_told_as_a_person_would_look_for_it(host: Host, route: str, why: str) -> None:
    host.batch("nexthop add id 5 via 192.168.77.2 dev lan0", f"route add {route}")

    assert host.whys("10.1.0.0/30") == [why]


def test_a_pool_that_is_routed_whole_is_refused_with_the_route(host: Host) -> None:
    host.batch("route add 10.0.0.0/8 via 192.168.77.2 table 75")

    assert host.refusal(TEN, host.taken()) == (
        "cannot allocate a /30 from 10.0.0.0/8: the host routes all of it (10.0.0.0/8 via 192.168.77.2, table 75)"
    )


def test_a_side_table_counts_with_and_without_a_rule(host: Host) -> None:
    host.batch("route add 10.0.0.0/9 via 192.168.77.2 table 75", "route add 10.128.0.0/16 via 192.168.77.2 table 76")
    host.batch("rule add pref 100 lookup 75")

    assert host.free() == "10.129.0.0/30"


def test_a_link_that_is_gone_is_told_by_its_index(host: Host) -> None:
    host.batch("link add x0 type veth peer name x1", "link set x0 up", "address add 10.1.0.0/32 dev x0")
    index, taken = host.index("x0"), host.taken()

    host.batch("link del x0")

    assert f"address 10.1.0.0/32 on if{index}" in [host.text(occupant) for occupant in taken]


@pytest.mark.parametrize("kind", ["blackhole", "unreachable", "prohibit", "throw"])
def test_a_null_route_occupies_only_where_it_wins_over_a_runs_own(host: Host, kind: str) -> None:
    host.batch(f"route add {kind} 10.0.0.0/8", f"route add {kind} 10.1.0.0/16 metric 99 table 75", f"route add {kind} 10.1.0.0/30")
    host.batch(f"route add {kind} 10.1.0.6/32")

    found = host.free()

    assert found == "10.1.0.8/30"
    for prefix, reached in (("10.1.0.0/30", False), ("10.1.0.4/30", False), (found, True)):
        gateway, sandbox = (str(address) for address in IPv4Network(prefix).hosts())
        host.batch(f"address add {gateway}/30 dev lan0")
        assert (host.ip("route get", sandbox).returncode == 0) is reached


@pytest.mark.parametrize("prefixes", [("0.0.0.0/1", "128.0.0.0/1"), ("8.0.0.0/7", "196.0.0.0/6"), ("default", "default")])
def test_a_route_broader_than_an_eighth_is_a_default(host: Host, prefixes: tuple[str, str]) -> None:
    host.batch(*(f"route add {prefix} via 192.168.77.2 table {table}" for prefix, table in zip(prefixes, ("main", "9"), strict=True)))

    assert host.free(DEFAULT_POOL) == "198.18.0.0/30"
    assert host.free() == "10.1.0.0/30"


def test_an_address_on_lo_is_avoided(host: Host) -> None:
    host.batch("address add 10.1.0.2/32 dev lo", "address add 10.1.0.5/32 dev lo")

    assert host.free() == "10.1.0.8/30"
    assert "address 10.1.0.5/32 on lo" in host.whys("10.1.0.5/32")


@pytest.mark.parametrize("kind", ["tuntap add x0 mode tun", "link add x0 link lan0 type macvlan", "link add x0 type veth peer name x1"])
@pytest.mark.parametrize("state", ["up", "down"])
def test_the_network_of_a_link_is_avoided_up_or_down(host: Host, kind: str, state: str) -> None:
    host.batch(kind, "address add 10.1.0.1/24 dev x0", f"link set x0 {state}")

    assert host.free() == "10.1.1.0/30"


def test_both_ends_of_a_peer_address_are_avoided(host: Host) -> None:
    host.batch("link add x0 type veth peer name x1", "address add 10.1.0.1 peer 10.1.0.9/32 dev x0")
    host.batch("route del local 10.1.0.1 dev x0 table local")

    assert {span("10.1.0.1/32"), span("10.1.0.9/32")} <= ranges(host.taken())
    assert host.whys("10.1.0.9/32") == ["address 10.1.0.1 peer 10.1.0.9/32 on x0"]


def test_an_address_told_to_be_no_route_is_one_address(host: Host) -> None:
    host.batch("address add 10.1.0.1/9 dev lo noprefixroute")

    assert host.free() == "10.1.0.4/30"


def test_an_address_of_a_broad_network_is_one_address(host: Host) -> None:
    host.batch("link add x0 type veth peer name x1", "address add 10.1.0.1/7 dev x0")

    assert host.free() == "10.1.0.4/30"


def test_resolvers_are_avoided(host: Host, tmp_path: Path) -> None:
    conf = tmp_path / "resolv.conf"
    lines = [
        "# nameserver 10.1.0.8",
        "search lan",
        "nameserver 10.1.0.1",
        "nameserver\t10.1.5  # office",
        "nameserver fd00::1",
        "nameserver",
    ]
    conf.write_text("\n".join([*lines, "nameserver x", ""]))

    assert [o for o in host.taken(conf) if str(o.why).startswith("resolver")] == [
        Occupant(*span("10.1.0.1/32"), "resolver 10.1.0.1"),
        Occupant(*span("10.1.0.5/32"), "resolver 10.1.0.5"),
    ]
    assert host.free(TEN, conf) == "10.1.0.8/30"


def test_the_resolvers_behind_a_local_stub_are_avoided(host: Host, tmp_path: Path) -> None:
    stub, upstreams = tmp_path / "resolv.conf", tmp_path / "upstreams"
    stub.write_text("nameserver 10.1.0.5\nnameserver 127.0.0.53\n")
    upstreams.write_text("nameserver 10.1.0.1\n")

    taken = routes.see_taken(host.netlink, resolv_conf=stub, upstreams=upstreams)

    assert str(first_free(TEN, taken, frozenset(), max_runs=9)) == "10.1.0.8/30"


def test_resolvers_that_cannot_be_read_are_no_guess(host: Host, tmp_path: Path) -> None:
    with pytest.raises(CannotSeal, match=r"cannot read resolvers .*: Is a directory"):
        host.taken(tmp_path)


def test_a_runs_own_link_is_left_out_and_a_strangers_is_not(host: Host) -> None:
    for n, link in enumerate(("sealaaa", "sealbbb")):
        host.batch(f"link add {link} type veth peer name p{n}", f"address add 198.18.0.{4 * n + 1}/30 dev {link}", f"link set {link} up")
    idle = host.taken(runs=blocks("198.18.0.0/30", "198.18.0.4/30"))
    run = blocks("198.18.0.0/30")

    taken = host.taken(runs=run)

    assert ranges(taken) - ranges(idle) == {span(p) for p in ("198.18.0.4/30", "198.18.0.5/32", "198.18.0.7/32")}
    assert host.refusal((IPv4Network("198.18.0.0/29"),), taken, run).endswith(
        ": the host routes 1 of its 2 (198.18.0.4/30 dev sealbbb, table main), and 1 live run holds the rest"
    )
    assert "1 of its 2" in host.refusal((IPv4Network("198.18.0.0/29"),), host.taken(), run)


def test_what_is_broader_than_a_run_is_never_its_own(host: Host) -> None:
    host.batch("address add 198.18.0.1/24 dev lan0", "route add 198.18.0.0/20 via 192.168.77.2")
    told = {host.text(occupant) for occupant in host.taken(runs=blocks("198.18.0.0/30"))}

    expected = {"198.18.0.0/20 via 192.168.77.2, table main", "198.18.0.0/24 dev lan0, table main", "address 198.18.0.1/24 on lan0"}
    assert expected <= told


def test_two_thousand_scattered_routes_are_read_and_jumped_in_no_time(host: Host) -> None:
    host.batch(*(f"route add 10.{1 + n // 8}.{n % 8 * 32}.0/24 via 192.168.77.2" for n in range(2000)))

    took_s = []
    for _ in range(7):
        began = time.thread_time()
        assert host.free() == "10.1.1.0/30"
        took_s.append(time.thread_time() - began)

    # Of its own work: what others take of the processor's caches is in each, and not in all of them.
    assert min(took_s) < 0.05


def test_a_hundred_thousand_routes_are_read_in_less_than_a_second(host: Host) -> None:
    host.batch(*(f"route add 10.{1 + (n >> 12)}.{n >> 4 & 255}.{(n & 15) << 4}/28 via 192.168.77.2" for n in range(100_000)))

    began = time.thread_time()
    found = host.free()

    assert time.thread_time() - began < 1
    assert found == "10.25.106.0/30"


class Scripted:
    """A netlink socket that answers each request with the next of some dumps."""

    def __init__(self, *dumps: list[bytes]) -> None:
        self._dumps = iter(dumps)
        self._left: list[bytes] = []
        self.asked: list[int] = []

    def send(self, request: bytes) -> int:
        kind, sequence = struct.unpack_from("=4xH2xI", request)
        self.asked.append(kind)
        self._left = [d[:8] + struct.pack("=I", sequence) + d[12:] for d in next(self._dumps)]
        return len(request)

    def recv_into(self, place: memoryview, _size: int, _flags: int) -> int:
        datagram = self._next()
        place[: len(datagram)] = datagram
        return len(datagram)

    def _next(self) -> bytes:
        return self._left.pop(0)


def message(kind: int, body: bytes, *, interrupted: bool = False) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0x12 if interrupted else 0x2, 0, 0) + body


def route(prefix: str, *attributes: tuple[int, bytes], kind: int = 1, flags: int = 0) -> bytes:
    network = IPv4Network(prefix)
    destination = (1, network.network_address.packed)
    packed = b"".join(struct.pack("=HH", 8, k) + data for k, data in attributes or ((15, struct.pack("=I", 254)), destination))
    return struct.pack("=8BI", 2, network.prefixlen, 0, 0, 254, 2, 0, kind, flags) + packed


DONE = message(3, bytes(4))


def read(*dumps: list[bytes]) -> tuple[list[Occupant], list[int]]:
    asking, script = Netlink(), Scripted(*dumps)
    asking.close()
    asking._socket = script  # type: ignore[assignment]
    return routes.see_taken(asking, resolv_conf=NOWHERE, upstreams=NOWHERE), script.asked


@pytest.mark.parametrize("where", ["route", "done"])
def test_a_dump_that_changed_meanwhile_is_read_again_and_not_used_in_part(where: str) -> None:
    old, new = route("10.1.0.0/16"), route("10.2.0.0/16")
    torn = [message(24, old), message(24, old, interrupted=where == "route"), message(3, bytes(4), interrupted=where == "done")]

    taken, asked = read(torn, [message(24, new) + DONE], [DONE])

    assert ranges(taken) == {span("10.2.0.0/16")}
    assert asked == [26, 26, 22]


def test_a_dump_that_nobody_has_read_to_its_end_does_not_keep_the_next_from_being_read(host: Host) -> None:
    """A signal's handler may raise in the middle of one, and what comes then is the teardown."""
    host.batch(*(f"route add 10.{at // 250}.{at % 250}.0/24 dev lan0" for at in range(2000)))
    asked = Message(netlink.GETROUTE, 0, struct.pack("=8BI", socket.AF_INET, *[0] * 8), "list the routes")
    whole = list(map(netlink.messages, host.netlink.dump(asked)))
    assert len(whole) > 2

    host.netlink._socket.send(host.netlink._pack(asked, netlink.DUMP))
    host.netlink._socket.recv(1)

    again = list(map(netlink.messages, host.netlink.dump(asked)))
    assert sum(len([*told]) for told in again) == sum(len([*told]) for told in whole) > 2000


def test_an_answer_that_does_not_fit_is_not_used_in_part() -> None:
    asking = Netlink()
    asking.close()
    asking._socket = Long()  # type: ignore[assignment]
    with pytest.raises(KernelRefused, match="cannot read an answer of the kernel's: it has 70000 bytes"):
        routes.see_taken(asking, resolv_conf=NOWHERE, upstreams=NOWHERE)


class Long(Scripted):
    def send(self, request: bytes) -> int:
        return len(request)

    def recv_into(self, _place: memoryview, _size: int, flags: int) -> int:
        assert flags & socket.MSG_TRUNC
        return 70000


def test_a_dump_that_never_holds_still_is_refused() -> None:
    with pytest.raises(KernelRefused, match="cannot list the routes: it changed during each of"):
        read(*[[message(24, route("10.1.0.0/16"), interrupted=True), DONE]] * 99)


def test_a_route_is_read_whatever_the_order_of_its_attributes() -> None:
    table, destination, link = (15, struct.pack("=I", 75)), (1, bytes([10, 3, 0, 0])), (4, struct.pack("=I", 9999))

    taken, _ = read([message(24, route("10.3.0.0/16", link, destination, table)) + DONE], [DONE])

    assert ranges(taken) == {span("10.3.0.0/16")}
    assert str(taken[0].why) == "10.3.0.0/16 dev if9999, table 75"


_RUNS = ("198.18.0.0/30", "198.18.0.8/30", "10.1.0.4/30")
_PREFIXES = (
    "198.18.0.0/30", "198.18.0.1/32", "198.18.0.3/32", "198.18.0.0/29", "198.18.0.8/31", "198.18.0.4/30", "198.0.0.0/15", "10.1.0.4/30",
    "10.1.0.0/24", "10.1.0.8/32", "172.16.0.0/12", "192.168.7.0/24",
)  # fmt: skip


def is_a_runs(prefix: str) -> bool:
    network = IPv4Network(prefix)
    return network.prefixlen >= 30 and int(network[0]) >> 2 in blocks(*_RUNS)


@given(told=st.lists(st.tuples(st.sampled_from(_PREFIXES), st.integers(1, 9), st.integers(0, 2)), max_size=12))
def test_routes_and_addresses_of_runs_are_left_out_wherever_they_stand(told: list[tuple[str, int, int]]) -> None:
    """A stretch of messages of one length is looked at by some of its words, shorter ones message by message: the answer is the same."""
    both: list[list[bytes]] = [[], []]
    for prefix, times, more in told:
        first = IPv4Network(prefix).network_address.packed
        table, link = (15, struct.pack("=I", 254)), (4, struct.pack("=I", 9))
        # The other way round, and with what makes it longer.
        attributes = [(1, first), table] if more == 2 else [table, (1, first)]
        both[0] += [message(24, route(prefix, *attributes, *[link] * more))] * times
        body = struct.pack("=4BI", 2, IPv4Network(prefix).prefixlen, 0, 0, 9) + struct.pack("=HH", 8, 1) + first
        both[1] += [message(20, body + struct.pack("=HH", 8, 2) + first + struct.pack("=HHI", 8, 8, 0x200) * more)] * times
    dumps = [[b"".join(part), DONE] if part else [DONE] for part in both]

    asking = Netlink()
    asking.close()
    asking._socket = Scripted(*dumps)  # type: ignore[assignment]
    taken = routes.see_taken(asking, blocks(*_RUNS), resolv_conf=NOWHERE, upstreams=NOWHERE)

    others = {span(prefix) for prefix, _times, _more in told if not is_a_runs(prefix)}
    assert {found for found in ranges(taken) if found in {span(prefix) for prefix in _PREFIXES}} == others


def test_a_cached_exception_is_no_route() -> None:
    taken, _ = read([message(24, route("10.3.0.0/32", flags=0x200)) + DONE], [DONE])

    assert taken == []


# What `ip route get` says, and its exit status, is the oracle of a lookup.


def ip_says(host: Host, **question: Any) -> dict[str, Any] | str:
    words = routes.command(**question).removeprefix("ip ")
    done = host.ip("-json", words)
    if done.returncode:
        return re.sub(r"^RTNETLINK answers: ", "", done.stderr.strip())
    return dict(json.loads(done.stdout)[0])


def test_a_lookup_answers_what_ip_answers(host: Host) -> None:
    host.batch(
        "route add default via 192.168.77.2",
        "route add 10.9.0.0/16 via 192.168.77.3 table 75",
        "rule add pref 100 to 10.9.0.0/16 lookup 75",
    )
    lan, lo = host.index("lan0"), host.index("lo")

    assert routes.lookup(host.netlink, destination="192.168.77.9") == ("unicast", lan, 254, None, None)
    assert routes.lookup(host.netlink, destination="192.168.77.1") == ("local", lo, 255, None, None)
    assert routes.lookup(host.netlink, destination="192.168.77.255") == ("broadcast", lan, 255, None, None)
    assert routes.lookup(host.netlink, destination="8.8.8.8") == ("unicast", lan, 254, "192.168.77.2", None)
    assert routes.lookup(host.netlink, destination="10.9.1.1") == ("unicast", lan, 75, "192.168.77.3", None)
    for destination in ("192.168.77.9", "192.168.77.1", "192.168.77.255", "8.8.8.8", "10.9.1.1"):
        found, said = routes.lookup(host.netlink, destination=destination), ip_says(host, destination=destination)
        assert isinstance(said, dict)
        assert (said.get("type", "unicast"), host.index(said["dev"]), said.get("gateway")) == (found.kind, found.oif, found.gateway)
        assert said.get("table", "main") in {"main": ("main",), "local": ("local", "main")}.get(
            routes._table(found.table), (str(found.table),)
        )
    assert host.text(routes.lookup(host.netlink, destination="10.9.1.1")) == "unicast via 192.168.77.3 dev lan0, table 75"


@pytest.mark.parametrize("table", ["main", "75"])
@pytest.mark.parametrize(
    ("kind", "name"), [("blackhole", "EINVAL"), ("prohibit", "EACCES"), ("unreachable", "EHOSTUNREACH"), ("throw", "ENETUNREACH")]
)
def test_a_null_route_is_a_refusal_in_the_kernels_words(host: Host, kind: str, name: str, table: str) -> None:
    host.batch(f"route add {kind} 10.0.0.0/8 table {table}", "rule add pref 100 to 10.0.0.0/8 lookup 75")

    found = routes.lookup(host.netlink, destination="10.1.0.2")

    assert found.kind == name
    assert found.refusal is not None
    assert found.refusal.split(" (")[0] == ip_says(host, destination="10.1.0.2")
    assert kind == "throw" or kind in found.refusal


@pytest.mark.parametrize(("kind", "name"), [("blackhole", "EINVAL"), ("prohibit", "EACCES"), ("unreachable", "ENETUNREACH")])
def test_a_refusal_by_rule_is_told_with_the_rule(host: Host, kind: str, name: str) -> None:
    host.batch("address add 10.1.0.1/30 dev lan0", f"rule add pref 99 to 10.0.0.0/8 {kind}", f"rule add pref 98 to 10.2.0.0/16 {kind}")

    found = routes.lookup(host.netlink, destination="10.1.0.2", source="10.1.0.1")
    suspects = routes.suspects(routes.see_rules(host.netlink), found, destination="10.1.0.2", source="10.1.0.1")

    assert found.kind == name
    assert kind in str(found.refusal)
    assert [str(rule) for rule in suspects] == [f"99: from all to 10.0.0.0/8 {kind}"]


def test_a_rule_that_takes_the_replies_is_told_by_priority_and_table(host: Host) -> None:
    host.batch("address add 10.1.0.1/30 dev lan0", "route add default via 192.168.77.2 table 199")
    assert routes.lookup(host.netlink, destination="10.1.0.2", source="10.1.0.1").table == 254

    host.batch("rule add pref 99 to 10.0.0.0/8 lookup 199", "rule add pref 50 from 172.16.0.0/12 lookup 199")
    found = routes.lookup(host.netlink, destination="10.1.0.2", source="10.1.0.1")
    suspects = routes.suspects(routes.see_rules(host.netlink), found, destination="10.1.0.2", source="10.1.0.1")

    assert (found.table, found.gateway) == (199, "192.168.77.2")
    assert [(rule.priority, rule.table, str(rule)) for rule in suspects] == [(99, 199, "99: from all to 10.0.0.0/8 lookup 199")]


def test_a_lookup_takes_the_user_the_port_and_the_incoming_link_into_account(host: Host) -> None:
    host.batch("address add 10.1.0.1/30 dev lan0", "route add default via 192.168.77.2 table 75")
    host.batch("rule add pref 10 uidrange 1000-1000 lookup 75", "rule add pref 11 ipproto tcp sport 8080 lookup 75")
    lan = host.index("lan0")
    questions: list[tuple[dict[str, Any], int | str]] = [
        ({}, 254),
        ({"uid": 1000}, 75),
        ({"uid": 1001}, 254),
        ({"tcp_sport": 8080}, 75),
        ({"tcp_sport": 8081}, 254),
        ({"uid": 1001, "tcp_sport": 8080}, 75),
    ]

    for more, table in questions:
        question = {"destination": "10.1.0.2", "source": "10.1.0.1", **more}
        said = ip_says(host, **question)
        assert routes.lookup(host.netlink, **question).table == table
        assert isinstance(said, dict)
        assert said.get("table", "254") == str(table)

    incoming = routes.lookup(host.netlink, destination="10.1.0.1", source="10.1.0.2", iif=lan)
    assert (incoming.kind, incoming.table) == ("local", 255)
    assert routes.lookup(host.netlink, destination="192.0.2.1", source="10.1.0.2", iif=lan).kind == "EHOSTUNREACH"
    assert ip_says(host, destination="192.0.2.1", source="10.1.0.2", iif="lan0") == "No route to host"


def test_a_lookup_from_an_address_that_is_not_the_hosts_is_a_refusal(host: Host) -> None:
    found = routes.lookup(host.netlink, destination="192.168.77.9", source="10.1.0.1")

    assert found.kind == "ENETUNREACH"
    assert "the source is no address of this host" in str(found)
    assert ip_says(host, destination="192.168.77.9", source="10.1.0.1") == "Network is unreachable"


def test_a_lookup_by_a_link_that_is_gone_is_an_error(host: Host) -> None:
    with pytest.raises(KernelRefused, match=r"cannot look up the route to 10.1.0.1: No such device"):
        routes.lookup(host.netlink, destination="10.1.0.1", source="10.1.0.2", iif=4242)


def test_a_lookup_is_quoted_as_the_command_that_repeats_it() -> None:
    assert routes.command(destination="198.18.0.2") == "ip route get 198.18.0.2"
    assert routes.command(destination=ipaddress.IPv4Address("198.18.0.2"), source="198.18.0.1", uid=1000, tcp_sport=8080) == (
        "ip route get 198.18.0.2 from 198.18.0.1 uid 1000 ipproto tcp sport 8080"
    )
    assert (
        routes.command(destination="198.18.0.1", source="198.18.0.2", iif="sealaaa")
        == "ip route get 198.18.0.1 from 198.18.0.2 iif sealaaa"
    )


def test_rules_are_what_ip_prints(host: Host) -> None:
    host.batch(
        "rule add pref 10 to 10.0.0.0/8 lookup 199",
        "rule add pref 11 not from all fwmark 0xca6c lookup 51820",
        "rule add pref 12 lookup main suppress_prefixlength 0",
        "rule add pref 13 from 198.18.0.1 blackhole",
        "rule add pref 14 from 198.18.0.0/15 to 10.1.2.3 prohibit",
        "rule add pref 15 iif lan0 unreachable",
        "rule add pref 16 oif lan0 lookup 5",
        "rule add pref 17 uidrange 1000-2000 lookup 6",
        "rule add pref 18 ipproto tcp sport 80 dport 1000-2000 lookup 7",
        "rule add pref 19 fwmark 0x1/0xff tos 0x0c lookup 300",
        "rule add pref 20 goto 32766",
        "rule add pref 21 nop",
        "rule add pref 22 l3mdev",
        "rule add pref 23 lookup 8 suppress_prefixlength 3 suppress_ifgroup 4",
        "rule add pref 24 iif lo ipproto icmp lookup 9",
        "rule add pref 25 ipproto 222 lookup 9",
    )

    printed = [line.replace(":\t", ": ").strip() for line in host.ip("rule").stdout.splitlines()]

    assert [str(rule) for rule in routes.see_rules(host.netlink)] == printed
    assert len(printed) == 19


def test_a_rule_with_not_may_match_what_its_addresses_exclude() -> None:
    to, source = ipaddress.IPv4Address("10.1.0.2"), ipaddress.IPv4Address("10.1.0.1")

    assert not routes.Rule(1, "lookup", 7, destination=IPv4Network("172.16.0.0/12")).may_match(to, source)
    assert routes.Rule(1, "lookup", 7, inverted=True, destination=IPv4Network("172.16.0.0/12")).may_match(to, source)
