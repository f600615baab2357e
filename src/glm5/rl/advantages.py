"""Group-relative advantages, in float64 because 1.0 - mean of equal rewards must be exactly 0 or close to it.

GLM-5's agentic stage uses the mean alone: ``A_i = r_i - mean(r)`` (no division by the standard deviation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ZERO_VARIANCE = 1e-6
"""Rewards of a group that differ by no more than this carry no signal."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """``r - mean(r)`` over one group; a padded group passes the repeated rewards too."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether any two rewards of the group differ."""
    return max(rewards) - min(rewards) > ZERO_VARIANCE
