"""What was observed of a seal before its payload started, and what many such receipts amount to together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sealnet.errors import UsageError
from sealnet.model.check import Check
from sealnet.model.policy import Confinement, least_confined

SCHEMA = "sealnet.receipt/1"
FOLD_SCHEMA = "sealnet.fold/1"
BROKEN, INCONCLUSIVE = "broken", "inconclusive"
# From best to worst; a proved one stands before both.
_UNPROVED = (INCONCLUSIVE, BROKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One run's. Addresses are text, `started` is seconds since the epoch, None is `does not apply`; docs/receipt.schema.json says it all.

    `reason` tells why a run that was refused has no proof; `why_severed` why one that asked for a broker runs without.
    """

    run_id: str
    started: float
    confinement: str
    asked: str
    user: str
    checks: tuple[Check, ...] = ()
    hosts: tuple[str, ...] = ()
    gateway: str | None = None
    sandbox: str | None = None
    lease_ports: tuple[int, ...] = ()
    subnet: str | None = None
    ifname: str | None = None
    ifindex: int | None = None
    mac: str | None = None
    netns_inode: int | None = None
    rulesets: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    proof_ms: float = 0.0
    preflight: bool = True
    why_severed: str | None = None
    reason: str | None = None

    @property
    def verdict(self) -> str:
        found = verdict(self.confinement, self.checks)
        return BROKEN if self.reason is not None and found not in _UNPROVED else found

    @property
    def wording(self) -> str:
        return wording(self.confinement, self.verdict, gateway=self.gateway, ports=self.lease_ports, hosts=self.hosts)

    @property
    def network_severed(self) -> bool:
        return claims(self.confinement, self.verdict)["network_severed"]

    @property
    def egress_sealed(self) -> bool:
        return claims(self.confinement, self.verdict)["egress_sealed"]

    @property
    def egress_enforced(self) -> bool:
        return claims(self.confinement, self.verdict)["egress_enforced"]

    def render(self) -> bytes:
        """As a file: one JSON object."""
        return json.dumps(self.to_json(), indent=1).encode() + b"\n"

    def to_json(self) -> dict[str, Any]:
        link = {"ifname": self.ifname, "ifindex": self.ifindex, "mac": self.mac} if self.ifname is not None else None
        rest = {name: getattr(self, name) for name in _PLAIN}
        return {
            "schema": SCHEMA,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in rest.items()},
            "verdict": self.verdict,
            "wording": self.wording,
            **claims(self.confinement, self.verdict),
            "link": link,
            # A severed run has nothing to do with the gate.
            "rulesets": {"gate": None, "inside": None, **self.rulesets},
            "proof_ms": round(self.proof_ms, 3),
            "checks": [one.to_json() for one in self.checks],
        }


_PLAIN = tuple(item.name for item in fields(Receipt) if item.name not in ("ifname", "ifindex", "mac", "checks"))


def parse(told: Mapping[str, Any]) -> Receipt:
    """The receipt that `to_json` rendered. Raises ValueError when it is none; whether it claims what follows is for `fold` to see."""
    known = {item.name for item in fields(Receipt)}
    try:
        if told["schema"] != SCHEMA:
            raise ValueError(f"its schema is {told['schema']!r}")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items() if name in known}
        return Receipt(**{**values, **(told["link"] or {}), "checks": tuple(Check(**one) for one in told["checks"])})
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"not a receipt ({e!r})") from e


def verdict(confinement: str, checks: Sequence[Check]) -> str:
    """The confinement's own word when everything held. A check that could not be made, a refusal beside which nothing was seen to answer,
    and a proof without any positive control are inconclusive. An open run claims nothing, so nothing is asked of it.
    """
    if confinement == Confinement.OPEN:
        return confinement
    if any(one.ok is False for one in checks):
        return BROKEN
    uncontrolled = any(one.kind == "negative" and one.control is None for one in checks)
    if uncontrolled or any(one.ok is None for one in checks) or not any(one.kind == "positive" for one in checks):
        return INCONCLUSIVE
    return str(confinement)


