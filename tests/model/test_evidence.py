"""The evidence claims what plan, proof and log bear out; a bundle that was edited, cut or cannot be read is never folded to enforced."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealnet.errors import UsageError
from sealnet.model.check import Check
from sealnet.model.egressfold import Tally
from sealnet.model.evidence import Bundle, EvidenceFold, Log, Told, digest, document, fold, render
from sealnet.model.lock import Frozen, freeze
from sealnet.model.policy import Confinement
from sealnet.model.receipt import Receipt
from tests.model.build import a_plan, egress_line

PUBLISHED = json.loads((Path(__file__).parents[2] / "docs/evidence.schema.json").read_text())
HELD = (
    Check(name="broker", kind="positive", asked="a", expected="b", found="b", ok=True, took_ms=0.1),
    Check(name="internet", kind="negative", asked="a", expected="b", found="b", ok=True, took_ms=0.1, control="the broker answered"),
)
LINES = (egress_line(1, "ALLOW"), egress_line(2))


def a_log(*lines: bytes, run_id: str = "run-1") -> Log:
    tally = Tally(run_id)
    for line in lines:
        tally.add(line)
    return Log(egress=tally.egress(ended=True), sha256=digest(b"".join(lines)))


def a_frozen(confinement: str, **changes: Any) -> Frozen:
    frozen = freeze(a_plan(lease_port=8080 if confinement == "sealed" else None))
    allow = ("good.test:443",) if confinement == "allowlist" else ()
    return dataclasses.replace(frozen, confinement=confinement, allow=allow, **changes)


def a_proof(confinement: str = "severed", run_id: str = "run-1", **changes: Any) -> bytes:
    values: dict[str, Any] = {"checks": HELD, "started": 1.5, "asked": confinement, "user": "root"}
    if confinement == "allowlist":
        values["hosts"] = ("good.test:443",)
    return Receipt(run_id=run_id, confinement=confinement, **values | changes).render()


ENDED = Told(ended=True, exit_status=0, duration_s=1.0, recorded=None, tried=[], events=[])
RECORDED = dataclasses.replace(ENDED, recorded=2)


def a_bundle(where: str = "a", confinement: str = "severed", *, told: Told | None = None, log: Log | None = None, **proof: Any) -> Bundle:
    frozen, data = a_frozen(confinement), a_proof(confinement, **proof)
    if confinement == "allowlist":
        log, told = log or a_log(*LINES), told or RECORDED
    environment = render(document(frozen, data, log, told or ENDED))
    return Bundle(where=where, plan=frozen.render(), proof=data, environment=environment, log=log)


def told_of(bundle: Bundle) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(bundle.environment or b"")
    jsonschema.Draft202012Validator(PUBLISHED).validate(told)
    return told


def test_each_confinement_claims_its_own() -> None:
    found = [told_of(a_bundle(confinement=str(one))) for one in Confinement]

    claims = ("confinement", "verdict", "network_severed", "egress_sealed", "egress_enforced", "complete")
    assert [[told[name] for name in claims] for told in found] == [
        ["severed", "severed", True, True, True, True],
        ["sealed", "sealed", False, True, True, True],
        ["allowlist", "allowlist", False, False, True, True],
        ["open", "open", False, False, False, True],
    ]
    assert [told["allowlist"] for told in found] == [[], [], ["good.test:443"], []]
    assert (found[2]["allowed"], found[2]["denied"], found[2]["denials"][0]["flag"]) == (1, 1, "--allow evil.test:443")


CUT = {
    "no end was seen": lambda: a_bundle(told=Told()),
    "no log": lambda: dataclasses.replace(
        a_bundle(),
        plan=a_frozen("allowlist").render(),
        proof=a_proof("allowlist"),
        environment=render(document(a_frozen("allowlist"), a_proof("allowlist"), None, RECORDED)),
    ),
    "a cut line": lambda: a_bundle(confinement="allowlist", log=a_log(LINES[0], LINES[1][:-1])),
    "a lost record": lambda: a_bundle(confinement="allowlist", log=a_log(LINES[0])),
    "a lost first record": lambda: a_bundle(confinement="allowlist", log=a_log(LINES[1]), told=dataclasses.replace(ENDED, recorded=1)),
    "no end of a request": lambda: a_bundle(confinement="allowlist", log=a_log(egress_line(1, "ALLOW", bytes_up=None), LINES[1])),
    "the door's count differs": lambda: a_bundle(confinement="allowlist", told=dataclasses.replace(ENDED, recorded=3)),
    "a decision was not recorded": lambda: a_bundle(confinement="allowlist", told=dataclasses.replace(RECORDED, unrecorded="no space")),
    "the door told no count": lambda: a_bundle(confinement="allowlist", told=ENDED),
}


@pytest.mark.parametrize("make", CUT.values(), ids=CUT.keys())
def test_what_was_not_recorded_whole_is_not_claimed(make: Callable[[], Bundle]) -> None:
    bundle = make()

    told = told_of(bundle)
    folded = fold([bundle])
    assert (told["complete"], told["verdict"], told["egress_enforced"]) == (False, "inconclusive", False)
    assert told["incomplete"]
    assert told["wording"].startswith("network: not proved")
    assert (folded.complete, folded.egress_enforced, folded.verdict) == (False, False, "inconclusive")
    assert folded.bundles[0].faults == tuple(told["incomplete"])


def test_a_refused_run_is_complete_and_claims_nothing() -> None:
    told = told_of(a_bundle(reason="cannot reach the broker", told=dataclasses.replace(ENDED, exit_status=125)))

    assert (told["reason"], told["verdict"], told["egress_enforced"], told["complete"]) == (
        "cannot reach the broker",
        "broken",
        False,
        True,
    )
    assert fold([a_bundle(reason="cannot reach the broker")]).egress_enforced is False


def test_a_run_that_was_severed_instead_is_one_of_its_plan() -> None:
    frozen = a_frozen("sealed", fallback="sever")
    proof = Receipt(
        run_id="run-1", started=1.5, confinement="severed", asked="sealed", user="root", checks=HELD, why_severed="no pool"
    ).render()

    told = document(frozen, proof, None, ENDED)

    assert (told["confinement"], told["asked"], told["egress_enforced"]) == ("severed", "sealed", True)
    with pytest.raises(ValueError, match="it is severed, and the plan's run sealed"):
        document(a_frozen("sealed"), proof, None, ENDED)


def test_a_receipt_of_other_hosts_is_not_the_plans() -> None:
    with pytest.raises(ValueError, match=r"its hosts are evil\.test:443, and the plan's good\.test:443"):
        document(a_frozen("allowlist"), a_proof("allowlist", hosts=("evil.test:443",)), a_log(*LINES), RECORDED)


def test_a_receipt_of_another_kind_of_run_is_not_the_plans() -> None:
    with pytest.raises(ValueError, match="it is severed, and the plan's run allowlist"):
        document(a_frozen("allowlist"), a_proof("severed"), None, ENDED)


# Folding


def test_enforced_only_if_every_one_was() -> None:
    runs = [a_bundle("a", run_id="run-3"), a_bundle("b", "sealed", run_id="run-2"), a_bundle("c", "allowlist")]

    folded = fold(runs)
    with_open = fold([*runs, a_bundle("d", "open", run_id="run-4")])

    assert (folded.egress_enforced, folded.complete, folded.confinement, folded.verdict) == (True, True, "allowlist", "allowlist")
    assert (folded.allowed, folded.denied, len(folded.bundles)) == (1, 1, 3)
    assert (with_open.egress_enforced, with_open.complete, with_open.confinement) == (False, True, "open")
    assert folded.to_json()["schema"] == "sealnet.evidence-fold/1"
    assert json.loads(json.dumps(folded.to_json()))["bundles"][2]["denied"] == 1


def test_no_evidence_is_no_answer() -> None:
    with pytest.raises(UsageError, match="none was named"):
        fold([])


def test_a_run_is_counted_once() -> None:
    with pytest.raises(UsageError, match="cannot fold evidence b: it is of the same run as a"):
        fold([a_bundle("b"), a_bundle("a")])
    assert fold([a_bundle("b"), a_bundle("a", started=2.5)]).egress_enforced


def changed(bundle: Bundle, part: str, change: Callable[[dict[str, Any]], object]) -> Bundle:
    told = json.loads(getattr(bundle, part))
    change(told)
    return dataclasses.replace(bundle, **{part: render(told)})


UNREADABLE = {
    "a directory that cannot be read": lambda: Bundle(where="a", unread="it cannot be read: Permission denied"),
    "an empty directory": lambda: Bundle(where="a"),
    **{
        f"{part} {what}": lambda part=part, data=data: dataclasses.replace(a_bundle(confinement="sealed"), **{part: data})
        for part, (what, data) in itertools.product(
            ("plan", "proof", "environment"),
            (("missing", None), ("empty", b""), ("no JSON", b"\xff"), ("a list", b"[]"), ("a number", b"1"), ("deep", b"[" * 100_000)),
        )
    },
}
EDITED = {
    "another claim": lambda: changed(a_bundle(confinement="open"), "environment", lambda told: told.update(egress_enforced=True)),
    "another verdict": lambda: changed(a_bundle(told=Told()), "environment", lambda told: told.update(verdict="severed")),
    "made complete": lambda: changed(
        a_bundle(confinement="allowlist", log=a_log(LINES[0])),
        "environment",
        lambda told: told.update(complete=True, incomplete=[], verdict="allowlist", egress_enforced=True),
    ),
    "fewer denied": lambda: changed(a_bundle(confinement="allowlist"), "environment", lambda told: told.update(denied=0, denials=[])),
    "another schema": lambda: changed(a_bundle(), "environment", lambda told: told.update(schema="sealnet.evidence/2")),
    "a strange field": lambda: changed(a_bundle(), "environment", lambda told: told.update(remark="x")),
    "a lost field": lambda: changed(a_bundle(), "environment", lambda told: told.pop("versions")),
    "tried of a wrong kind": lambda: changed(a_bundle(), "environment", lambda told: told.update(tried=7)),
    "an edited plan": lambda: changed(a_bundle(), "plan", lambda told: told["plan"].update(argv=["other"])),
    "another plan": lambda: dataclasses.replace(a_bundle(), plan=a_frozen("severed", argv=("other",)).render()),
    "a plan of another kind": lambda: dataclasses.replace(a_bundle(), plan=a_frozen("open").render()),
    "another run's receipt": lambda: dataclasses.replace(a_bundle(), proof=a_proof(run_id="run-2")),
    "an edited receipt": lambda: changed(a_bundle(), "proof", lambda told: told["checks"][0].update(ok=False)),
    "a receipt without a reason": lambda: changed(a_bundle(reason="refused"), "proof", lambda told: told.update(reason=None)),
    "a changed time": lambda: changed(a_bundle(), "proof", lambda told: told.update(started=2.5)),
    "another log": lambda: dataclasses.replace(a_bundle(confinement="allowlist"), log=a_log(LINES[0], egress_line(2, host="else.test"))),
    "a longer log": lambda: dataclasses.replace(a_bundle(confinement="allowlist"), log=a_log(*LINES, egress_line(3))),
    "a log that has gone": lambda: dataclasses.replace(a_bundle(confinement="allowlist"), log=None),
    "a log from elsewhere": lambda: dataclasses.replace(a_bundle(), log=a_log(*LINES)),
}


@pytest.mark.parametrize("make", [*UNREADABLE.values(), *EDITED.values()], ids=[*UNREADABLE, *EDITED])
def test_what_cannot_be_relied_on_is_never_folded_to_enforced(make: Callable[[], Bundle]) -> None:
    good = a_bundle("good", run_id="run-9")

    alone, beside = fold([make()]), fold([good, make()])

    assert fold([good]).egress_enforced
    for folded in (alone, beside):
        assert (folded.egress_enforced, folded.complete, folded.verdict) == (False, False, "broken")
        assert folded.wording.startswith("network: not proved")
    assert alone.bundles[0].faults
    assert beside.bundles[1].egress_enforced


@given(
    st.sampled_from(["plan", "proof", "environment"]),
    st.integers(0, 10_000),
    st.one_of(st.binary(min_size=1, max_size=3), st.just(b"")),
    st.sampled_from(["open", "allowlist"]),
)
@settings(max_examples=200)
def test_no_change_of_bytes_makes_a_claim_true(part: str, at: int, data: bytes, confinement: str) -> None:
    """Of one that is not enforced."""
    bundle = a_bundle(confinement=confinement, log=None if confinement == "open" else a_log(LINES[0]))
    whole = getattr(bundle, part)
    at %= len(whole)

    folded: EvidenceFold = fold([dataclasses.replace(bundle, **{part: whole[:at] + data + whole[at + 1 :]})])

    assert not (folded.egress_enforced and folded.complete)


def test_the_digests_are_of_the_files() -> None:
    bundle = a_bundle(confinement="allowlist")

    files = told_of(bundle)["files"]

    assert files == {
        "receipt.json": hashlib.sha256(bundle.proof or b"").hexdigest(),
        "run-1.egress.jsonl": hashlib.sha256(b"".join(LINES)).hexdigest(),
    }
