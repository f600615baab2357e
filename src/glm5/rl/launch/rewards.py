"""What the task services of a run need for blended rewards: their configuration as a file, and the reward model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from glm5.errors import ConfigError
from glm5.rl.config import RLConfig
from glm5.runlog import write_atomic


def reward_model_directory(reward_model: str, run_dir: Path) -> Path:
    """Directory of ``reward_model``; ``stage:NAME`` is looked for beside ``run_dir`` and one level above, where the
    stages of a pipeline lie that evaluates in a directory of its own. Raises ConfigError when there is none."""
    if not reward_model.startswith("stage:"):
        directory = Path(reward_model)
        if not (directory / "reward_head.safetensors").is_file():
            raise ConfigError(f"reward_model={reward_model!r}: no reward_head.safetensors there; give the checkpoint "
                              "of a trained reward model")
        return directory
    name = reward_model.removeprefix("stage:")
    for parent in run_dir.resolve().parents[:2]:
        final = parent / name / "final.json"
        if final.is_file():
            checkpoint = json.loads(final.read_text(encoding="utf-8"))["checkpoint"]
            return reward_model_directory(str(parent / name / "checkpoints" / str(checkpoint)), run_dir)
    raise ConfigError(f"reward_model={reward_model!r}: no finished run {name!r} beside {run_dir}; train it first with "
                      "glm5 reward train, or give a checkpoint directory")


def reward_arguments(config: RLConfig, run_dir: Path, reward_model_url: str) -> list[str]:
    """Arguments of ``glm5 env serve`` for the rewards of ``config``, which are written into ``run_dir``."""
    if not config.rewards:
        return []
    path = run_dir / "rewards.json"
    rewards = {name: dataclasses.asdict(reward) for name, reward in config.rewards.items()}
    write_atomic(path, json.dumps(rewards, indent=1) + "\n")
    return ["--rewards", str(path), *(["--reward-model", reward_model_url] if reward_model_url else [])]
