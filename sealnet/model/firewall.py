"""Which rule of the host's own keeps a run from its broker, told to people, and the command that lets it in."""

from __future__ import annotations

from typing import NamedTuple

from sealnet.model import names

# Those of iptables that may drop.
XT_TABLES = frozenset({"filter", "mangle", "raw", "security"})


class Dropper(NamedTuple):
    """A chain that drops, by its `policy` or by a rule's verdict (`drop`, `reject`, `queue`)."""

    family: str
    table: str
    chain: str
    how: str
    # What it drops is what the broker answers.
    answers: bool = False
    # iptables writes this table, and would not know of a rule that nft adds.
    iptables: bool = False

    def __str__(self) -> str:
        return f"table {self.family} {self.table}, chain {self.chain}"


class Blame(NamedTuple):
    """What a second try showed. `traced`: its packets were followed, so `droppers` are those that did; else those that could have."""

    droppers: tuple[Dropper, ...]
    traced: bool
    answered: bool = False
    # Tables of the old iptables, whose rules no trace tells of.
    legacy: tuple[str, ...] = ()

    def cause(self) -> str:
        if self.droppers:
            first = [f"{one} {self._verb(one)} {'what the broker answers' if one.answers else 'it'} ({one.how})" for one in self.droppers]
            return "; ".join(first)
        if self.answered:
            return "asked again, it answers"
        if self.legacy:
            return f"a rule of iptables-legacy may drop it (table {', '.join(self.legacy)})"
        return "though it listens, and no rule of this host's nftables drops it"

    def _verb(self, dropper: Dropper) -> str:
        # A queue is judged by some program: what that one did is not seen.
        return "drops" if self.traced and dropper.how != "queue" else "may drop"

    def hint(self, port: int, doors: tuple[int, int] | None = None) -> str:
        """`doors` are the first and the last port of doors, where it is one of them."""
        if self.droppers:
            return f"let it in: {admit(self.droppers[0], port, doors)}"
        if self.answered:
            return "try again, once the broker is up"
        if self.legacy:
            return f"let it in: iptables-legacy -I INPUT -i {names.LINK_PREFIX}+ -p tcp --dport {_ports(port, doors, ':')} -j ACCEPT"
        return f"does the broker accept connections, and on IPv4? ss -ltnp sport = :{port}"


def admit(dropper: Dropper, port: int, doors: tuple[int, int] | None = None) -> str:
    """The command that lets a lease of that port through the chain, or those of all doors."""
    if (dropper.family, dropper.table) == ("inet", "firewalld") and not dropper.answers:
        # The zone lets doors in by itself.
        return f"sealnet host install{'' if doors else f' --lease-port {port}'} --reload"
    if dropper.iptables:
        way = f"-o {names.LINK_PREFIX}+ -p tcp --sport" if dropper.answers else f"-i {names.LINK_PREFIX}+ -p tcp --dport"
        return f"iptables -t {dropper.table} -I {dropper.chain} {way} {_ports(port, doors, ':')} -j ACCEPT"
    way = f'oifname "{names.LINK_PREFIX}*" tcp sport' if dropper.answers else f'iifname "{names.LINK_PREFIX}*" tcp dport'
    return f"nft insert rule {dropper.family} {dropper.table} {dropper.chain} {way} {_ports(port, doors, '-')} accept"


def _ports(port: int, doors: tuple[int, int] | None, to: str) -> str:
    return f"{doors[0]}{to}{doors[1]}" if doors else str(port)


def is_iptables(family: str, table: str, chains: set[str]) -> bool:
    """Whether a table is one that iptables-nft writes: it has its names, and a built-in chain in capitals."""
    return family == "ip" and table in XT_TABLES and bool(chains & {"INPUT", "OUTPUT", "PREROUTING"})


def trace_table(ifname: str) -> str:
    """One per run: two that fail at once do not meet."""
    return f"sealnet-trace-{ifname}"


def render_trace(ifname: str, port: int) -> str:
    """A table that marks a lease's packets for tracing, before any other chain sees them, and judges nothing.

    `owner` (Linux 5.12) ties it to the netlink socket that made it: whoever is killed takes it along.
    """
    return f"""table inet {trace_table(ifname)} {{
	flags owner

	chain asks {{
		type filter hook prerouting priority -2147483648; policy accept;
		iifname "{ifname}" tcp dport {port} meta nftrace set 1
	}}

	chain answers {{
		type filter hook output priority -2147483648; policy accept;
		oifname "{ifname}" tcp sport {port} meta nftrace set 1
	}}
}}
"""
