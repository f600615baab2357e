"""Learning-rate schedules against the numbers of the published recipe."""

from functools import partial
from itertools import islice

import pytest

from glm5.data.packing import row_ranges
from glm5.train.config import BatchRampConfig, ScheduleConfig, StageConfig
from glm5.train.schedules import lr_factor, rows_of_step


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


RAMP = StageConfig(stage="pretrain", name="p", tokenizer="t", steps=20, batch_rows=16, micro_rows=2,
                   batch_ramp=BatchRampConfig(first_rows=4, steps=8))
ROWS = partial(rows_of_step, RAMP)


def test_the_batch_grows_in_whole_micro_batches_to_its_size():
    assert [rows_of_step(RAMP, step) for step in range(10)] == [4, 4, 6, 8, 10, 10, 12, 14, 16, 16]


def test_every_row_is_taken_once_from_any_step_on_and_by_any_number_of_processes():
    straight = list(islice(row_ranges(ROWS), 14))
    numbers = [number for rows in straight for number in rows]
    assert numbers == list(range(len(numbers)))
    for start in (1, 5, 8, 11):
        assert list(islice(row_ranges(ROWS, start), 3)) == straight[start : start + 3]
    halves = [list(islice(row_ranges(ROWS, 2, part, 2), 4)) for part in (0, 1)]
    assert [[*first, *second] for first, second in zip(*halves, strict=True)] == [list(rows) for rows in straight[2:6]]


def test_the_published_rates_follow_from_the_shipped_kinds():
    """GLM-5 report, appendix A: 2e-4 to 4e-5 by cosine, 4e-5 to 1e-5 and 5e-3 to 2e-4 by lines, 1e-5 constant."""
    cosine = ScheduleConfig(kind="cosine", warmup_steps=100, final=0.2)
    assert 2e-4 * lr_factor(cosine, 99, 1000) == pytest.approx(2e-4)
    assert 2e-4 * lr_factor(cosine, 999, 1000) == pytest.approx(4e-5)
    line = ScheduleConfig(kind="linear", final=0.25)
    assert [4e-5 * lr_factor(line, step, 101) for step in (0, 50, 100)] == pytest.approx([4e-5, 2.5e-5, 1e-5])
    assert 1e-5 * lr_factor(ScheduleConfig(kind="constant"), 14_999, 15_000) == 1e-5
