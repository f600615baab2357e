import pytest

from glm5.rl.advantages import group_advantages, has_signal


def test_advantages_are_rewards_minus_the_group_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([0.0, 0.0, 0.9]) == pytest.approx([-0.3, -0.3, 0.6], abs=1e-15)


def test_equal_rewards_give_zero_up_to_float64_rounding():
    assert max(abs(value) for value in group_advantages([0.1] * 7)) < 1e-15


def test_equal_rewards_have_no_signal_whatever_their_value():
    assert not has_signal([0.1 + 0.2, 0.3])
    assert has_signal([0.0, 0.0, 0.01])
