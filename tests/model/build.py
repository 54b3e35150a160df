"""Plans and seals to start from: a test says only what is special about its own."""

from __future__ import annotations

import json
from ipaddress import IPv4Network
from typing import Any

from sealnet.model import names
from sealnet.model.plan import Plan, Seal, User
from sealnet.model.policy import Confinement
from sealnet.model.record import Record

ROOT = User(name="root", uid=0, gid=0, groups=(0,), home="/root", shell="/bin/bash")
NOBODY = User(name="nobody", uid=65534, gid=65534, groups=(), home="/nonexistent", shell="/usr/sbin/nologin")
SUBNET = IPv4Network("198.18.0.0/30")


def a_plan(**changes: Any) -> Plan:
    """A severed run of `true` as root, or a sealed one when it is given a lease port."""
    confinement = Confinement.SEALED if changes.get("lease_port") is not None else Confinement.SEVERED
    given: dict[str, Any] = {"run_id": "run-1", "confinement": confinement, "argv": ("true",), "user": ROOT, "environment": {}, "cwd": "/"}
    return Plan(**given | changes)


def a_record(run_id: str = "run-1", **changes: Any) -> Record:
    """What is written down of a severed run that was just claimed."""
    given: dict[str, Any] = {
        "confinement": "severed",
        "asked": "severed",
        "user": "root",
        "command": "true",
        "started": 1.5,
        "boot_id": "b",
    }
    given |= {"supervisor": 7, "supervisor_start": 8, "ifname": names.ifname(run_id), "netns": names.netns(run_id)}
    return Record(run_id=run_id, **given | changes)


def sealed(run_id: str = "run-1", port: int = 8080) -> Seal:
    return Seal(run_id=run_id, subnet=SUBNET, lease_port=port)


def severed(run_id: str = "run-1") -> Seal:
    return Seal(run_id=run_id)


def egress_record(seq: int = 1, verdict: str = "DENY", **changes: Any) -> dict[str, Any]:
    """One decision of a run's proxy."""
    told: dict[str, Any] = {
        "schema": "sealnet.egress/1",
        "seq": seq,
        "run_id": "run-1",
        "time": 1.5,
        "verdict": verdict,
        "method": "CONNECT",
    }
    told |= {"host": "evil.test", "port": 443, "address": None, "reason": "not declared" if verdict == "DENY" else None}
    if verdict == "ALLOW":
        told |= {"host": "good.test", "address": "93.184.216.34"}
    count = 7 if verdict == "ALLOW" else None
    return told | {"bytes_up": count, "bytes_down": count, "duration_s": 0.5 if verdict == "ALLOW" else None} | changes


def egress_line(seq: int = 1, verdict: str = "DENY", **changes: Any) -> bytes:
    return json.dumps(egress_record(seq, verdict, **changes)).encode() + b"\n"
