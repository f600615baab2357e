"""Preference pairs from what an RL run recorded: within a group, or human-written anchors against the policy's answers.

Only episodes that were answered at once count: their first sampled span is the answer, and the task's instruction the
conversation. Tasks come from their tasksets again, so that no text is guessed from tokens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5.env.episodes import first_messages
from glm5.env.rewards.anchors import Anchors
from glm5.env.tasks import Taskset, load_taskset, task_from_id
from glm5.errors import DataError
from glm5.records import TRAINABLE_OUTCOMES, Episode
from glm5.rl.replay import EpisodeFilter, read_episodes
from glm5.runlog import write_atomic
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer

_Answers = list[tuple[float, str]]
"""(reward, answer) of the episodes of a task."""


def write_ledger_pairs(run_dir: Path, tokenizer_dir: Path, output: Path, count: int, anchors: str = "") -> int:
    """Write up to ``count`` pairs, one JSON object a line with ``messages``, ``chosen`` and ``rejected``; their number.

    Without ``anchors`` the best answer of each group is preferred to the worst one, if their rewards differ; with them
    (``solution`` or a ``.jsonl`` file) the anchor of a task to the answer of lowest reward. Raises DataError when there
    is no pair, ServiceError when there is no ledger.
    """
    groups = _answers_by_task(run_dir, load_tokenizer(tokenizer_dir))
    lines = []
    for pair in _pairs(groups, anchors):
        lines.append(json.dumps(pair) + "\n")
        if len(lines) == count:
            break
    if not lines:
        raise DataError(f"{run_dir}: no group with two answers of different rewards, and no anchor; record more "
                        "episodes")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, "".join(lines))
    return len(lines)


def _pairs(groups: dict[str, _Answers], source: str) -> Iterator[dict[str, Any]]:
    tasksets: dict[str, Taskset] = {}
    for task_id, answers in groups.items():
        name = task_id.partition("/")[0]
        if name not in tasksets:
            tasksets[name] = load_taskset(name)
        task = task_from_id(tasksets, task_id)
        (worst_reward, worst), (best_reward, best) = min(answers), max(answers)
        anchor = Anchors(source, tasksets[name]).answer(task)
        chosen = anchor if source else (best if best_reward > worst_reward else None)
        if chosen and chosen != worst:
            yield {"messages": first_messages(task), "chosen": chosen, "rejected": worst}


def _answers_by_task(run_dir: Path, tokenizer: Tokenizer) -> dict[str, _Answers]:
    groups: dict[str, _Answers] = defaultdict(list)
    for item in read_episodes(run_dir, EpisodeFilter()):
        episode = item.episode
        if episode.outcome in TRAINABLE_OUTCOMES and episode.reward is not None:
            answer = _answer(episode, tokenizer)
            if answer:
                groups[episode.task_id].append((episode.reward, answer))
    return groups


def _answer(episode: Episode, tokenizer: Tokenizer) -> str:
    """Text of the first sampled span; empty when that is a tool call or was cut off."""
    if not episode.trajectories:
        return ""
    trajectory = episode.trajectories[0]
    first = trajectory.loss_mask.index(True)
    end = first
    while end < len(trajectory.ids) and trajectory.loss_mask[end]:
        end += 1
    span = trajectory.ids[first:end]
    special = set(tokenizer.special_ids.values())
    if span[-1] != tokenizer.special_id("<|user|>") or special & set(span[:-1]):
        return ""
    return tokenizer.decode(span[:-1]).strip()
