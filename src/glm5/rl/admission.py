"""Which finished groups may be trained on, and as what samples. Pure functions; the ledger calls them.

Failure rule of GLM-5: episodes that died of infrastructure, were cancelled or are too stale are excluded. When more
than half of the group's slots are valid, the group is kept and may be padded to full size by repeating valid episodes
in turn; with half or fewer it is dropped. A group whose rewards are all equal has no gradient and is dropped too, under
its own reason. Repetition is a multiplicity, not a copied row: the same gradient, computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glm5.records import TRAINABLE_OUTCOMES, Episode, Sample, Trajectory
from glm5.rl.advantages import GroupAdvantage, group_advantages, has_signal


@dataclass(frozen=True, slots=True)
class Admission:
    """Verdict over one finished group."""

    reason: str
    """Empty when the group is kept; else why it was dropped."""
    multiplicities: list[int]
    """Per slot, how often its episode counts; 0 for excluded ones. All 0 in a dropped group."""


def admit(episodes: Sequence[Episode], is_stale: Callable[[Episode], bool], pad: bool,
          keep_equal: bool = False) -> Admission:
    """Apply the failure rule to the final episodes of a group, one per slot; ``keep_equal`` keeps equal rewards."""
    size = len(episodes)
    measured = [index for index, episode in enumerate(episodes) if is_measured(episode)]
    valid = [index for index in measured if not is_stale(episodes[index])]
    nothing = [0] * size
    if 2 * len(valid) <= size:
        return Admission("stale" if 2 * len(measured) > size else "too_few_valid", nothing)
    if not keep_equal and not has_signal([_reward(episodes[index]) for index in valid]):
        return Admission("zero_variance", nothing)
    multiplicities = list(nothing)
    for turn in range(size if pad else len(valid)):
        multiplicities[valid[turn % len(valid)]] += 1
    return Admission("", multiplicities)


def is_measured(episode: Episode) -> bool:
    """Whether the episode ended in a way that may be learned from: reward known, at least one sampled token."""
    sampled = any(any(trajectory.loss_mask) for trajectory in episode.trajectories)
    return episode.outcome in TRAINABLE_OUTCOMES and episode.reward is not None and sampled


def sampled_versions(episode: Episode) -> set[int]:
    """Policy versions that sampled the episode's trained tokens, as the engine reported them."""
    return {version for trajectory in episode.trajectories
            for version, sampled in zip(trajectory.versions, trajectory.loss_mask, strict=True) if sampled}


def group_samples(episodes: Sequence[Episode], multiplicities: Sequence[int],
                  advantage: GroupAdvantage = "mean") -> list[Sample]:
    """Samples of an admitted group: one per trajectory with sampled tokens.

    The group mean counts every episode as often as its multiplicity says. ``Sample.weight`` is the multiplicity times
    the trajectory's share of the episode's sampled tokens, so that siblings together weigh as much as one episode.
    """
    rewards = [_reward(episode) for episode, times in zip(episodes, multiplicities, strict=True) for _ in range(times)]
    advantages = group_advantages(rewards, advantage)
    samples: list[Sample] = []
    position = 0
    for episode, times in zip(episodes, multiplicities, strict=True):
        if times:
            samples += _episode_samples(episode, advantages[position], times)
        position += times
    return samples


def _episode_samples(episode: Episode, advantage: float, times: int) -> list[Sample]:
    total = sum(sum(trajectory.loss_mask) for trajectory in episode.trajectories)
    return [Sample(sample_id=f"{episode.episode_id}/{leaf}", episode_id=episode.episode_id, group_id=episode.group_id,
                   taskset=episode.taskset, trajectory=_cut_tail(trajectory), advantage=advantage,
                   weight=times * sum(trajectory.loss_mask) / total)
            for leaf, trajectory in enumerate(episode.trajectories) if any(trajectory.loss_mask)]


def _cut_tail(trajectory: Trajectory) -> Trajectory:
    """Without what follows the last sampled token: nothing after it influences the loss."""
    end = len(trajectory.loss_mask)
    while not trajectory.loss_mask[end - 1]:
        end -= 1
    return Trajectory(ids=trajectory.ids[:end], loss_mask=trajectory.loss_mask[:end],
                      logprobs=trajectory.logprobs[:end], versions=trajectory.versions[:end],
                      turn_ids=trajectory.turn_ids)


def _reward(episode: Episode) -> float:
    assert episode.reward is not None, "only measured episodes are admitted"
    return episode.reward
