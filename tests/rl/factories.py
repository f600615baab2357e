"""Small episodes and ledgers for the tests of this layer."""

from pathlib import Path

from glm5.records import Episode, Trajectory
from glm5.rl.ledger import Ledger


def make_trajectory(sampled=2, version=0, prompt=3):
    mask = [False] * prompt + [True] * sampled
    return Trajectory(ids=list(range(prompt + sampled)), loss_mask=mask,
                      logprobs=[-0.5 if on else 0.0 for on in mask], versions=[version if on else -1 for on in mask])


def make_episode(group_id, slot, reward=1.0, outcome="ok", version=0, attempt=0, sampled=2, trajectories=1):
    return Episode(episode_id=f"{group_id}-s{slot}a{attempt}", group_id=group_id, task_id=f"task-{group_id}",
                   taskset="calculator", outcome=outcome, reward=reward,
                   trajectories=[make_trajectory(sampled, version)] * trajectories, started_at=1.0, duration_s=0.5)


def open_ledger(directory: Path, max_staleness=2, pad_groups=True):
    return Ledger(directory / "ledger.sqlite", max_staleness=max_staleness, pad_groups=pad_groups)


def add_group(ledger, index, rewards=(0.0, 1.0, 1.0, 0.0), version=0, outcomes=None):
    group_id = f"calculator-{index}"
    ledger.open_group(group_id, taskset="calculator", task_id=f"task-{group_id}", task_index=index, size=len(rewards))
    outcomes = outcomes or ["ok"] * len(rewards)
    slots = [[make_episode(group_id, slot, reward, outcome, version)]
             for slot, (reward, outcome) in enumerate(zip(rewards, outcomes, strict=True))]
    return ledger.close_group(group_id, slots)
