"""What one caller may have, and that it is not another's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sealnet.model.rates import Count, Rate


def test_a_burst_is_had_at_once_and_comes_back_with_time() -> None:
    rate = Rate(per_s=2, burst=3)

    assert [rate.take(7, 0.0) for _ in range(4)] == [True, True, True, False]
    assert rate.take(8, 0.0)
    assert [rate.take(7, 0.6), rate.take(7, 0.6), rate.take(7, 1.1)] == [True, False, True]


@given(st.lists(st.floats(0, 5), min_size=1, max_size=200), st.integers(1, 5), st.integers(1, 10))
def test_never_more_than_the_burst_and_what_came_back(pauses: list[float], per_s: int, burst: int) -> None:
    rate, now, taken = Rate(per_s=per_s, burst=burst), 0.0, 0

    for pause in pauses:
        now += pause
        taken += rate.take(1, now)

    assert taken <= burst + per_s * now + 1e-6


def test_who_has_all_of_it_again_is_forgotten() -> None:
    rate = Rate(per_s=1, burst=2)
    rate.take(1, 0.0)
    rate.take(2, 9.5)

    rate.forget_full(10.0)

    assert len(rate) == 1
    assert [rate.take(2, 10.0) for _ in range(2)] == [True, False]


def test_a_count_is_each_ones_own_and_can_be_given_back() -> None:
    count = Count(2)

    assert [count.take(1), count.take(1), count.take(1), count.take(2)] == [True, True, False, True]
    count.give_back(1)
    assert (count.of(1), count.take(1), count.take(1)) == (1, True, False)
    for _ in range(2):
        count.give_back(1)
    assert count.of(1) == 0
    for _ in range(3):
        count.add(3)
    assert (count.of(3), count.take(3)) == (3, False)


def test_amounts_are_taken_whole_and_paid_back_with_time() -> None:
    rate, count = Rate(per_s=10, burst=20), Count(most=5)

    assert [rate.take(7, 0.0, 50), rate.take(7, 0.0, 0), rate.take(7, 2.9, 0), rate.take(7, 3.2, 0)] == [True, False, False, True]
    assert [count.take(7, 4), count.take(7, 2), count.take(8, 2), count.take(7, 1)] == [True, False, True, True]
    count.give_back(7, 5)
    assert (count.of(7), count.of(8)) == (0, 2)
