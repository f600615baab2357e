"""HTTP connections that cannot be held open by sending next to nothing.

A request's head has a deadline and a size; uvicorn has neither with httptools. The body's deadline belongs to whoever
reads it (``protocol.read_json``).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 64 << 10
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def deadline_protocol(header_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn that gives the head of a request ``header_timeout_s`` to arrive."""

    class DeadlineProtocol(HttpToolsProtocol):
        _alarm: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            super().data_received(data)
            if self._alarm is not None and self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._alarm is None:  # a further request of the connection
                self._arm()

        def on_headers_complete(self) -> None:
            self._disarm()
            super().on_headers_complete()

        def _arm(self) -> None:
            self._head_bytes = 0
            self._alarm = self.loop.call_later(header_timeout_s, self._refuse, _TOO_SLOW)

        def _disarm(self) -> None:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None

        def _refuse(self, answer: bytes) -> None:
            self._disarm()
            if not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()

    return DeadlineProtocol
