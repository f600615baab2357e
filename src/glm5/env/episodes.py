"""Episodes of a task service: prepare, act, verify, clean up, and the one boundary that classifies what goes wrong.

What the model does is data: it is graded. What the machinery does wrong (sandbox, gateway, deadline, a defect of a
verifier) gives ``infra_error`` with a reason and no reward, so that it can never be read as a bad answer.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from glm5.env.harness import Run, run_agent
from glm5.env.rewards.blend import Rewards
from glm5.env.rewards.config import RewardConfig
from glm5.env.rewards.verification import verdict, verification_turn
from glm5.env.sandbox import Sandbox, SandboxPool
from glm5.env.tasks import Message, Task, Taskset, ToolError, task_from_id
from glm5.env.tools import final_answer
from glm5.errors import Glm5Error, TaskError
from glm5.records import Outcome
from glm5.wire import HttpClient

_CACHED_TASKS = 256
"""The episodes of a group share a task, and drawing one costs about a millisecond."""
_GRACE_S = 30.0
"""An episode that outlives its time by this much is reaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """What is reported of an episode that a service ran."""

    outcome: Outcome
    reward: float | None
    reward_parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    turns: int = 0
    duration_s: float = 0.0


class InfrastructureFailure(Exception):
    """The machinery failed; the message is the reason."""


@asynccontextmanager
async def boundary(stage: str, deadline: float) -> AsyncIterator[None]:
    """Turn every failure of ``stage``, and passing the monotonic ``deadline``, into InfrastructureFailure.

    The only place that catches broadly.
    """
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
            yield
    except TimeoutError:
        raise InfrastructureFailure(f"{stage}: the episode's time is over") from None
    except Glm5Error as error:
        raise InfrastructureFailure(f"{stage}: {error}") from error
    except Exception as error:
        raise InfrastructureFailure(f"{stage}: defect: {type(error).__name__}: {error}") from error


