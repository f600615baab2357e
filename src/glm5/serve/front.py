"""The ASGI layer before the routes: request ids, API keys, limits on concurrency, metrics, access log.

It also ends connections whose body nobody reads. An answer that is sent before the body has arrived (too large, wrong
key, server full) says ``connection: close``; what the client is still sending is thrown away for a moment, since a
connection that is reset at once would take the answer with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TextIO

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm5.dialects.protocol import ApiError, dump, to_api_error
from glm5.engine.requests import Sequence as EngineSequence
from glm5.errors import Glm5Error, ServiceError
from glm5.serve.config import ServeConfig
from glm5.serve.metrics import Metrics
from glm5.serve.usage import HEADER, Usage, usage_of, write_comment

GENERATING = frozenset({"/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Routes that occupy the engine."""
OPEN = frozenset({"/health", "/docs", "/openapi.json"})
"""Routes without a key: they say nothing that is secret, and probes have none."""
_LINGER_S = 2.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Front:
    """Wraps the routes; ``routes`` are the paths that are told apart in metrics."""

    def __init__(self, app: ASGIApp, config: ServeConfig, metrics: Metrics, routes: Collection[str]) -> None:
        self._app, self._config, self._metrics, self._routes = app, config, metrics, frozenset(routes)
        self._digests = [_digest(key) for key in config.api_keys]
        self._log = _open_log(config.access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        is_generating = scope["method"] == "POST" and scope["path"] in GENERATING
        self._metrics.in_flight += is_generating
        try:
            refusal = self._refusal(scope, is_generating)
            app = self._app if refusal is None else error_response(refusal, scope["path"])
            await app(scope, exchange.receive, exchange.send)
        finally:
            self._metrics.in_flight -= is_generating
            path = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.observe(path, exchange.status, exchange.elapsed_s, exchange.first_byte_s)
            if self._log is not None:
                print(json.dumps(exchange.record()), file=self._log, flush=True)

    def close(self) -> None:
        """Close the access log."""
        if self._log is not None and self._log is not sys.stdout:
            self._log.close()

    def _refusal(self, scope: Scope, is_generating: bool) -> ApiError | None:
        if self._digests and scope["path"] not in OPEN:
            key = _key_of(Headers(scope=scope))
            if not key:
                return ApiError(401, "No API key; send it as Authorization: Bearer or x-api-key", "missing_api_key")
            # All keys are compared, in constant time each, so that time says nothing about them.
            digest = _digest(key)
            if not sum(hmac.compare_digest(digest, known) for known in self._digests):
                return ApiError(401, "Unknown API key; check it", "invalid_api_key")
            scope["state"]["owner"] = digest.hex()
        if is_generating and self._metrics.in_flight > self._config.max_concurrent:
            return ApiError(
                429, f"{self._config.max_concurrent} requests are running or waiting; retry later", "too_many_requests"
            )
        return None


class _Exchange:
    """One request and its answer as they pass."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        self.status = 500
        self.first_byte_s: float | None = None
        self._scope, self._receive, self._send = scope, receive, send
        self._has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self._tells_usage, self._is_stream = HEADER in headers, False
        self._start = time.perf_counter()
        scope.setdefault("state", {})

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request came in."""
        return time.perf_counter() - self._start

    async def receive(self) -> Message:
        """Pass a message of the client on."""
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._has_body = False
        return message

    async def send(self, message: Message) -> None:
        """Pass a message to the client on, with what belongs in its headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=list(message["headers"]))
            headers["x-request-id"] = headers["request-id"] = self.request_id
            if self._has_body:
                headers["connection"] = "close"
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            if self._tells_usage and not self._is_stream and (usage := self._usage()):
                headers[HEADER] = json.dumps(usage)
            message = {**message, "headers": headers.raw}
        elif message.get("body") and self.first_byte_s is None:
            self.first_byte_s = self.elapsed_s
        elif self._tells_usage and self._is_stream and not message.get("more_body", False) and (usage := self._usage()):
            message = {**message, "body": message.get("body", b"") + write_comment(usage)}
        if message["type"] == "http.response.body" and self._has_body and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(_LINGER_S):
                while self._has_body:
                    await self.receive()
        except TimeoutError:
            return

    def record(self) -> dict[str, Any]:
        """The line of the access log."""
        scope = self._scope
        record = {
            "time": round(time.time(), 3),
            "request_id": self.request_id,
            "client": scope["client"][0] if scope.get("client") else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": self.status,
            "duration_ms": round(self.elapsed_s * 1e3, 1),
            "first_byte_ms": None if self.first_byte_s is None else round(self.first_byte_s * 1e3, 1),
        }
        if "owner" in scope["state"]:
            record["key"] = scope["state"]["owner"][:8]
        return record | (self._usage() or {})

    def _usage(self) -> Usage | None:
        """Tokens of the request, from its sequences or from what its server said; None without either."""
        state = self._scope["state"]
        sequences: Iterable[EngineSequence] = state.get("sequences", ())
        told: Usage | None = state.get("usage")
        return usage_of(sequences) if sequences else told


def assemble(routes: Sequence[Route], config: ServeConfig, metrics: Metrics,
             lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]]) -> ASGIApp:
    """The ASGI application of ``routes`` with everything in front of them. Raises ServiceError for a bad access log."""

    @asynccontextmanager
    async def whole_life(app: Starlette) -> AsyncIterator[None]:
        async with lifespan(app):
            yield
        front.close()

    handlers = {Glm5Error: _on_error, HTTPException: _on_http_error, RecursionError: _on_recursion,
                Exception: _on_defect}
    app = Starlette(routes=list(routes), lifespan=whole_life, exception_handlers=handlers)
    front = Front(app, config, metrics, [route.path for route in routes])
    if not config.cors_origins:
        return front
    return CORSMiddleware(
        front,
        allow_origins=config.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


def error_response(error: ApiError, path: str) -> Response:
    """The answer to a request of ``path`` that failed with ``error``."""
    return Response(dump(error.body(path)), error.status, error.headers, "application/json")


def _key_of(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _open_log(path: str) -> TextIO | None:
    if not path or path == "-":
        return sys.stdout if path else None
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"{path}: {error.strerror}; choose another --access-log") from None


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, Glm5Error)
    return error_response(to_api_error(error), request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = error_response(ApiError(error.status_code, message, code), request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _on_recursion(request: Request, error: Exception) -> Response:
    return error_response(ApiError(400, "body: nested too deeply; flatten it", "invalid_json"), request.url.path)


async def _on_defect(request: Request, error: Exception) -> Response:
    message = f"internal error ({type(error).__name__}); see the server's log"
    return error_response(ApiError(500, message, "internal_error"), request.url.path)
