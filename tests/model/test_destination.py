"""Which addresses a declared name may lead to."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealnet.model.destination import address, refusal

PUBLIC = ["93.184.216.34", "8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:2800:220::34", "2a00:1450::1", "64:ff9b::5db8:d822"]
PRIVATE = ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.77.1", "100.64.0.1", "100.127.255.255", "fd00::2", "fc00::1"]
NEVER = [
    *("0.0.0.0", "0.1.2.3", "127.0.0.1", "127.0.0.2", "169.254.169.254", "198.18.0.2", "198.19.255.255", "192.0.2.1", "198.51.100.1"),
    *(
        "203.0.113.1",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "192.0.0.8",
        "192.88.99.1",
        "168.63.129.16",
        "100.100.100.200",
    ),
    *(
        "::",
        "::1",
        "fe80::1",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "3fff::1",
        "100::1",
        "64:ff9b:1::1",
        "fd00:ec2::254",
        "::7f00:1",
        "5f00::1",
    ),
    *(
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "64:ff9b::a9fe:a9fe",
        "2001:0:7f00:1::ffff:ffff",
        "2001:0:5db8:d822:0:0:80ff:fffe",
    ),
    *("fe80::1%lo", "2606::1%eth0"),
]


@pytest.mark.parametrize("text", PUBLIC)
@pytest.mark.parametrize("private", [False, True])
def test_a_public_address_may_be_dialled(text: str, private: bool) -> None:
    assert refusal(ip_address(text), private=private, own=()) is None


@pytest.mark.parametrize("text", [*PRIVATE, "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::"])
def test_a_private_address_takes_a_declaration(text: str) -> None:
    """DST-02"""
    assert refusal(ip_address(text), private=False, own=())
    assert refusal(ip_address(text), private=True, own=()) is None


@pytest.mark.parametrize("text", NEVER)
@pytest.mark.parametrize("private", [False, True])
def test_what_no_declaration_opens(text: str, private: bool) -> None:
    """DST-02"""
    assert refusal(ip_address(text), private=private, own=())


@pytest.mark.parametrize(
    ("text", "own"), [("93.184.216.34", "93.184.216.34"), ("2002:5db8:d822::1", "93.184.216.34"), ("fd00::2", "fd00::2")]
)
def test_the_hosts_own_address_is_refused(text: str, own: str) -> None:
    assert refusal(ip_address(text), private=True, own=frozenset({ip_address(own)}))
    assert refusal(ip_address(text), private=True, own=()) is None


def test_a_mapped_address_is_the_one_it_maps() -> None:
    assert address("::ffff:8.8.8.8") == IPv4Address("8.8.8.8")
    assert address("2606::1") == IPv6Address("2606::1")


@given(st.ip_addresses(v=4))
def test_nothing_is_let_through_that_python_knows_to_be_special(asked: IPv4Address) -> None:
    if refusal(asked, private=False, own=()) is None:
        assert asked.is_global
        assert not asked.is_multicast
    if asked.is_global and not asked.is_multicast:
        assert refusal(asked, private=False, own=()) in (None, "reserved", "metadata")


@given(st.ip_addresses(v=6))
def test_nor_of_ipv6(asked: IPv6Address) -> None:
    if refusal(asked, private=False, own=()) is None:
        # NAT64 and mapped addresses are judged by what they embed.
        assert int(asked) >> 125 == 1 or asked.packed[:12] == IPv6Address("64:ff9b::").packed[:12] or asked.ipv4_mapped
