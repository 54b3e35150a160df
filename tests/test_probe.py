"""When an answer is kept, and that who asks together asks once."""

from __future__ import annotations

import threading

import pytest

from sealnet.probe import RETRY_S, Answers, CanSeal

GOOD = CanSeal(ok=True, took_ms=50.0, at=0.0)
BAD = CanSeal(ok=False, step="build", reason="cannot add netns x: No space left on device", took_ms=1.0, at=0.0)


class Place:
    """A host that answers what it is told to, under a clock that is set by hand."""

    def __init__(self, *answers: CanSeal) -> None:
        self.answers, self.asked, self.now = list(answers), 0, 1000.0
        self.known = Answers(self.attempt, clock=lambda: self.now)

    def attempt(self, _port: int | None) -> CanSeal:
        self.asked += 1
        return self.answers.pop(0)


def test_an_answer_is_true_or_false() -> None:
    assert GOOD
    assert not BAD


def test_a_success_is_kept_for_good() -> None:
    place = Place(GOOD, BAD)
    place.known.ask()

    place.now += 1e6

    assert place.known.ask() is GOOD
    assert place.asked == 1


def test_a_failure_is_kept_for_a_minute_and_no_longer() -> None:
    place = Place(BAD, GOOD)
    assert place.known.ask() is BAD

    place.now += RETRY_S - 0.001
    within = place.known.ask()
    asked = place.asked
    place.now += 0.001
    after = place.known.ask()

    assert (within, asked) == (BAD, 1)
    assert after is GOOD
    assert place.known.ask() is GOOD
    assert place.asked == 2


def test_a_failure_that_goes_on_is_tried_again_every_minute() -> None:
    place = Place(BAD, BAD, BAD)

    for _ in range(3):
        assert place.known.ask() is BAD
        assert place.known.ask() is BAD
        place.now += RETRY_S

    assert place.asked == 3


def test_the_minute_begins_when_the_attempt_has_ended() -> None:
    place = Place(BAD, GOOD)
    known = Answers(lambda port: (setattr(place, "now", place.now + RETRY_S), place.attempt(port))[1], clock=lambda: place.now)

    assert known.ask() is BAD
    assert known.ask() is BAD


def test_doubt_drops_a_success_and_keeps_a_failure() -> None:
    good, bad = Place(GOOD, BAD), Place(BAD, GOOD)
    for place in (good, bad):
        place.known.ask()
        place.known.doubt()

    assert good.known.ask() is BAD
    assert bad.known.ask() is BAD
    assert (good.asked, bad.asked) == (2, 1)


def test_what_is_forgotten_is_tried_again() -> None:
    place = Place(BAD, GOOD)
    place.known.ask()

    place.known.forget()

    assert place.known.ask() is GOOD


def test_each_port_has_an_answer_of_its_own() -> None:
    known = Answers(lambda port: GOOD if port == 8080 else BAD)

    assert known.ask(8080)
    assert not known.ask()
    assert known.ask(8080)


def test_an_attempt_that_raises_is_no_answer_and_keeps_nobody_waiting() -> None:
    tried = []

    def attempt(_port: int | None) -> CanSeal:
        tried.append(1)
        if len(tried) == 1:
            raise KeyboardInterrupt
        return GOOD

    known = Answers(attempt)
    with pytest.raises(KeyboardInterrupt):
        known.ask()

    assert known.ask() is GOOD


@pytest.mark.parametrize("answer", [GOOD, BAD], ids=["good", "bad"])
def test_sixteen_who_ask_at_once_wait_for_one_attempt(answer: CanSeal) -> None:
    begun, go, tried = threading.Event(), threading.Event(), []
    together = threading.Barrier(16)

    def attempt(_port: int | None) -> CanSeal:
        tried.append(threading.get_ident())
        begun.set()
        assert go.wait(60)
        return answer

    known, told = Answers(attempt), []

    def ask() -> None:
        together.wait(60)
        told.append(known.ask())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    early = list(told)
    go.set()
    for thread in threads:
        thread.join(60)

    assert early == []
    assert len(tried) == 1
    assert told == [answer] * 16


def test_what_is_known_waits_for_no_attempt_at_another_port() -> None:
    begun, go = threading.Event(), threading.Event()

    def attempt(port: int | None) -> CanSeal:
        if port is not None:
            begun.set()
            assert go.wait(600)
        return GOOD

    known, told = Answers(attempt), []
    known.ask()
    other = threading.Thread(target=known.ask, args=(8080,))
    other.start()
    assert begun.wait(60)

    asking = threading.Thread(target=lambda: told.append(known.ask()), daemon=True)
    asking.start()
    asking.join(60)
    meanwhile = list(told)
    go.set()
    other.join(60)

    assert meanwhile == [GOOD]


def test_who_asks_for_many_ports_has_nobody_elses_answer_forgotten() -> None:
    tried: list[int | None] = []
    known = Answers(lambda port: (tried.append(port), BAD)[1], clock=lambda: 0.0)
    known.ask()

    for port in range(1, 200):
        known.ask(port)
    known.ask()

    assert tried.count(None) == 1
    assert len(known._kept) <= 64
