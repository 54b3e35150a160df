"""What was planned against what is there: each difference in words, and none without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sealnet.model import names
from sealnet.model.check import Check, Seen, Side, differences, faults
from tests.model.build import sealed, severed

MARK = "sealnet run-1 0:0"
MACS = ("02:00:00:00:00:01", "02:00:00:00:00:02")
SYSCTLS = {"ipv4/conf/{link}/forwarding": "0", "ipv4/conf/{link}/rp_filter": "1", "ipv6/conf/{link}/disable_ipv6": "1"}
HOST = Side(exists=True, up=True, carrier=True, mac=MACS[0], group=names.LINK_GROUP, addresses=("198.18.0.1/30",), sysctls=SYSCTLS)
INSIDE = replace(HOST, mac=MACS[1], group=0, addresses=("198.18.0.2/30",))
SEALED = Seen(
    netns_inode=5, mark=MARK, host=HOST, inside=INSIDE, links_inside=("lo", "eth0"), gate_fault=None, filter_fault=None, rulesets={}
)
SEVERED = replace(SEALED, host=Side(exists=False), inside=Side(exists=False), links_inside=("lo",))
LINK = f"link {names.ifname('run-1')}"
ETH0 = "link eth0 of the sandbox"


def told(seal: Any, seen: Seen) -> list[str]:
    return differences(seal, seen, mark=MARK, sysctls=SYSCTLS, macs=MACS, group=names.LINK_GROUP)


def test_a_whole_seal_has_no_difference() -> None:
    assert told(sealed(), SEALED) == []
    assert told(severed(), SEVERED) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mark": ""}, "netns sealnet-run-1 is marked '', not 'sealnet run-1 0:0'"),
        ({"mark": "sealnet run-2 0:0"}, "netns sealnet-run-1 is marked 'sealnet run-2 0:0', not 'sealnet run-1 0:0'"),
        ({"filter_fault": "the filter is gone"}, "the filter is gone"),
        ({"gate_fault": "the gate is gone"}, "the gate is gone"),
        ({"links_inside": ("lo",)}, "netns sealnet-run-1 holds links lo, not lo and eth0 alone"),
        ({"links_inside": ("lo", "eth0", "wg0")}, "netns sealnet-run-1 holds links lo, eth0, wg0, not lo and eth0 alone"),
        ({"host": Side(exists=False)}, f"{LINK} is gone"),
        ({"inside": Side(exists=False)}, f"{ETH0} is gone"),
    ],
)
def test_what_is_wrong_with_a_sealed_run_as_a_whole_is_told(change: dict[str, Any], words: str) -> None:
    assert told(sealed(), replace(SEALED, **change)) == [words]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"up": False}, "is down"),
        ({"mac": "02:00:00:00:00:09"}, "has MAC 02:00:00:00:00:09, not {mac}"),
        ({"master": 7}, "is enslaved to link 7"),
        ({"master": 7, "master_name": "br0"}, "is enslaved to link br0"),
        ({"addresses": ()}, "has address none, not {address} alone"),
        ({"addresses": ("10.0.0.1/30",)}, "has address 10.0.0.1/30, not {address} alone"),
        ({"addresses": ("198.18.0.1/30", "198.18.0.2/30")}, "has address 198.18.0.1/30, 198.18.0.2/30, not {address} alone"),
        ({"sysctls": {**SYSCTLS, "ipv4/conf/{link}/forwarding": "1"}}, "has forwarding = 1, not 0 (ipv4)"),
        ({"sysctls": {**SYSCTLS, "ipv6/conf/{link}/disable_ipv6": "0"}}, "has disable_ipv6 = 0, not 1 (ipv6)"),
    ],
)
@pytest.mark.parametrize("end", ["host", "inside"])
def test_what_is_wrong_with_either_end_of_the_link_is_told(end: str, change: dict[str, Any], words: str) -> None:
    name, mac, address = (LINK, MACS[0], "198.18.0.1/30") if end == "host" else (ETH0, MACS[1], "198.18.0.2/30")

    seen = replace(SEALED, **{end: replace(getattr(SEALED, end), **change)})

    # Braces that are not `mac` and `address` belong to no expected text.
    assert told(sealed(), seen) == [f"{name} {words.format(mac=mac, address=address)}"]


def test_the_group_is_the_host_ends_alone() -> None:
    seen = replace(SEALED, host=replace(HOST, group=0), inside=replace(INSIDE, group=9))

    assert told(sealed(), seen) == [f"{LINK} is in group 0x0, not 0x5ea1"]


def test_a_host_without_ipv6_has_nothing_to_switch_off() -> None:
    without = {key: value for key, value in SYSCTLS.items() if not key.startswith("ipv6/")}

    assert told(sealed(), replace(SEALED, host=replace(HOST, sysctls=without), inside=replace(INSIDE, sysctls=without))) == []


def test_all_differences_are_told_together() -> None:
    seen = replace(SEALED, mark="", gate_fault="gate", host=replace(HOST, up=False, master=3), inside=Side(exists=False))

    assert told(sealed(), seen) == [
        "netns sealnet-run-1 is marked '', not 'sealnet run-1 0:0'",
        "gate",
        f"{LINK} is down",
        f"{LINK} is enslaved to link 3",
        f"{ETH0} is gone",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"links_inside": ("lo", "eth0")}, "netns sealnet-run-1 holds links lo, eth0; a severed run has lo alone"),
        ({"links_inside": ()}, "netns sealnet-run-1 holds links ; a severed run has lo alone"),
        ({"filter_fault": "the filter is gone"}, "the filter is gone"),
        ({"mark": "x"}, "netns sealnet-run-1 is marked 'x', not 'sealnet run-1 0:0'"),
    ],
)
def test_what_is_wrong_with_a_severed_run_is_told(change: dict[str, Any], words: str) -> None:
    assert told(severed(), replace(SEVERED, **change)) == [words]


def test_a_severed_run_does_not_depend_on_the_gate() -> None:
    assert told(severed(), replace(SEVERED, gate_fault="the gate is gone")) == []


def test_a_check_reads_as_a_question_and_its_answer() -> None:
    check = Check(name="canary", kind="negative", asked="tcp 192.0.2.1:443", expected="refused", found="answered", ok=False, took_ms=0.1)

    assert str(check) == "canary: tcp 192.0.2.1:443: expected refused, found answered"
    assert check.to_json()["control"] is None


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mark-changed", {"mark": ""}),
        ("filter-changed", {"filter_fault": "the filter is gone"}),
        ("gate-lost", {"gate_fault": "the gate is gone", "rulesets": {"gate": ""}}),
        ("gate-changed", {"gate_fault": "the gate has been changed", "rulesets": {"gate": "12ab"}}),
        ("link-added", {"links_inside": ("lo", "eth0", "wg0")}),
        ("link-gone", {"links_inside": ("lo",)}),
        ("link-gone", {"host": Side(exists=False)}),
        ("link-down", {"host": replace(HOST, up=False)}),
        ("link-down", {"inside": replace(INSIDE, up=False)}),
        ("link-changed", {"host": replace(HOST, mac=MACS[1])}),
        ("link-changed", {"host": replace(HOST, group=0)}),
        ("enslaved", {"host": replace(HOST, master=7)}),
        ("address-lost", {"host": replace(HOST, addresses=("10.0.0.1/30",))}),
        ("address-added", {"host": replace(HOST, addresses=(*HOST.addresses, "fe80::1/64"))}),
        ("sysctl-changed", {"host": replace(HOST, sysctls={**SYSCTLS, "ipv4/conf/{link}/rp_filter": "0"})}),
        ("ipv6-back", {"inside": replace(INSIDE, sysctls={**SYSCTLS, "ipv6/conf/{link}/disable_ipv6": "0"})}),
    ],
)
def test_each_difference_is_of_a_kind(kind: str, change: dict[str, Any]) -> None:
    found = faults(sealed(), replace(SEALED, **change), mark=MARK, sysctls=SYSCTLS, macs=MACS, group=names.LINK_GROUP)

    assert [fault.kind for fault in found] == [kind]
    assert [fault.text for fault in found] == told(sealed(), replace(SEALED, **change))


def test_a_severed_run_that_gets_a_link_is_told() -> None:
    found = faults(severed(), replace(SEVERED, links_inside=("lo", "wg0")), mark=MARK, sysctls=SYSCTLS, macs=MACS, group=names.LINK_GROUP)

    assert [fault.kind for fault in found] == ["link-added"]
