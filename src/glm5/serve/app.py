"""The HTTP server of an engine: token-level protocol, OpenAI and Anthropic APIs, health and metrics.

Torch is loaded by ``serve`` only. Routes are plain Starlette endpoints: a call of the token protocol costs one parse,
one submit and one dump. A client that disconnects, before or during a stream, aborts its request. A stream's status
is sent with its first event, so a request that cannot start (queue full, deadline) gets an error status either way.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from glm5.dialects.answer import Format, Run, answer_events, answer_whole
from glm5.dialects.anthropic import count_tokens, parse_message
from glm5.dialects.chat import parse_chat
from glm5.dialects.completions import parse_completion
from glm5.dialects.conversation import Conversation, Prompt, Prompter
from glm5.dialects.protocol import ApiError, dump, field, read_json
from glm5.dialects.responses import Remembered, parse_response
from glm5.engine.config import EngineConfig
from glm5.engine.generation import Generation
from glm5.engine.grammar import Grammars
from glm5.process import bind, serve_app
from glm5.records import SamplingParams
from glm5.serve.collection import Collection, is_wanted, then
from glm5.serve.config import ServeConfig
from glm5.serve.connection import deadline_protocol
from glm5.serve.events import CLIENT_GONE, open_stream, token_events, unless_gone
from glm5.serve.front import assemble
from glm5.serve.handover import LENGTH_HEADER, VERSION_HEADER, PrefillPeer
from glm5.serve.memory import ResponseMemory
from glm5.serve.metrics import Metrics
from glm5.serve.openapi import docs_page, openapi
from glm5.serve.token_protocol import parse_generate
from glm5.serve.weight_group import WeightGroupApi
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer

if TYPE_CHECKING:  # the engine module loads torch
    from glm5.engine.engine import Engine

Endpoint = Callable[[Request], Awaitable[Response]]
_PING_S = 10.0


class Api:
    """Endpoints over one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model_name: str, config: ServeConfig) -> None:
        self._engine, self._tokenizer, self._model_name, self._config = engine, tokenizer, model_name, config
        self._created = int(time.time())
        key = config.api_keys[0] if config.api_keys else ""
        self.peer = PrefillPeer(config.peer, engine, key) if config.peer else None
        self._memory = ResponseMemory(config.response_memory_bytes)
        self._collection = Collection(Path(config.collect)) if config.collect else None
        self.metrics = Metrics()

    def routes(self) -> list[Route]:
        """All routes of the server."""
        table: list[tuple[str, str, Endpoint]] = [
            ("POST", "/generate", self.generate),
            *([("POST", "/export_prefix", self.export_prefix)] if self._config.role == "prefill" else []),
            ("POST", "/update_weights_from_disk", self.update_weights),
            *WeightGroupApi(self._engine, self._config).table(),
            ("POST", "/pause_generation", self.pause),
            ("POST", "/continue_generation", self.resume),
            ("GET", "/health", self.health),
            ("GET", "/health_generate", self.health),
            ("GET", "/get_model_info", self.model_info),
            ("GET", "/stats", self.stats),
            ("GET", "/metrics", self.metrics_page),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/docs", self.docs),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model_id:path}", self.model),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/responses", self.responses),
            ("GET", "/v1/responses/{response_id}", self.recall_response),
            ("DELETE", "/v1/responses/{response_id}", self.forget_response),
            ("POST", "/v1/embeddings", self.embeddings),
            ("POST", "/v1/messages", self.messages),
            ("POST", "/v1/messages/count_tokens", self.count_tokens),
            *([("POST", "/feedback", self.feedback)] if self._collection is not None else []),
        ]
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in table]

    async def generate(self, request: Request) -> Response:
        """Ids in, ids, log-probs and weight versions out."""
        wanted = parse_generate(await self._read(request))
        generation = await self._submit(
            wanted.ids,
            wanted.params,
            session_id=wanted.session_id,
            prompt_logprobs=wanted.wants_prompt_logprobs,
            priority=wanted.priority,
        )
        request.state.sequences = [generation.sequence]
        timeout_s = self._config.request_timeout_s
        if wanted.stream:
            return await open_stream(request, token_events(generation, timeout_s))
        done = await unless_gone(request.receive, generation.wait(timeout_s))
        if done is None:
            return Response(status_code=CLIENT_GONE)
        body: dict[str, Any] = {
            "output_ids": done.output_ids,
            "weight_versions": done.weight_versions,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
        }
        if wanted.wants_logprobs:
            body["logprobs"] = done.logprobs
        if wanted.params.top_logprobs:
            body["top_logprobs"] = generation.sequence.top_logprobs
        if wanted.wants_prompt_logprobs:
            body["prompt_logprobs"] = done.prompt_logprobs
        return _json(body)

    async def export_prefix(self, request: Request) -> Response:
        """Compute a prompt and answer with the keys of its tokens, for another engine's prefix cache."""
        ids = field(await self._read(request), "input_ids", list, required=True)
        generation = self._engine.submit(ids, SamplingParams(max_new_tokens=0))
        if await unless_gone(request.receive, generation.wait(self._config.request_timeout_s)) is None:
            return Response(status_code=CLIENT_GONE)
        prefix = await asyncio.to_thread(self._engine.export_prefix, ids)
        headers = {LENGTH_HEADER: str(prefix.length), VERSION_HEADER: str(prefix.version)}
        return Response(prefix.to_bytes(), media_type="application/octet-stream", headers=headers)

    async def update_weights(self, request: Request) -> Response:
        """Swap weights; a checkpoint that cannot be used answers 400 and changes nothing."""
        data = await self._read(request)
        directory = field(data, "model_path", str, required=True)
        version = field(data, "weight_version", int, required=True)
        rollback = field(data, "rollback", bool, False)
        outcome = await asyncio.to_thread(self._engine.update_weights, directory, version, rollback=rollback)
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
        page = self.metrics.render(asdict(self._engine.stats()))
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI description of this server."""
        return _json(openapi(self._model_name))

    async def docs(self, request: Request) -> Response:
        """The same for people."""
        return HTMLResponse(docs_page(openapi(self._model_name)))

    async def models(self, request: Request) -> Response:
        """The one model; the fields of both OpenAI's and Anthropic's lists."""
        model = self._model()
        page = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return _json({"object": "list", "data": [model], **page})

    async def model(self, request: Request) -> Response:
        """One model by its name."""
        name = request.path_params["model_id"]
        if name != self._model_name:
            raise ApiError(404, f"The model `{name}` does not exist", "model_not_found", "model")
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "glm5",
            "max_model_len": self._engine.max_context,
            "type": "model",
            "display_name": self._model_name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created)),
        }

    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions."""
        data = await self._read(request)
        form = parse_chat(data, self._tokenizer, self._model_name, self._engine.max_context,
                          self._prompter(request, data))
        return await self._answer(request, form)

    async def completions(self, request: Request) -> Response:
        """OpenAI completions."""
        data = await self._read(request)
        return await self._answer(request, parse_completion(data, self._tokenizer, self._model_name))

    async def responses(self, request: Request) -> Response:
        """OpenAI responses."""
        data = await self._read(request)
        owner = _owner(request)

        def recall(response_id: str) -> Remembered | None:
            return self._memory.recall(owner, response_id)

        def remember(response: Remembered) -> None:
            self._memory.remember(owner, response)

        context = self._engine.max_context
        form = parse_response(data, self._tokenizer, self._model_name, context, recall, remember,
                              self._prompter(request, data))
        return await self._answer(request, form)

    async def recall_response(self, request: Request) -> Response:
        """A stored response."""
        response_id = request.path_params["response_id"]
        found = self._memory.recall(_owner(request), response_id)
        if found is None:
            raise _not_stored(response_id)
        return _json(found.body)

    async def forget_response(self, request: Request) -> Response:
        """Delete a stored response."""
        response_id = request.path_params["response_id"]
        if not self._memory.forget(_owner(request), response_id):
            raise _not_stored(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def embeddings(self, request: Request) -> Response:
        """Refused: the models of this family have no embedding head."""
        raise ApiError(
            400, f"The model `{self._model_name}` does not do embeddings; use another", "unsupported", "model"
        )

    async def messages(self, request: Request) -> Response:
        """Anthropic messages."""
        data = await self._read(request)
        prompter = self._prompter(request, data)
        return await self._answer(request, parse_message(data, self._tokenizer, self._model_name, prompter))

    async def count_tokens(self, request: Request) -> Response:
        """Length of the prompt that a message request would have."""
        data = await self._read(request)
        return _json(count_tokens(data, self._tokenizer, self._model_name))

    async def feedback(self, request: Request) -> Response:
        """What a user thinks of an answer."""
        assert self._collection is not None
        return _json(self._collection.add_feedback(await self._read(request), _owner(request)))

    def _prompter(self, request: Request, data: dict[str, Any]) -> Prompter | None:
        """Renders a conversation and keeps it with the request, where the exchange is going to be recorded."""
        if self._collection is None or not is_wanted(request, data):
            return None

        def prompt(conversation: Conversation) -> Prompt:
            request.state.conversation = conversation.messages
            return conversation.prompt(self._tokenizer)

        return prompt

    def _record(self, request: Request, run: Run) -> None:
        messages = getattr(request.state, "conversation", None)
        if self._collection is not None and messages is not None:
            self._collection.add(run, messages, _owner(request))

    async def _read(self, request: Request) -> dict[str, Any]:
        return await read_json(request, self._config.max_body_bytes, self._config.body_timeout_s)

    async def _submit(self, ids: list[int], params: SamplingParams, **rest: Any) -> Generation:
        """Queue a request; a grammar is compiled outside of the event loop, long prompts may be filled by the peer."""
        if self.peer is not None:
            await self.peer.fetch(ids)
        if params.grammar is None:
            return self._engine.submit(ids, params, **rest)
        return await asyncio.to_thread(self._engine.submit, ids, params, **rest)

    async def _answer(self, request: Request, form: Format) -> Response:
        wanted = form.request
        run = Run(wanted, self._tokenizer, await self._start(form), self._config.request_timeout_s)
        request.state.sequences = run.sequences
        if wanted.stream:
            return await open_stream(request, then(answer_events(form, run), lambda: self._record(request, run)))
        body = await unless_gone(request.receive, answer_whole(form, run))
        if body is None:
            return Response(status_code=CLIENT_GONE)
        self._record(request, run)
        return _json(body)

    async def _start(self, form: Format) -> list[Generation]:
        """One generation for each answer; all or none."""
        generations: list[Generation] = []
        try:
            for ids in form.request.prompts:
                for number in range(form.request.n):
                    params = form.request.nth_params(number)
                    generations.append(await self._submit(ids, params, session_id=form.request.session_id))
        except BaseException:
            for generation in generations:
                generation.abort()
            raise
        return generations


def build_app(engine: Engine, tokenizer: Tokenizer, model_name: str, config: ServeConfig | None = None) -> ASGIApp:
    """The ASGI application over ``engine``, which it closes at shutdown. Raises ServiceError for a bad access log."""
    config = config or ServeConfig()
    api = Api(engine, tokenizer, model_name, config)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        if api.peer is not None:
            await api.peer.close()
        await asyncio.to_thread(engine.close)

    return assemble(api.routes(), config, api.metrics, lifespan)


def serve(
    directory: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    ready_file: Path | None = None,
    engine_config: EngineConfig | None = None,
    weight_version: int = 0,
    config: ServeConfig | None = None,
    model_name: str = "",
) -> None:
    """Serve the checkpoint in ``directory``, by its name or ``model_name``, until SIGTERM. Raises CheckpointError, or
    ServiceError for a taken port."""
    config = config or ServeConfig()
    if port:
        bind(host, port).close()  # a taken port is reported before torch and the weights are loaded
    from glm5.engine.engine import Engine
    from glm5.engine.replacement import load_weights
    from glm5.engine.tensor_parallel import join, world_size

    # The engine's thread gives the interpreter lock away in every tensor operation and would wait up to the default
    # 5 ms, longer than a decode step, to get it back from a busy HTTP thread.
    sys.setswitchinterval(0.0003)
    path = Path(directory)
    tokenizer = load_tokenizer(path)
    engine_config = engine_config or EngineConfig()
    model = load_weights(path, engine_config)
    leader = None
    if world_size() > 1:
        model = leader = join(model)
        if leader is None:  # another process serves; this one has done its share
            return
    engine = Engine(
        model,
        tokenizer.stop_ids,
        engine_config,
        weight_version=weight_version,
        model_path=str(directory),
        grammars=Grammars(tokenizer),
    )
    try:
        app = build_app(engine, tokenizer, model_name or path.resolve().name, config)
        protocol = deadline_protocol(config.header_timeout_s)
        serve_app(app, host, port, ready_file, lambda: engine.failure, config.shutdown_timeout_s, protocol)
    finally:
        engine.close()
        if leader is not None:
            leader.close()


def _owner(request: Request) -> str:
    """Whose stored responses a request may see: those of its key."""
    return str(request.scope["state"].get("owner", ""))


def _not_stored(response_id: str) -> ApiError:
    return ApiError(404, f"Response {response_id!r} is not stored (any more)", "response_not_found", "response_id")


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(dump(body), status, media_type="application/json")
