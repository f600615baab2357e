"""The task service: owns tasksets, hands out tasks, prepares sandboxes, runs and verifies episodes, over HTTP.

``GET /info`` · ``GET /tasks?split=&offset=&limit=[&taskset=]`` · ``POST /episodes`` · ``POST /episodes/ID/exec`` ·
``POST /episodes/ID/verify`` · ``DELETE /episodes/ID`` · ``POST /episodes/run`` · ``GET /anchor?task_id=``. Mistakes of
a caller are 4xx with ``{"error": {"message", "type", "code"}}``; a failure of the machinery is an answer with outcome
``infra_error`` and reward null. It refuses to start when a taskset needs isolation that does not work.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.env.check import check_taskset, write_demonstrations
from glm5.env.episodes import Episodes, InfrastructureFailure, Running, boundary, first_messages
from glm5.env.rewards.config import RewardConfig, read_rewards
from glm5.env.sandbox import SandboxPool
from glm5.env.tasks import SPLITS, Solution, Task, Taskset, ToolError, available_tasksets, load_taskset
from glm5.errors import ConfigError, SandboxError, ServiceError, TaskError
from glm5.process import serve_app
from glm5.wire import HttpClient, HttpStatusError

__all__ = ["Solution", "Task", "Taskset", "ToolError", "available_tasksets", "build_app", "check_taskset",
           "require_sandbox", "run_service", "write_demonstrations"]

_TTL_S = 600.0
"""Life of an episode that a caller drives itself."""
_REAP_EVERY_S = 5.0
_HEARTBEAT_S = 2.0
_CONTROL_S = 5.0
"""Deadline of a call to the orchestrator."""
_STEP_S = 60.0
"""Deadline of one step of an episode that a caller drives itself."""
_MAX_TASKS = 10_000
Handler = Callable[["_Service", Request], Awaitable[JSONResponse]]


class _Service:
    """What the routes share."""

    def __init__(self, names: Sequence[str], sandbox: str, capacity: int, rewards: Mapping[str, RewardConfig],
                 reward_model_url: str) -> None:
        self.service_id = f"tasks-{os.getpid()}-{secrets.token_hex(3)}"
        self.tasksets = {name: load_taskset(name) for name in names}
        needs_sandbox = any(taskset.needs_sandbox for taskset in self.tasksets.values())
        self.pool = SandboxPool(sandbox, ready=min(4, capacity)) if needs_sandbox else None
        self.episodes = Episodes(self.tasksets, self.pool, capacity, rewards, reward_model_url)


@dataclass(frozen=True, slots=True)
class Registration:
    """Where to register, the file that says under which URL this service is reached, and what it wishes."""

    register_url: str
    ready_file: Path
    ratio: float = 1.0
    """Factor on the shares of its tasksets."""
    speed: float = 0.0
    """Episodes that may start in a second at most; 0: as many as come."""


def build_app(names: Sequence[str], *, sandbox: str = "bwrap", capacity: int = 32,
              registration: Registration | None = None, rewards: Mapping[str, RewardConfig] | None = None,
             reward_model_url: str = "") -> Starlette:
    """The HTTP application that serves the tasksets ``names``. Raises ConfigError or TaskError for a bad name or for
    ``rewards`` (by taskset) that cannot be given."""
    if not names:
        raise ConfigError("no taskset named; give at least one, see `glm5 env list`")
    service = _Service(names, sandbox, capacity, rewards or {}, reward_model_url)
    routes = [
        _route(service, "/info", _info, "GET"), _route(service, "/health", _info, "GET"),
        _route(service, "/tasks", _tasks, "GET"), _route(service, "/episodes", _prepare, "POST"),
        _route(service, "/anchor", _anchor, "GET"),
        _route(service, "/episodes/run", _run, "POST"), _route(service, "/episodes/{episode_id}/exec", _exec, "POST"),
        _route(service, "/episodes/{episode_id}/verify", _verify, "POST"),
        _route(service, "/episodes/{episode_id}", _delete, "DELETE"),
    ]
    return Starlette(routes=routes, lifespan=lambda _: _lifespan(service, registration))


def run_service(names: Sequence[str], host: str = "127.0.0.1", port: int = 0, ready_file: Path | None = None,
                register_url: str | None = None, sandbox: str = "bwrap", capacity: int = 32, ratio: float = 1.0,
                speed: float = 0.0, rewards: Path | None = None, reward_model_url: str = "") -> None:
    """Serve ``names`` until a signal. With ``register_url``, stay registered at that orchestrator, which is told
    ``ratio`` and ``speed``. ``rewards`` is a JSON file of rewards by taskset.

    Raises SandboxError when isolation is missing, ServiceError when the port is taken.
    """
    with tempfile.TemporaryDirectory(prefix="glm5-service-") as directory:
        ready_file = ready_file or Path(directory) / "ready.json"
        registration = Registration(register_url, ready_file, ratio, speed) if register_url else None
        app = build_app(names, sandbox=sandbox, capacity=capacity, registration=registration,
                        rewards=read_rewards(rewards) if rewards else None, reward_model_url=reward_model_url)
        if any(load_taskset(name).needs_sandbox for name in names):
            require_sandbox(sandbox)  # inside the server a failure could not be reported in one line
        serve_app(app, host, port, ready_file)


def require_sandbox(backend: str) -> None:
    """Prove that a sandbox backend works. Raises SandboxError with one line when isolation is missing."""
    asyncio.run(_start_and_stop(SandboxPool(backend)))


async def _start_and_stop(pool: SandboxPool) -> None:
    try:
        await pool.start()
    finally:
        await pool.close()


def _route(service: _Service, path: str, handler: Handler, method: str) -> Route:
    async def endpoint(request: Request) -> JSONResponse:
        try:
            return await handler(service, request)
        except ToolError as error:
            return _error(422, error, "tool_error")
        except TaskError as error:
            return _error(400, error, "invalid_request")
        except InfrastructureFailure as failure:
            return _error(503, failure, "infra_error")
    return Route(path, endpoint, methods=[method])


@asynccontextmanager
async def _lifespan(service: _Service, registration: Registration | None) -> AsyncIterator[None]:
    if service.pool is not None:
        await service.pool.start()
    keepers = [asyncio.create_task(_reap_forever(service.episodes))]
    if registration is not None:
        keepers.append(asyncio.create_task(_stay_registered(service, registration)))
    try:
        yield
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await service.episodes.close()
        if service.pool is not None:
            await service.pool.close()


async def _reap_forever(episodes: Episodes) -> None:
    while True:
        await asyncio.sleep(_REAP_EVERY_S)
        await episodes.reap()


async def _stay_registered(service: _Service, registration: Registration) -> None:
    """Register, then send heartbeats; register again when the orchestrator does not know us (it was restarted)."""
    description = {
        "kind": "task_service", "id": service.service_id, "capacity": service.episodes.capacity,
        "url": json.loads(registration.ready_file.read_text())["url"], "tasksets": list(service.tasksets),
        "ratio": registration.ratio, "speed": registration.speed}
    http = HttpClient()
    registered, complaint = False, ""
    try:
        while True:
            try:
                if not registered:
                    await http.post(f"{registration.register_url}/register", description, _CONTROL_S)
                    registered = True
                else:
                    await http.post(f"{registration.register_url}/heartbeat", {"id": service.service_id}, _CONTROL_S)
            except ServiceError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    logging.getLogger("glm5.env").warning("not registered: %s", error)
                registered = registered and not isinstance(error, HttpStatusError)
            await asyncio.sleep(_HEARTBEAT_S)
    finally:
        http.close()


async def _info(service: _Service, request: Request) -> JSONResponse:
    tasksets = [{"name": taskset.name, "needs_sandbox": taskset.needs_sandbox, "tools": taskset.tools()}
                for taskset in service.tasksets.values()]
    episodes, pool = service.episodes, service.pool
    return JSONResponse({
        "kind": "task_service", "id": service.service_id, "pid": os.getpid(), "tasksets": tasksets,
        "capacity": episodes.capacity, "running": episodes.num_running, "outcomes": dict(episodes.outcomes),
        "sandbox": pool.backend if pool else "", "open_sandboxes": pool.num_open if pool else 0})


async def _tasks(service: _Service, request: Request) -> JSONResponse:
    query = request.query_params
    split = query.get("split", "train")
    if split not in SPLITS:
        raise TaskError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    name = query.get("taskset")
    if name is not None and name not in service.tasksets:
        raise TaskError(f"taskset {name!r} is not served here; served: {', '.join(service.tasksets)}")
    try:
        offset, limit = int(query.get("offset", "0")), int(query.get("limit", "100"))
    except ValueError:
        raise TaskError("offset and limit: expected integers") from None
    if offset < 0 or not 0 < limit <= _MAX_TASKS:
        raise TaskError(f"offset {offset}, limit {limit}: expected offset >= 0 and limit in 1 to {_MAX_TASKS}")
    chosen = [name] if name else list(service.tasksets)
    tasks = [service.tasksets[one].task(split, offset + index) for index in range(limit) for one in chosen]
    return JSONResponse({"tasks": [{"task_id": task.task_id, "taskset": task.taskset, "split": task.split,
                                    "instruction": task.instruction} for task in tasks]})


async def _anchor(service: _Service, request: Request) -> JSONResponse:
    return JSONResponse({"answer": service.episodes.anchor(request.query_params.get("task_id", ""))})


async def _prepare(service: _Service, request: Request) -> JSONResponse:
    body = await _body(request)
    running: Running
    episode_id, task_id = _text(body, "episode_id"), _text(body, "task_id")
    try:
        running = await asyncio.wait_for(service.episodes.prepare(episode_id, task_id, _TTL_S), _STEP_S)
    except TimeoutError:
        raise InfrastructureFailure(f"setup: no free slot within {_STEP_S:g} s") from None
    except SandboxError as error:
        raise InfrastructureFailure(f"setup: {error}") from error
    return JSONResponse({"episode_id": episode_id, "instruction": running.task.instruction,
                         "messages": first_messages(running.task), "tools": running.taskset.tools()})


async def _run(service: _Service, request: Request) -> JSONResponse:
    body = await _body(request)
    result = await service.episodes.run(
        episode_id=_text(body, "episode_id"), task_id=_text(body, "task_id"), base_url=_text(body, "base_url"),
        api_key=_text(body, "api_key"), max_turns=int(_number(body, "max_turns", 1, 1000)),
        timeout_s=_number(body, "timeout_s", 0.01, 86400))
    return JSONResponse(dataclasses.asdict(result))


async def _exec(service: _Service, request: Request) -> JSONResponse:
    running = service.episodes.get(request.path_params["episode_id"])
    body = await _body(request)
    arguments = body.get("arguments")
    if not isinstance(arguments, dict):
        raise TaskError("arguments: expected an object")
    async with boundary("tool", time.monotonic() + _STEP_S):
        try:
            output = await running.call(_text(body, "name"), arguments)
        except ToolError as error:  # the model's mistake is its result
            output = str(error)
    return JSONResponse({"output": output})


async def _verify(service: _Service, request: Request) -> JSONResponse:
    running = service.episodes.get(request.path_params["episode_id"])
    body = await _body(request)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TaskError("messages: expected a list of chat messages")
    try:
        async with boundary("verifier", time.monotonic() + _STEP_S):
            parts = await service.episodes.verify(running, messages)
    except InfrastructureFailure as failure:
        return JSONResponse({"reward": None, "reward_parts": {}, "outcome": "infra_error", "reason": str(failure)})
    return JSONResponse({"reward": parts.pop("reward"), "reward_parts": parts, "outcome": "ok"})


async def _delete(service: _Service, request: Request) -> JSONResponse:
    return JSONResponse({"removed": await service.episodes.remove(request.path_params["episode_id"])})


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError:
        raise TaskError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise TaskError("the body is not a JSON object")
    return body


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise TaskError(f"{key}: expected a text, got {value!r}")
    return value


def _number(body: dict[str, Any], key: str, low: float, high: float) -> float:
    value = body.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise TaskError(f"{key}: expected a number from {low:g} to {high:g}, got {value!r}")
    return value


def _error(status: int, error: Exception, code: str) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error), "type": type(error).__name__, "code": code}}, status)
