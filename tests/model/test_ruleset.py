"""The rulesets, word for word, and what sealnet later asks of them."""

from __future__ import annotations

import re
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from sealnet.model import names, ruleset
from sealnet.model.plan import Seal
from tests.golden import assert_golden
from tests.model.build import SUBNET, sealed, severed

GOLDEN = Path(__file__).with_name("golden")
HOOKS = {"prerouting": 0, "input": 1, "forward": 2, "output": 3}
PRIORITIES = {"raw": -300, "filter - 10": -10, "filter": 0}


def inside(seal: Seal) -> str:
    return ruleset.render_inside(gateway=seal.gateway, ports=seal.ports, ifname=names.SANDBOX_LINK)


def chains(text: str) -> list[tuple[str, int | None, int | None, bool | None, int]]:
    """(name, hook, priority, whether its policy is drop, number of rules) of each chain of a ruleset's text."""
    found = []
    for name, body in re.findall(r"\tchain (\w+) \{\n(.*?)\n\t\}", text, re.DOTALL):
        lines = body.split("\n")
        base = re.fullmatch(r"\t\ttype filter hook (\w+) priority (.*); policy (\w+);", lines[0])
        if base is None:
            found.append((name, None, None, None, len(lines)))
        else:
            found.append((name, HOOKS[base[1]], PRIORITIES[base[2]], base[3] == "drop", len(lines) - 1))
    return found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gate.nft", ruleset.render_gate()),
        ("inside-sealed.nft", inside(sealed())),
        ("inside-severed.nft", inside(severed())),
        (
            "lease.nft",
            ruleset.render_lease("sealjzs5h67ivvs", IPv4Address("198.18.0.2"), IPv4Address("198.18.0.1"), 8080, ttl_s=90),
        ),
    ],
)
def test_a_ruleset_is_word_for_word_what_was_signed(name: str, text: str) -> None:
    assert_golden(GOLDEN / name, text)


def test_the_chains_that_sealnet_asks_for_are_those_that_it_loads() -> None:
    assert tuple(chain[:4] for chain in chains(ruleset.render_gate())) == ruleset.GATE_CHAINS
    assert chains(inside(severed())) == [(*ruleset.INSIDE_CHAINS[0], ruleset.INSIDE_RULES)]
    assert chains(inside(sealed())) == [(*ruleset.INSIDE_CHAINS[0], ruleset.INSIDE_RULES + 1)]


def test_the_gate_is_loaded_whole_and_in_one_transaction() -> None:
    assert ruleset.render_gate() == f"add table inet sealnet\ndelete table inet sealnet\n{ruleset.GATE_TABLE}"


def test_the_gate_is_keyed_on_the_prefix_that_every_link_has() -> None:
    assert re.findall(r'[io]ifname "(.*?)"', ruleset.GATE_TABLE).count(f"{names.LINK_PREFIX}*") == 6


def test_an_element_key_is_the_leases_key_in_its_order() -> None:
    rule = re.search(r"iifname \. ip saddr \. ip daddr \. tcp dport @leases", ruleset.GATE_TABLE)

    assert rule is not None
    assert ruleset.lease_element("sealx", "198.18.0.2", "198.18.0.1", 80) == '"sealx" . 198.18.0.2 . 198.18.0.1 . 80'


def test_a_severed_namespace_lets_nothing_out_but_to_itself() -> None:
    accepted = [line.strip() for line in inside(severed()).splitlines() if line.endswith(" accept")]

    assert accepted == ['oifname "lo" fib daddr type local accept']


def test_a_sealed_one_lets_out_its_lease_beside() -> None:
    added = set(inside(sealed()).splitlines()) - set(inside(severed()).splitlines())

    assert added == {'\t\toifname "eth0" ip daddr 198.18.0.1 tcp dport 8080 accept'}


def test_two_leases_are_two_rules() -> None:
    both = Seal(run_id="run-1", subnet=SUBNET, lease_port=8080, proxy_port=3128)

    added = [line for line in inside(both).splitlines() if line not in inside(severed()).splitlines()]

    assert added == [f'\t\toifname "eth0" ip daddr 198.18.0.1 tcp dport {port} accept' for port in (8080, 3128)]


@pytest.mark.parametrize("half", [{"gateway": IPv4Address("198.18.0.1"), "ports": ()}, {"gateway": None, "ports": (8080,)}])
def test_half_a_lease_lets_nothing_out(half: dict[str, object]) -> None:
    assert ruleset.render_inside(**half, ifname="eth0") == inside(severed())  # type: ignore[arg-type]
