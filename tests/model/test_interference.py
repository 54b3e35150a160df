"""What is said of what gets in the way of runs, or seems to."""

from __future__ import annotations

from typing import Any

import pytest

from sealnet.model.facts import ROOT_ONLY, Chain, Daemon, Facts, Row
from sealnet.model.interference import interference


def chain(**changed: Any) -> Chain:
    given: dict[str, Any] = {
        "family": "inet",
        "table": "filter",
        "name": "input",
        "kind": "filter",
        "hook": "input",
        "priority": 0,
        "drops": True,
    }
    return Chain(**{**given, **changed})


def judged(*, let_in: bool | None = True, **seen: Any) -> dict[str, Row]:
    given: dict[str, Any] = {
        "release": "6.1",
        "root": True,
        "chains": (),
        "orphans": (),
        "free": "198.18.0.0/30",
        "pool": "198.18.0.0/15",
        **seen,
    }
    return {row.name: row for row in interference(Facts(**given), let_in=let_in)}


def test_a_quiet_host_is_ok_in_every_row() -> None:
    rows = judged()

    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["subnet pool"].found == "198.18.0.0/15, next 198.18.0.0/30"


@pytest.mark.parametrize(("let_in", "status"), [(True, "note"), (False, "warn"), (None, "warn")])
def test_an_input_policy_that_drops_is_named(let_in: bool | None, status: str) -> None:
    row = judged(chains=(chain(),), let_in=let_in)["input policy"]

    assert row.status == status
    assert row.found == "table inet filter, chain input (filter, priority 0, policy drop)"
    assert row.fix == "nft insert rule inet filter input iifname '\"seal*\"' tcp dport PORT accept"


@pytest.mark.parametrize(
    ("changed", "chain_names", "fix"),
    [
        ({"family": "ip", "name": "INPUT"}, [], "iptables -I INPUT -i seal+ -p tcp --dport PORT -j ACCEPT"),
        ({"family": "ip", "name": "INPUT", "legacy": True}, [], "iptables-legacy -I INPUT -i seal+ -p tcp --dport PORT -j ACCEPT"),
        (
            {"family": "ip", "name": "INPUT"},
            ["ufw-user-input"],
            "in /etc/ufw/before.rules: -A ufw-before-input -i seal+ -p tcp --dport PORT -j ACCEPT; then: ufw reload",
        ),
    ],
)
def test_a_firewall_is_opened_in_its_own_words(changed: dict[str, Any], chain_names: list[str], fix: str) -> None:
    assert judged(chains=(chain(**changed),), chain_names=frozenset(chain_names), let_in=False)["input policy"].fix == fix


@pytest.mark.parametrize("changed", [{"drops": False}, {"hook": "output"}, {"family": "ip6"}, {"table": "sealnet"}])
def test_a_chain_that_drops_nothing_of_a_runs_is_not_named(changed: dict[str, Any]) -> None:
    assert "input policy" in judged(chains=(chain(),))

    assert "input policy" not in judged(chains=(chain(**changed),))


def test_docker_is_a_note_and_its_dnat_is_not_told_twice() -> None:
    dnat = chain(family="ip", table="nat", name="PREROUTING", kind="nat", hook="prerouting", priority=-100, drops=False)

    rows = judged(chains=(dnat,), chain_names=frozenset({"DOCKER"}), daemons=(Daemon(name="dockerd", pid=7),))
    others = judged(chains=(dnat,))

    assert (rows["docker"].status, rows["docker"].found) == ("note", "dockerd runs (pid 7); its chains are loaded")
    assert "DNAT" not in rows
    assert (others["DNAT"].status, "docker" in others) == ("note", False)


def test_a_forward_policy_that_drops_is_fine() -> None:
    assert judged(chains=(chain(hook="forward", name="FORWARD"),))["forward policy"].status == "ok"


