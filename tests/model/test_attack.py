"""The judgement of an attempt to get out: a refusal counts only where the other end was seen to be there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sealnet.model.attack import Answer, Seen, Verdict, counts, document, judge, judged, overall

REFUSED = Answer("Connection refused", "ECONNREFUSED", 0.1)
CONNECTED = Answer("connected", "ok", 0.1)
SENT = Answer("sent", "sent", 0.1)
SILENT = Answer("no answer", "ETIMEDOUT", 500.2)
NO_FAMILY = Answer("Address family not supported by protocol", "EAFNOSUPPORT", 0.1)
NO_FILE = Answer("No such file or directory", "ENOENT", 0.1)
EAR = Seen(control=CONNECTED, control_heard=True, answer=REFUSED, heard=False)
DEED = Seen(control=CONNECTED, answer=REFUSED)
WIRE = Seen(witnessed="its link", answer=REFUSED, heard=False)


@pytest.mark.parametrize(
    ("seen", "verdict", "found"),
    [
        (EAR, Verdict.BLOCKED, "Connection refused"),
        (DEED, Verdict.BLOCKED, "Connection refused"),
        (WIRE, Verdict.BLOCKED, "Connection refused"),
        (replace(EAR, answer=CONNECTED), Verdict.REACHED, "connected"),
        (replace(DEED, answer=CONNECTED), Verdict.REACHED, "connected"),
        # What the other end heard counts more than what the payload was told.
        (replace(EAR, heard=True), Verdict.REACHED, "Connection refused; it was heard"),
        (replace(WIRE, heard=True), Verdict.REACHED, "Connection refused; it was heard"),
        (replace(EAR, answer=SENT, heard=True), Verdict.REACHED, "sent; it was heard"),
        # Silence is no refusal, but where the other end heard nothing either.
        (replace(EAR, answer=SENT), Verdict.BLOCKED, "sent, and nothing arrived"),
        (replace(EAR, answer=SILENT), Verdict.BLOCKED, "no answer in 500 ms, and nothing arrived"),
        (replace(DEED, answer=SILENT), Verdict.INCONCLUSIVE, "no answer in 500 ms; nobody can tell whether it arrived"),
        (replace(DEED, answer=SENT), Verdict.INCONCLUSIVE, "sent; nobody can tell whether it arrived"),
        (replace(EAR, answer=replace(REFUSED, ms=80.0)), Verdict.BLOCKED, "Connection refused, but only after 80 ms"),
        # An other end that was not there.
        (replace(EAR, control_heard=False), Verdict.INCONCLUSIVE, "Connection refused"),
        (replace(EAR, control=REFUSED, control_heard=False), Verdict.INCONCLUSIVE, "Connection refused"),
        (replace(DEED, control=REFUSED), Verdict.INCONCLUSIVE, "Connection refused"),
        (replace(DEED, control=None), Verdict.INCONCLUSIVE, "Connection refused"),
        (replace(WIRE, witnessed=None), Verdict.INCONCLUSIVE, "Connection refused"),
        # An other end that is reached was there.
        (replace(EAR, control_heard=False, answer=CONNECTED), Verdict.REACHED, "connected"),
        # What the host does not have.
        (Seen(absent="no IPv6"), Verdict.NOT_APPLICABLE, "no IPv6"),
        (replace(DEED, control=NO_FAMILY), Verdict.NOT_APPLICABLE, f"root of this host gets no further: {NO_FAMILY.got}"),
        (
            replace(DEED, control=NO_FILE, lacking=frozenset({"ENOENT"})),
            Verdict.NOT_APPLICABLE,
            f"root of this host gets no further: {NO_FILE.got}",
        ),
        (replace(DEED, control=NO_FILE), Verdict.INCONCLUSIVE, "Connection refused"),
        (replace(DEED, control=NO_FAMILY, answer=CONNECTED), Verdict.REACHED, "connected"),
        # A payload that ended early, or is wrong, was refused nothing.
        (replace(EAR, answer=None), Verdict.INCONCLUSIVE, "the payload did not get so far"),
        (replace(EAR, answer=Answer("TypeError: x", "bug", 0.1)), Verdict.INCONCLUSIVE, "TypeError: x"),
    ],
)
def test_the_verdict_on_one_row(seen: Seen, verdict: Verdict, found: str) -> None:
    assert judge(seen) == (verdict, found)


@pytest.mark.parametrize(
    ("seen", "oracle"),
    [
        (EAR, "the host reaches it"),
        (DEED, "the host can"),
        (WIRE, "its link"),
        (replace(EAR, control=SENT, control_heard=False), "NOT reached by the host either: sent"),
        (replace(DEED, control=REFUSED), "NOT by the host either: Connection refused"),
        (replace(WIRE, witnessed=None), "NOT seen"),
        (Seen(absent="no IPv6"), ""),
    ],
)
def test_what_made_it_count_is_told(seen: Seen, oracle: str) -> None:
    assert row(seen).oracle == oracle


def row(seen: Seen, **changes: Any) -> Any:
    return judged(seen, **{"name": "name", "group": "group", "tried": "tried", "must_reach": True, **changes})


BLOCKED, REACHED, DOUBTFUL, ABSENT = (
    row(seen) for seen in (EAR, replace(EAR, answer=CONNECTED), replace(EAR, control_heard=False), Seen(absent="none"))
)


@pytest.mark.parametrize(
    ("rows", "broker", "verdict"),
    [
        ([BLOCKED, ABSENT], True, "sealed"),
        ([BLOCKED, REACHED, DOUBTFUL], True, "broken"),
        ([REACHED], False, "broken"),
        ([BLOCKED, DOUBTFUL], True, "inconclusive"),
        # A payload that reaches nothing at all shows nothing, and neither does a host that has nothing to try.
        ([BLOCKED], False, "inconclusive"),
        ([ABSENT], True, "inconclusive"),
        ([], True, "inconclusive"),
    ],
)
def test_the_verdict_on_a_seal(rows: list[Any], broker: bool, verdict: str) -> None:
    assert overall(rows, sealed=True, broker=broker) == verdict


@pytest.mark.parametrize(
    ("rows", "broker", "verdict"),
    [
        ([REACHED, ABSENT], True, "reaches"),
        ([REACHED, row(EAR, must_reach=False)], True, "reaches"),
        ([REACHED, BLOCKED], True, "inconclusive"),
        ([REACHED, DOUBTFUL], True, "inconclusive"),
        ([REACHED], False, "inconclusive"),
        ([ABSENT], True, "inconclusive"),
    ],
)
def test_the_verdict_on_the_control(rows: list[Any], broker: bool, verdict: str) -> None:
    assert overall(rows, sealed=False, broker=broker) == verdict


def test_the_document_has_every_row_and_counts_every_verdict() -> None:
    shown = document([BLOCKED, BLOCKED, ABSENT], kernel="6.1", sealed=True, broker=True)

    assert shown["schema"] == "sealnet.attack/1"
    assert (shown["kernel"], shown["sealed"], shown["broker"], shown["verdict"]) == ("6.1", True, True, "sealed")
    assert shown["counts"] == {"BLOCKED": 2, "REACHED": 0, "INCONCLUSIVE": 0, "NOT-APPLICABLE": 1}
    assert shown["rows"][0] == {
        "name": "name",
        "group": "group",
        "verdict": "BLOCKED",
        "tried": "tried",
        "found": "Connection refused",
        "ms": 0.1,
        "oracle": "the host reaches it",
    }
    assert counts([]) == dict.fromkeys(Verdict, 0)
