"""What is told of a firewall that drops a lease, and the command that lets it in."""

from __future__ import annotations

import pytest

from sealnet.model.firewall import Blame, Dropper, admit, is_iptables, render_trace

OURS = Dropper("inet", "theirs", "in", "policy")
LEGACY = ("filter", "raw")


@pytest.mark.parametrize(
    ("blame", "cause", "hint"),
    [
        (
            Blame((OURS,), traced=True),
            "table inet theirs, chain in drops it (policy)",
            'let it in: nft insert rule inet theirs in iifname "seal*" tcp dport 80 accept',
        ),
        (
            Blame((OURS, OURS._replace(chain="out", answers=True)), traced=False),
            "table inet theirs, chain in may drop it (policy); table inet theirs, chain out may drop what the broker answers (policy)",
            'let it in: nft insert rule inet theirs in iifname "seal*" tcp dport 80 accept',
        ),
        (
            Blame((OURS._replace(how="queue"),), traced=True),
            "table inet theirs, chain in may drop it (queue)",
            'let it in: nft insert rule inet theirs in iifname "seal*" tcp dport 80 accept',
        ),
        (
            Blame((OURS,), traced=True, legacy=LEGACY),
            "table inet theirs, chain in drops it (policy)",
            'let it in: nft insert rule inet theirs in iifname "seal*" tcp dport 80 accept',
        ),
        (
            Blame((), traced=True, legacy=LEGACY),
            "a rule of iptables-legacy may drop it (table filter, raw)",
            "let it in: iptables-legacy -I INPUT -i seal+ -p tcp --dport 80 -j ACCEPT",
        ),
        (Blame((), traced=True, answered=True, legacy=LEGACY), "asked again, it answers", "try again, once the broker is up"),
        (
            Blame((), traced=True),
            "though it listens, and no rule of this host's nftables drops it",
            "does the broker accept connections, and on IPv4? ss -ltnp sport = :80",
        ),
    ],
)
def test_what_is_told_is_what_was_seen(blame: Blame, cause: str, hint: str) -> None:
    assert (blame.cause(), blame.hint(80)) == (cause, hint)


def test_doors_are_let_in_together() -> None:
    doors = (29400, 29407)

    assert Blame((OURS,), traced=True).hint(29401, doors) == (
        'let it in: nft insert rule inet theirs in iifname "seal*" tcp dport 29400-29407 accept'
    )
    assert Blame((), traced=True, legacy=LEGACY).hint(29401, doors).endswith("--dport 29400:29407 -j ACCEPT")
    assert admit(Dropper("ip", "filter", "INPUT", "drop", iptables=True), 29401, doors) == (
        "iptables -t filter -I INPUT -i seal+ -p tcp --dport 29400:29407 -j ACCEPT"
    )
    assert admit(Dropper("inet", "firewalld", "filter_INPUT", "reject"), 29401, doors) == "sealnet host install --reload"


@pytest.mark.parametrize(
    ("dropper", "command"),
    [
        (Dropper("inet", "firewalld", "filter_INPUT", "reject"), "sealnet host install --lease-port 80 --reload"),
        (
            Dropper("inet", "firewalld", "filter_OUTPUT", "drop", answers=True),
            'nft insert rule inet firewalld filter_OUTPUT oifname "seal*" tcp sport 80 accept',
        ),
        (Dropper("ip", "raw", "PREROUTING", "drop", iptables=True), "iptables -t raw -I PREROUTING -i seal+ -p tcp --dport 80 -j ACCEPT"),
        (
            Dropper("ip", "filter", "OUTPUT", "policy", answers=True, iptables=True),
            "iptables -t filter -I OUTPUT -o seal+ -p tcp --sport 80 -j ACCEPT",
        ),
    ],
)
def test_the_command_is_of_the_tool_that_wrote_the_chain(dropper: Dropper, command: str) -> None:
    assert admit(dropper, 80) == command


@pytest.mark.parametrize(
    ("family", "table", "chains", "expected"),
    [
        ("ip", "filter", {"INPUT", "theirs"}, True),
        ("ip", "filter", {"input"}, False),
        ("ip", "theirs", {"INPUT"}, False),
        ("inet", "filter", {"INPUT"}, False),
    ],
)
def test_a_table_of_iptables_is_told_by_its_chains(family: str, table: str, chains: set[str], expected: bool) -> None:
    assert is_iptables(family, table, chains) is expected


def test_the_trace_judges_nothing() -> None:
    text = render_trace("sealaaaaaaaaaaa", 80)

    rules = [line.strip() for line in text.splitlines() if "name" in line]
    assert rules == [
        'iifname "sealaaaaaaaaaaa" tcp dport 80 meta nftrace set 1',
        'oifname "sealaaaaaaaaaaa" tcp sport 80 meta nftrace set 1',
    ]
    assert text.count("policy accept;") == 2
    assert "\tflags owner\n" in text
