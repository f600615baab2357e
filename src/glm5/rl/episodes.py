"""Running one episode under the limits of a configuration, and again when the infrastructure failed.

Retrying is what keeps slow or unlucky tasks in the data: skipping them would favour the quick ones. An attempt never
raises; what breaks around it is an ``infra_error`` with its reason.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from glm5.env.client import fetch_tasks, run_episode
from glm5.records import Episode, Outcome, SamplingParams
from glm5.rl.config import RLConfig
from glm5.wire import HttpClient

RETRY_BASE_S = 1.0
RETRY_FACTOR = 4.0


class EpisodeRunner:
    """Use as an async context manager, on one event loop."""

    def __init__(self, config: RLConfig, gateway_url: str, temperature: float) -> None:
        self._config, self._gateway_url = config, gateway_url
        self._sampling = SamplingParams(temperature=temperature, max_new_tokens=config.max_new_tokens)
        self._http = HttpClient()

    async def __aenter__(self) -> EpisodeRunner:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.close()

    async def attempt(self, service_url: str, *, taskset: str, task_id: str, group_id: str, episode_id: str,
                      anchored: bool = False) -> Episode:
        """One attempt at a task; cancelling it ends its session. ``anchored``: with the task's anchor as its answer."""
        config = self._config
        return await run_episode(
            self._http, gateway_url=self._gateway_url, service_url=service_url, episode_id=episode_id,
            group_id=group_id, taskset=taskset, task_id=task_id, sampling=self._sampling, max_turns=config.max_turns,
            timeout_s=config.episode_timeout_s, enable_thinking=config.enable_thinking,
            declare_tools=config.declare_tools, anchored=anchored)

    async def until_measured(self, attempt: Callable[[int], Awaitable[Episode]]) -> list[Episode]:
        """Call ``attempt(0)``, ``attempt(1)`` … while the infrastructure fails, ``max_attempts`` times at most, with
        growing pauses; gives all attempts, of which the last counts."""
        attempts: list[Episode] = []
        for number in range(self._config.max_attempts):
            if number:
                await asyncio.sleep(RETRY_BASE_S * RETRY_FACTOR ** (number - 1) * random.uniform(0.75, 1.25))
            attempts.append(await attempt(number))
            if attempts[-1].outcome != "infra_error":
                break
        return attempts

    async def list_tasks(self, service_url: str, taskset: str, split: str, offset: int, limit: int) -> list[str]:
        """Ids of tasks ``offset`` … ``offset + limit - 1`` of a split. Raises ServiceError."""
        headers = await fetch_tasks(self._http, service_url, taskset, split, offset, limit)
        return [header.task_id for header in headers]


def failed_episode(reason: str, *, taskset: str, task_id: str, group_id: str, episode_id: str, started_at: float,
                   outcome: Outcome = "infra_error") -> Episode:
    """An attempt that ended before or outside ``run_episode``."""
    return Episode(episode_id=episode_id, group_id=group_id, task_id=task_id, taskset=taskset, outcome=outcome,
                   reward=None, reason=reason, started_at=started_at, duration_s=time.time() - started_at)


def monitor_counts(episodes: Iterable[Episode]) -> dict[str, int]:
    """What the reward-hacking monitor counted in ``episodes``, by the names of its reward parts; empty for nothing."""
    total: Counter[str] = Counter()
    for episode in episodes:
        total.update({name.removeprefix("monitor."): int(value) for name, value in episode.reward_parts.items()
                      if name.startswith("monitor.")})
    return dict(total)
