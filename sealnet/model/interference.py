"""What on a host gets in the way of runs or seems to, judged: what it is, what sealnet does about it, what a person can do."""

from __future__ import annotations

from collections.abc import Iterator

from sealnet.model import ruleset
from sealnet.model.facts import ROOT_ONLY, Chain, Facts, Row, Status

_INSTALL = "sealnet host install"
_ADOPTERS: dict[str, tuple[Status, str]] = {
    "NetworkManager": ("warn", "and may configure links seal* as its own"),
    "systemd-networkd": ("warn", "and may configure links seal* as its own"),
    "systemd-udevd": ("note", "and its rules may write the settings of sysctl.d over those of links seal*"),
}
_LEASED = "judges a lease's packets before any DNAT, and has them not tracked: no such rule takes them"
# conf/all/rp_filter; of it and the link's own the larger counts (ip-sysctl).
_RP_FILTER = {
    0: "off: on a run's own link it is strict",
    1: "strict: so it is on a run's own link",
    2: "loose, also on a run's own link: the gate compares address and link itself",
}


def interference(facts: Facts, *, let_in: bool | None) -> Iterator[Row]:
    """`let_in` is whether the throw-away seal's own broker answered through this host's firewall; None when it did not get so far."""
    yield from _firewalls(facts, let_in)
    yield from _forwarding(facts)
    yield from _adopters(facts)
    yield from _routes(facts)
    yield from _settings(facts)
    yield from _leftovers(facts)


def _firewalls(facts: Facts, let_in: bool | None) -> Iterator[Row]:
    if facts.chains is None:
        yield Row(name="firewalls", status="note", found=ROOT_ONLY, fix="sudo sealnet doctor")
    # Whatever stands here: the seal's own broker was reached through it.
    status: Status = "note" if let_in else "warn"
    does = "reached its own broker through it; another port may be shut" if let_in else "is asked first, and cannot overrule a drop"
    ufw = any(name.startswith("ufw-") for name in facts.chain_names)
    for chain in _others(facts.chains):
        if chain.hook == "input" and chain.drops and chain.family in ("inet", "ip"):
            yield Row(name="input policy", status=status, found=str(chain), does=does, fix=_accept(chain, ufw=ufw))
    if ufw:
        yield Row(name="ufw", status=status, found="its chains are loaded", does=does, fix=_accept(None, ufw=True))
    for daemon in facts.daemons:
        if daemon.name == "firewalld":
            zone = "firewalld" in facts.installed
            yield Row(
                name="firewalld",
                status="ok" if zone and let_in else status,
                found=f"{daemon}, {'zone sealnet is installed' if zone else 'and its default zone judges links seal*'}",
                does="a reload takes the gate away: it is put back at the next renewal, the filter inside the run stands",
                fix="" if zone else f"{_INSTALL} --lease-port PORT",
            )


def _others(chains: tuple[Chain, ...] | None) -> list[Chain]:
    return [chain for chain in chains or () if (chain.family, chain.table) != (ruleset.FAMILY, ruleset.TABLE)]


def _accept(chain: Chain | None, *, ufw: bool) -> str:
    if ufw:
        return "in /etc/ufw/before.rules: -A ufw-before-input -i seal+ -p tcp --dport PORT -j ACCEPT; then: ufw reload"
    if chain is not None and chain.legacy:
        return "iptables-legacy -I INPUT -i seal+ -p tcp --dport PORT -j ACCEPT"
    if chain is None or (chain.family, chain.table, chain.name) == ("ip", "filter", "INPUT"):
        return "iptables -I INPUT -i seal+ -p tcp --dport PORT -j ACCEPT"
    return f"nft insert rule {chain.family} {chain.table} {chain.name} iifname '\"seal*\"' tcp dport PORT accept"


def _forwarding(facts: Facts) -> Iterator[Row]:
    docker = [str(daemon) for daemon in facts.daemons if daemon.name == "dockerd"]
    if "DOCKER" in facts.chain_names:
        docker.append("its chains are loaded")
    if docker:
        does = f"{_LEASED}, and none is forwarded. A broker in a container needs docker-proxy (docker's default)"
        yield Row(name="docker", status="note", found="; ".join(docker), does=does)
    for chain in _others(facts.chains):
        of_docker = bool(docker) and (chain.table, chain.name) == ("nat", "PREROUTING")
        if chain.kind == "nat" and chain.hook == "prerouting" and chain.family in ("inet", "ip") and not of_docker:
            yield Row(name="DNAT", status="note", found=str(chain), does=_LEASED)
        if chain.hook == "forward" and chain.drops and chain.family in ("inet", "ip"):
            yield Row(name="forward policy", status="ok", found=str(chain), does="a run needs no forwarding, and gets none")


def _adopters(facts: Facts) -> Iterator[Row]:
    for daemon in facts.daemons:
        if daemon.name in _ADOPTERS:
            told = daemon.name in facts.installed
            status, what = _ADOPTERS[daemon.name]
            yield Row(
                name=daemon.name,
                status="ok" if told else status,
                found=f"{daemon}, {'and is told to leave links seal* alone' if told else what}",
                does="reads each link back when it is up, and `sealnet check` again; one that was changed is refused",
                fix="" if told else _INSTALL,
            )


def _routes(facts: Facts) -> Iterator[Row]:
    if facts.free is None:
        yield Row(name="subnet pool", status="fail", found=facts.exhausted, does="refuses every run", fix=facts.exhausted_hint)
    elif facts.covering:
        more = f" and {len(facts.covering) - 3} more" if len(facts.covering) > 3 else ""
        yield Row(
            name="subnet pool",
            status="note",
            found=f"{'; '.join(facts.covering[:3])}{more}",
            does=f"takes what nothing of the host's covers, next {facts.free}",
        )
    else:
        yield Row(name="subnet pool", status="ok", found=f"{facts.pool}, next {facts.free}")
    for route in facts.broad:
        yield Row(
            name="VPN route",
            status="note",
            found=route,
            does="counts as a default route: a run's own /30 is narrower and wins, and every run asks the kernel for the way",
        )
    for rule in facts.rules:
        yield Row(
            name="policy rule",
            status="note",
            found=f"ip rule {rule}",
            does="asks the kernel for the way of every packet of a run, and refuses the run that a rule leads astray",
        )


def _settings(facts: Facts) -> Iterator[Row]:
    on = "on: a run's packets are dropped where they would be forwarded, and its link has forwarding off" if facts.ip_forward else "off"
    yield Row(name="ip_forward", status="ok", found=on)
    yield Row(name="rp_filter", status="ok", found=_RP_FILTER.get(facts.rp_filter, str(facts.rp_filter)))


def _leftovers(facts: Facts) -> Iterator[Row]:
    if facts.gate:
        yield Row(
            name="gate",
            status="warn",
            found=facts.gate,
            does="puts it up anew when no lease stands in it; else refuses sealed runs",
            fix=f"when no run is alive (sealnet ls): nft delete table {ruleset.FAMILY} {ruleset.TABLE}",
        )
    if facts.orphans is None:
        yield Row(name="orphans", status="note", found=ROOT_ONLY, fix="sudo sealnet doctor")
    elif facts.orphans:
        more = ", ..." if len(facts.orphans) > 3 else ""
        yield Row(
            name="orphans",
            status="note",
            found=f"{len(facts.orphans)} without a supervisor: {', '.join(facts.orphans[:3])}{more}",
            does="takes them away at the start of the next run",
            fix="sealnet reap --orphans",
        )
    else:
        yield Row(name="orphans", status="ok", found="none")
