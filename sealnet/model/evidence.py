"""The evidence of a run: what is claimed of all of it, from plan, proof, log and end; and of many runs together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sealnet.errors import UsageError
from sealnet.model import lock, receipt
from sealnet.model.egressfold import Denial, Egress, merged
from sealnet.model.lock import Frozen
from sealnet.model.policy import Confinement

SCHEMA = "sealnet.evidence/1"
FOLD_SCHEMA = "sealnet.evidence-fold/1"
PLAN, RECEIPT, ENVIRONMENT = "plan.lock.json", "receipt.json", "environment.json"

LOG_SUFFIX = ".egress.jsonl"


def log_name(run_id: str) -> str:
    return f"{run_id}{LOG_SUFFIX}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What only the end of the run tells, and no other file of the bundle bears out.

    `recorded` is the door's own count of the decisions that it has written down, `unrecorded` why it could not write one. `tried` is None
    where nothing recorded it; `tally` tells how much of it that is, as `Record.tally`.
    """

    ended: bool = False
    exit_status: int | None = None
    duration_s: float | None = None
    recorded: int | None = None
    unrecorded: str | None = None
    tried: Sequence[Mapping[str, Any]] | None = None
    tally: str = "none"
    events: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Told:
        return cls(**{name: document[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The log beside the document: its content, counted, and the hash of the file."""

    egress: Egress
    sha256: str


def document(frozen: Frozen, proof: bytes, log: Log | None, told: Told) -> dict[str, Any]:
    """`environment.json`. What was not recorded whole is not claimed to have been enforced: whoever reads one field must not be misled.

    Raises ValueError where the proof is none, or not of this plan.
    """
    seen = _receipt(proof, frozen)
    found, confinement = seen["verdict"], seen["confinement"]
    missing = _incomplete(seen, log, told)
    wording = seen["wording"]
    if missing and found == confinement:
        found = receipt.INCONCLUSIVE
        wording = receipt.wording(confinement, found, gateway=None, ports=())
    egress = log.egress if log is not None else Egress()
    return {
        "schema": SCHEMA,
        "run_id": seen["run_id"],
        "started": seen["started"],
        "duration_s": told.duration_s,
        "ended": told.ended,
        "exit_status": told.exit_status,
        "confinement": confinement,
        "asked": seen["asked"],
        "verdict": found,
        "wording": wording,
        **receipt.claims(confinement, found),
        "complete": not missing,
        "incomplete": missing,
        "reason": seen["reason"],
        "allowlist": frozen.allowlist if confinement == Confinement.ALLOWLIST else [],
        "allowed": egress.allowed,
        "denied": egress.denied,
        "denials": [one.to_json() for one in egress.denials],
        "denials_left_out": egress.left_out,
        "recorded": told.recorded,
        "unrecorded": told.unrecorded,
        "tried": None if told.tried is None else [dict(one) for one in told.tried],
        "tally": told.tally,
        "events": [dict(one) for one in told.events],
        "versions": seen["versions"],
        "plan_sha256": frozen.sha256,
        "files": {RECEIPT: digest(proof), **({log_name(seen["run_id"]): log.sha256} if log is not None else {})},
    }


def render(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _receipt(proof: bytes, frozen: Frozen) -> dict[str, Any]:
    try:
        seen = json.loads(proof)
        receipt.fold([seen])
    except UsageError as e:
        raise ValueError(e.message.removeprefix("cannot fold a receipt: ")) from e
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f"not a receipt ({e})") from e
    severed = seen["confinement"] == Confinement.SEVERED and frozen.fallback == "sever" and seen["why_severed"]
    if seen["asked"] != frozen.confinement or not (seen["confinement"] == frozen.confinement or severed):
        raise ValueError(f"it is {seen['confinement']}, and the plan's run {frozen.confinement}")
    if seen["verdict"] == Confinement.ALLOWLIST and sorted(seen["hosts"]) != frozen.allowlist:
        raise ValueError(f"its hosts are {', '.join(seen['hosts'])}, and the plan's {', '.join(frozen.allowlist)}")
    return dict(seen)


def _incomplete(seen: Mapping[str, Any], log: Log | None, told: Told) -> list[str]:
    """Why the files do not tell everything. A run that was refused had nobody to log."""
    missing = [] if told.ended else ["the end of the run was not seen"]
    if told.unrecorded is not None:
        missing.append(f"its proxy could not write down a decision: {told.unrecorded}")
    if log is not None:
        missing += log.egress.faults
    if seen["confinement"] != Confinement.ALLOWLIST or seen["reason"] is not None or not told.ended:
        return missing
    if log is None:
        missing.append("there is no log of what its proxy decided")
    elif told.recorded is None:
        missing.append("its proxy did not tell how many decisions it has written down")
    elif told.recorded != log.egress.records:
        missing.append(f"its proxy has written down {told.recorded} decisions, and the log has {log.egress.records}")
    return missing


# Many


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One directory's files as they were found; None for what is not there. `unread` says why where one could not be read."""

    where: str
    plan: bytes | None = None
    proof: bytes | None = None
    environment: bytes | None = None
    log: Log | None = None
    unread: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class One:
    """What one bundle is worth. `faults`: why nothing can be built on it; an unreadable or edited one, a run whose log was cut."""

    where: str
    run_id: str | None
    confinement: str
    verdict: str
    egress_enforced: bool
    complete: bool
    allowed: int
    denied: int
    exit_status: int | None
    faults: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFold:
    """Many bundles as one: enforced only if every one was, complete only if every one is. `receipts`: how confined they are together."""

    receipts: receipt.Fold
    complete: bool
    allowed: int
    denied: int
    denials: tuple[Denial, ...]
    bundles: tuple[One, ...] = field(default=())

    @property
    def egress_enforced(self) -> bool:
        return self.receipts.egress_enforced

    @property
    def verdict(self) -> str:
        return self.receipts.verdict

    @property
    def confinement(self) -> str:
        return self.receipts.confinement

    @property
    def wording(self) -> str:
        return self.receipts.wording

    def to_json(self) -> dict[str, Any]:
        return {
            **self.receipts.to_json(),
            "schema": FOLD_SCHEMA,
            "complete": self.complete,
            "allowed": self.allowed,
            "denied": self.denied,
            "denials": [one.to_json() for one in self.denials],
            "bundles": [one.to_json() for one in self.bundles],
        }


def fold(bundles: Sequence[Bundle]) -> EvidenceFold:
    """Raises UsageError where there is none, or two are of one run: nothing is counted twice."""
    if not bundles:
        raise UsageError("cannot fold evidence: none was named")
    ones: list[One] = []
    receipts: list[dict[str, Any]] = []
    denials: list[Denial] = []
    places: dict[tuple[str, float], str] = {}
    for bundle in sorted(bundles, key=lambda bundle: bundle.where):
        one, proof = _judge(bundle)
        ones.append(one)
        receipts.append(proof)
        denials += bundle.log.egress.denials if bundle.log is not None else ()
        if one.run_id is not None:
            key = (one.run_id, proof["started"])
            if key in places:
                raise UsageError(f"cannot fold evidence {bundle.where}: it is of the same run as {places[key]}", hint="name each run once")
            places[key] = bundle.where
    return EvidenceFold(
        receipts=receipt.fold(receipts),
        complete=all(one.complete for one in ones),
        allowed=sum(one.allowed for one in ones),
        denied=sum(one.denied for one in ones),
        denials=merged(denials),
        bundles=tuple(ones),
    )


def _judge(bundle: Bundle) -> tuple[One, dict[str, Any]]:
    """What it is worth, and the receipt that it counts as."""
    try:
        told, proof = _consistent(bundle)
    except ValueError as e:
        return _worthless(bundle, str(e))
    faults = tuple(told["incomplete"])
    counts = {**proof, **{name: told[name] for name in ("verdict", "wording", *receipt.claims(proof["confinement"], ""))}}
    names = ("run_id", "confinement", "verdict", "egress_enforced", "complete", "allowed", "denied", "exit_status")
    return One(where=bundle.where, faults=faults, **{name: told[name] for name in names}), counts


def _consistent(bundle: Bundle) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document and the receipt. Every claim is derived anew from the other files; ValueError where they do not bear it out."""
    if bundle.unread is not None:
        raise ValueError(bundle.unread)
    for name, data in ((PLAN, bundle.plan), (RECEIPT, bundle.proof), (ENVIRONMENT, bundle.environment)):
        if data is None:
            raise ValueError(f"there is no {name}")
    try:
        frozen = lock.parse(bundle.plan or b"", PLAN)
    except UsageError as e:
        raise ValueError(e.message) from e
    try:
        told = json.loads(bundle.environment or b"")
        if told["schema"] != SCHEMA:
            raise ValueError(f"its schema is {told['schema']!r}")
        ending = Told.of(told)
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{ENVIRONMENT} is none ({e!r})") from e
    try:
        follows = json.loads(json.dumps(document(frozen, bundle.proof or b"", bundle.log, ending)))
    except ValueError as e:
        raise ValueError(f"{RECEIPT}: {e}") from e
    except (KeyError, TypeError) as e:
        raise ValueError(f"{ENVIRONMENT} is none ({e!r})") from e
    if differing := sorted(
        name for name in follows.keys() | told.keys() if name not in told or name not in follows or follows[name] != told[name]
    ):
        raise ValueError(f"edited: {', '.join(differing)} of {ENVIRONMENT} not what plan, receipt and log bear out")
    return told, json.loads(bundle.proof or b"")


def _worthless(bundle: Bundle, why: str) -> tuple[One, dict[str, Any]]:
    """Nothing is known of such a run, so it counts as the least confined and as broken."""
    egress = bundle.log.egress if bundle.log is not None else Egress()
    stand_in = receipt.Receipt(
        run_id=bundle.where, started=0.0, confinement=Confinement.OPEN, asked=Confinement.OPEN, user="", reason=why
    ).to_json()
    stand_in["wording"] = f"network: not proved - the evidence in {bundle.where} is worth nothing"
    return One(
        where=bundle.where,
        run_id=None,
        confinement=str(Confinement.OPEN),
        verdict=receipt.BROKEN,
        egress_enforced=False,
        complete=False,
        allowed=egress.allowed,
        denied=egress.denied,
        exit_status=None,
        faults=(why,),
    ), stand_in
