"""The HTTP server of an engine: token-level protocol, OpenAI API, health and metrics. Torch is loaded by ``serve``
only.

Routes are plain Starlette endpoints: a call of the token protocol costs one parse, one submit and one dump. A client
that disconnects, before or during a stream, aborts its request. Every error leaves in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm5.engine.config import EngineConfig
from glm5.engine.generation import Generation
from glm5.errors import Glm5Error
from glm5.process import bind, serve_app
from glm5.serve.answer import TextRequest
from glm5.serve.metrics import Metrics
from glm5.serve.openai import answer_events, answer_whole, parse_chat, parse_completion
from glm5.serve.protocol import ApiError, field, parse_generate, read_json, to_api_error
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer

if TYPE_CHECKING:  # the engine module loads torch
    from glm5.engine.engine import Engine

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
_PING_S = 10.0
_CLIENT_GONE = 499


class EventStream(Response):
    """Server-sent events; the source is closed as soon as the client disconnects."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the source ends or the client leaves."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Glm5Error as error:  # the status has been sent; the event carries the error
                await send(
                    {"type": "http.response.body", "body": _event(to_api_error(error).body()), "more_body": True}
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Api:
    """Endpoints over one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model_name: str) -> None:
        self._engine, self._tokenizer, self._model_name = engine, tokenizer, model_name
        self._created = int(time.time())
        self.metrics = Metrics()

    def routes(self) -> list[Route]:
        """All routes of the server."""
        table: list[tuple[str, str, Endpoint]] = [
            ("POST", "/generate", self.generate),
            ("POST", "/update_weights_from_disk", self.update_weights),
            ("POST", "/pause_generation", self.pause),
            ("POST", "/continue_generation", self.resume),
            ("GET", "/health", self.health),
            ("GET", "/health_generate", self.health),
            ("GET", "/get_model_info", self.model_info),
            ("GET", "/stats", self.stats),
            ("GET", "/metrics", self.metrics_page),
            ("GET", "/v1/models", self.models),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
        ]
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in table]

    async def generate(self, request: Request) -> Response:
        """Ids in, ids, log-probs and weight versions out."""
        wanted = parse_generate(await read_json(request))
        generation = self._engine.submit(
            wanted.ids, wanted.params, session_id=wanted.session_id, prompt_logprobs=wanted.wants_prompt_logprobs
        )
        if wanted.stream:
            return EventStream(_token_events(generation))
        done = await _unless_gone(request.receive, generation.wait())
        if done is None:
            return Response(status_code=_CLIENT_GONE)
        body: dict[str, Any] = {
            "output_ids": done.output_ids,
            "weight_versions": done.weight_versions,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
        }
        if wanted.wants_logprobs:
            body["logprobs"] = done.logprobs
        if wanted.wants_prompt_logprobs:
            body["prompt_logprobs"] = done.prompt_logprobs
        return _json(body)

    async def update_weights(self, request: Request) -> Response:
        """Swap weights; a checkpoint that cannot be used answers 400 and changes nothing."""
        data = await read_json(request)
        directory, version = (
            field(data, "model_path", str, required=True),
            field(data, "weight_version", int, required=True),
        )
        outcome = await asyncio.to_thread(self._engine.update_weights, directory, version)
        return _json(asdict(outcome), 200 if outcome.success else 400)

    async def pause(self, request: Request) -> Response:
        """Run no more steps; requests stay. Answers once the step that was running has ended."""
        self._engine.pause()
        await asyncio.to_thread(self._engine.ping, _PING_S)
        return _json({"success": True})

    async def resume(self, request: Request) -> Response:
        """Go on after ``pause_generation``."""
        self._engine.resume()
        return _json({"success": True})

    async def health(self, request: Request) -> Response:
        """200 when the engine's thread reaches a step boundary in time."""
        await asyncio.to_thread(self._engine.ping, _PING_S)
        return _json({"status": "ok", "weight_version": self._engine.weight_version})

    async def model_info(self, request: Request) -> Response:
        """What is served."""
        engine = self._engine
        return _json(
            {
                "model_path": engine.model_path,
                "model_name": self._model_name,
                "weight_version": engine.weight_version,
                "vocab_size": engine.vocab_size,
                "max_context": engine.max_context,
                "max_slots": engine.config.max_slots,
            }
        )

    async def stats(self, request: Request) -> Response:
        """Counters and load as JSON."""
        return _json(asdict(self._engine.stats()))

    async def metrics_page(self, request: Request) -> Response:
        """Counters and load for Prometheus."""
        return PlainTextResponse(self.metrics.render(self._engine.stats()), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The one model, in OpenAI's form."""
        model = {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "glm5",
            "max_model_len": self._engine.max_context,
        }
        return _json({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions."""
        data = await read_json(request)
        return await self._answer(
            request, parse_chat(data, self._tokenizer, self._model_name, self._engine.max_context)
        )

    async def completions(self, request: Request) -> Response:
        """OpenAI completions."""
        data = await read_json(request)
        return await self._answer(request, parse_completion(data, self._tokenizer, self._model_name))

    async def _answer(self, request: Request, wanted: TextRequest) -> Response:
        generation = self._engine.submit(wanted.ids, wanted.params, session_id=wanted.session_id)
        if wanted.stream:
            return EventStream(_guarded(answer_events(wanted, self._tokenizer, generation), generation))
        body = await _unless_gone(request.receive, answer_whole(wanted, self._tokenizer, generation))
        return Response(status_code=_CLIENT_GONE) if body is None else _json(body)


class _Meter:
    """ASGI layer that times requests by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = 500, time.perf_counter()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.observe(path, status, time.perf_counter() - start)


def build_app(engine: Engine, tokenizer: Tokenizer, model_name: str) -> ASGIApp:
    """The ASGI application over ``engine``, which it closes at shutdown."""
    api = Api(engine, tokenizer, model_name)
    routes = api.routes()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={Glm5Error: _on_error, HTTPException: _on_http_error, Exception: _on_defect},
    )
    return _Meter(app, api.metrics, frozenset(route.path for route in routes))


def serve(
    directory: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    ready_file: Path | None = None,
    engine_config: EngineConfig | None = None,
    weight_version: int = 0,
) -> None:
    """Serve the checkpoint in ``directory`` until SIGTERM. Raises CheckpointError, or ServiceError for a taken port."""
    if port:
        bind(host, port).close()  # a taken port is reported before torch and the weights are loaded
    from glm5.engine.engine import Engine

    # The engine's thread gives the interpreter lock away in every tensor operation and would wait up to the default
    # 5 ms, longer than a decode step, to get it back from a busy HTTP thread.
    sys.setswitchinterval(0.0003)
    path = Path(directory)
    tokenizer = load_tokenizer(path)
    engine = Engine.from_directory(path, tokenizer.stop_ids, engine_config, weight_version)
    try:
        serve_app(build_app(engine, tokenizer, path.resolve().name), host, port, ready_file)
    finally:
        engine.close()


async def _token_events(generation: Generation) -> AsyncIterator[bytes]:
    """Events of a streaming ``/generate``."""
    async with aclosing(generation.stream()) as chunks:
        async for chunk in chunks:
            yield _event(
                {
                    "output_ids": chunk.output_ids,
                    "logprobs": chunk.logprobs,
                    "weight_versions": chunk.weight_versions,
                    "finish_reason": chunk.finish_reason,
                }
            )
    yield b"data: [DONE]\n\n"


async def _guarded(events: AsyncIterator[bytes], generation: Generation) -> AsyncIterator[bytes]:
    """``events``, aborting the generation even when the reader leaves before the first one."""
    try:
        async with aclosing(events) as source:
            async for event in source:
                yield event
    finally:
        generation.abort()


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Result of ``work``; None, with ``work`` cancelled, when the client disconnects first."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, Glm5Error)
    api_error = to_api_error(error)
    return _json(api_error.body(), api_error.status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return _json(ApiError(error.status_code, message, code).body(), error.status_code)


async def _on_defect(request: Request, error: Exception) -> Response:
    return _json(
        ApiError(500, f"internal error ({type(error).__name__}); see the server's log", "internal_error").body(), 500
    )


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body, ensure_ascii=False), status, media_type="application/json")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
