"""The allocator: never an overlap, a free /30 wherever there is one, and words for it when there is none."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealnet.errors import PoolExhausted, UsageError
from sealnet.model.subnets import DEFAULT_POOL, Occupant, at, first_free, order, parse_pool

TEN = (IPv4Network("10.0.0.0/8"),)
FEW = 50


def host(prefix: str, why: str = "") -> Occupant:
    return Occupant.of(IPv4Network(prefix), why or f"{prefix} via 192.168.77.2, table main")


def run(prefix: str) -> int:
    """The block of a run."""
    return int(IPv4Network(prefix).network_address) >> 2


def find(pool: Sequence[IPv4Network], *taken: Occupant | int, max_runs: int) -> IPv4Network:
    hosts, runs = [one for one in taken if isinstance(one, Occupant)], {one for one in taken if isinstance(one, int)}
    return first_free(pool, hosts, runs, max_runs=max_runs)


def free(pool: Sequence[IPv4Network], *taken: Occupant | int, max_runs: int = 4096) -> str:
    return str(find(pool, *taken, max_runs=max_runs))


def refusal(pool: Sequence[IPv4Network], *taken: Occupant | int, max_runs: int = 4096) -> PoolExhausted:
    with pytest.raises(PoolExhausted) as caught:
        find(pool, *taken, max_runs=max_runs)
    return caught.value


def test_the_first_run_of_an_idle_host_gets_the_first_prefix_of_the_benchmarking_range() -> None:
    assert free(DEFAULT_POOL) == "198.18.0.0/30"


def test_the_second_prefix_is_used_when_the_first_is_routed() -> None:
    assert free(DEFAULT_POOL, host("198.18.0.0/15")) == "10.1.0.0/30"


def test_ten_is_walked_from_its_second_sixteen_and_wraps_to_its_first() -> None:
    assert free(TEN) == "10.1.0.0/30"
    assert free(TEN, host("10.1.0.0/16")) == "10.2.0.0/30"
    assert free(TEN, *(host(f"10.{n}.0.0/16") for n in range(1, 256))) == "10.0.0.0/30"


@pytest.mark.parametrize(
    ("pool", "first", "last"),
    [
        ("10.0.0.0/8", "10.1.0.0/30", "10.0.255.252/30"),
        ("10.0.0.0/15", "10.1.0.0/30", "10.0.255.252/30"),
        ("10.0.0.0/16", "10.0.0.0/30", "10.0.255.252/30"),
        ("10.1.0.0/16", "10.1.0.0/30", "10.1.255.252/30"),
        ("172.16.0.0/12", "172.16.0.0/30", "172.31.255.252/30"),
        ("198.18.0.0/15", "198.18.0.0/30", "198.19.255.252/30"),
        ("10.9.0.4/30", "10.9.0.4/30", "10.9.0.4/30"),
    ],
)
def test_a_prefix_is_walked_from_its_start_unless_it_holds_x_1_0_0(pool: str, first: str, last: str) -> None:
    prefix = IPv4Network(pool)

    assert str(at(0, [prefix])) == first
    assert str(at(prefix.num_addresses // 4 - 1, [prefix])) == last


def test_order_and_at_are_inverse_at_every_octet_boundary() -> None:
    edges = (0, 1, 127, 128, 254, 255)
    blocks = [f"10.{b}.{c}.{d}/30" for b, c, d in itertools.product(edges, edges, (0, 4, 124, 128, 248, 252))]
    blocks += [f"198.{b}.{c}.{d}/30" for b, c, d in itertools.product((18, 19), edges, (0, 4, 124, 128, 248, 252))]

    for prefix in map(IPv4Network, blocks):
        assert at(order(prefix, DEFAULT_POOL), DEFAULT_POOL) == prefix


def test_the_walk_offers_every_block_of_the_pool_once() -> None:
    pool = (IPv4Network("10.3.0.0/26"), IPv4Network("10.2.255.240/28"), IPv4Network("10.9.0.8/30"))

    offered = [at(i, pool) for i in range(21)]

    assert offered == [block for prefix in pool for block in prefix.subnets(new_prefix=30)]
    assert [order(block, pool) for block in offered] == list(range(21))


@pytest.mark.parametrize("index", [-1, 2, 1 << 40])
def test_no_block_lies_beyond_the_walk(index: int) -> None:
    with pytest.raises(IndexError):
        at(index, [IPv4Network("10.9.0.0/29")])


@pytest.mark.parametrize("prefix", ["10.9.0.8/30", "10.9.0.0/29", "10.9.0.0/32"])
def test_what_is_no_block_of_the_pool_has_no_place_in_it(prefix: str) -> None:
    with pytest.raises(ValueError, match="not a /30 of the pool"):
        order(IPv4Network(prefix), [IPv4Network("10.9.0.0/29")])


addresses = st.integers(int(IPv4Address("10.0.255.128")), int(IPv4Address("10.1.0.127")))
pools = st.lists(
    st.builds(lambda address, length: IPv4Network((address, length), strict=False), addresses, st.integers(27, 30)), min_size=1, max_size=3
)
ranges = st.builds(
    lambda address, size, own: run(f"{IPv4Address(address & ~3)}/30") if own else Occupant(address, address + size, "host"),
    addresses,
    st.one_of(st.integers(0, 8), st.integers(0, 200)),
    st.booleans(),
)


def brute(pool: Sequence[IPv4Network], taken: Sequence[Occupant | int]) -> IPv4Network | None:
    """The first block of the pool that no range touches, by looking at each."""
    spans = [(one.first, one.last) if isinstance(one, Occupant) else (one << 2, one << 2 | 3) for one in taken]
    for prefix in pool:
        for block in prefix.subnets(new_prefix=30):
            first, last = int(block[0]), int(block[-1])
            if all(end < first or begin > last for begin, end in spans):
                return block
    return None


@settings(max_examples=FEW)
@given(pools, st.lists(ranges, max_size=8))
def test_it_finds_what_looking_at_each_block_finds(pool: list[IPv4Network], taken: list[Occupant | int]) -> None:
    expected = brute(pool, taken)

    if expected is None:
        refusal(pool, *taken)
    else:
        assert free(pool, *taken) == str(expected)


@settings(max_examples=FEW)
@given(st.lists(st.builds(lambda a, n: IPv4Network((a, n), strict=False), st.integers(0, 2**32 - 1), st.integers(8, 32)), max_size=30))
def test_what_is_handed_out_never_overlaps_and_keeps_the_pools_order(taken: list[IPv4Network]) -> None:
    found = first_free(DEFAULT_POOL, [Occupant.of(prefix, "") for prefix in taken], frozenset(), max_runs=1)

    assert not any(found.overlaps(prefix) for prefix in taken)
    place = order(found, DEFAULT_POOL)
    assert place == 0 or any(at(place - 1, DEFAULT_POOL).overlaps(prefix) for prefix in taken)


@settings(max_examples=FEW)
@given(st.integers(1, 8))
def test_runs_get_distinct_prefixes_until_the_pool_is_full(room: int) -> None:
    pool = [IPv4Network((int(IPv4Address("10.7.0.0")) + 4 * n, 30)) for n in range(room)]
    taken: set[int] = set()

    for _ in range(room):
        taken.add(run(free(pool, *taken, max_runs=99)))

    assert len(taken) == room
    refusal(pool, *taken, max_runs=99)


@pytest.mark.parametrize("size", ["10.1.0.0/32", "10.1.0.3/32", "10.1.0.2/31"])
def test_one_address_takes_its_whole_block(size: str) -> None:
    assert free(TEN, host(size)) == "10.1.0.4/30"


def test_routes_that_touch_are_jumped_as_one_range() -> None:
    assert free(TEN, host("10.1.128.0/17"), host("10.1.0.0/17"), host("10.2.0.0/15"), host("10.1.4.0/24")) == "10.4.0.0/30"


def test_a_gap_between_routes_is_found() -> None:
    assert free(TEN, host("10.1.0.0/30"), host("10.1.0.8/29")) == "10.1.0.4/30"


def test_a_route_that_ends_beyond_the_prefix_does_not_lead_out_of_it() -> None:
    assert free([IPv4Network("10.9.0.0/29"), IPv4Network("10.200.0.0/30")], host("10.9.0.0/24")) == "10.200.0.0/30"


def test_two_thousand_scattered_routes_cost_no_walk() -> None:
    taken = [host(f"10.{1 + n // 8}.{n % 8 * 32}.0/24") for n in range(2000)]

    began = time.thread_time()
    found = free(TEN, *taken)

    assert time.thread_time() - began < 0.05
    assert found == "10.1.1.0/30"


def test_a_route_over_the_pool_is_named() -> None:
    error = refusal(TEN, host("10.0.0.0/8", "10.0.0.0/8 via 192.168.77.2, table 75"), host("10.5.0.0/16"), host("0.0.0.0/8"))

    assert error.message == "cannot allocate a /30 from 10.0.0.0/8: the host routes all of it (10.0.0.0/8 via 192.168.77.2, table 75)"
    assert error.hint == 'set another pool in /etc/sealnet/config.toml, for example pool = ["198.18.0.0/15"]'


def test_the_pool_that_is_suggested_is_free() -> None:
    error = refusal(DEFAULT_POOL, host("10.0.0.0/8"), host("198.18.0.0/15"), host("172.16.0.0/12"))

    assert error.hint == 'set another pool in /etc/sealnet/config.toml, for example pool = ["192.168.0.0/16"]'


def test_no_pool_is_suggested_where_none_is_free() -> None:
    error = refusal(DEFAULT_POOL, *map(host, ("10.0.0.0/8", "198.18.0.0/15", "172.16.0.0/12", "192.168.0.0/16")))

    assert error.hint == "remove a route, or set another pool in /etc/sealnet/config.toml"


def test_three_routes_are_named_widest_first_and_the_rest_counted() -> None:
    pool = [IPv4Network("10.9.0.0/24")]
    taken = [
        host("10.9.0.0/26", "a"),
        host("10.9.0.64/27", "b"),
        host("10.9.0.96/27", "c"),
        host("10.9.0.128/25", "d"),
        host("10.9.0.0/27"),
    ]

    error = refusal(pool, *taken)

    assert error.message == "cannot allocate a /30 from 10.9.0.0/24: the host routes all of it (d; a; b; and 1 more)"


def test_the_same_route_in_two_tables_is_named_once() -> None:
    error = refusal(TEN, host("10.0.0.0/8", "a"), host("10.0.0.0/8", "b"))

    assert error.message.endswith("the host routes all of it (a)")


def test_a_reason_is_not_rendered_unless_it_is_reported() -> None:
    class Unread:
        def __str__(self) -> str:
            raise AssertionError

    assert free(TEN, Occupant.of(IPv4Network("10.1.0.0/16"), Unread())) == "10.2.0.0/30"
    refusal(TEN, host("10.0.0.0/8"), Occupant.of(IPv4Network("10.1.0.0/16"), Unread()))


def test_live_runs_that_hold_the_pool_are_counted() -> None:
    pool = [IPv4Network("10.9.0.0/29")]

    error = refusal(pool, run("10.9.0.0/30"), run("10.9.0.4/30"))

    assert error.message == "cannot allocate a /30 from 10.9.0.0/29: 2 live runs hold all of it"
    assert error.hint == "end some (sealnet ls lists them), or set a larger pool in /etc/sealnet/config.toml"


def test_the_hosts_blocks_and_the_runs_are_counted_apart() -> None:
    pool = [IPv4Network("10.9.0.0/28")]

    error = refusal(pool, run("10.9.0.0/30"), host("10.9.0.4/30", "a"), host("10.9.0.8/29", "b"), host("10.9.0.12/32"))

    assert error.message == "cannot allocate a /30 from 10.9.0.0/28: the host routes 3 of its 4 (b; a), and 1 live run holds the rest"


def test_a_runs_own_routes_and_addresses_are_not_the_hosts() -> None:
    pool = [IPv4Network("10.9.0.0/29")]
    own_link = [host("10.9.0.0/30"), host("10.9.0.1/32"), host("10.9.0.3/32")]

    error = refusal(pool, run("10.9.0.0/30"), run("10.9.0.4/30"), *own_link)

    assert error.message == "cannot allocate a /30 from 10.9.0.0/29: 2 live runs hold all of it"


def test_a_route_that_came_over_a_live_run_is_the_hosts() -> None:
    error = refusal(TEN, run("10.0.0.0/30"), host("10.0.0.0/8", "a"))

    assert error.message == "cannot allocate a /30 from 10.0.0.0/8: the host routes all of it (a)"


def test_max_runs_refuses_while_the_pool_has_room() -> None:
    error = refusal(DEFAULT_POOL, run("198.18.0.0/30"), run("198.18.0.4/30"), max_runs=2)

    assert error.message == "cannot allocate a /30 from 198.18.0.0/15, 10.0.0.0/8: 2 runs are live, and max_runs is 2"
    assert error.hint == "end some (sealnet ls lists them), or set max_runs in /etc/sealnet/config.toml"
    assert free(DEFAULT_POOL, run("198.18.0.0/30"), run("198.18.0.4/30"), max_runs=3) == "198.18.0.8/30"


def test_a_pool_is_read_in_its_order() -> None:
    assert parse_pool(["172.16.0.0/12", "10.9.0.0/30"]) == (IPv4Network("172.16.0.0/12"), IPv4Network("10.9.0.0/30"))
    assert parse_pool([str(prefix) for prefix in DEFAULT_POOL]) == DEFAULT_POOL


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("", "it is not an IPv4 prefix"),
        ("10.0.0.0", "it is not an IPv4 prefix"),
        ("10.0.0.0/33", "it is not an IPv4 prefix"),
        ("10.0.0/8", "it is not an IPv4 prefix"),
        ("fd00::/64", "it is not an IPv4 prefix"),
        ("lan", "it is not an IPv4 prefix"),
        (10, "it is not an IPv4 prefix"),
        ("10.0.0.1/8", "that is not how the prefix is written"),
        ("10.0.0.0/255.0.0.0", "that is not how the prefix is written"),
        ("10.0.0.0/08", "that is not how the prefix is written"),
        ("10.0.0.0/31", "it has no room for one /30"),
        ("10.0.0.0/32", "it has no room for one /30"),
        ("0.0.0.0/0", "it overlaps 0.0.0.0/8"),
        ("0.1.0.0/16", "it overlaps 0.0.0.0/8"),
        ("127.0.0.0/16", "it overlaps 127.0.0.0/8 (loopback)"),
        ("126.0.0.0/7", "it overlaps 127.0.0.0/8 (loopback)"),
        ("169.254.1.0/24", "it overlaps 169.254.0.0/16 (link-local)"),
        ("239.0.0.0/8", "it overlaps 224.0.0.0/4 (multicast)"),
        ("255.255.255.0/24", "it overlaps 240.0.0.0/4 (class E)"),
    ],
)
def test_a_prefix_that_cannot_be_used_is_named_with_its_cause(value: str, cause: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_pool(["198.18.0.0/15", value])

    assert caught.value.message.startswith(f"cannot use pool prefix {value}: {cause}")


def test_host_bits_are_answered_with_the_prefix_that_was_meant() -> None:
    with pytest.raises(UsageError) as caught:
        parse_pool(["10.0.0.1/8"])

    assert caught.value.hint == "write 10.0.0.0/8"


def test_prefixes_of_a_pool_do_not_overlap() -> None:
    with pytest.raises(UsageError) as caught:
        parse_pool(["10.0.0.0/8", "10.9.0.0/16"])

    assert caught.value.message == "cannot use pool prefix 10.9.0.0/16: it overlaps 10.0.0.0/8, which is in the pool too"


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot use an empty pool"):
        parse_pool([])
