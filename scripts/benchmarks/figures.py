"""Numbers from repeated measurements: medians, quantiles, and how far to trust them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_RESAMPLES = 400
_SEED = 1
_BOUNDS = (0.025, 0.975)


def quantile(values: Sequence[float], q: float) -> float:
    """Between the two nearest of the sorted values, in proportion (type 7 of Hyndman and Fan)."""
    if not values:
        raise ValueError("there is no quantile of nothing")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


@dataclass(frozen=True, slots=True)
class Interval:
    """A number, and between which bounds it lies in 95 of 100 resamples."""

    value: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """The median with its bootstrap interval."""
    chance = random.Random(_SEED)  # noqa: S311 - not for secrets
    found = [median(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    return Interval(median(values), *(quantile(found, q) for q in _BOUNDS))


def ratio(values: Sequence[float], control: Sequence[float]) -> Interval:
    """The ratio of the medians. Values that were taken in turns are resampled as pairs: what slowed both of a pair down cancels out."""
    chance = random.Random(_SEED)  # noqa: S311 - not for secrets
    paired = len(values) == len(control)
    found = []
    for _ in range(_RESAMPLES):
        picked = chance.choices(range(len(values)), k=len(values))
        other = picked if paired else chance.choices(range(len(control)), k=len(control))
        found.append(median([values[i] for i in picked]) / median([control[i] for i in other]))
    return Interval(median(values) / median(control), *(quantile(found, q) for q in _BOUNDS))


def in_turns(measures: Mapping[str, Callable[[], Mapping[str, float]]], *, rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Every measure once a round, A B C A B C, so that all of them see the same machine; what each told, by name. Warm-up is thrown away.

    The order within a round is turned by one each time: nobody always comes after the same neighbour's leftovers.
    """
    told: dict[str, list[float]] = {}
    order = list(measures)
    for done in range(-warm_up, rounds):
        for name in order:
            for key, value in measures[name]().items():
                values = told.setdefault(key, [])
                if done >= 0:
                    values.append(value)
        order = [*order[1:], order[0]]
    return told
