"""What an attempt to get out means: pure judgement of what came back, what the other end heard, and whether that end was there."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = "sealnet.attack/1"
OK, SENT, TIMED_OUT, BUG = "ok", "sent", "ETIMEDOUT", "bug"
# What the kernel says, to root as well, of a thing that it does not have.
_NOT_IN_THIS_KERNEL = frozenset({"EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EPFNOSUPPORT", "ENOSYS"})
# A refusal comes with an errno and before this.
AT_ONCE_MS = 50.0


class Verdict(enum.StrEnum):
    """Of one row. `BLOCKED` is only said where the other end was seen to be there."""

    BLOCKED = "BLOCKED"
    REACHED = "REACHED"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_APPLICABLE = "NOT-APPLICABLE"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one attempt got: in words, as a code (an errno's name or one of the above), and after how long."""

    got: str
    code: str
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that was observed of one row.

    `absent` is why there is nothing to try here. `control` is what the same attempt got outside of any seal, `control_heard` whether the
    other end heard that, `heard` whether it heard the payload; where the other end has no ear, both are None and the deed itself tells.
    `witnessed` is an observation of another kind that the other end is there, in words.
    """

    absent: str | None = None
    control: Answer | None = None
    control_heard: bool | None = None
    witnessed: str | None = None
    answer: Answer | None = None
    heard: bool | None = None
    lacking: frozenset[str] = frozenset()
    """Further codes of the control that mean that this host does not have it."""

    @property
    def oracle_was_there(self) -> bool:
        if self.control_heard is not None:
            return self.control_heard
        return self.witnessed is not None or (self.control is not None and self.control.code == OK)

    @property
    def oracle(self) -> str:
        """What makes a refusal count, or why it does not."""
        if self.witnessed is not None:
            return self.witnessed
        if self.control is None:
            return "NOT seen"
        if self.control_heard is not None:
            return "the host reaches it" if self.control_heard else f"NOT reached by the host either: {self.control.got}"
        return "the host can" if self.control.code == OK else f"NOT by the host either: {self.control.got}"


def judge(seen: Seen) -> tuple[Verdict, str]:
    """The verdict on one row, and what was found in words."""
    answer = seen.answer
    if seen.absent is not None:
        return Verdict.NOT_APPLICABLE, seen.absent
    if answer is None:
        return Verdict.INCONCLUSIVE, "the payload did not get so far"
    if seen.heard or answer.code == OK:
        return Verdict.REACHED, f"{answer.got}; it was heard" if seen.heard and answer.code != OK else answer.got
    control = seen.control
    if not seen.oracle_was_there and control is not None and control.code in _NOT_IN_THIS_KERNEL | seen.lacking:
        return Verdict.NOT_APPLICABLE, f"root of this host gets no further: {control.got}"
    if answer.code == BUG or not seen.oracle_was_there:
        return Verdict.INCONCLUSIVE, answer.got
    if answer.code in (SENT, TIMED_OUT):
        silence = "sent" if answer.code == SENT else f"no answer in {answer.ms:.0f} ms"
        if seen.heard is None:
            return Verdict.INCONCLUSIVE, f"{silence}; nobody can tell whether it arrived"
        return Verdict.BLOCKED, f"{silence}, and nothing arrived"
    late = f", but only after {answer.ms:.0f} ms" if answer.ms > AT_ONCE_MS else ""
    return Verdict.BLOCKED, f"{answer.got}{late}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One judged row. `must_reach`: plain bwrap, which shares the host's network, reaches it; that is the control of the whole kit."""

    name: str
    group: str
    verdict: Verdict
    tried: str
    found: str
    ms: float
    oracle: str
    must_reach: bool

    def to_json(self) -> dict[str, Any]:
        names = ("name", "group", "verdict", "tried", "found", "ms", "oracle")
        return {name: str(value) if isinstance(value := getattr(self, name), Verdict) else value for name in names}


def judged(seen: Seen, *, name: str, group: str, tried: str, must_reach: bool) -> Row:
    verdict, found = judge(seen)
    ms = round(seen.answer.ms, 3) if seen.answer is not None else 0.0
    oracle = "" if verdict is Verdict.NOT_APPLICABLE else seen.oracle
    return Row(name=name, group=group, verdict=verdict, tried=tried, found=found, ms=ms, oracle=oracle, must_reach=must_reach)


def counts(rows: Iterable[Row]) -> Mapping[Verdict, int]:
    """How often each verdict was given, those that never were included."""
    found = Counter(row.verdict for row in rows)
    return {verdict: found[verdict] for verdict in Verdict}


def overall(rows: Iterable[Row], *, sealed: bool, broker: bool) -> str:
    """`sealed`, `broken` or `inconclusive`; of an unsealed payload `reaches`, or `inconclusive` where a row that must reach did not.

    Without the broker's answer nothing shows that the payload could reach anything at all.
    """
    rows = list(rows)
    if not sealed:
        missed = [row for row in rows if row.must_reach and row.verdict not in (Verdict.REACHED, Verdict.NOT_APPLICABLE)]
        return "inconclusive" if missed or not broker or not any(row.verdict is Verdict.REACHED for row in rows) else "reaches"
    found = counts(rows)
    if found[Verdict.REACHED]:
        return "broken"
    if found[Verdict.INCONCLUSIVE] or not found[Verdict.BLOCKED] or not broker:
        return "inconclusive"
    return "sealed"


def document(rows: Iterable[Row], *, kernel: str, sealed: bool, broker: bool) -> dict[str, Any]:
    """The report as one JSON document."""
    rows = list(rows)
    return {
        "schema": SCHEMA,
        "kernel": kernel,
        "sealed": sealed,
        "broker": broker,
        "rows": [row.to_json() for row in rows],
        "verdict": overall(rows, sealed=sealed, broker=broker),
        "counts": {str(verdict): count for verdict, count in counts(rows).items()},
    }
