"""The receiving side of prefill/decode separation: fetches the keys of long prompts from an engine that fills.

Whatever goes wrong costs time only: the engine then computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import httpx

from glm5.errors import EngineError

if TYPE_CHECKING:  # the engine module loads torch
    from glm5.engine.engine import Engine

LENGTH_HEADER, VERSION_HEADER = "x-glm5-prefix-length", "x-glm5-weight-version"
_WORTH_FETCHING = 64
"""Prompt tokens that must be missing here before the peer is asked."""
_TIMEOUT_S = 600.0
_log = logging.getLogger(__name__)


class PrefillPeer:
    """The engine at ``url`` fills prompts for ``engine``."""

    def __init__(self, url: str, engine: Engine, api_key: str = "") -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(base_url=url.rstrip("/"), timeout=_TIMEOUT_S, headers=headers)
        self._engine = engine
        self.fetched_tokens = 0
        """Prompt tokens whose keys came from the peer."""

    async def fetch(self, ids: list[int]) -> None:
        """Bring the keys of ``ids`` into the engine's prefix cache, unless they are there or the peer cannot."""
        try:
            known = await asyncio.to_thread(self._engine.cached_length, ids)
            if len(ids) - known < _WORTH_FETCHING:
                return
            answer = await self._client.post("/export_prefix", json={"input_ids": ids})
            answer.raise_for_status()
            length, version = int(answer.headers[LENGTH_HEADER]), int(answer.headers[VERSION_HEADER])
            await asyncio.to_thread(self._import, ids, answer.content, length, version)
            self.fetched_tokens += length - known
        except (httpx.HTTPError, EngineError, KeyError, ValueError) as error:
            _log.warning("prefill peer %s: %s; computing the prompt here", self._client.base_url, error)

    def _import(self, ids: list[int], data: bytes, length: int, version: int) -> None:
        from glm5.engine.handover import CachedPrefix

        self._engine.import_prefix(ids, CachedPrefix.from_bytes(data, length, version))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
