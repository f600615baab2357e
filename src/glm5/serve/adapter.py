"""The token-level protocol in front of an engine of others, so that it is one more engine URL for everybody else.

The adapter owns the policy version: new requests wait while weights are swapped and carry the version that is in force
when they go on. It loads nothing itself, but checks a directory before it hands its path on (checksums of the manifest,
the names and shapes of the weights before), because an external engine may die of a bad one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glm5.dialects.protocol import ApiError, dump, field, read_json, to_api_error
from glm5.engine.checksums import tensor_shapes, verify_checksums
from glm5.errors import CheckpointError, ConfigError, Glm5Error
from glm5.process import bind, serve_app
from glm5.records import Completion
from glm5.serve.events import CLIENT_GONE, unless_gone
from glm5.serve.external import ENGINES, ExternalEngine, wait_until_well
from glm5.serve.token_protocol import GenerateRequest, parse_generate
from glm5.wire import split_url

_MAX_BODY_BYTES = 16 << 20
_BODY_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 60.0


class Adapter:
    """Endpoints over one external engine."""

    def __init__(self, engine: ExternalEngine, url: str, directory: Path, version: int, max_context: int) -> None:
        """The engine holds the weights in ``directory`` as ``version``."""
        self._engine, self._url = engine, url
        self._directory, self._version = directory, version
        self._shapes = tensor_shapes(directory)
        self._max_context = max_context
        self._updating = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._started = time.monotonic()
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self._running = self._answers = self._generated = self._prefilled = self._cached = self._updates = 0

    def routes(self) -> list[Route]:
        """All routes."""
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in (
            ("POST", "/generate", self.generate), ("POST", "/update_weights_from_disk", self.update_weights),
            ("POST", "/pause_generation", self.pause), ("POST", "/continue_generation", self.resume),
            ("GET", "/health", self.health), ("GET", "/health_generate", self.health),
            ("GET", "/get_model_info", self.model_info), ("GET", "/stats", self.stats))]

    async def generate(self, request: Request) -> Response:
        """Ids in, ids, log-probs and weight versions out."""
        wanted = parse_generate(await read_json(request, _MAX_BODY_BYTES, _BODY_TIMEOUT_S))
        if wanted.stream:
            raise ApiError(400, "stream: an external engine is asked for whole answers; send false", "unsupported")
        if len(wanted.ids) + 1 > self._max_context:
            raise ApiError(400, f"This model's maximum context length is {self._max_context} tokens and the prompt has "
                                f"{len(wanted.ids)}; shorten it", "context_length_exceeded")
        done = await unless_gone(request.receive, self._sample(wanted))
        if done is None:
            return Response(status_code=CLIENT_GONE)
        body: dict[str, Any] = {
            "output_ids": done.output_ids, "logprobs": done.logprobs, "weight_versions": done.weight_versions,
            "finish_reason": done.finish_reason, "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens}
        if wanted.wants_prompt_logprobs:
            body["prompt_logprobs"] = done.prompt_logprobs
        return _json(body)

    async def _sample(self, wanted: GenerateRequest) -> Completion:
        self._running += 1
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        try:
            while True:
                await self._open.wait()
                done = await self._engine.generate(wanted, self._version)
                if done.output_ids or done.finish_reason != "abort":
                    break  # one that was aborted before its first id is simply asked again
        finally:
            self._running -= 1
            if self._running == 0:
                self._busy_s, self._busy_since = self._busy(), None
        self._answers += 1
        self._generated += len(done.output_ids)
        self._prefilled += done.prompt_tokens - done.cached_tokens
        self._cached += done.cached_tokens
        return done

    async def update_weights(self, request: Request) -> Response:
        """Swap weights; a directory that cannot be used answers 400 and changes nothing. Versions only grow, except
        that ``rollback`` brings back an earlier one."""
        data = await read_json(request, _MAX_BODY_BYTES, _BODY_TIMEOUT_S)
        directory = Path(field(data, "model_path", str, required=True))
        version = field(data, "weight_version", int, required=True)
        rollback = field(data, "rollback", bool, False)
        start, message = time.perf_counter(), ""
        async with self._updating:
            try:
                await asyncio.to_thread(self._check, directory, version, rollback)
                self._open.clear()
                await self._engine.load(directory, version)
                self._directory, self._version = directory, version
                self._updates += 1
            except Glm5Error as error:
                message = f"{error}; version {self._version} stays in force"
            finally:
                self._open.set()
        body = {"success": not message, "message": message, "weight_version": self._version,
                "load_ms": (time.perf_counter() - start) * 1e3}
        return _json(body, 400 if message else 200)

    def _check(self, directory: Path, version: int, rollback: bool) -> None:
        if version < self._version and not rollback:
            raise ConfigError(f"weight_version {version}: {self._version} is in force and versions only grow; raise it")
        verify_checksums(directory)
        if tensor_shapes(directory) != self._shapes:
            raise CheckpointError(f"{directory}: its tensors differ in name, shape or type from those being served; "
                                  "start another engine")

    async def pause(self, request: Request) -> Response:
        """Sample nothing until ``continue_generation``."""
        self._open.clear()
        await self._engine.pause()
        return _json({"success": True})

    async def resume(self, request: Request) -> Response:
        """Go on after ``pause_generation``."""
        await self._engine.resume()
        self._open.set()
        return _json({"success": True})

    async def health(self, request: Request) -> Response:
        """200 when the engine behind is well."""
        await self._engine.check_health()
        return _json({"status": "ok", "weight_version": self._version})

    async def model_info(self, request: Request) -> Response:
        """What is served."""
        return _json({"model_path": str(self._directory), "model_name": self._directory.name, "engine": self._url,
                      "weight_version": self._version, "max_context": self._max_context})

    async def stats(self, request: Request) -> Response:
        """Counters since the start of the adapter; ``steps``, by which others see that it works, are answers."""
        return _json({"busy_s": self._busy(), "uptime_s": time.monotonic() - self._started, "running": self._running,
                      "steps": self._answers, "generated_tokens": self._generated, "prefilled_tokens": self._prefilled,
                      "cached_tokens": self._cached, "weight_version": self._version, "weight_updates": self._updates})

    def _busy(self) -> float:
        """Seconds with a request in flight."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._busy_since is not None else 0.0)


