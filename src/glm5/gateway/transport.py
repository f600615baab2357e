"""A small HTTP/1.1 client for JSON calls: asyncio protocol, httptools parser, connections kept per engine.

It exists because a model call costs this process one request to an engine, and a general client takes several times the
CPU of all the rest of the call. No redirects, cookies, proxies, compression or streaming.

Every request ends with a response, or with an OSError: ``ConnectFailure`` when nobody listens, ``TimeoutError`` at the
deadline, ``ConnectionError`` when the connection breaks. A cancelled request closes its connection, which is how
the engine learns that nobody wants the answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from glm5.errors import GatewayError

CONNECT_TIMEOUT_S = 5.0
IDLE_S = 30.0
"""Connections idle for longer are not used again: the server may be about to close them."""


class ConnectFailure(ConnectionError):
    """No connection could be made."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """Status and whole body."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where an engine listens."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    """Path in front of every path."""

    @classmethod
    def from_url(cls, url: str) -> _Origin:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GatewayError(f"engine URL {url!r}: expected http://HOST:PORT")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))


class HttpClient:
    """Connections to a set of origins. Use on one event loop."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        """Raises GatewayError for a URL that is none."""
        self._origins = {url: _Origin.from_url(url) for url in urls}
        self._idle: dict[str, list[_Connection]] = {url: [] for url in urls}
        self._is_closed = False

    async def request(self, method: str, url: str, path: str, body: bytes | None, timeout_s: float) -> HttpResponse:
        """Send one request to ``url`` + ``path`` and return the whole response. Raises OSError."""
        origin = self._origins[url]
        head = (f"{method} {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.host}:{origin.port}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body or b'')}\r\n\r\n").encode()
        connection = self._take_idle(url) or await self._connect(origin)
        try:
            async with asyncio.timeout(timeout_s):
                response = await connection.exchange(head + (body or b""))
        except BaseException:
            connection.abort()
            raise
        if connection.is_reusable and not self._is_closed:
            self._idle[url].append(connection)
        else:
            connection.abort()
        return response

    def close(self) -> None:
        """Close the idle connections; those in use close with their requests."""
        self._is_closed = True
        for connections in self._idle.values():
            while connections:
                connections.pop().abort()

    def _take_idle(self, url: str) -> _Connection | None:
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while self._idle[url]:
            connection = self._idle[url].pop()
            if connection.is_reusable and connection.used_at > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: _Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(lambda: _Connection(loop), origin.host, origin.port,
                                                             ssl=origin.is_tls or None)
        except OSError as error:
            raise ConnectFailure(f"cannot connect ({error or type(error).__name__})") from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._parser: Any = None
        self._waiter: asyncio.Future[HttpResponse] | None = None
        self._chunks: list[bytes] = []
        self.is_reusable = True
        self.used_at = loop.time()

    async def exchange(self, request: bytes) -> HttpResponse:
        """Send a request, wait for its response."""
        self._parser = httptools.HttpResponseParser(self)
        self._chunks = []
        self._waiter = self._loop.create_future()
        self._transport.write(request)
        return await self._waiter

    def abort(self) -> None:
        """Close at once."""
        self.is_reusable = False
        self._waiter = None
        self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not an HTTP response ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection was closed")

    # Called by the parser

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self.is_reusable = self._parser.should_keep_alive()
        self.used_at = self._loop.time()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(HttpResponse(self._parser.get_status_code(), b"".join(self._chunks)))

    def _fail(self, reason: str) -> None:
        self.is_reusable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError(reason))
