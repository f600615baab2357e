"""A few trained episodes of every step as text, in ``<run>/transcripts/000012.jsonl``: what the policy really does.

Of a batch the episodes of the largest and of the smallest advantage are kept, alternately, each episode once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5.errors import ServiceError
from glm5.records import Sample
from glm5.rl.ledger import LeasedBatch
from glm5.rl.replay import read_episode, transcript
from glm5.runlog import read_jsonl, write_atomic
from glm5.tokenizer.bpe import Tokenizer


def write_transcripts(run_dir: Path, step: int, batch: LeasedBatch, count: int, tokenizer: Tokenizer) -> None:
    """Keep ``count`` episodes of ``batch``, trained in ``step``."""
    chosen = choose(batch.samples, count)
    lines = []
    for sample in chosen:
        item = read_episode(run_dir, sample.episode_id)
        lines.append(json.dumps({
            "step": step, "episode_id": sample.episode_id, "taskset": sample.taskset, "reward": item.episode.reward,
            "advantage": sample.advantage, "staleness": batch.staleness[sample.sample_id],
            "text": transcript(item, tokenizer)}) + "\n")
    if lines:
        path = folder(run_dir) / f"{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, "".join(lines))


def choose(samples: list[Sample], count: int) -> list[Sample]:
    """``count`` samples of different episodes: best, worst, second best … by advantage."""
    by_episode = {sample.episode_id: sample for sample in samples}
    ranked = sorted(by_episode.values(), key=lambda sample: (-sample.advantage, sample.episode_id))
    chosen: list[Sample] = []
    while ranked and len(chosen) < count:
        chosen.append(ranked.pop(0 if len(chosen) % 2 == 0 else -1))
    return chosen


def read_transcripts(run_dir: Path, step: int | None = None, taskset: str | None = None) -> Iterator[dict[str, Any]]:
    """Kept episodes in order of their steps; of the newest step when None. Raises ServiceError when there are none."""
    files = sorted(folder(run_dir).glob("*.jsonl"))
    if step is not None:
        files = [path for path in files if path.stem == f"{step:06d}"]
    if not files:
        what = "step" if step is None else f"step {step}"
        raise ServiceError(f"{folder(run_dir)}: no transcripts of {what}; set observation.transcripts above 0")
    for record in read_jsonl(files[-1]):
        if taskset is None or record["taskset"] == taskset:
            yield record


def folder(run_dir: Path) -> Path:
    """Where the transcripts of a run lie."""
    return run_dir / "transcripts"
