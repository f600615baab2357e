import math

import pytest

from glm5.rl.advantages import (
    gae,
    group_advantages,
    has_signal,
    length_adaptive_lambda,
    turn_advantages,
)


def test_advantages_are_rewards_minus_the_group_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([0.0, 0.0, 0.9]) == pytest.approx([-0.3, -0.3, 0.6], abs=1e-15)


def test_equal_rewards_give_zero_up_to_float64_rounding():
    assert max(abs(value) for value in group_advantages([0.1] * 7)) < 1e-15


def test_equal_rewards_have_no_signal_whatever_their_value():
    assert not has_signal([0.1 + 0.2, 0.3])
    assert has_signal([0.0, 0.0, 0.01])


def test_the_standard_deviation_is_the_unbiased_one():
    # mean 0.5, deviations ±0.5, unbiased variance 4 * 0.25 / 3
    scale = math.sqrt(1 / 3) + 1e-6
    assert group_advantages([1.0, 0.0, 0.0, 1.0], "mean_std") == pytest.approx(
        [0.5 / scale, -0.5 / scale, -0.5 / scale, 0.5 / scale], rel=1e-12)
    assert group_advantages([0.7] * 5, "mean_std") == pytest.approx([0.0] * 5, abs=1e-9)


def test_leave_one_out_compares_with_the_others_only():
    assert group_advantages([1.0, 0.0, 0.5], "leave_one_out") == pytest.approx([1.0 - 0.25, -0.75, 0.0], abs=1e-15)


def test_a_group_of_one_has_nothing_to_compare_with():
    assert group_advantages([0.8]) == [0.0] == group_advantages([0.8], "mean_std")
    assert group_advantages([0.8], "leave_one_out") == [0.8]


def test_turn_credit_with_a_final_reward_alone_is_the_group_advantage():
    assert turn_advantages([[0.0, 1.0], [0.0, 0.0]]) == [[0.5, 0.5], [-0.5, -0.5]]


def test_turn_credit_compares_a_turn_with_the_episodes_that_reached_it():
    # returns: [0.5 + 0.5 * 1, 1] and [0]; the second turn has nobody to compare with
    assert turn_advantages([[0.5, 1.0], [0.0]], gamma=0.5) == [[0.5, 0.0], [-0.5]]
    assert turn_advantages([]) == []


def test_gae_without_observations_equals_the_recursion_by_hand():
    # delta_1 = 1 - 0.4 = 0.6; delta_0 = 0 + 0.9 * 0.4 - 0.5 = -0.14; A_0 = -0.14 + 0.9 * 0.8 * 0.6
    advantages, returns = gae([0.0, 1.0], [0.5, 0.4], [True, True], gamma=0.9, lam=0.8)
    assert advantages == pytest.approx([-0.14 + 0.432, 0.6], rel=1e-12)
    assert returns == pytest.approx([0.292 + 0.5, 1.0], rel=1e-12)


def test_gae_links_turns_over_the_observation_between_them():
    dense = gae([0.0, 1.0], [0.5, 0.4], [True, True], gamma=0.9, lam=0.8)
    mask = [False, True, False, False, True, False]
    advantages, returns = gae([9.0, 0.0, 9.0, 9.0, 1.0, 9.0], [7.0, 0.5, 7.0, math.nan, 0.4, 7.0], mask, gamma=0.9,
                              lam=0.8)
    assert [advantages[1], advantages[4]] == dense[0] and [returns[1], returns[4]] == dense[1]
    assert [value for value, on in zip(advantages, mask, strict=True) if not on] == [0.0] * 4


def test_gae_of_nothing_sampled_is_zero_and_of_unequal_lengths_refused():
    assert gae([1.0], [1.0], [False], gamma=1.0, lam=1.0) == ([0.0], [0.0])
    with pytest.raises(ValueError, match="lengths 1, 2, 1 differ"):
        gae([1.0], [1.0, 2.0], [True], gamma=1.0, lam=1.0)


def test_lambda_grows_with_the_length_of_the_episode():
    assert length_adaptive_lambda(40, 0.05) == pytest.approx(0.5)
    assert length_adaptive_lambda(1, 0.05) == 0.0
