"""Learning-rate schedules against the numbers of the published recipe."""

import pytest

from glm5.train.config import ScheduleConfig
from glm5.train.schedules import lr_factor


def test_cosine_rises_linearly_then_falls_to_the_final_factor():
    schedule = ScheduleConfig(kind="cosine", warmup_steps=10, final=0.2)
    factors = [lr_factor(schedule, step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == pytest.approx(1.0)
    assert factors[99] == pytest.approx(0.2)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[54] == pytest.approx(0.6, abs=0.01)


def test_linear_reaches_the_indexer_rate_of_the_report():
    schedule = ScheduleConfig(kind="linear", final=2e-4 / 5e-3)
    assert 5e-3 * lr_factor(schedule, 999, 1000) == pytest.approx(2e-4)
    assert lr_factor(schedule, 0, 1000) == 1.0


def test_constant_stays_and_stable_falls_only_at_the_end():
    assert {lr_factor(ScheduleConfig(kind="constant"), step, 50) for step in range(50)} == {1.0}
    stable = ScheduleConfig(kind="stable", decay_fraction=0.2, final=0.0)
    assert lr_factor(stable, 79, 101) == 1.0
    assert lr_factor(stable, 90, 101) == pytest.approx(0.5)
    assert lr_factor(stable, 100, 101) == pytest.approx(0.0)


def test_a_step_beyond_the_last_keeps_the_final_factor():
    assert lr_factor(ScheduleConfig(kind="cosine", final=0.3), 500, 100) == pytest.approx(0.3)