def claims(confinement: str, found: str) -> dict[str, bool]:
    """Each is true of everything at least as confined: severed is sealed, and both are enforced. Nothing is claimed that was not proved."""
    proved = found == confinement
    return {
        "network_severed": proved and confinement == Confinement.SEVERED,
        "egress_sealed": proved and confinement in (Confinement.SEVERED, Confinement.SEALED),
        "egress_enforced": proved and confinement != Confinement.OPEN,
    }


def wording(confinement: str, found: str, *, gateway: str | None, ports: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """One line for people. It is pinned: others match on it."""
    if found != confinement:
        return f"network: not proved - {confinement} was asked for, the proof is {found}"
    at = f"{gateway}:{ports[0]}" if gateway and ports else "nowhere"
    if confinement == Confinement.SEVERED:
        return "network: off - severed"
    if confinement == Confinement.SEALED:
        return f"network: off - egress sealed to the run's broker at {at}"
    if confinement == Confinement.ALLOWLIST:
        door = f"{gateway}:{ports[-1]}" if gateway and ports else "nowhere"
        broker = f", and sealed to its broker at {at}" if len(ports) > 1 else ""
        return f"network: limited - egress enforced to {', '.join(hosts)} by the run's door at {door}{broker}"
    return "network: on - egress is not enforced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Many receipts as one. `least` is the run that decided: of those alike the first by run id."""

    confinement: str
    verdict: str
    wording: str
    network_severed: bool
    egress_sealed: bool
    egress_enforced: bool
    runs: int
    counts: dict[str, int]
    least: str | None

    def to_json(self) -> dict[str, Any]:
        return {"schema": FOLD_SCHEMA, **asdict(self)}


def fold(receipts: Iterable[Receipt | Mapping[str, Any]]) -> Fold:
    """A set of runs is as confined as its least confined member, and as proved as its least proved; the order of them does not matter.

    Takes receipts as they are or as JSON objects. Raises UsageError for what is none. Of no runs at all nothing is proved or claimed.
    """
    known = sorted(map(_checked, receipts), key=lambda receipt: str(receipt["run_id"]))
    confinement = least_confined(Confinement(receipt["confinement"]) for receipt in known)
    words = [receipt["verdict"] for receipt in known]
    unproved = [word for word in reversed(_UNPROVED) if word in words]
    found = unproved[0] if unproved else str(confinement) if known else INCONCLUSIVE
    least = next((receipt for receipt in known if receipt["verdict"] == found), None)
    text = "network: not proved - there are no runs"
    if least is not None:
        text = least["wording"] if len(known) == 1 else f"{least['wording']} ({len(known)} runs, the least confined is {least['run_id']})"
    return Fold(
        confinement=str(confinement),
        verdict=found,
        wording=text,
        **{
            name: bool(known) and all(receipt[name] for receipt in known)
            for name in ("network_severed", "egress_sealed", "egress_enforced")
        },
        runs=len(known),
        counts={str(one): sum(receipt["confinement"] == one for receipt in known) for one in Confinement},
        least=least["run_id"] if least is not None else None,
    )


def _checked(given: Receipt | Mapping[str, Any]) -> Mapping[str, Any]:
    """What a receipt claims must follow from its own checks, confinement and verdict: an edited one is none."""
    receipt = given.to_json() if isinstance(given, Receipt) else given
    try:
        if receipt["schema"] != SCHEMA:
            raise ValueError(f"its schema is {receipt['schema']!r}")
        confinement = Confinement(receipt["confinement"])
        if receipt["verdict"] not in (confinement, *_UNPROVED):
            raise ValueError(f"its verdict is {receipt['verdict']!r}")
        proved = receipt["verdict"] == confinement
        if proved and (verdict(confinement, [Check(**one) for one in receipt["checks"]]) != confinement or receipt["reason"] is not None):
            raise ValueError("its verdict does not follow from its checks")
        for name, value in claims(confinement, receipt["verdict"]).items():
            if receipt[name] is not value:
                raise ValueError(f"{name} does not follow from its verdict")
        if not isinstance(receipt["run_id"], str) or not isinstance(receipt["wording"], str):
            raise ValueError("run_id and wording are text")
    except (KeyError, TypeError, ValueError) as e:
        raise UsageError(f"cannot fold a receipt: {e if isinstance(e, ValueError) else f'not a receipt ({e!r})'}") from e
    return receipt
