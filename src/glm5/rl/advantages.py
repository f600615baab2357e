"""Advantages: group-relative, of turns, from a critic. Pure functions in float64.

float64 because 1.0 - mean of equal rewards must be exactly 0 or close to it: divided by a standard deviation, rounding
would otherwise become signal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

EpisodeAdvantage = Literal["mean", "mean_std", "leave_one_out"]
GroupAdvantage = Literal[EpisodeAdvantage, "turn", "critic"]
"""``turn``: ``turn_advantages`` instead of ``group_advantages``; ``critic``: ``gae`` with the values of a critic."""
ZERO_VARIANCE = 1e-6
"""Rewards of a group that differ by no more than this carry no signal; also what keeps divisors above 0."""


def group_advantages(rewards: Sequence[float], kind: EpisodeAdvantage = "mean") -> list[float]:
    """Advantages of the episodes of one group; a padded group passes the repeated rewards too.

    ``mean``: ``r - mean(r)`` (GLM-5 agentic RL; Dr. GRPO). ``mean_std``: that over the unbiased standard deviation
    + 1e-6 (GRPO; GLM-5 reasoning RL). ``leave_one_out``: ``r`` minus the mean of the others (RLOO), which is
    ``G / (G - 1)`` times the first. A group of one has advantage 0 under the first two and ``r`` under the last: there
    is nothing to compare it with.
    """
    size = len(rewards)
    mean = math.fsum(rewards) / size
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return centred
    if size == 1:
        return centred if kind == "mean_std" else list(rewards)
    if kind == "mean_std":
        deviation = math.sqrt(math.fsum(value * value for value in centred) / (size - 1))
        return [value / (deviation + ZERO_VARIANCE) for value in centred]
    return [value * size / (size - 1) for value in centred]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether any two rewards of the group differ."""
    return max(rewards) - min(rewards) > ZERO_VARIANCE


def turn_advantages(turn_rewards: Sequence[Sequence[float]], gamma: float = 1.0) -> list[list[float]]:
    """Credit per turn for episodes with rewards inside them: one row of rewards per episode of a group, the final
    reward added to its last turn.

    A turn's return is ``R_k = r_k + gamma * R_(k+1)``; its baseline is the mean return, at the same turn, of the
    group's episodes that got that far. With a reward at the last turn only, ``gamma = 1`` and episodes of equal length,
    every turn gets the group advantage ``r - mean(r)``.
    """
    returns = [_discounted(rewards, gamma) for rewards in turn_rewards]
    longest = max((len(row) for row in returns), default=0)
    means = []
    for turn in range(longest):
        reached = [row[turn] for row in returns if turn < len(row)]
        means.append(math.fsum(reached) / len(reached))
    return [[value - means[turn] for turn, value in enumerate(row)] for row in returns]


def gae(rewards: Sequence[float], values: Sequence[float], loss_mask: Sequence[bool], *, gamma: float,
        lam: float) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one trajectory's tokens by generalised advantage estimation that skips observations.

    All sequences have the trajectory's length; rewards and values of tokens that the model did not sample are ignored,
    and such tokens get 0. The recursion links the last token of one turn to the first of the next, over whatever the
    environment wrote between them: ``delta_t = r_t + gamma V_next - V_t``, ``A_t = delta_t + gamma lam A_next``,
    ``R_t = A_t + V_t``, where next is the next sampled token (value and advantage 0 behind the last).
    """
    if not len(rewards) == len(values) == len(loss_mask):
        raise ValueError(f"gae: lengths {len(rewards)}, {len(values)}, {len(loss_mask)} differ; expected one of each "
                         "per token")
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    next_value = next_advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        if loss_mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            advantages[t], returns[t] = next_advantage, next_advantage + values[t]
    return advantages, returns


def length_adaptive_lambda(sampled_tokens: int, alpha: float) -> float:
    """``1 - 1 / (alpha * L)``: the longer the episode, the further its reward reaches back (VAPO, arXiv:2504.05118)."""
    return max(0.0, 1.0 - 1.0 / (alpha * max(sampled_tokens, 1)))


def _discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    returns = [0.0] * len(rewards)
    following = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        following = rewards[turn] + gamma * following
        returns[turn] = following
    return returns
