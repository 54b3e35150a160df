"""What the host uses of IPv4, known by notifications, against what a reading of everything tells."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network

import pytest

from sealnet.errors import KernelRefused
from sealnet.kernel import routes, taken
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.taken import Taken
from sealnet.model.subnets import Occupant
from tests.lab import Host

pytestmark = pytest.mark.root

BLOCK, NEXT = IPv4Network("198.18.0.0/30"), IPv4Network("198.18.0.4/30")


def own(*blocks: IPv4Network) -> frozenset[int]:
    return frozenset(int(block.network_address) >> 2 for block in blocks)


class Desk:
    """Asks `Taken`, and counts how often everything was read for it."""

    def __init__(self, nl: Netlink, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nl, self.taken, self.readings = nl, Taken(), 0
        real = routes.see_others

        def see_others(nl: Netlink, blocks: frozenset[int]) -> list[Occupant]:
            self.readings += 1
            return real(nl, blocks)

        monkeypatch.setattr(routes, "see_others", see_others)

    def see(self, *blocks: IPv4Network, anew: bool = False) -> set[tuple[int, int]]:
        return {(one.first, one.last) for one in self.taken.see(self.nl, own(*blocks), anew=anew)}

    def whole(self, *blocks: IPv4Network) -> set[tuple[int, int]]:
        return {(one.first, one.last) for one in routes.see_taken(self.nl, own(*blocks))}


@pytest.fixture
def desk(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with Netlink() as nl:
        made = Desk(nl, monkeypatch)
        made.see()
        yield made
        made.taken.close()


def add_run(host: Host, name: str, block: IPv4Network) -> None:
    host.run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p")
    host.run("ip", "addr", "add", f"{block[1]}/30", "dev", name)
    host.run("ip", "link", "set", name, "up")
    host.run("ip", "link", "set", f"{name}p", "up")


def test_runs_that_come_and_go_have_nothing_read_anew(host: Host, desk: Desk) -> None:
    before = desk.see()

    add_run(host, "sealone", BLOCK)
    while_it_lives = desk.see(BLOCK)
    host.run("ip", "link", "del", "sealone")
    after = desk.see()

    assert desk.readings == 1
    assert before == while_it_lives == after == desk.whole()


@pytest.mark.parametrize(
    "change",
    [
        ("route", "add", "203.0.113.0/24", "via", "192.168.77.2"),
        ("route", "add", "203.0.113.7/32", "via", "192.168.77.2", "table", "77"),
        ("route", "add", "blackhole", "203.0.113.4/30"),
        ("route", "add", "203.0.113.0/24", "nexthop", "via", "192.168.77.2", "nexthop", "via", "192.168.77.3"),
        ("addr", "add", "203.0.113.9/24", "dev", "lan"),
    ],
)
def test_whatever_else_changes_is_known_at_once_and_so_is_its_end(host: Host, desk: Desk, change: tuple[str, ...]) -> None:
    before = desk.see()
    if change[0] == "addr":
        change = (*change[:-1], lan(host))

    host.run("ip", *change)
    changed, read = desk.see(), desk.readings
    assert changed == desk.whole() != before
    assert read == 2

    host.run("ip", change[0], "del", *change[2:])
    assert desk.see() == desk.whole() == before


def lan(host: Host) -> str:
    told = host.run("ip", "-o", "-4", "addr", "show", "to", "192.168.77.1").stdout
    return told.split()[1]


@pytest.mark.parametrize(
    "route",
    [
        (f"{BLOCK[2]}/32", "via", "192.168.77.2"),
        ("blackhole", f"{BLOCK[2]}/32"),
        (f"{BLOCK[2]}/32", "nexthop", "via", "192.168.77.2", "nexthop", "via", "192.168.77.3"),
    ],
    ids=["of a link", "of none", "of two hops"],
)
def test_what_somebody_else_has_within_a_run_counts_when_that_has_gone(host: Host, desk: Desk, route: tuple[str, ...]) -> None:
    add_run(host, "sealone", BLOCK)
    host.run("ip", "route", "add", "table", "77", *route)
    beside = desk.see(BLOCK)
    host.run("ip", "link", "del", "sealone")

    assert (int(BLOCK[2]), int(BLOCK[2])) in desk.see()
    assert (int(BLOCK[2]), int(BLOCK[2])) in beside
    host.run("ip", "route", "del", f"{BLOCK[2]}/32", "table", "77")
    assert desk.see() == desk.whole()


def test_a_reading_that_fails_is_made_up_for_by_the_next(host: Host, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_nl: Netlink, _blocks: frozenset[int]) -> list[Occupant]:
        raise KernelRefused("cannot list the routes: it changed during each of 8 reads", errno=11)

    host.run("ip", "route", "add", "203.0.113.0/24", "via", "192.168.77.2")
    with monkeypatch.context() as patched:
        patched.setattr(routes, "see_others", refused)
        with pytest.raises(KernelRefused):
            desk.see()

    # What was heard is not heard again, and the route is there.
    assert desk.see() == desk.whole()
    host.run("ip", "route", "del", "203.0.113.0/24")


def test_an_address_whose_far_end_is_nobody_counts(host: Host, desk: Desk) -> None:
    host.run("ip", "addr", "add", "203.0.113.9", "peer", "0.0.0.0", "dev", lan(host))

    assert desk.see() == desk.whole()
    assert int(IPv4Address("203.0.113.9")) in {first for first, _last in desk.see()}
    host.run("ip", "addr", "del", "203.0.113.9", "peer", "0.0.0.0", "dev", lan(host))
    assert desk.see() == desk.whole()


def test_a_runs_link_with_a_route_elsewhere_counts(host: Host, desk: Desk) -> None:
    add_run(host, "sealone", BLOCK)
    host.run("ip", "route", "add", "203.0.113.0/24", "dev", "sealone")

    assert desk.see(BLOCK) == desk.whole(BLOCK)
    # Nobody is told that the route has gone with its link.
    host.run("ip", "link", "del", "sealone")
    assert desk.see() > desk.whole()
    assert desk.see(anew=True) == desk.whole()


def test_what_has_gone_in_silence_counts_for_a_while_only(host: Host, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    host.run("ip", "link", "add", "other", "type", "veth", "peer", "name", "otherp")
    host.run("ip", "link", "set", "other", "up")
    host.run("ip", "route", "add", "203.0.113.0/24", "dev", "other")
    assert desk.see() == desk.whole()

    host.run("ip", "link", "del", "other")
    assert desk.see() != desk.whole()
    monkeypatch.setattr(desk.taken, "_until", 0.0)
    assert desk.see() == desk.whole()


def test_a_lost_notification_has_everything_read_anew(host: Host, desk: Desk) -> None:
    monkey = desk.taken._socket
    assert monkey is not None
    monkey.setsockopt(taken.socket.SOL_SOCKET, taken.socket.SO_RCVBUF, 1)
    before = desk.readings

    add_run(host, "sealone", BLOCK)
    for number in range(64):
        host.run("ip", "route", "add", f"{NEXT[2]}/32", "dev", "sealone", "table", str(100 + number), "proto", "static")
    seen = desk.see(BLOCK, NEXT)

    assert desk.readings == before + 1
    assert seen == desk.whole(BLOCK, NEXT)
    host.run("ip", "link", "del", "sealone")
