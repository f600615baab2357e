"""The client side of an episode, for the orchestrator and for evaluation: session, run, trajectories, record.

Nothing here raises for what goes wrong in an episode: a gateway or service that fails, refuses or is late gives an
episode with outcome ``infra_error`` and a reason. Whatever ran, the session is finished, so that the gateway frees it.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from glm5.env.wire import HttpClient
from glm5.errors import ServiceError
from glm5.records import OUTCOMES, Episode, SamplingParams, Trajectory, trajectory_from_json

_CONTROL_S = 30.0
"""Deadline of a call that does no model work."""
_MARGIN_S = 15.0
"""Time that the service may take beyond the episode's own to say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """How every episode of a run is played."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Overrides what the agent asks for; the gateway applies them."""
    max_turns: int = 4
    """Model calls of one episode."""
    max_tokens: int = 512
    """Tokens of one session, prompts included."""
    timeout_s: float = 60.0
    """Wall clock of one episode."""
    enable_thinking: bool = False
    """Whether the model thinks before it acts."""
    declare_tools: bool = False
    """Whether the prompt lists the tools; small models know theirs from demonstrations."""


@dataclass(frozen=True, slots=True)
class TaskHeader:
    """What a service tells of a task."""

    task_id: str
    taskset: str
    split: str
    instruction: str


async def list_tasks(http: HttpClient, service_url: str, taskset: str, split: str, offset: int, limit: int) -> list[TaskHeader]:
    """Tasks ``offset`` to ``offset + limit`` of a split. Raises ServiceError when the service cannot answer."""
    answer = await http.get(f"{service_url}/tasks?taskset={taskset}&split={split}&offset={offset}&limit={limit}", _CONTROL_S)
    return [TaskHeader(**task) for task in answer["tasks"]]


async def service_info(http: HttpClient, service_url: str) -> dict[str, Any]:
    """What a service serves and how busy it is. Raises ServiceError when it cannot answer."""
    answer: dict[str, Any] = await http.get(f"{service_url}/info", _CONTROL_S)
    return answer


async def run_episode(http: HttpClient, *, gateway_url: str, service_url: str, task_id: str, episode_id: str,
                      group_id: str, settings: EpisodeSettings) -> Episode:
    """One episode from an open session to a terminal record; the session has the episode's id. Never raises, except
    for cancellation."""
    started_at, started = time.time(), time.monotonic()
    outcome: dict[str, Any]
    trajectories: list[Trajectory] = []
    try:
        session = await _open_session(http, gateway_url, episode_id, group_id, settings)
        outcome = await _run_at_service(http, service_url, task_id, episode_id, session, settings)
    except ServiceError as error:
        outcome = _infra_error(str(error))
    try:
        trajectories = await _finish(http, gateway_url, episode_id, outcome)
    except ServiceError as error:
        outcome = _infra_error(outcome["reason"] or f"the session could not be finished: {error}")
    if outcome["outcome"] != "infra_error" and not trajectories:
        outcome = _infra_error("the gateway recorded no trajectory")
    return Episode(
        episode_id=episode_id, group_id=group_id, task_id=task_id, taskset=task_id.partition("/")[0],
        outcome=outcome["outcome"], reward=outcome["reward"], reward_parts=outcome["reward_parts"],
        reason=outcome["reason"], trajectories=trajectories if outcome["outcome"] != "infra_error" else [],
        started_at=started_at, duration_s=time.monotonic() - started)


async def _open_session(http: HttpClient, gateway_url: str, episode_id: str, group_id: str,
                        settings: EpisodeSettings) -> dict[str, Any]:
    sampling = {key: value for key, value in dataclasses.asdict(settings.sampling).items() if value is not None}
    session = await http.post(f"{gateway_url}/sessions", {
        "session_id": episode_id, "group_id": group_id, "ttl_s": settings.timeout_s + 2 * _MARGIN_S, "sampling": sampling,
        "max_turns": settings.max_turns, "max_tokens": settings.max_tokens, "enable_thinking": settings.enable_thinking,
        "declare_tools": settings.declare_tools}, _CONTROL_S)
    if not isinstance(session, dict) or not {"base_url", "api_key"} <= session.keys():
        raise ServiceError(f"{gateway_url}/sessions: expected base_url and api_key, got {str(session)[:80]}")
    return session


async def _run_at_service(http: HttpClient, service_url: str, task_id: str, episode_id: str, session: dict[str, Any],
                          settings: EpisodeSettings) -> dict[str, Any]:
    result = await http.post(f"{service_url}/episodes/run", {
        "episode_id": episode_id, "task_id": task_id, "base_url": session["base_url"], "api_key": session["api_key"],
        "max_turns": settings.max_turns, "timeout_s": settings.timeout_s}, settings.timeout_s + _MARGIN_S)
    if not isinstance(result, dict) or result.get("outcome") not in OUTCOMES:
        raise ServiceError(f"{service_url}/episodes/run: expected an outcome, got {str(result)[:80]}")
    return result


async def _finish(http: HttpClient, gateway_url: str, episode_id: str, outcome: dict[str, Any]) -> list[Trajectory]:
    answer = await http.post(f"{gateway_url}/sessions/{episode_id}/finish",
                             {"outcome": outcome["outcome"], "reward": outcome["reward"]}, _CONTROL_S)
    try:
        return [trajectory_from_json(item) for item in answer["trajectories"]]
    except (TypeError, KeyError) as error:
        raise ServiceError(f"{gateway_url}: expected trajectories, got {error!r}") from None


def _infra_error(reason: str) -> dict[str, Any]:
    return {"outcome": "infra_error", "reward": None, "reward_parts": {}, "reason": reason}
