"""Intervals against numbers worked out by hand or taken from the papers."""

import math

import pytest

from glm5.errors import DataError
from glm5.eval.statistics import Interval, bootstrap_mean, difference, mean_of_intervals, wilson_interval


def test_wilson_equals_the_published_example():
    # Newcombe (1998), table I: 81/263 and 15/148, 95%.
    first, second = wilson_interval(81, 263), wilson_interval(15, 148)
    assert (round(first.low, 4), round(first.high, 4)) == (0.2553, 0.3662)
    assert (round(second.low, 4), round(second.high, 4)) == (0.0624, 0.1605)
    assert first.value == 81 / 263 and first.n == 263


def test_wilson_stays_inside_at_the_ends():
    none, all_of_them = wilson_interval(0, 20), wilson_interval(20, 20)
    assert (none.low, round(none.high, 4)) == (0.0, 0.1611)  # Newcombe (1998): 0/20
    assert (round(all_of_them.low, 4), all_of_them.high) == (0.8389, 1.0)
    assert wilson_interval(5, 10, level=0.5).low > wilson_interval(5, 10).low


def test_the_difference_equals_newcombes_example():
    # Newcombe (1998), method 10: 56/70 - 48/80 = 0.2000, 0.0524 to 0.3339.
    result = difference(wilson_interval(56, 70), wilson_interval(48, 80))
    assert (round(result.value, 4), round(result.low, 4), round(result.high, 4)) == (0.2, 0.0524, 0.3339)
    assert result.n == 150


def test_the_mean_of_intervals_by_hand():
    result = mean_of_intervals([Interval(0.5, 0.2, 0.9, 10), Interval(0.9, 0.5, 1.0, 20)])
    # Distances below: 0.3 and 0.4, root 0.5; above: 0.4 and 0.1, root sqrt(0.17).
    assert result.value == pytest.approx(0.7)
    assert result.low == pytest.approx(0.7 - 0.25)
    assert result.high == pytest.approx(0.7 + math.sqrt(0.17) / 2)
    assert result.n == 30
    lowest = mean_of_intervals([wilson_interval(0, 30), wilson_interval(1, 30), wilson_interval(0, 30)])
    assert lowest.low >= 0


def test_the_bootstrap_resamples_whole_groups():
    # Attempts of a group agree: only the number of groups can narrow the interval, not the number of attempts.
    few = bootstrap_mean([[1.0], [0.0]] * 10)
    many_attempts = bootstrap_mean([[1.0] * 50, [0.0] * 50] * 10)
    assert few.value == many_attempts.value == 0.5
    assert (few.low, few.high) == (many_attempts.low, many_attempts.high)
    # The mean of 20 coins has a standard deviation of 0.112.
    assert 0.5 - few.low == pytest.approx(1.96 * 0.112, abs=0.04)
    assert few == bootstrap_mean([[1.0], [0.0]] * 10)
    assert few.n == 20 and many_attempts.n == 1000


def test_groups_of_different_sizes_are_weighted_by_their_values():
    assert bootstrap_mean([[1.0, 1.0, 1.0], [0.0], []]).value == 0.75


@pytest.mark.parametrize("call", [
    lambda: wilson_interval(0, 0), lambda: wilson_interval(3, 2), lambda: wilson_interval(-1, 2),
    lambda: bootstrap_mean([]), lambda: bootstrap_mean([[], []]), lambda: mean_of_intervals([])])
def test_nothing_measured_is_an_error_and_not_a_zero(call):
    with pytest.raises(DataError):
        call()
