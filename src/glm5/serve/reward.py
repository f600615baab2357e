"""``glm5 reward serve``: an outcome reward model over HTTP. Torch is loaded by ``serve_reward_model`` only.

``POST /score {"conversations": [[message, …], …]}`` → ``{"scores", "rewards", "model"}``; ``GET /health``. Requests
that arrive while a pass runs are scored together by the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glm5.dialects.protocol import ApiError, dump, field, read_json, to_api_error
from glm5.errors import Glm5Error
from glm5.process import bind, serve_app

_MAX_BODY_BYTES, _BODY_TIMEOUT_S = 16 << 20, 30.0
_MAX_CONVERSATIONS = 1024


class Scoring(Protocol):
    """What the server needs of ``glm5.engine.scoring.Scorer``."""

    def render(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a conversation; raises DataError."""

    def score(self, conversations: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
        """(scores, rewards)."""


class _Batcher:
    """One pass at a time; everything that waits goes into the next."""

    def __init__(self, scorer: Scoring) -> None:
        self._scorer = scorer
        self._waiting: list[tuple[list[list[int]], asyncio.Future[tuple[list[float], list[float]]]]] = []
        self._wake = asyncio.Event()

    async def score(self, conversations: list[list[int]]) -> tuple[list[float], list[float]]:
        """(scores, rewards) of rendered conversations."""
        future: asyncio.Future[tuple[list[float], list[float]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((conversations, future))
        self._wake.set()
        return await future

    async def run(self) -> None:
        """Score for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            taken, self._waiting = self._waiting, []
            together = [ids for conversations, _ in taken for ids in conversations]
            try:
                scores, rewards = await asyncio.to_thread(self._scorer.score, together)
            except Exception as error:  # a defect belongs to the requests that met it
                for _, future in taken:
                    future.cancelled() or future.set_exception(error)
                continue
            start = 0
            for conversations, future in taken:
                end = start + len(conversations)
                future.cancelled() or future.set_result((scores[start:end], rewards[start:end]))
                start = end


def build_reward_app(scorer: Scoring, model_name: str) -> Starlette:
    """The application around a scorer."""
    batcher: _Batcher

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        nonlocal batcher
        batcher = _Batcher(scorer)
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def score(request: Request) -> Response:
        data = await read_json(request, _MAX_BODY_BYTES, _BODY_TIMEOUT_S)
        conversations = field(data, "conversations", list, required=True)
        if not 1 <= len(conversations) <= _MAX_CONVERSATIONS:
            raise ApiError(400, f"conversations: got {len(conversations)}, expected 1 to {_MAX_CONVERSATIONS}",
                           "invalid_request", "conversations")
        if not all(isinstance(item, list) and all(isinstance(message, dict) for message in item)
                   for item in conversations):
            raise ApiError(400, "conversations: expected lists of chat messages", "invalid_request", "conversations")
        scores, rewards = await batcher.score([scorer.render(item) for item in conversations])
        return Response(dump({"scores": scores, "rewards": rewards, "model": model_name}),
                        media_type="application/json")

    async def health(request: Request) -> Response:
        return Response(dump({"status": "ok", "model": model_name}), media_type="application/json")

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Glm5Error)
        api_error = to_api_error(error)
        return Response(dump(api_error.body(request.url.path)), api_error.status, api_error.headers,
                        "application/json")

    routes = [Route("/score", score, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={Glm5Error: refuse})


def serve_reward_model(directory: Path, host: str = "127.0.0.1", port: int = 0, ready_file: Path | None = None,
                       threads: int = 0, device: str = "auto") -> None:
    """Serve the reward model in ``directory`` until SIGTERM. Raises CheckpointError, ServiceError for a taken port."""
    if port:
        bind(host, port).close()
    import torch

    from glm5.engine.scoring import Scorer

    if threads:
        torch.set_num_threads(threads)
    serve_app(build_reward_app(Scorer(directory, device), directory.resolve().name), host, port, ready_file)
