"""The two rulesets as nft text: the gate, shared by all runs of a host, and the filter inside each run's namespace.

Why each line stands where it stands is told in docs/design.md; the texts are pinned as golden files in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address

TABLE = "sealnet"
FAMILY = "inet"

# In front of a table: a whole one in place of another, in one transaction. `add table` before `delete table` makes the deletion
# idempotent: `destroy` does not exist in nft 1.0.6. A table block that is loaded twice would double its rules, so it is only ever loaded
# whole.
REPLACE = f"""add table {FAMILY} {TABLE}
delete table {FAMILY} {TABLE}
"""

# notrack: a leased flow makes no conntrack entry, so no DNAT can turn it elsewhere and a payload cannot fill the host's table.
# fib: a link that somebody has put into a bridge, bond or the like receives by that one's name, so whatever claims to come from a
# sandbox by another link is dropped. Sandbox addresses end in binary 10, which spares three quarters of all packets the lookup.
# gateways: a host answers for its addresses on every link, so a broker that listens on a gateway alone would be open to whoever on the
# LAN routes the pool to this host.
# reject: whoever opens a connection to a lease that has run out is told so at once; an open one waits, for the lease may come back. Only
# where his address leads back to his own link: an answer to one that he has made up would go to somebody else, and could end a connection
# there. That way is looked up in prerouting alone: before Linux 5.14 it is known nowhere else.
# lo is first: the host's own packets are most of what passes, and an index is compared faster than a name.
# Nothing here says `ct state established accept`: a lease that is removed cuts its live connections.
GATE_TABLE = f"""table {FAMILY} {TABLE} {{
	set leases {{
		type ifname . ipv4_addr . ipv4_addr . inet_service
		flags timeout
		comment "interface, sandbox, gateway, port"
	}}

	set gateways {{
		type ipv4_addr
		flags timeout
		comment "no other link leads to these"
	}}

	set denied {{
		type ifname . ipv4_addr . inet_proto . inet_service
		size 65535
		flags dynamic,timeout
		counter
		timeout 1h
	}}

	chain gate {{
		iifname . ip saddr . ip daddr . tcp dport @leases notrack accept
		update @denied {{ iifname . ip daddr . meta l4proto . th dport }}
		drop
	}}

	chain refuse {{
		iifname . ip saddr . ip daddr . tcp dport @leases notrack accept
		tcp flags & (fin | syn | rst | ack) == syn fib daddr type local fib saddr . iif oif exists {{denied}} reject with tcp reset
		goto gate
	}}

	chain prerouting {{
		type filter hook prerouting priority raw; policy accept;
		iif "lo" accept
		iifname "{{prefix}}*" jump refuse
		ip saddr & 0.0.0.3 == 0.0.0.2 fib saddr oifname "{{prefix}}*" drop
		ip daddr & 0.0.0.3 == 0.0.0.1 ip daddr @gateways drop
	}}

	chain input {{
		type filter hook input priority filter - 10; policy accept;
		iif "lo" accept
		iifname "{{prefix}}*" jump gate
	}}

	chain forward {{
		type filter hook forward priority filter - 10; policy accept;
		iifname "{{prefix}}*" drop
		oifname "{{prefix}}*" drop
	}}

	chain output {{
		type filter hook output priority raw; policy accept;
		oif "lo" accept
		oifname "{{prefix}}*" notrack
	}}
}}
""".replace("{prefix}", "seal").replace("{denied}", "update @denied { iifname . ip daddr . meta l4proto . th dport }")


def render_gate() -> str:
    """The gate, replacing whatever table of that name is there (leases included)."""
    return REPLACE + GATE_TABLE


# What the kernel must tell of the gate afterwards: (chain, hook, priority, whether its policy is drop).
GATE_CHAINS = (
    ("gate", None, None, None),
    ("refuse", None, None, None),
    ("prerouting", 0, -300, False),
    ("input", 1, -10, False),
    ("forward", 2, -10, False),
    ("output", 3, -300, False),
)
INSIDE_CHAINS = (("output", 3, 0, True),)
# And one more for each leased port.
INSIDE_RULES = 7


# Destinations of a family that a run's tally holds, a proof's own attempts among them.
TALLY = 4096


def lease_element(ifname: str, sandbox: object, gateway: object, port: object) -> str:
    """The key of a lease, as nft takes it."""
    return f'"{ifname}" . {sandbox} . {gateway} . {port}'


def lease_key(ifname: str, sandbox: IPv4Address, gateway: IPv4Address, port: int) -> bytes:
    """The same as the kernel holds it: each part in network order, padded to whole 32-bit registers; IFNAMSIZ is 16."""
    return ifname.encode().ljust(16, b"\0") + sandbox.packed + gateway.packed + port.to_bytes(2, "big") + b"\0\0"


def render_lease(ifname: str, sandbox: IPv4Address, gateway: IPv4Address, port: int, *, ttl_s: int) -> str:
    """Grant or refresh a lease for `ttl_s` seconds. In one transaction: a bare `add` of a live element keeps its old expiry."""
    text = ""
    for element in (f"gateways {{ {gateway}", f"leases {{ {lease_element(ifname, sandbox, gateway, port)}"):
        whole = f"element {FAMILY} {TABLE} {element}"
        text += f"add {whole} timeout {ttl_s}s }}\ndelete {whole} }}\nadd {whole} timeout {ttl_s}s }}\n"
    return text


def render_no_lease(ifname: str, sandbox: IPv4Address, gateway: IPv4Address, port: int) -> str:
    """No such lease and no such gateway, whether there is one or not: an `add` of what stands changes nothing, and a bare `delete` of what
    is gone would undo the whole transaction."""
    text = ""
    for element in (f"gateways {{ {gateway}", f"leases {{ {lease_element(ifname, sandbox, gateway, port)}"):
        whole = f"element {FAMILY} {TABLE} {element}"
        text += f"add {whole} timeout 1s }}\ndelete {whole} }}\n"
    return text


def render_inside(*, gateway: IPv4Address | None, ports: Sequence[int], ifname: str) -> str:
    """The filter inside the run's namespace. Without a leased port only the namespace's own addresses answer.

    `fib daddr type local` is the namespace's own addresses, reached over lo. Everything else is counted and refused at once: the sink
    route (`default dev lo`) lets this chain see attempts to addresses that have no route. What the kernel answers by itself (a reset, port
    unreachable) to what still comes for a run that had the addresses before is nobody's attempt: no payload can send such a packet.

    The kernel allocates and clears the table of a set of that size at once: 130 kB each, where 16,384 took 500. One without a size grows,
    and while it does a dump misses elements and tells others twice.
    """
    lease = "".join(f'\t\toifname "{ifname}" ip daddr {gateway} tcp dport {port} accept\n' for port in ports if gateway is not None)
    return f"""table {FAMILY} {TABLE} {{
	set tried {{
		type ipv4_addr . inet_proto . inet_service
		size {TALLY}
		flags dynamic
		counter
	}}

	set tried6 {{
		type ipv6_addr . inet_proto . inet_service
		size {TALLY}
		flags dynamic
		counter
	}}

	chain output {{
		type filter hook output priority filter; policy drop;
{lease}		oifname "lo" fib daddr type local accept
		tcp flags rst drop
		icmp type destination-unreachable drop
		update @tried {{ ip daddr . meta l4proto . th dport }}
		update @tried6 {{ ip6 daddr . meta l4proto . th dport }}
		meta l4proto tcp reject with tcp reset
		reject with icmpx admin-prohibited
	}}
}}
"""
