"""Blends the parts of a reward; see ``config`` for the formula. Every part is recorded; none is ever guessed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from glm5.env.rewards.anchors import Anchors
from glm5.env.rewards.config import RewardConfig
from glm5.env.rewards.judge import Judge
from glm5.env.rewards.monitor import Monitor
from glm5.env.rewards.scoring import RewardModelClient
from glm5.env.tasks import Message, Task, Taskset
from glm5.env.tools import final_answer
from glm5.errors import ConfigError
from glm5.wire import HttpClient


class Rewards:
    """How the episodes of one taskset are rewarded and watched; use on one event loop."""

    def __init__(self, config: RewardConfig, taskset: Taskset, http: HttpClient, reward_model_url: str = "") -> None:
        """Raises ConfigError when the configuration asks for what is not there."""
        if config.model and not reward_model_url:
            raise ConfigError(f"rewards.{taskset.name}: model={config.model} needs a reward model; set reward_model, "
                              "or give --reward-model URL")
        self.config = config
        self.anchors = Anchors(config.anchors, taskset)
        self._model = RewardModelClient(reward_model_url, http) if config.model else None
        self._judges = [Judge(judge, http) if judge else None
                        for judge in (config.judge, config.monitor.judge if config.monitor else None)]
        self.monitor = Monitor(config.monitor, self._judges[1]) if config.monitor else None

    def close(self) -> None:
        """Close the judges' caches."""
        for judge in self._judges:
            if judge is not None:
                judge.close()

    async def blend(self, task: Task, messages: list[Message], parts: Mapping[str, float],
                    counts: Counter[str]) -> dict[str, float]:
        """Parts of the whole reward: ``reward``; the taskset's own as ``task``; ``rule.KIND``, ``model``, ``judge``
        where they are configured and count; the taskset's other parts and the monitor's ``counts`` as they are.

        Raises TaskError when a part that counts cannot be had.
        """
        config = self.config
        own = float(parts["reward"])
        if not math.isfinite(own):
            raise ConfigError(f"{task.task_id}: the taskset's own reward is {own}; it must be a finite number")
        answer = final_answer(messages)
        blended = {**parts, "task": own}
        correctness = [(config.task, own)]
        for number, rule in enumerate(config.rules):
            value = rule.score(answer)
            name = f"rule.{rule.kind}"
            blended[name if name not in blended else f"{name}.{number}"] = value
            correctness.append((rule.weight, value))
        gate = min(max(own, 0.0), 1.0) if config.gate else 1.0
        quality = await self._quality(task, messages, answer) if gate else {}
        blended |= quality
        weights = self._quality_weights()
        reward = math.fsum([*(weight * value for weight, value in correctness),
                            *(weight * gate * quality.get(name, 0.0) for name, weight in weights.items())])
        reward /= math.fsum([*(weight for weight, _ in correctness), *weights.values()])
        is_hacked = config.monitor is not None and config.monitor.zero_reward and counts["monitor.confirmed"]
        return {**blended, "reward": 0.0 if is_hacked else reward, **{name: float(n) for name, n in counts.items()}}

    async def _quality(self, task: Task, messages: list[Message], answer: str) -> dict[str, float]:
        quality: dict[str, float] = {}
        if self._model is not None:
            quality["model"] = await self._model.score(messages)
        judge = self._judges[0]
        if judge is not None and judge.config.weight:
            quality["judge"] = await judge.score(messages[:-1], answer, self.anchors.answer(task))
        return quality

    def _quality_weights(self) -> dict[str, float]:
        config = self.config
        weights = {"model": config.model, "judge": config.judge.weight if config.judge else 0.0}
        return {name: weight for name, weight in weights.items() if weight}
