"""Which finished groups may be trained on, and as what samples. Pure functions; the ledger calls them.

Failure rule of GLM-5: episodes that died of infrastructure, were cancelled or are too stale are excluded. When more
than half of the group's slots are valid, the group is kept and may be padded to full size by repeating valid episodes
in turn; with half or fewer it is dropped. A group whose rewards are all equal has no gradient and is dropped too, under
its own reason. Repetition is a multiplicity, not a copied row: the same gradient, computed once.

Rewards inside an episode are reward parts named ``turn.K``: what turn K, from 0, earned besides the final reward, which
counts for the last turn. They matter where turns are credited by themselves (``advantage = "turn"``), and to a critic
(``advantage = "critic"``), which gets every reward at the token where it was earned and compares no episodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glm5.records import TRAINABLE_OUTCOMES, Episode, Sample, Trajectory
from glm5.rl.advantages import GroupAdvantage, group_advantages, has_signal, turn_advantages

_TURN_PART = "turn."


@dataclass(frozen=True, slots=True)
class Admission:
    """Verdict over one finished group."""

    reason: str
    """Empty when the group is kept; else why it was dropped."""
    multiplicities: list[int]
    """Per slot, how often its episode counts; 0 for excluded ones. All 0 in a dropped group."""


def admit(episodes: Sequence[Episode], is_stale: Callable[[Episode], bool], pad: bool,
          advantage: GroupAdvantage | None = "mean", keep_equal: bool = False) -> Admission:
    """Apply the failure rule to the final episodes of a group, one per slot. ``advantage`` None: they are not compared,
    so that equal rewards are no reason to drop them; ``keep_equal`` keeps them although they are compared."""
    size = len(episodes)
    measured = [index for index, episode in enumerate(episodes) if is_measured(episode)]
    valid = [index for index in measured if not is_stale(episodes[index])]
    nothing = [0] * size
    if 2 * len(valid) <= size:
        return Admission("stale" if 2 * len(measured) > size else "too_few_valid", nothing)
    if not keep_equal and advantage is not None and not _differ([episodes[index] for index in valid], advantage):
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
                  advantage: GroupAdvantage | None = "mean") -> list[Sample]:
    """Samples of an admitted group: one per trajectory with sampled tokens.

    The group mean counts every episode as often as its multiplicity says. ``Sample.weight`` is the multiplicity times
    the trajectory's share of the episode's sampled tokens, so that siblings together weigh as much as one episode.
    Advantages are 0 where episodes are not compared (``advantage`` None), rewards where a critic looks at them.
    """
    counted = [episode for episode, times in zip(episodes, multiplicities, strict=True) for _ in range(times)]
    rewards = [_reward(episode) for episode in counted]
    by_turn: list[list[float]] = []
    if advantage is None:
        advantages = [0.0] * len(rewards)
    elif advantage == "critic":
        advantages = rewards
    elif advantage == "turn":
        advantages = group_advantages(rewards)
        by_turn = turn_advantages([turn_rewards(episode) for episode in counted])
    else:
        advantages = group_advantages(rewards, advantage)
    samples: list[Sample] = []
    position = 0
    for episode, times in zip(episodes, multiplicities, strict=True):
        if times:
            samples += _episode_samples(episode, advantages[position], times, advantage,
                                        by_turn[position] if by_turn else [])
        position += times
    return samples


def turn_rewards(episode: Episode) -> list[float]:
    """What each recorded turn earned, the final reward added to the last."""
    rewards = _rewards_inside(episode)
    rewards[-1] += _reward(episode)
    return rewards


def _rewards_inside(episode: Episode) -> list[float]:
    """What each recorded turn earned besides the final reward; a part of a turn that was not recorded counts for the
    last one."""
    rewards = [0.0] * max(len(_turn_numbers(episode)), 1)
    for name, value in episode.reward_parts.items():
        number = name.removeprefix(_TURN_PART)
        if name.startswith(_TURN_PART) and number.isdecimal():
            rewards[min(int(number), len(rewards) - 1)] += value
    return rewards


def _differ(episodes: Sequence[Episode], advantage: GroupAdvantage) -> bool:
    """Whether comparing these episodes gives any of them an advantage."""
    if advantage == "critic":
        return True
    if advantage == "turn":
        return any(has_signal([0.0, value]) for row in turn_advantages([turn_rewards(episode) for episode in episodes])
                   for value in row)
    return has_signal([_reward(episode) for episode in episodes])


def _turn_numbers(episode: Episode) -> dict[str, int]:
    """Turns by their first appearance: the order in which the agent took them."""
    ids = dict.fromkeys(turn for trajectory in episode.trajectories for turn in trajectory.turn_ids)
    return {turn: number for number, turn in enumerate(ids)}


def _episode_samples(episode: Episode, value: float, times: int, advantage: GroupAdvantage | None,
                     by_turn: Sequence[float]) -> list[Sample]:
    """``value``: what ``Sample.advantage`` holds; ``by_turn``: advantages of the turns where they have their own."""
    total = sum(sum(trajectory.loss_mask) for trajectory in episode.trajectories)
    numbers = _turn_numbers(episode)
    samples = []
    for leaf, whole in enumerate(episode.trajectories):
        if any(whole.loss_mask):
            trajectory = _cut_tail(whole)
            credits: list[float] = []
            if advantage == "turn":
                credits = _spread(trajectory, numbers, by_turn)
            elif advantage == "critic":
                credits = _place(trajectory, numbers, _rewards_inside(episode), _reward(episode))
            samples.append(Sample(
                sample_id=f"{episode.episode_id}/{leaf}", episode_id=episode.episode_id, group_id=episode.group_id,
                taskset=episode.taskset, trajectory=trajectory, advantage=value,
                weight=times * sum(whole.loss_mask) / total,
                token_credits=credits))
    return samples


def _spread(trajectory: Trajectory, numbers: dict[str, int], by_turn: Sequence[float]) -> list[float]:
    """The advantage of each id's turn, 0 where nothing was sampled."""
    spread: list[float] = []
    for turn, length in _stretches(trajectory):
        spread += [by_turn[numbers[turn]] if turn else 0.0] * length
    return spread


def _place(trajectory: Trajectory, numbers: dict[str, int], inside: Sequence[float], final: float) -> list[float]:
    """The reward of each id: what a turn earned at its last id, the final reward at the last id of the path, whose end
    is sampled."""
    placed: list[float] = []
    for turn, length in _stretches(trajectory):
        placed += [0.0] * (length - 1) + [inside[numbers[turn]] if turn else 0.0]
    placed[-1] += final
    return placed


def _stretches(trajectory: Trajectory) -> list[tuple[str, int]]:
    """Turn and length of each stretch of ids, "" for ids that were not sampled. Every stretch of sampled ids is one
    turn; the last is the last turn of the path, because turns that an earlier path trained lie at its beginning."""
    stretches = [(sampled, len(list(ids))) for sampled, ids in itertools.groupby(trajectory.loss_mask)]
    turns = iter(trajectory.turn_ids[len(trajectory.turn_ids) - sum(sampled for sampled, _ in stretches):])
    return [(next(turns) if sampled else "", length) for sampled, length in stretches]


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
