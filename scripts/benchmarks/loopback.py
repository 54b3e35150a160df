"""What the gate costs every packet of the host, at 0 and 4,000 leases, and what a table per run would."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

from scripts.benchmarks.figures import in_turns
from scripts.benchmarks.packets import Packets
from scripts.benchmarks.result import Effort, Result
from sealnet.errors import KernelRefused
from sealnet.kernel.gate import Gate
from sealnet.kernel.netns import Inside
from sealnet.kernel.nft import Nft
from sealnet.model import names, ruleset

_LEASES, _QUICK_LEASES = 4000, 200
_TABLES, _QUICK_TABLES = (100, 1000), (50,)
_FIRST = int(IPv4Address("198.18.0.0"))
_BATCH = 500
_TABLE = """
table inet run{number} {{
  chain prerouting {{ type filter hook prerouting priority raw; iifname "{ifname}" jump gate; }}
  chain input {{ type filter hook input priority filter - 10; iifname "{ifname}" jump gate; }}
  chain forward {{ type filter hook forward priority filter - 10; iifname "{ifname}" drop; oifname "{ifname}" drop; }}
  chain gate {{ ip saddr {sandbox} ip daddr {gateway} tcp dport 8080 accept; drop; }}
}}
""".strip()


def measure(effort: Effort) -> Result:
    result, leases = Result(), _QUICK_LEASES if effort.quick else _LEASES
    idle = "no rules at all"
    hosts: dict[str, Callable[[], None]] = {
        idle: lambda: None,
        "the gate, no lease": partial(_gate, 0),
        f"the gate, {leases:,} leases": partial(_gate, leases),
    }
    for count in _QUICK_TABLES if effort.quick else _TABLES:
        hosts[f"a table per run, {count:,} runs"] = partial(_tables, count)
    with ExitStack() as stack:
        packets: dict[str, Packets] = {}
        for name, prepare in hosts.items():
            host = stack.enter_context(Inside.new("bench"))
            try:
                host.call(prepare)
            except KernelRefused as error:
                result.missing[name] = error.message
                continue
            packets[name] = host.call(Packets)
        told = in_turns({name: partial(_one, name, socket) for name, socket in packets.items()}, rounds=effort.rounds(60, 5))
    group = result.group("one UDP packet over lo, sent and received by one thread")
    for name, values in told.items():
        group.add(name, values, unit="us", control=None if name == idle else idle)
    return result


def _one(name: str, packets: Packets) -> dict[str, float]:
    return {name: packets.measure()}


def _ends(number: int) -> tuple[IPv4Address, IPv4Address]:
    return IPv4Address(_FIRST + 4 * number + 1), IPv4Address(_FIRST + 4 * number + 2)


def _gate(leases: int) -> None:
    with tempfile.TemporaryDirectory(dir="/run/bench") as directory:
        gate = Gate(Path(directory))
        gate.add()
        for first in range(0, leases, _BATCH):
            texts = []
            for number in range(first, min(first + _BATCH, leases)):
                gateway, sandbox = _ends(number)
                texts.append(ruleset.render_lease(names.ifname(str(number)), sandbox, gateway, 8080, ttl_s=86400))
            gate.nft.apply("\n".join(texts), "grant leases")


def _tables(count: int) -> None:
    nft = Nft()
    for first in range(0, count, _BATCH):
        texts = []
        for number in range(first, min(first + _BATCH, count)):
            gateway, sandbox = _ends(number)
            texts.append(_TABLE.format(number=number, ifname=names.ifname(str(number)), gateway=gateway, sandbox=sandbox))
        nft.apply("\n".join(texts), f"add {count} tables")
