"""A scripted OpenAI-compatible server and gateway for tests: real HTTP, answers from a function."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.process import bind

Policy = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Conversation → assistant message, or {"status": N, "error": {...}}, or {"sleep": seconds}."""


def tool_call(name: str, arguments: str, call_id: str = "call_7") -> dict[str, Any]:
    """An assistant message with one tool call."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def answer(text: str) -> dict[str, Any]:
    """A final assistant message."""
    return {"role": "assistant", "content": text}


def model_app(policy: Policy, seen: list[Any] | None = None) -> Starlette:
    """``/v1/chat/completions`` by ``policy``, and the session routes of a gateway around it."""

    async def chat(request: Request) -> JSONResponse:
        body = await request.json()
        if seen is not None:
            seen.append(body)
        message = policy(body["messages"])
        if "sleep" in message:
            await asyncio.sleep(message["sleep"])
        if "status" in message:
            return JSONResponse({"error": message["error"]}, message["status"])
        finish = message.pop("finish", "tool_calls" if message.get("tool_calls") else "stop")
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": finish}]})

    async def create(request: Request) -> JSONResponse:
        body = await request.json()
        if seen is not None:
            seen.append(body)
        return JSONResponse({"base_url": f"{request.base_url}v1", "api_key": "key"})

    async def finish(request: Request) -> JSONResponse:
        if seen is not None:
            seen.append(await request.json())
        trajectory = {
            "ids": [1, 2],
            "loss_mask": [False, True],
            "logprobs": [0.0, -0.5],
            "versions": [-1, 3],
            "turn_ids": ["t"],
        }
        return JSONResponse({"trajectories": [trajectory], "turns": 1, "mismatches": 0, "kinds": {}})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/sessions", create, methods=["POST"]),
            Route("/sessions/{session}/finish", finish, methods=["POST"]),
        ]
    )


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application in a thread; its URL."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, loop="asyncio"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()
