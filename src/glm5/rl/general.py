"""What general RL needs before it starts: the outcome reward model, trained from its tasksets' preference pairs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from glm5.env.check import write_pairs
from glm5.errors import ConfigError
from glm5.rl.config import RLConfig
from glm5.runlog import write_atomic
from glm5.train.preference_config import PreferenceConfig
from glm5.train.preferences import run_preferences


def train_reward_model(reward: PreferenceConfig, rl: RLConfig, pipeline_dir: Path, pairs_per_taskset: int) -> Path:
    """Write ``preferences.jsonl`` for the tasksets of ``rl`` that the reward model scores and train it beside the other
    stages of ``pipeline_dir``; gives its final checkpoint, at once when it is finished. Raises ConfigError when the two
    configurations do not fit."""
    if rl.reward_model != f"stage:{reward.name}":
        raise ConfigError(f"{rl.name}: reward_model={rl.reward_model!r}, the reward model's run is {reward.name!r}; "
                          f"set reward_model = \"stage:{reward.name}\"")
    path = pipeline_dir / "preferences.jsonl"
    if not path.exists():
        text = ""
        for name in (name for name, rewards in rl.rewards.items() if rewards.model):
            part = pipeline_dir / f"preferences.{name}.jsonl"
            write_pairs(name, pairs_per_taskset, part)
            text += part.read_text(encoding="utf-8")
            part.unlink()
        write_atomic(path, text)
    return run_preferences(dataclasses.replace(reward, pairs=(str(path),)), pipeline_dir / reward.name)
