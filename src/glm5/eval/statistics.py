"""Intervals for what evaluation measures. All are 95% unless a level is given; inputs are plain numbers.

Proportions: Wilson's score interval (1927), which stays inside [0, 1] and is honest near both ends. Differences and
means of proportions: MOVER, the method of variance estimates recovery (Zou and Donner 2008; for a difference it is
Newcombe's method 10): square the distances from each estimate to its own bounds, add them, take the root. Several
attempts per task: bootstrap over whole tasks, because attempts at one task are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from glm5.errors import DataError


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its bounds."""

    value: float
    low: float
    high: float
    n: int
    """Observations behind the estimate."""


def wilson_interval(successes: int, n: int, level: float = 0.95) -> Interval:
    """Share of ``successes`` in ``n`` trials. Raises DataError when there are no trials or the counts disagree."""
    if n < 1 or not 0 <= successes <= n:
        raise DataError(f"wilson_interval: {successes} successes in {n} trials; expected 0 <= successes <= n, n >= 1")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = successes / n
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At the ends the formula gives 0 and 1 up to rounding.
    return Interval(share, max(centre - half, 0.0) if successes else 0.0,
                    min(centre + half, 1.0) if successes < n else 1.0, n)


def difference(second: Interval, first: Interval) -> Interval:
    """``second - first`` of two independent estimates."""
    value = second.value - first.value
    below = math.hypot(second.value - second.low, first.high - first.value)
    above = math.hypot(second.high - second.value, first.value - first.low)
    return Interval(value, value - below, value + above, second.n + first.n)


def mean_of_intervals(intervals: Sequence[Interval]) -> Interval:
    """Unweighted mean of independent estimates. Raises DataError when there is none."""
    if not intervals:
        raise DataError("mean_of_intervals: got no estimate; evaluate at least one taskset")
    count = len(intervals)
    value = math.fsum(item.value for item in intervals) / count
    below = math.hypot(*(item.value - item.low for item in intervals)) / count
    above = math.hypot(*(item.high - item.value for item in intervals)) / count
    return Interval(value, value - below, value + above, sum(item.n for item in intervals))


def bootstrap_mean(groups: Sequence[Sequence[float]], level: float = 0.95, resamples: int = 2000,
                   seed: int = 0) -> Interval:
    """Mean over all values, with a percentile interval from resampling whole groups.

    Deterministic for a seed. Raises DataError when there is no value.
    """
    kept = [group for group in groups if len(group)]
    if not kept:
        raise DataError("bootstrap_mean: got no value; evaluate at least one task")
    sums = np.array([math.fsum(group) for group in kept])
    sizes = np.array([len(group) for group in kept])
    drawn = np.random.default_rng(seed).integers(len(kept), size=(resamples, len(kept)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(sums.sum() / sizes.sum()), float(low), float(high), int(sizes.sum()))
