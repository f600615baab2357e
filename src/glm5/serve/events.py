"""Answers that depend on the client staying: streams of events, and waiting that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm5.engine.generation import Generation
from glm5.errors import Glm5Error
from glm5.serve.protocol import dump, to_api_error

T = TypeVar("T")
CLIENT_GONE = 499
"""Status of an answer that nobody waits for."""


class EventStream(Response):
    """Server-sent events, of which ``first`` has been read; the source is closed when the client disconnects."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the source ends or the client leaves."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(send))
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def open_stream(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """``events`` as a response that begins with the first of them. Raises what they raise before it."""

    async def read_first() -> bytes:
        return await anext(events)

    first = await unless_gone(request.receive, read_first())
    return Response(status_code=CLIENT_GONE) if first is None else EventStream(first, events)


async def token_events(generation: Generation, timeout_s: float) -> AsyncGenerator[bytes, None]:
    """Events of a streaming ``/generate``. Raises the first EngineError before the first event; later it is one."""
    has_begun = False
    try:
        async with aclosing(generation.stream(timeout_s)) as chunks:
            async for chunk in chunks:
                has_begun = True
                yield b"data: " + dump(asdict(chunk)) + b"\n\n"
        yield b"data: [DONE]\n\n"
    except Glm5Error as error:
        if not has_begun:
            raise
        yield b"data: " + dump(to_api_error(error).body("")) + b"\n\n"
    finally:
        generation.abort()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
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
