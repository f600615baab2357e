"""The client side of an episode, for the orchestrator and for evaluation: session, run, trajectories, record.

Nothing here raises for what goes wrong in an episode: a gateway or service that fails, refuses or is late gives an
episode with outcome ``infra_error`` and a reason. Whatever ran, the session is finished, so that the gateway frees it.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from glm5.errors import ServiceError
from glm5.records import OUTCOMES, Episode, SamplingParams, Trajectory, trajectory_from_json
from glm5.wire import HttpClient

_CONTROL_S = 30.0
"""Deadline of a call that does no model work."""
_MARGIN_S = 15.0
"""Time that the service may take beyond the episode's own to say so."""


@dataclass(frozen=True, slots=True)
class TaskHeader:
    """What a service tells of a task."""

    task_id: str
    taskset: str
    split: str
    instruction: str


async def fetch_tasks(http: HttpClient, service_url: str, taskset: str, split: str, offset: int,
                      limit: int) -> list[TaskHeader]:
    """Tasks ``offset`` to ``offset + limit`` of a split. Raises ServiceError when the service cannot answer."""
    query = f"taskset={taskset}&split={split}&offset={offset}&limit={limit}"
    answer = await http.get(f"{service_url}/tasks?{query}", _CONTROL_S)
    return [TaskHeader(**task) for task in answer["tasks"]]


async def service_info(http: HttpClient, service_url: str) -> dict[str, Any]:
    """What a service serves and how busy it is. Raises ServiceError when it cannot answer."""
    answer: dict[str, Any] = await http.get(f"{service_url}/info", _CONTROL_S)
    return answer


async def run_episode(http: HttpClient, *, gateway_url: str, service_url: str, episode_id: str, group_id: str,
                      taskset: str, task_id: str, sampling: SamplingParams, max_turns: int, timeout_s: float,
                      enable_thinking: bool = False, declare_tools: bool = False,
                      max_tokens: int | None = None, anchored: bool = False) -> Episode:
    """One episode from an open session to a terminal record; the session has the episode's id.

    ``anchored``: the first answer is the task's anchor, where it has one, instead of a sampled one.

    ``max_turns``: model calls; ``max_tokens``: sampled tokens of all of them; ``timeout_s``: wall clock at the service.
    Never raises, except for cancellation, which finishes the session too.
    """
    started_at, started = time.time(), time.monotonic()
    result = _infra_error("cancelled")
    trajectories: list[Trajectory] = []
    settings = {"session_id": episode_id, "group_id": group_id, "ttl_s": timeout_s + 2 * _MARGIN_S,
                "sampling": {key: value for key, value in dataclasses.asdict(sampling).items() if value is not None},
                "max_turns": max_turns, "enable_thinking": enable_thinking, "declare_tools": declare_tools,
                **({} if max_tokens is None else {"max_tokens": max_tokens})}
    try:
        if anchored:
            settings["answers"] = await _anchors(http, service_url, task_id)
        session = await _open_session(http, gateway_url, settings)
        result = await _run_at_service(http, service_url, session, {
            "episode_id": episode_id, "task_id": task_id, "max_turns": max_turns, "timeout_s": timeout_s})
    except ServiceError as error:
        result = _infra_error(str(error))
    finally:
        try:
            trajectories = await _finish(http, gateway_url, episode_id, result)
        except ServiceError as error:
            result = _infra_error(result["reason"] or f"the session could not be finished: {error}")
    if result["outcome"] != "infra_error" and not trajectories:
        result = _infra_error("the gateway recorded no trajectory")
    return Episode(
        episode_id=episode_id, group_id=group_id, task_id=task_id, taskset=taskset, outcome=result["outcome"],
        reward=result["reward"], reward_parts=result["reward_parts"], reason=result["reason"],
        trajectories=trajectories if result["outcome"] != "infra_error" else [], started_at=started_at,
        duration_s=time.monotonic() - started)


async def _anchors(http: HttpClient, service_url: str, task_id: str) -> list[str]:
    answer = (await http.get(f"{service_url}/anchor?task_id={quote(task_id)}", _CONTROL_S)).get("answer")
    return [answer] if isinstance(answer, str) else []


async def _open_session(http: HttpClient, gateway_url: str, settings: dict[str, Any]) -> dict[str, Any]:
    session = await http.post(f"{gateway_url}/sessions", settings, _CONTROL_S)
    if not isinstance(session, dict) or not {"base_url", "api_key"} <= session.keys():
        raise ServiceError(f"{gateway_url}/sessions: expected base_url and api_key, got {str(session)[:80]}")
    return session


async def _run_at_service(http: HttpClient, service_url: str, session: dict[str, Any],
                          episode: dict[str, Any]) -> dict[str, Any]:
    request = {**episode, "base_url": session["base_url"], "api_key": session["api_key"]}
    result = await http.post(f"{service_url}/episodes/run", request, episode["timeout_s"] + _MARGIN_S)
    if not isinstance(result, dict) or result.get("outcome") not in OUTCOMES:
        raise ServiceError(f"{service_url}/episodes/run: expected an outcome, got {str(result)[:80]}")
    return result


async def _finish(http: HttpClient, gateway_url: str, episode_id: str, result: dict[str, Any]) -> list[Trajectory]:
    answer = await http.post(f"{gateway_url}/sessions/{episode_id}/finish",
                             {"outcome": result["outcome"], "reward": result["reward"]}, _CONTROL_S)
    try:
        return [trajectory_from_json(item) for item in answer["trajectories"]]
    except (TypeError, KeyError) as error:
        raise ServiceError(f"{gateway_url}: expected trajectories, got {error!r}") from None


def _infra_error(reason: str) -> dict[str, Any]:
    return {"outcome": "infra_error", "reward": None, "reward_parts": {}, "reason": reason}
