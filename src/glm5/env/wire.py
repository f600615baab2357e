"""A lean HTTP client for JSON services: one coroutine per request, connections kept alive, every call has a deadline.

An agent harness makes a few small requests per episode, and tens of episodes run each second beside a trainer on the
same processor; a general client costs about 2 ms of processor time per request here, this one about 0.3 ms. The parser
is httptools, which the server side uses too. Requests are never repeated: a model call is not idempotent.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from glm5.errors import ServiceError

_IDLE_S = 30.0
"""A connection unused for longer is not reused: the server may be about to close it."""
Origin = tuple[str, str, int]


class HttpStatusError(ServiceError):
    """The server answered with an error status."""

    def __init__(self, status: int, url: str, body: bytes) -> None:
        self.status = status
        self.detail, self.code = _describe(body)
        super().__init__(f"{url}: HTTP {status}: {self.detail}")


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Decoded body. Raises ServiceError when it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise ServiceError(f"expected a JSON answer, got {self.body[:80]!r}") from None


class HttpClient:
    """Keeps connections per origin; use from one event loop. ``close`` when done."""

    def __init__(self) -> None:
        self._idle: dict[Origin, list[_Connection]] = defaultdict(list)
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False

    async def post(self, url: str, body: Any, timeout_s: float, key: str | None = None) -> Any:
        """POST JSON; the decoded answer. Raises HttpStatusError for 4xx/5xx, ServiceError for anything else."""
        return await self._checked("POST", url, body, timeout_s, key)

    async def get(self, url: str, timeout_s: float, key: str | None = None) -> Any:
        """GET; the decoded answer. Raises as ``post``."""
        return await self._checked("GET", url, None, timeout_s, key)

    async def delete(self, url: str, timeout_s: float) -> Any:
        """DELETE; the decoded answer. Raises as ``post``."""
        return await self._checked("DELETE", url, None, timeout_s, None)

    async def close(self) -> None:
        """Close every idle connection; those in use close when their request ends."""
        self._is_closed = True
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    async def _checked(self, method: str, url: str, body: Any, timeout_s: float, key: str | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._request(method, url, body, key)
        except TimeoutError:
            raise ServiceError(f"{url}: no answer within {timeout_s:g} s") from None
        except OSError as error:
            raise ServiceError(f"{url}: {error.strerror or error}") from None
        if response.status >= 400:
            raise HttpStatusError(response.status, url, response.body)
        return response.json() if response.body else None

    async def _request(self, method: str, url: str, body: Any, key: str | None) -> Response:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        origin = (parts.scheme, parts.hostname or "", port)
        payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = f"{method} {target} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(payload)}\r\n"
        if body is not None:
            head += "content-type: application/json\r\n"
        if key is not None:
            head += f"authorization: Bearer {key}\r\n"
        connection = await self._connect(origin)
        try:
            response = await connection.exchange(head.encode() + b"\r\n" + payload)
        except BaseException:
            connection.abort()
            raise
        if connection.is_reusable and not self._is_closed:
            self._idle[origin].append(connection)
        else:
            connection.abort()
        return response

    async def _connect(self, origin: Origin) -> _Connection:
        now = asyncio.get_running_loop().time()
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_reusable and now - connection.used_at < _IDLE_S:
                return connection
            connection.abort()
        scheme, host, port = origin
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        _, protocol = await asyncio.get_running_loop().create_connection(
            _Connection, host, port, ssl=self._tls if scheme == "https" else None)
        return protocol


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self.used_at = 0.0
        self._transport: Any = None  # uvloop's transports are no subclass of asyncio.Transport
        self._waiter: asyncio.Future[Response] | None = None
        self._parser: Any = None
        self._pieces: list[bytes] = []
        self._keep_alive = True

    @property
    def is_reusable(self) -> bool:
        """Open, idle and kept alive by the server."""
        return self._keep_alive and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes) -> Response:
        """Send a request, wait for its answer. The caller sets the deadline."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("connection closed")
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._pieces = []
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self.used_at = loop.time()
            self._waiter = None

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is open."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        if self._waiter is None:  # nobody asked: an answer that we gave up on
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not an HTTP answer: {error}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the connection is closed."""
        self._keep_alive = False
        self._fail(error if isinstance(error, OSError) else ConnectionResetError("the server closed the connection"))

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the body."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """httptools: the answer is complete."""
        self._keep_alive = self._parser.should_keep_alive()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Response(self._parser.get_status_code(), b"".join(self._pieces)))

    def _fail(self, error: OSError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


def _describe(body: bytes) -> tuple[str, str]:
    """(message, code) of an error body, OpenAI-shaped or not."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200].decode(errors="replace").strip() or "no message", ""