def build_adapter(engine: ExternalEngine, url: str, directory: Path, version: int, max_context: int) -> Starlette:
    """The ASGI application, which closes ``engine`` when it ends. Raises CheckpointError for a directory that is no
    checkpoint."""
    adapter = Adapter(engine, url, directory, version, max_context)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        engine.close()

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Glm5Error)
        refusal = to_api_error(error)
        return Response(dump(refusal.body(request.url.path)), refusal.status, refusal.headers, "application/json")

    return Starlette(routes=adapter.routes(), lifespan=lifespan, exception_handlers={Glm5Error: refuse})


def run_adapter(kind: str, url: str, directory: Path, version: int, host: str, port: int,
                ready_file: Path | None, max_context: int = 0) -> None:
    """Bring the weights in ``directory`` to the engine, then serve until SIGTERM. ``max_context`` shortens the
    engine's own limit; 0 does not.

    Raises ConfigError for an unknown kind, CheckpointError for a directory that is no checkpoint, ServiceError or
    EngineError when the engine does not answer or refuses the weights.
    """
    if kind not in ENGINES:
        raise ConfigError(f"kind={kind!r}: expected one of {', '.join(ENGINES)}")
    split_url(url)
    if port:
        bind(host, port).close()
    tensor_shapes(directory)  # an engine may die of a directory that is none

    async def prepare() -> int:
        engine = ENGINES[kind](url)
        try:
            longest = await wait_until_well(engine, url, _START_TIMEOUT_S)
            await engine.load(directory, version)
            return min(longest, max_context or longest)
        finally:
            engine.close()

    limit = asyncio.run(prepare())
    serve_app(build_adapter(ENGINES[kind](url), url, directory, version, limit), host, port, ready_file)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(dump(body), status, media_type="application/json")
