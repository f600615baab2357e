"""Schedules: pure functions from a step to a factor of the peak learning rate, and to the rows of its batch.

The published ones are a warm-up with cosine decay (pre-training), a straight line (mid-training and the indexer
warm-up), and a constant (sparse adaptation). Step 0 is the first step; during the warm-up the factor rises linearly and
reaches 1 at the last warm-up step, so that no step has rate 0.
"""

from __future__ import annotations

import math

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
