"""Looks at this host, builds a throw-away seal on it, and judges both."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from typing import Any

from sealnet import caller, probe, request
from sealnet.errors import CannotSeal, PoolExhausted, SealnetError, UsageError
from sealnet.kernel import daemons, firewalls, routes, survey
from sealnet.kernel.netlink import Netlink
from sealnet.model.config import Config
from sealnet.model.facts import Facts, Row
from sealnet.model.interference import interference
from sealnet.model.requirements import requirements
from sealnet.model.subnets import Occupant, first_free
from sealnet.probe import CanSeal
from sealnet.records import State

SCHEMA = "sealnet.doctor/1"
# Steps of the probe that come after its broker was reached.
_LATER = ("start", "run", "remove")
# A /16.
_WIDE = 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was seen, what is to be said of it, and what became of the throw-away seal."""

    facts: Facts
    rows: tuple[Row, ...]
    can: CanSeal

    def to_json(self, version: str) -> dict[str, Any]:
        """The document of `SCHEMA`; `version` is sealnet's own."""
        can = self.can
        versions = {tool.name: tool.version for tool in self.facts.tools if tool.version}
        return {
            "schema": SCHEMA,
            "can_seal": can.ok,
            "kernel": self.facts.release,
            "versions": {"sealnet": version, "python": platform.python_version(), **versions},
            "rows": [row.to_json() for row in self.rows],
            "probe": {
                "ok": can.ok,
                "step": can.step,
                "reason": can.reason,
                "hint": can.hint,
                "at": can.at,
                "took_ms": can.took_ms,
                "steps": [{"step": step, "took_ms": took_ms} for step, took_ms in can.steps],
            },
        }


def examine(state: State, *, lease_port: int | None = None, tried: CanSeal | None = None) -> Report:
    """Look first, for the seal puts up the gate. Whatever cannot be looked at is told as a row, not raised.

    `tried` is what the worker's attempt has answered: none is made then.
    """
    facts = replace(_facts(state), has_worker=tried is not None)
    can = probe.attempt(lambda: _ready(state), lease_port) if tried is None else tried
    let_in = True if can.ok or can.step in _LATER else False if can.step == "prove" else None
    rows = (*requirements(facts), *interference(facts, let_in=let_in))
    return Report(facts=facts, rows=rows, can=can)


def _ready(state: State) -> tuple[State, Config]:
    caller.require_root("try a seal", "sealnet doctor")
    config = request.config()
    state.prepare()
    return state, config


def _facts(state: State) -> Facts:
    root, release = os.geteuid() == 0, platform.release()
    lacking = survey.lacking() if root else ()
    may_look = root and not lacking
    config, config_fault = _config()
    seen: dict[str, Any] = {"chains": None, "gate": None, "orphans": None}
    if may_look:
        seen["chains"], seen["chain_names"] = firewalls.see()
        seen["gate"], seen["orphans"] = _own(state)
    return Facts(
        release=release,
        machine=platform.machine(),
        root=root,
        lacking=lacking,
        container=survey.container(),
        sysctls_writable=survey.sysctls_writable() if root else None,
        features=tuple(survey.features(root=may_look)),
        tools=tuple(survey.tools()),
        modules=survey.modules(release),
        modules_disabled=survey.number("kernel/modules_disabled") == 1,
        max_net_namespaces=survey.number("user/max_net_namespaces"),
        max_user_namespaces=survey.number("user/max_user_namespaces"),
        max_runs=config.max_runs,
        daemons=tuple(daemons.see()),
        installed=survey.installed(),
        ip_forward=survey.number("net/ipv4/ip_forward") == 1,
        rp_filter=survey.number("net/ipv4/conf/all/rp_filter") or 0,
        config_fault=config_fault,
        state_path=str(state.path),
        **_stored(state, root=root),
        **_routed(state, config),
        **seen,
    )


def _stored(state: State, *, root: bool) -> dict[str, Any]:
    """What keeps runs from being written down, and what mends it. Whose the directory must be, only root can say."""
    if (fault := survey.storage_fault(state.path)) is not None:
        return {"state_fault": fault}
    if root and (owned := state.fault()) is not None:
        return {"state_fault": owned[0], "state_fix": owned[1]}
    return {}


def _config() -> tuple[Config, str | None]:
    try:
        return request.config(), None
    except UsageError as error:
        return Config(), error.message


def _own(state: State) -> tuple[str | None, tuple[str, ...] | None]:
    """What is wrong with the gate (nothing, while it is still to be put up), and the orphans."""
    if not state.path.is_dir():
        return "", ()
    try:
        # A library that they need may be missing, which is told with the tools.
        from sealnet import reap
        from sealnet.kernel.gate import Gate
        from sealnet.kernel.host import Host

        host = Host(state.path, state.tag)
    except CannotSeal:
        return None, None
    try:
        gate = Gate(state.path)
        return gate.changed() or "", tuple(run_id for run_id in reap.orphans(host, state) if run_id != probe.run_id(state))
    finally:
        host.close()


def _routed(state: State, config: Config) -> dict[str, Any]:
    """What the host routes, as far as the pool goes."""
    runs = frozenset(int(subnet.network_address) >> 2 for subnet in state.reservations())
    told: dict[str, Any] = {"pool": ", ".join(map(str, config.pool))}
    try:
        with Netlink() as netlink:
            taken = routes.see_taken(netlink, runs)
            told["broad"] = tuple(routes.see_broad(netlink))
            told["rules"] = tuple(str(rule) for rule in routes.bending(routes.see_rules(netlink), config.pool))
        # A peer or a resolver in the pool is passed over, and not worth a word.
        wide = [one for one in taken if one.last - one.first >= _WIDE]
        covering = [one for one in wide if any(_overlap(one, prefix) for prefix in config.pool)]
        told["covering"] = tuple(dict.fromkeys(str(one.why) for one in sorted(covering, key=lambda one: one.first - one.last)))
        told["free"] = str(first_free(config.pool, taken, runs, max_runs=config.max_runs))
    except PoolExhausted as error:
        told["exhausted"], told["exhausted_hint"] = error.message, error.hint or ""
    except (SealnetError, OSError) as error:
        told["exhausted"] = str(error)
    return told


def _overlap(occupant: Occupant, prefix: IPv4Network) -> bool:
    return occupant.first <= int(prefix.broadcast_address) and occupant.last >= int(prefix.network_address)
