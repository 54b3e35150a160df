"""`sealnet run --dry-run`: what a run would be, with nothing changed."""

from __future__ import annotations

import dataclasses
import json
from ipaddress import IPv4Network

import click

from sealnet import request
from sealnet.kernel.host import Host
from sealnet.model import lock, names, ruleset
from sealnet.model.plan import Plan, Seal
from sealnet.model.subnets import first_free
from sealnet.records import State

_RELAY, _PROXY = 60001, 60002


def show(plan: Plan, *, as_json: bool) -> int:
    """Print plan, addresses and both rulesets."""
    config, state = request.config(), State()
    subnet: IPv4Network | None = None
    if plan.is_leased:
        host = Host(state.path, "dry-run")
        runs = frozenset(int(held.network_address) >> 2 for held in state.reservations())
        subnet = first_free(config.pool, host.see_taken(runs), runs, max_runs=config.max_runs)
        host.close()
    # A door's port is the kernel's choice when the run starts; a number from the documentation stands for it.
    relay, proxy = (_RELAY if plan.broker is not None else plan.lease_port), (_PROXY if plan.allow else None)
    seal = Seal(run_id=plan.run_id, subnet=subnet, lease_port=relay, proxy_port=proxy)
    gate = ruleset.GATE_TABLE if subnet is not None else ""
    lease = ""
    if seal.sandbox is not None and seal.gateway is not None:
        ttl_s = config.lease_ttl_s
        lease = "".join(ruleset.render_lease(seal.ifname, seal.sandbox, seal.gateway, port, ttl_s=ttl_s) for port in seal.ports)
    inside = ruleset.render_inside(gateway=seal.gateway, ports=seal.ports, ifname=names.SANDBOX_LINK)
    shown = {
        "run_id": plan.run_id,
        "confinement": str(plan.confinement),
        "command": list(plan.argv),
        "user": dataclasses.asdict(plan.user),
        "cwd": plan.cwd,
        "environment": sorted(plan.environment),
        "subnet": str(subnet) if subnet else None,
        "gateway": str(seal.gateway) if subnet else None,
        "sandbox": str(seal.sandbox) if subnet else None,
        "lease_ports": list(seal.ports),
        "broker": None if plan.broker is None else str(plan.broker),
        "allow": [f"{entry.host}:{entry.port}" for entry in plan.allow],
        "ifname": seal.ifname,
        "netns": seal.netns,
        "rulesets": {"gate": gate + lease, "inside": inside},
        "plan": None if plan.build else lock.freeze(plan).to_json(),
    }
    if as_json:
        click.echo(json.dumps(shown, indent=1))
        return 0
    for name in ("run_id", "confinement", "subnet", "gateway", "sandbox", "lease_ports", "broker", "allow", "ifname", "netns", "cwd"):
        value = shown[name]
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        click.echo(f"{name:<12} {text if value else '-'}")
    click.echo(f"{'user':<12} {plan.user.name} ({plan.user.uid}:{plan.user.gid})")
    click.echo(f"{'command':<12} {plan.command}")
    click.echo(f"{'environment':<12} {' '.join(sorted(plan.environment))}")
    if shown["plan"] is not None:
        click.echo("\n# The plan, as `sealnet plan` freezes it\n" + json.dumps(shown["plan"], indent=1))
    click.echo(
        "\n# The host's gate, shared by all runs\n"
        + (
            gate + "\n# The lease, in one transaction: renewed by adding it anew\n" + lease
            if lease
            else "# none: a severed run has no link\n"
        )
    )
    click.echo("# Inside the run's namespace\n" + inside, nl=False)
    return 0
