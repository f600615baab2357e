"""Schedules: pure functions from a step to a factor of the peak learning rate, and to the rows of its batch.

The published ones are a warm-up with cosine decay (pre-training), a straight line (mid-training and the indexer
warm-up), and a constant (sparse adaptation). Step 0 is the first step; during the warm-up the factor rises linearly and
reaches 1 at the last warm-up step, so that no step has rate 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from glm5.train.config import ScheduleConfig, StageConfig


def lr_factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Factor of the peak learning rate at ``step`` of ``steps``; beyond the last step it stays at the final value."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    decay_steps = max(steps - 1 - schedule.warmup_steps, 1)
    progress = min((step - schedule.warmup_steps) / decay_steps, 1.0)
    if schedule.kind == "cosine":
        return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule.kind == "linear":
        return 1 - (1 - schedule.final) * progress
    if schedule.kind == "stable":
        falling = max(progress - (1 - schedule.decay_fraction), 0.0) / schedule.decay_fraction
        return 1 - (1 - schedule.final) * falling
    return 1.0


def rows_of_step(config: StageConfig, step: int) -> int:
    """Rows of one optimizer step: during the ramp a straight line rounded down to whole micro-batches."""
    ramp = config.batch_ramp
    if step >= ramp.steps:
        return config.batch_rows
    unit = config.micro_rows or 1
    return ramp.first_rows + (config.batch_rows - ramp.first_rows) * step // ramp.steps // unit * unit


def row_ranges(config: StageConfig, start_step: int = 0, part: int = 0, parts: int = 1) -> Iterator[range]:
    """Numbers of the rows of each step from ``start_step`` on, without end; of them the share ``part`` of ``parts``.

    A pure function of the configuration and the step, so that a run resumed within the ramp goes on with the same rows,
    whatever the number of processes is.
    """
    first = sum(rows_of_step(config, step) for step in range(min(start_step, config.batch_ramp.steps)))
    first += max(start_step - config.batch_ramp.steps, 0) * config.batch_rows
    step = start_step
    while True:
        rows = rows_of_step(config, step)
        yield range(first + rows * part // parts, first + rows * (part + 1) // parts)
        first, step = first + rows, step + 1
