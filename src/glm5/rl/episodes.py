"""Running one episode with a deadline, and again when the infrastructure failed.

The one place of this layer that catches broadly: whatever goes wrong between here, the gateway and a task service is an
``infra_error`` of that attempt, never an exception of the caller and never a reward. Retrying is what keeps slow or
unlucky tasks in the data: skipping them would favour the quick ones.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import httpx

from glm5.env.client import fetch_tasks, run_episode
from glm5.errors import Glm5Error
from glm5.records import Episode, SamplingParams
from glm5.rl.config import RLConfig

GRACE_S = 15.0
"""What the calls around an episode may take on top of its own time limit."""
RETRY_BASE_S = 1.0
RETRY_FACTOR = 4.0


class EpisodeRunner:
    """Episodes under the limits of one configuration; use as an async context manager."""

    def __init__(self, config: RLConfig, gateway_url: str, temperature: float) -> None:
        self._config, self._gateway_url = config, gateway_url
        self._sampling = SamplingParams(temperature=temperature, max_new_tokens=config.max_new_tokens)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency)
        self.http = httpx.AsyncClient(limits=limits, timeout=config.episode_timeout_s + GRACE_S, trust_env=False)

    async def __aenter__(self) -> EpisodeRunner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def attempt(self, service_url: str, *, taskset: str, task_id: str, group_id: str, episode_id: str) -> Episode:
        """One attempt; anything that breaks around it is an ``infra_error`` with its reason."""
        config = self._config
        started_at = time.time()
        try:
            async with asyncio.timeout(config.episode_timeout_s + GRACE_S):
                return await run_episode(
                    self.http, gateway_url=self._gateway_url, service_url=service_url, episode_id=episode_id,
                    group_id=group_id, taskset=taskset, task_id=task_id, sampling=self._sampling,
                    max_turns=config.max_turns, timeout_s=config.episode_timeout_s,
                    enable_thinking=config.enable_thinking, declare_tools=config.declare_tools)
        except TimeoutError:
            reason = f"no answer within {config.episode_timeout_s + GRACE_S:.0f} s"
        except (httpx.HTTPError, Glm5Error, OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        return failed_episode(reason, taskset=taskset, task_id=task_id, group_id=group_id, episode_id=episode_id,
                              started_at=started_at)

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
        """Ids of tasks ``offset`` … ``offset + limit - 1`` of a split."""
        return [task.task_id for task in await fetch_tasks(self.http, service_url, taskset, split, offset, limit)]


def failed_episode(reason: str, *, taskset: str, task_id: str, group_id: str, episode_id: str,
                   started_at: float) -> Episode:
    """An attempt that the infrastructure ended."""
    return Episode(episode_id=episode_id, group_id=group_id, task_id=task_id, taskset=taskset, outcome="infra_error",
                   reward=None, reason=reason.splitlines()[0][:300] if reason else "unknown", started_at=started_at,
                   duration_s=time.time() - started_at)