@pytest.mark.parametrize(("name", "status"), [("NetworkManager", "warn"), ("systemd-networkd", "warn"), ("systemd-udevd", "note")])
def test_who_might_adopt_a_link_is_told_of_until_it_is_told_not_to(name: str, status: str) -> None:
    daemon = Daemon(name=name, pid=7)

    untold, told = (judged(daemons=(daemon,), installed=frozenset(told))[name] for told in ([], [name]))

    assert (untold.status, untold.fix) == (status, "sealnet host install")
    assert (told.status, told.fix) == ("ok", "")


@pytest.mark.parametrize(
    ("installed", "let_in", "status", "fix"),
    [
        ([], False, "warn", "sealnet host install --lease-port PORT"),
        ([], True, "note", "sealnet host install --lease-port PORT"),
        (["firewalld"], True, "ok", ""),
        (["firewalld"], False, "warn", ""),
    ],
)
def test_firewalld_is_judged_by_its_zone_and_by_what_it_let_in(installed: list[str], let_in: bool, status: str, fix: str) -> None:
    row = judged(daemons=(Daemon(name="firewalld", pid=7),), installed=frozenset(installed), let_in=let_in)["firewalld"]

    assert (row.status, row.fix) == (status, fix)


def test_ufw_is_known_by_its_chains() -> None:
    assert judged(chain_names=frozenset({"ufw-before-input"}), let_in=False)["ufw"].status == "warn"
    assert "ufw" not in judged(chain_names=frozenset({"my-ufw"}), let_in=False)


def test_a_process_that_only_root_can_tell_is_told_as_such() -> None:
    row = judged(daemons=(Daemon(name="dockerd", pid=7, sure=False),))["docker"]

    assert row.found == "pid 7 is called dockerd; only root can tell what it is"


def test_routes_that_cover_the_pool_are_named_with_what_is_taken_instead() -> None:
    row = judged(covering=("10.0.0.0/8 via 192.168.77.2, table 75", "b", "c", "d"))["subnet pool"]

    assert row.status == "note"
    assert row.found == "10.0.0.0/8 via 192.168.77.2, table 75; b; c and 1 more"
    assert row.does.endswith("next 198.18.0.0/30")


def test_a_pool_that_is_gone_is_a_failure_with_the_allocators_own_words() -> None:
    row = judged(free=None, exhausted="cannot allocate a /30 from 10.0.0.0/8: ...", exhausted_hint="set another pool")["subnet pool"]

    assert (row.status, row.found, row.fix) == ("fail", "cannot allocate a /30 from 10.0.0.0/8: ...", "set another pool")


def test_vpn_routes_and_policy_rules_are_notes() -> None:
    rows = judged(broad=("0.0.0.0/1 via 192.168.77.2, table main",), rules=("50: from all lookup 75",))

    assert (rows["VPN route"].status, rows["VPN route"].found) == ("note", "0.0.0.0/1 via 192.168.77.2, table main")
    assert (rows["policy rule"].status, rows["policy rule"].found) == ("note", "ip rule 50: from all lookup 75")


@pytest.mark.parametrize(("value", "word"), [(0, "off"), (1, "strict"), (2, "loose")])
def test_every_reverse_path_filter_is_fine(value: int, word: str) -> None:
    row = judged(rp_filter=value)["rp_filter"]

    assert row.status == "ok"
    assert row.found.startswith(word)


def test_ip_forward_is_fine_and_said_to_be() -> None:
    row = judged(ip_forward=True)["ip_forward"]

    assert row.status == "ok"
    assert row.found.startswith("on: a run's packets are dropped")


def test_a_gate_that_was_changed_and_orphans_are_told() -> None:
    rows = judged(gate="the gate has been changed (table inet sealnet)", orphans=("a", "b", "c", "d"))

    assert (rows["gate"].status, rows["gate"].fix) == ("warn", "when no run is alive (sealnet ls): nft delete table inet sealnet")
    assert (rows["orphans"].status, rows["orphans"].found) == ("note", "4 without a supervisor: a, b, c, ...")


def test_what_takes_root_to_look_at_is_said_to() -> None:
    rows = judged(chains=None, orphans=None)

    assert {(rows[name].status, rows[name].found) for name in ("firewalls", "orphans")} == {("note", ROOT_ONLY)}
