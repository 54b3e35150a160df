"""libnftables under other people's transactions, and what the kernel itself tells of an element."""

from __future__ import annotations

import socket
import threading
from ipaddress import IPv4Address

import pytest

from sealnet.kernel import links, nfnetlink
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.netns import Inside
from sealnet.kernel.nft import Nft
from sealnet.model import ruleset

pytestmark = pytest.mark.root

_ENDS = IPv4Address("198.18.0.2"), IPv4Address("198.18.0.1")


def test_an_answer_does_not_fail_because_somebody_changes_the_ruleset() -> None:
    """nf_tables tells EINTR to whoever reads while a transaction is committed; read again, the answer is right."""
    with Inside.new("nft-test") as inside:
        inside.call(lambda: Nft().apply(ruleset.render_gate(), "add the gate"))
        stop = threading.Event()

        def change(number: int) -> None:
            with Inside.joined(inside.fd, f"nft-change-{number}") as other:
                nft = other.call(Nft)
                while not stop.is_set():
                    other.call(nft.apply, f"add table ip other{number}; delete table ip other{number}", "come and go")

        threads = [threading.Thread(target=change, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            nft, kernel = inside.call(Nft), inside.call(nfnetlink.connect)
            element = 'inet sealnet leases { "sealx" . 198.18.0.2 . 198.18.0.1 . 80 }'
            key = ruleset.lease_key("sealx", *_ENDS, 80)
            for _ in range(150):
                inside.call(nft.apply, f"add element {element}", "grant")
                assert inside.call(nfnetlink.has_element, kernel, ruleset.TABLE, "leases", key)
                inside.call(nft.apply, f"delete element {element}", "revoke")
                assert not inside.call(nfnetlink.has_element, kernel, ruleset.TABLE, "leases", key)
                assert inside.call(nft.elements, "inet sealnet leases", "list") == []
            kernel.close()
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_an_element_is_found_by_its_whole_key_alone() -> None:
    sandbox, gateway = _ENDS
    with Inside.new("nft-test") as inside, inside.call(nfnetlink.connect) as kernel:

        def has(*parts: object, name: str = "leases", table: str = ruleset.TABLE) -> bool:
            return inside.call(nfnetlink.has_element, kernel, table, name, ruleset.lease_key(*parts))  # type: ignore[arg-type]

        assert not has("sealx", sandbox, gateway, 80)
        inside.call(lambda: Nft().apply(ruleset.render_gate() + ruleset.render_lease("sealx", sandbox, gateway, 80, ttl_s=60), "grant"))

        assert has("sealx", sandbox, gateway, 80)
        assert not has("sealx", sandbox, gateway, 81)
        assert not has("seal", sandbox, gateway, 80)
        assert not has("sealx1", sandbox, gateway, 80)
        assert not has("sealx", gateway, sandbox, 80)
        assert not has("sealx", sandbox, gateway, 80, name="no-such-set")
        assert not has("sealx", sandbox, gateway, 80, table="no-such-table")


def test_what_was_tried_is_counted_to_the_last_place_and_refused_beyond() -> None:
    """And read at once: of a set that has no size of its own, and grows, a dump misses thousands and tells as many others twice."""
    over = 500

    def attempt() -> int:
        refused = 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for number in range(ruleset.TALLY + over):
                try:
                    sock.sendto(b"", (str(IPv4Address("198.51.100.0") + number), 9))
                except PermissionError:
                    refused += 1
        return refused

    with Inside.new("nft-test") as inside, inside.call(nfnetlink.connect) as kernel, inside.call(Netlink) as route:
        inside.call(lambda: Nft().apply(ruleset.render_inside(gateway=None, ports=[], ifname="eth0"), "add the filter"))
        route.exchange([links.bring_up(links.LOOPBACK_INDEX), links.add_sink(family=socket.AF_INET)])
        refused = inside.call(attempt)
        counted = nfnetlink.counted(kernel, ruleset.TABLE, "tried")
    assert refused == ruleset.TALLY + over
    assert len({key for key, _ in counted}) == len(counted) == ruleset.TALLY
    assert {packets for _, packets in counted} == {1}
