"""The base chains of this host, whoever made them: of nf_tables by a dump, and the policies of iptables-legacy."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from sealnet.kernel import libc, nfnetlink
from sealnet.model import ruleset
from sealnet.model.facts import Chain

# linux/netfilter.h: NFPROTO_* and the hooks of those families.
_FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")

# linux/netfilter_ipv4/ip_tables.h: ipt_getinfo (name, valid_hooks, hook_entry, underflow, num_entries, size), ipt_get_entries (name, size,
# padding), and where an ipt_entry has its target_offset, and a standard target its verdict.
_IPT_SO_GET_INFO, _IPT_SO_GET_ENTRIES = 64, 65
_INFO, _ENTRIES = struct.Struct("=32sI5I5III"), struct.Struct("=32sI4x")
_TARGET_OFFSET, _VERDICT = 88, 32
_NF_DROP = -1
_LEGACY_TABLES = Path("/proc/net/ip_tables_names")


def see() -> tuple[tuple[Chain, ...], frozenset[str]]:
    """Every base chain, and the names of the chains of other tables that are only jumped to. Root only."""
    base: list[Chain] = []
    names = set()
    for chain in nfnetlink.see_chains():
        family = _FAMILIES.get(chain.family, str(chain.family))
        if chain.hook is None or chain.priority is None:
            if chain.table != ruleset.TABLE:
                names.add(chain.name)
            continue
        # arp, netdev and bridge count their hooks in other ways, and no packet of a run that matters here passes them first.
        hook = _HOOKS[chain.hook] if family in ("inet", "ip", "ip6") and chain.hook < len(_HOOKS) else str(chain.hook)
        base.append(
            Chain(
                family=family,
                table=chain.table,
                name=chain.name,
                kind=chain.kind,
                hook=hook,
                priority=chain.priority,
                drops=bool(chain.drops),
            )
        )
    return (*base, *_legacy()), frozenset(names)


def _legacy() -> list[Chain]:
    """INPUT and FORWARD of iptables-legacy's filter table, where that is in use: to ask for one that is not would make it."""
    try:
        if "filter" not in _LEGACY_TABLES.read_text(encoding="ascii").split():
            return []
        return [
            Chain(family="ip", table="filter", name=hook.upper(), kind="filter", hook=hook, priority=0, drops=drops, legacy=True)
            for hook, drops in _legacy_policies("filter").items()
        ]
    except OSError:
        # A kernel without iptables-legacy, or the table went meanwhile.
        return []


def _legacy_policies(table: str) -> dict[str, bool]:
    """Whether the policy of each hook of a table is to drop: the verdict of the chain's last rule, its underflow."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW) as sock:
        info = bytearray(_INFO.size)
        info[: len(table)] = table.encode()
        libc.socket_option(sock.fileno(), socket.IPPROTO_IP, _IPT_SO_GET_INFO, info)
        _name, valid, *offsets, _count, size = _INFO.unpack(info)
        entries = bytearray(_ENTRIES.size + size)
        _ENTRIES.pack_into(entries, 0, table.encode(), size)
        libc.socket_option(sock.fileno(), socket.IPPROTO_IP, _IPT_SO_GET_ENTRIES, entries)
    policies = {}
    for hook, name in enumerate(_HOOKS):
        if valid >> hook & 1:
            entry = _ENTRIES.size + offsets[5 + hook]
            target = entry + struct.unpack_from("=H", entries, entry + _TARGET_OFFSET)[0]
            policies[name] = struct.unpack_from("=i", entries, target + _VERDICT)[0] == _NF_DROP
    return policies
