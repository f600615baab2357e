"""The gateway: records agents that know nothing but the base URL and key of an OpenAI or Anthropic API.

``POST /sessions`` opens a session; under its URL the agent finds ``chat/completions``, ``completions``, ``responses``,
``messages`` and ``models``; ``POST …/finish`` closes it and returns its trajectories. Per call: find the session, turn
the messages into exact ids, sample, record, answer. The order is the invariant: a turn is on disk before the last byte
of its answer leaves, and it enters the tree only then. All state lives on one event loop; the store has a thread of its
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from glm5.dialects.protocol import ApiError, dump, read_body, refuse_constant, to_api_error
from glm5.errors import GatewayError, Glm5Error
from glm5.gateway import history
from glm5.gateway.recorder import Recorder
from glm5.gateway.reply import Reply
from glm5.gateway.requests import DEFAULT_MODEL, Dialect, count_prompt
from glm5.gateway.router import Router
from glm5.gateway.sessions import PendingCall, Session, SessionSettings
from glm5.gateway.store import Store, StoredSession
from glm5.gateway.trajectory import build_trajectories, trajectory_to_json
from glm5.gateway.upstream import EnginePool
from glm5.process import bind, serve_app
from glm5.records import OUTCOMES
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer
from glm5.wire import split_url

KEEP_ALIVE_S = 2.0
"""A streamed answer that takes longer begins with comments, so that no proxy or client gives up."""
RETENTION_S = 600.0
"""How long the turns of a closed session stay on disk: a repeated ``finish`` gets the same trajectories."""
SWEEP_PERIOD_S = 1.0
_MAX_BODY_BYTES, _BODY_TIMEOUT_S = 64 << 20, 60.0
"""A request of an agent holds its whole history: far more than a context of text, never more than a disk would like."""


class Gateway:
    """Sessions, and the HTTP routes to them."""

    def __init__(self, store: Store, tokenizer: Tokenizer, pool: EnginePool) -> None:
        self._store, self._pool = store, pool
        self._tokenizer = tokenizer
        self._recorder = Recorder(tokenizer, pool, store)
        self._sessions: dict[str, Session] = {}
        self._settings_adapter = TypeAdapter(SessionSettings)
        self._counts: Counter[str] = Counter()

    async def reload(self) -> None:
        """Take up the sessions that were open when the last gateway on this store ended."""
        for stored in await self._store.open_sessions():
            session = await self._load(stored)
            self._sessions[stored.settings.session_id] = session

    async def sweep(self) -> None:
        """Close sessions whose time is up and delete what nobody will ask for again, for ever."""
        last_purge = 0.0
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            now = asyncio.get_running_loop().time()
            try:
                late = [item for item in self._sessions.values() if item.deadline <= now and not item.is_closed]
                for session in late:
                    await self._close(session, "expired", "infra_error", None)
                    self._counts["expired"] += 1
                if now - last_purge > RETENTION_S / 10:
                    last_purge = now
                    await self._store.purge(time.time() - RETENTION_S)
            except GatewayError:
                self._counts["errors"] += 1  # the store has noted a disk that fails, which ends the process

    # Control routes

    async def create(self, request: Request) -> Response:
        """``POST /sessions``."""
        try:
            settings = self._settings_adapter.validate_python(await _json_object(request), extra="forbid")
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ApiError(400, f"{key}: {first['msg']}; got {first['input']!r}", param=key) from None
        except GatewayError as error:  # values that make no sense
            raise ApiError(400, str(error)) from None
        session = self._sessions.get(settings.session_id)
        if session is None:
            session = self._new_session(settings, f"sk-{secrets.token_urlsafe(24)}", settings.ttl_s)
            self._sessions[settings.session_id] = session
            try:
                is_new = await self._store.create_session(settings, session.api_key)
            except GatewayError:
                del self._sessions[settings.session_id]
                raise
            if not is_new:
                del self._sessions[settings.session_id]
                raise ApiError(410, f"session {settings.session_id}: is closed", code="session_closed")
        if session.settings != settings:
            raise ApiError(409, f"session {settings.session_id}: is open with other settings; choose another id")
        base_url = f"{request.base_url}sessions/{quote(settings.session_id, safe='')}/v1"
        anthropic_url = base_url.removesuffix("/v1")  # that client adds the version itself
        return _json_response({"base_url": base_url, "anthropic_base_url": anthropic_url, "api_key": session.api_key})

    async def finish(self, request: Request) -> Response:
        """``POST /sessions/ID/finish``. The same request again gets the same answer."""
        data = await _json_object(request)
        outcome, reward = data.get("outcome", "ok"), data.get("reward")
        if outcome not in OUTCOMES:
            raise ApiError(400, f"outcome: got {outcome!r}, expected one of {', '.join(OUTCOMES)}", param="outcome")
        is_number = isinstance(reward, (int, float)) and not isinstance(reward, bool) and math.isfinite(reward)
        if reward is not None and not is_number:
            raise ApiError(400, f"reward: got {reward!r}, expected a finite number or null", param="reward")
        session_id = request.path_params["session_id"]
        session = self._sessions.get(session_id)
        if session is None:
            stored = await self._store.find_session(session_id)
            if stored is None or stored.state != "finished" or (stored.outcome, stored.reward) != (outcome, reward):
                raise self._not_open(session_id, stored)
            return _json_response(_summary(await self._load(stored)))
        if session.is_closed:
            raise ApiError(410, f"session {session_id}: is closed", code="session_closed")
        await self._close(session, "finished", outcome, reward)
        self._counts["finished"] += 1
        return _json_response(_summary(session))

    async def stats(self, request: Request) -> Response:
        """``GET /stats``."""
        return _json_response({"open_sessions": len(self._sessions), "cpu_s": time.process_time(),
                               **{name: self._counts[name] for name in
                                  ("finished", "expired", "calls", "retries", "errors", "mismatches", "abandoned")},
                               "engines": self._pool.stats()})

    async def health(self, request: Request) -> Response:
        """``GET /health``."""
        return _json_response({"status": "ok"})

    async def engines(self, request: Request) -> Response:
        """``POST /engines {url, state}``: ``serving`` adds an engine or ends its draining, ``draining`` moves its
        sessions to others before their next turns."""
        data = await _json_object(request)
        url, state = data.get("url"), data.get("state")
        if not isinstance(url, str) or state not in ("serving", "draining"):
            raise ApiError(400, f"expected a url and a state, serving or draining; got {url!r} and {state!r}",
                           "invalid_request", "state")
        try:
            split_url(url)
            change = self._pool.router.add if state == "serving" else self._pool.router.drain
            change(url)
        except Glm5Error as error:
            raise ApiError(400, str(error), "invalid_request", "url") from None
        return _json_response({"engines": self._pool.stats()})

    # Routes of an agent

    async def models(self, request: Request) -> Response:
        """``GET /sessions/ID/v1/models``: one model, with the fields of OpenAI's and Anthropic's lists."""
        await self._authorised(request)
        model = {"id": DEFAULT_MODEL, "object": "model", "created": 0, "owned_by": "glm5", "type": "model",
                 "display_name": DEFAULT_MODEL, "created_at": "1970-01-01T00:00:00Z"}
        page = {"has_more": False, "first_id": DEFAULT_MODEL, "last_id": DEFAULT_MODEL}
        return _json_response({"object": "list", "data": [model], **page})

    async def count_tokens(self, request: Request) -> Response:
        """``POST /sessions/ID/v1/messages/count_tokens``. Nothing is recorded."""
        session = await self._authorised(request)
        return _json_response(count_prompt(session, _object(await _body(request)), self._tokenizer))

    def answering(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """Endpoint of ``POST /sessions/ID/v1/DIALECT``."""
        async def answer(request: Request) -> Response:
            session = await self._authorised(request)
            body = await _body(request)
            key = request.headers.get("idempotency-key", "")
            digest = history.digest(f"{dialect}\0{key}\0".encode() + body)
            data = _object(body)
            is_retry = bool(key) or request.headers.get("x-stainless-retry-count", "0") != "0"
            node = session.retried(digest, is_retry)
            if node is not None:
                self._counts["retries"] += 1
                return _written(await self._recorder.repeat(session, dialect, data, node))
            self._counts["calls"] += 1
            call = self._recorder.join(session, digest, dialect, data)
            is_stream = call.form.request.stream
            has_left = await _wait(call, request, KEEP_ALIVE_S if is_stream else None)
            if has_left or call.task.done():
                self._recorder.leave(session, digest, call)
                if not call.task.done():
                    return Response(status_code=499)  # nobody reads it
                return _written(_result(call, session))
            return StreamingResponse(self._slow_events(session, digest, call), media_type="text/event-stream")

        return answer

    async def _slow_events(self, session: Session, digest: bytes, call: PendingCall) -> AsyncIterator[bytes]:
        """Comments until the answer is there, then its events."""
        try:
            while not call.task.done():
                yield b": keep-alive\n\n"
                await asyncio.wait({call.task}, timeout=KEEP_ALIVE_S)
        finally:
            self._recorder.leave(session, digest, call)
        try:
            yield _result(call, session).content
        except Glm5Error as error:
            yield b"".join(call.form.failure(to_api_error(error)))

    async def refuse(self, request: Request, error: Exception) -> Response:
        """OpenAI-shaped body for every error."""
        self._counts["errors"] += 1
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        elif isinstance(error, Glm5Error):
            error = to_api_error(error)
        else:
            error = ApiError(500, "internal error; see the gateway's log", "internal_error")
        return Response(dump(error.body(request.url.path)), error.status, error.headers, "application/json")

    # Sessions

    async def _authorised(self, request: Request) -> Session:
        session_id = request.path_params["session_id"]
        session = self._sessions.get(session_id)
        if session is None or session.is_closed:
            raise self._not_open(session_id, await self._store.find_session(session_id))
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), session.api_key.encode()):
            raise ApiError(401, f"session {session_id}: wrong API key", code="invalid_api_key")
        return session

    def _not_open(self, session_id: str, stored: StoredSession | None) -> ApiError:
        if stored is None:
            return ApiError(404, f"session {session_id}: not found; create it first", code="session_not_found")
        code = "session_expired" if stored.state == "expired" else "session_closed"
        return ApiError(410, f"session {session_id}: is closed; nothing more is recorded", code=code)

    def _new_session(self, settings: SessionSettings, api_key: str, ttl_s: float) -> Session:
        return Session(settings, api_key, asyncio.get_running_loop().time() + ttl_s)

    async def _load(self, stored: StoredSession) -> Session:
        left_s = stored.created_at + stored.settings.ttl_s - time.time()
        session = self._new_session(stored.settings, stored.api_key, min(max(left_s, 0.0), stored.settings.ttl_s))
        for node in await self._store.load_turns(stored.settings.session_id):
            session.add(node)
            session.calls = max(session.calls, int(node.turn_id.rpartition("-")[2]))
        return session

    async def _close(self, session: Session, state: str, outcome: str, reward: float | None) -> None:
        """Stop what is running and note the end; later calls find the session closed."""
        session.is_closed = True
        calls = list(session.pending.items())
        for digest, call in calls:
            if not call.is_recording:
                self._recorder.abort(session, digest, call)
        await asyncio.gather(*(call.task for _, call in calls), return_exceptions=True)
        try:
            await self._store.close_session(session.settings.session_id, state, outcome, reward)
        except GatewayError:
            session.is_closed = False
            raise
        del self._sessions[session.settings.session_id]
        self._pool.router.release(session.settings.session_id)
        self._counts["mismatches"] += session.num_mismatches()
        self._counts["abandoned"] += session.num_abandoned()


def build_app(store: Store, tokenizer: Tokenizer, engine_urls: Sequence[str]) -> Starlette:
    """The ASGI application. It closes ``store`` when it shuts down."""
    pool = EnginePool(Router(engine_urls))
    gateway = Gateway(store, tokenizer, pool)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await gateway.reload()
        background = [asyncio.create_task(gateway.sweep()), asyncio.create_task(pool.check_health())]
        try:
            yield
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            pool.close()
            store.close()

    routes = [
        *(Route(f"/sessions/{{session_id}}/v1/{dialect}", gateway.answering(dialect), methods=["POST"])
          for dialect in get_args(Dialect)),
        Route("/sessions/{session_id}/v1/messages/count_tokens", gateway.count_tokens, methods=["POST"]),
        Route("/sessions/{session_id}/v1/models", gateway.models, methods=["GET"]),
        Route("/sessions/{session_id}/finish", gateway.finish, methods=["POST"]),
        Route("/sessions", gateway.create, methods=["POST"]),
        Route("/engines", gateway.engines, methods=["POST"]),
        Route("/stats", gateway.stats, methods=["GET"]),
        Route("/health", gateway.health, methods=["GET"]),
    ]
    handlers: Any = {HTTPException: gateway.refuse, Glm5Error: gateway.refuse, Exception: gateway.refuse}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def run_gateway(engine_urls: Sequence[str], tokenizer_dir: str | Path, store_path: str | Path, host: str = "127.0.0.1",
                port: int = 0, ready_file: str | Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT; see ``glm5.process.serve_app``.

    Raises CheckpointError for a bad tokenizer, GatewayError for a store in use or a full disk, ServiceError for a port
    in use.
    """
    if port:
        bind(host, port).close()  # a taken port is reported before anything is written
    tokenizer = load_tokenizer(tokenizer_dir)
    store = Store(store_path)
    try:
        app = build_app(store, tokenizer, engine_urls)
        serve_app(app, host, port, Path(ready_file) if ready_file is not None else None, lambda: store.failure)
    finally:
        store.close()