@dataclass(slots=True)
class Running:
    """A prepared episode."""

    task: Task
    taskset: Taskset
    sandbox: Sandbox | None
    deadline: float
    """Monotonic time after which it is reaped."""
    rewards: Rewards | None = None
    """How it is rewarded and watched; None leaves it to the taskset."""
    counts: Counter[str] = field(default_factory=Counter)
    """What the monitor saw."""

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Run a tool for the agent, past the monitor. Raises ToolError for a call that the model got wrong."""
        async def run() -> str:
            return await self.taskset.call(self.task, self.sandbox, tool, arguments)

        if self.rewards is None or self.rewards.monitor is None:
            return await run()
        return await self.rewards.monitor.call(self.task, tool, arguments, self.counts, run)

    async def close(self) -> None:
        """Free the sandbox."""
        if self.sandbox is not None:
            await self.sandbox.close()


class Episodes:
    """The running episodes of one service, at most ``capacity`` at a time."""

    def __init__(self, tasksets: Mapping[str, Taskset], pool: SandboxPool | None, capacity: int,
                 rewards: Mapping[str, RewardConfig] | None = None, reward_model_url: str = "") -> None:
        """``rewards`` by taskset; others are rewarded by their own verifier. Raises ConfigError for what is missing."""
        self.tasksets = tasksets
        self.capacity = capacity
        self.outcomes: Counter[str] = Counter()
        self._pool = pool
        self._slots = asyncio.Semaphore(capacity)
        self._running: dict[str, Running] = {}
        self._ids: set[str] = set()
        self._http = HttpClient()
        self._rewards = {name: Rewards(config, tasksets[name], self._http, reward_model_url)
                         for name, config in (rewards or {}).items() if name in tasksets}
        self._task = functools.lru_cache(_CACHED_TASKS)(functools.partial(task_from_id, tasksets))

    @property
    def num_running(self) -> int:
        """Prepared episodes."""
        return len(self._running)

    async def prepare(self, episode_id: str, task_id: str, ttl_s: float) -> Running:
        """Set up the sandbox of an episode, waiting for a free slot. The caller ends it with ``remove``.

        Raises TaskError for an unknown task or an id in use, SandboxError when the sandbox cannot be prepared.
        """
        task = self._task(task_id)
        if episode_id in self._ids:
            raise TaskError(f"episode {episode_id!r} is already running; choose another id")
        self._ids.add(episode_id)
        try:
            await self._slots.acquire()
            try:
                sandbox = await self._prepare_sandbox(task)
            except BaseException:
                self._slots.release()
                raise
        except BaseException:
            self._ids.discard(episode_id)
            raise
        running = Running(task, self.tasksets[task.taskset], sandbox, time.monotonic() + ttl_s,
                          self._rewards.get(task.taskset))
        self._running[episode_id] = running
        return running

    async def _prepare_sandbox(self, task: Task) -> Sandbox | None:
        taskset = self.tasksets[task.taskset]
        if not taskset.needs_sandbox:
            await taskset.setup(task, None)
            return None
        if self._pool is None:
            raise TaskError(f"taskset {taskset.name!r} needs a sandbox and the service has none")
        sandbox = await self._pool.acquire()
        try:
            await taskset.setup(task, sandbox)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def get(self, episode_id: str) -> Running:
        """A prepared episode. Raises TaskError when there is none of this id."""
        if episode_id not in self._running:
            raise TaskError(f"episode {episode_id!r} is not running here; prepare it with POST /episodes")
        return self._running[episode_id]

    async def verify(self, running: Running, messages: list[Message]) -> dict[str, float]:
        """Reward parts of a finished conversation."""
        parts = await running.taskset.verify(running.task, running.sandbox, messages)
        if "reward" not in parts:
            raise TaskError(f"taskset {running.taskset.name!r}: verify gave no 'reward', only {sorted(parts)}")
        if running.rewards is None:
            return parts
        return await running.rewards.blend(running.task, messages, parts, running.counts)

    def anchor(self, task_id: str) -> str | None:
        """The human-written answer of a task, None when there is none. Raises TaskError for an unknown task."""
        task = self._task(task_id)
        rewards = self._rewards.get(task.taskset)
        return rewards.anchors.answer(task) if rewards else None

    async def remove(self, episode_id: str) -> bool:
        """End an episode and free what it holds; False when there is none."""
        running = self._running.pop(episode_id, None)
        if running is None:
            return False
        try:
            await running.close()
        finally:
            self._slots.release()
            self._ids.discard(episode_id)
        return True

    async def reap(self) -> None:
        """Remove the episodes whose time is over."""
        now = time.monotonic()
        for episode_id in [name for name, running in self._running.items() if running.deadline < now]:
            await self.remove(episode_id)

    async def close(self) -> None:
        """Remove every episode."""
        for episode_id in list(self._running):
            await self.remove(episode_id)
        for rewards in self._rewards.values():
            rewards.close()
        self._http.close()

    async def run(self, *, episode_id: str, task_id: str, base_url: str, api_key: str, max_turns: int,
                  timeout_s: float) -> EpisodeResult:
        """A whole episode with the built-in harness. Never raises for what happens inside it.

        Raises TaskError for an unknown task.
        """
        self._task(task_id)
        started = time.monotonic()
        deadline = started + timeout_s
        run: Run | None = None
        try:
            async with boundary("setup", deadline):
                running = await self.prepare(episode_id, task_id, ttl_s=timeout_s + _GRACE_S)
            try:
                async with boundary("harness", deadline):
                    run = await run_agent(
                        self._http, base_url=base_url, api_key=api_key, messages=first_messages(running.task),
                        tools=running.taskset.tools(), call_tool=running.call, max_turns=max_turns,
                        call_timeout_s=timeout_s)
                async with boundary("verifier", deadline):
                    parts = await self.verify(running, run.messages)
                async with boundary("verification", deadline):
                    parts = await self._verification(running, run, parts, base_url, api_key, max_turns, timeout_s)
            finally:
                await self.remove(episode_id)
        except InfrastructureFailure as failure:
            result = EpisodeResult(outcome="infra_error", reward=None, reason=str(failure),
                                   turns=run.turns if run else 0, duration_s=time.monotonic() - started)
        else:
            result = EpisodeResult(outcome=run.outcome, reward=parts.pop("reward"), reward_parts=parts,
                                   reason=run.reason, turns=run.turns, duration_s=time.monotonic() - started)
        self.outcomes[result.outcome] += 1
        return result

    async def _verification(self, running: Running, run: Run, parts: dict[str, float], base_url: str, api_key: str,
                            max_turns: int, timeout_s: float) -> dict[str, float]:
        """``parts`` with ``verdict`` (1 when the model was right about its own answer) blended into the reward, where
        self-play verification is configured. An episode that has no answer or no turn left gives no right verdict."""
        config = running.rewards.config.verification if running.rewards else None
        if config is None:
            return parts
        agrees = False
        if run.outcome == "ok" and run.turns < max_turns:
            asked = await run_agent(
                self._http, base_url=base_url, api_key=api_key, messages=[*run.messages, verification_turn(config)],
                tools=running.taskset.tools(), call_tool=_no_tools, max_turns=1, call_timeout_s=timeout_s)
            agrees = verdict(config, final_answer(asked.messages)) == (parts["task"] >= 1)
            run.turns += asked.turns
        reward = (1 - config.weight) * parts["reward"] + config.weight * agrees
        return {**parts, "verdict": float(agrees), "reward": reward}


async def _no_tools(tool: str, arguments: dict[str, Any]) -> str:
    raise ToolError("error: only a verdict is wanted")


def first_messages(task: Task) -> list[Message]:
    """The conversation that an episode starts with."""
    return [{"role": "user", "content": task.instruction}]


async def run_solution(taskset: Taskset, task: Task, sandbox: Sandbox | None) -> list[Message]:
    """The conversation of the scripted expert, its tool calls really executed. The sandbox must be set up."""
    solution = taskset.solution(task)
    messages = first_messages(task)
    for number, (name, arguments) in enumerate(solution.calls):
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            output = await taskset.call(task, sandbox, name, arguments)
        except ToolError as error:
            raise TaskError(f"{task.task_id}: the expert's call {name} {arguments} failed: {error}") from None
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": output})
    messages.append({"role": "assistant", "content": solution.answer})
    return messages
