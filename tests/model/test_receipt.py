"""The verdict follows from the checks, the claims from the verdict, and many receipts are as good as the worst of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealnet.errors import UsageError
from sealnet.model.check import Check
from sealnet.model.policy import Confinement
from sealnet.model.receipt import Receipt, fold, verdict, wording

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/receipt.schema.json").read_text())


def a_check(kind: str = "state", *, ok: bool | None = True, control: str | None = None, name: str = "check") -> Check:
    control = "the host reaches it" if kind == "negative" and control is None else control
    return Check(name=name, kind=kind, asked="a", expected="b", found="b", ok=ok, took_ms=0.12345, control=control)


HELD = (a_check(), a_check("positive", name="broker"), a_check("negative"))


def a_receipt(run_id: str = "run-1", confinement: str = "sealed", **changes: Any) -> Receipt:
    values: dict[str, Any] = {"checks": HELD, "started": 1.5, "asked": confinement, "user": "nobody"}
    if confinement == "sealed":
        values |= {"gateway": "10.1.0.1", "sandbox": "10.1.0.2", "subnet": "10.1.0.0/30", "lease_ports": (8080,), "ifname": "sealaaaa"}
    return Receipt(run_id=run_id, confinement=confinement, **values | changes)


def schema_faults(receipt: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(receipt)]


@pytest.mark.parametrize("confinement", ["severed", "sealed", "allowlist"])
@pytest.mark.parametrize(
    ("checks", "found"),
    [
        (HELD, None),
        ((*HELD, a_check(ok=False)), "broken"),
        ((*HELD, a_check(ok=None)), "inconclusive"),
        ((*HELD, a_check(ok=None), a_check("negative", ok=False)), "broken"),
        ((a_check(), a_check("negative")), "inconclusive"),
        ((), "inconclusive"),
        ((*HELD, dataclasses.replace(a_check("negative"), control=None)), "inconclusive"),
        ((a_check("positive", ok=None), a_check("negative")), "inconclusive"),
    ],
    ids=["held", "one fails", "one unmade", "fails beside unmade", "nothing answered", "no checks", "no control", "the door unmade"],
)
def test_a_verdict_is_the_confinements_own_word_only_when_everything_held(
    confinement: str, checks: tuple[Check, ...], found: str | None
) -> None:
    assert verdict(confinement, checks) == (found or confinement)


@pytest.mark.parametrize(
    ("confinement", "severed", "sealed", "enforced"),
    [("severed", True, True, True), ("sealed", False, True, True), ("allowlist", False, False, True), ("open", False, False, False)],
)
def test_each_claim_is_true_of_everything_at_least_as_confined(confinement: str, severed: bool, sealed: bool, enforced: bool) -> None:
    receipt = a_receipt(confinement=confinement)

    told = receipt.to_json()
    assert (told["network_severed"], told["egress_sealed"], told["egress_enforced"]) == (severed, sealed, enforced)
    assert (receipt.network_severed, receipt.egress_sealed, receipt.egress_enforced) == (severed, sealed, enforced)
    assert told["verdict"] == confinement
    assert schema_faults(told) == []


@pytest.mark.parametrize("ok", [False, None])
@pytest.mark.parametrize("confinement", ["severed", "sealed", "allowlist"])
def test_nothing_is_claimed_that_was_not_proved(confinement: str, ok: bool | None) -> None:
    told = a_receipt(confinement=confinement, checks=(*HELD, a_check(ok=ok))).to_json()

    assert not told["network_severed"]
    assert not told["egress_sealed"]
    assert not told["egress_enforced"]
    assert told["wording"].startswith("network: not proved")
    assert schema_faults(told) == []


def test_the_wording_is_pinned() -> None:
    at = {"gateway": "10.1.0.1", "ports": (8080,)}
    hosts = ("pypi.org:443", "files.pythonhosted.org:443")

    assert [
        wording("severed", "severed", gateway=None, ports=()),
        wording("sealed", "sealed", **at),
        wording("allowlist", "allowlist", **at, hosts=hosts),
        wording("allowlist", "allowlist", gateway="10.1.0.1", ports=(8080, 3128), hosts=("pypi.org:443",)),
        wording("open", "open", gateway=None, ports=()),
        wording("sealed", "broken", **at),
        wording("severed", "inconclusive", gateway=None, ports=()),
    ] == [
        "network: off - severed",
        "network: off - egress sealed to the run's broker at 10.1.0.1:8080",
        "network: limited - egress enforced to pypi.org:443, files.pythonhosted.org:443 by the run's door at 10.1.0.1:8080",
        "network: limited - egress enforced to pypi.org:443 by the run's door at 10.1.0.1:3128, and sealed to its broker at 10.1.0.1:8080",
        "network: on - egress is not enforced",
        "network: not proved - sealed was asked for, the proof is broken",
        "network: not proved - severed was asked for, the proof is inconclusive",
    ]


def test_a_refused_run_tells_why_and_is_broken() -> None:
    receipt = a_receipt(checks=HELD, reason="cannot seal run run-1: no")

    assert receipt.verdict == "broken"
    assert a_receipt(checks=(), reason="no").verdict == "inconclusive"
    assert json.loads(receipt.render())["reason"] == "cannot seal run run-1: no"


def test_the_schema_refuses_what_is_no_receipt() -> None:
    told = a_receipt().to_json()
    assert schema_faults(told) == []

    for name in told:
        assert schema_faults({key: value for key, value in told.items() if key != name}), name
    assert schema_faults(told | {"extra": 1})
    assert schema_faults(told | {"egress_sealed": False})
    assert schema_faults(told | {"verdict": "broken"})
    assert schema_faults(told | {"checks": []})
    assert schema_faults(told | {"checks": [told["checks"][0] | {"control": "x"}, *told["checks"][1:]]})


@pytest.mark.parametrize("confinement", ["severed", "sealed", "allowlist"])
def test_the_schema_refuses_a_proof_that_does_not_follow_from_its_checks(confinement: str) -> None:
    told = a_receipt(confinement=confinement).to_json()
    state, positive, negative = told["checks"]
    assert schema_faults(told) == []

    for checks in (
        [state, negative],
        [state, positive, negative | {"control": None}],
        [state, positive | {"ok": None}, negative],
        [state | {"ok": False}, positive, negative],
    ):
        assert schema_faults(told | {"checks": checks})
        with pytest.raises(UsageError, match="its verdict does not follow from its checks"):
            fold([told | {"checks": checks}])
    assert schema_faults(told | {"confinement": "open"})
    assert schema_faults(told | {"reason": "it was refused"})
    assert (fold([told]).verdict, fold([a_receipt(confinement=confinement, reason="refused")]).verdict) == (confinement, "broken")


def test_the_schema_knows_which_proof_has_a_door() -> None:
    sealed, severed = a_receipt().to_json(), a_receipt(confinement="severed").to_json()
    assert schema_faults(sealed) == schema_faults(severed) == []

    for name in ("gateway", "sandbox", "subnet", "link"):
        assert schema_faults(sealed | {name: None}), name
    assert schema_faults(sealed | {"lease_ports": []})
    for name in ("gateway", "lease_ports", "link"):
        assert schema_faults(severed | {name: sealed[name]}), name


# Many


RANKED = [str(one) for one in Confinement]


def test_the_ranking_is_pinned() -> None:
    assert RANKED == ["severed", "sealed", "allowlist", "open"]
    for one, other in itertools.combinations(RANKED, 2):
        for pair in ([one, other], [other, one]):
            folded = fold(a_receipt(f"run-{index}", confinement) for index, confinement in enumerate(pair))
            assert (folded.confinement, folded.verdict) == (other, other)
            assert folded.least == f"run-{pair.index(other)}"


def test_of_no_runs_nothing_is_claimed_and_one_run_is_itself() -> None:
    nothing, one = fold([]), fold([a_receipt().to_json()])

    assert (nothing.confinement, nothing.verdict, nothing.runs, nothing.least) == ("severed", "inconclusive", 0, None)
    assert nothing.wording == "network: not proved - there are no runs"
    assert [nothing.network_severed, nothing.egress_sealed, nothing.egress_enforced] == [False] * 3
    assert (one.confinement, one.wording, one.least) == (
        "sealed",
        "network: off - egress sealed to the run's broker at 10.1.0.1:8080",
        "run-1",
    )
    assert fold([a_receipt("b"), a_receipt("a")]).wording == one.wording + " (2 runs, the least confined is a)"


MIXED = st.lists(st.tuples(st.sampled_from(RANKED), st.sampled_from([True, None, False])), max_size=6)


@given(MIXED, st.randoms())
def test_the_order_does_not_matter_and_the_worst_decides(runs: list[tuple[str, bool | None]], random: Any) -> None:
    receipts = [a_receipt(f"run-{index}", word, checks=(*HELD, a_check(ok=ok))) for index, (word, ok) in enumerate(runs)]
    shuffled = receipts[:]
    random.shuffle(shuffled)

    folded = fold(receipts)

    assert fold(shuffled) == folded
    # A bad check of an open run breaks nothing: nothing was claimed.
    states = [True if word == "open" else ok for word, ok in runs]
    proved = bool(states) and all(ok is True for ok in states)
    assert folded.verdict == (folded.confinement if proved else "broken" if False in states else "inconclusive")
    assert folded.confinement == max((word for word, _ok in runs), key=RANKED.index, default="severed")
    for name in ("network_severed", "egress_sealed", "egress_enforced"):
        assert getattr(folded, name) == (bool(receipts) and all(getattr(receipt, name) for receipt in receipts))
    assert sum(folded.counts.values()) == folded.runs == len(runs)


@pytest.mark.parametrize(
    "changes",
    [
        {"egress_enforced": True},
        {"confinement": "severed"},
        {"verdict": "fine"},
        {"schema": "sealnet.receipt/2"},
        {"run_id": 7},
        {"wording": None},
        {"confinement": "tight"},
    ],
)
def test_an_edited_receipt_is_none(changes: dict[str, Any]) -> None:
    told = a_receipt(confinement="open").to_json()
    assert fold([told]).confinement == "open"

    with pytest.raises(UsageError, match="cannot fold a receipt"):
        fold([told | changes])


def test_what_is_no_receipt_at_all_is_refused() -> None:
    for given_ in ({}, {"schema": "sealnet.receipt/1"}, {"schema": "sealnet.receipt/1", "confinement": "open", "verdict": "open"}):
        with pytest.raises(UsageError, match="cannot fold a receipt"):
            fold([given_])