def _summary(session: Session) -> dict[str, Any]:
    """Answer of ``finish``."""
    turns = session.turns()
    trajectories = build_trajectories(turns, session.settings.trained_roles)
    return {"trajectories": [trajectory_to_json(item) for item in trajectories], "turns": len(turns),
            "mismatches": session.num_mismatches(), "reasons": session.reasons(), "kinds": session.kinds(),
            "roles": session.roles(), "abandoned": session.num_abandoned()}


async def _wait(call: PendingCall, request: Request, timeout_s: float | None) -> bool:
    """Wait until the call is done, its client has left (True), or the time is up."""
    watcher = asyncio.ensure_future(request.receive())  # after the body, the next message is the disconnect
    try:
        await asyncio.wait({call.task, watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return watcher.done() and not call.task.done()
    finally:
        watcher.cancel()


def _result(call: PendingCall, session: Session) -> Reply:
    """The answer of a call that is done. Raises ApiError when there is none."""
    if call.task.cancelled():
        session_id = session.settings.session_id
        raise ApiError(410, f"session {session_id}: was closed during the call", "session_closed")
    return call.task.result()


def _written(reply: Reply) -> Response:
    return Response(reply.content, media_type="text/event-stream" if reply.is_stream else "application/json")


async def _body(request: Request) -> bytes:
    return await read_body(request, _MAX_BODY_BYTES, _BODY_TIMEOUT_S)


async def _json_object(request: Request) -> dict[str, Any]:
    return _object(await _body(request))


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body, parse_constant=refuse_constant) if body else {}
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body is {type(data).__name__}, expected an object", "invalid_json")
    return data


def _json_response(data: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(data), status_code=status, media_type="application/json")
