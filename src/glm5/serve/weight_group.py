"""Endpoints by which a trainer broadcasts weights into the engine, named as SGLang's.

``POST /init_weights_update_group {master_address, master_port, rank_offset, world_size, backend, timeout_s}`` joins
the trainer's group, ``/update_weights_from_distributed {names, dtypes, shapes, sha256, weight_version}`` receives and
swaps, ``/destroy_weights_update_group`` leaves. What fails answers 400 and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from glm5.device import BACKENDS, HOST_BACKEND
from glm5.dialects.protocol import ApiError, field, read_json
from glm5.errors import WeightSyncError
from glm5.serve.config import ServeConfig

if TYPE_CHECKING:  # both load torch
    from glm5.engine.broadcast import WeightGroup
    from glm5.engine.engine import Engine

Endpoint = Callable[[Request], Awaitable[Response]]


class WeightGroupApi:
    """The engine's membership in at most one group."""

    def __init__(self, engine: Engine, config: ServeConfig) -> None:
        self._engine, self._config = engine, config
        self._group: WeightGroup | None = None

    def table(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each route."""
        return [("POST", "/init_weights_update_group", self.join),
                ("POST", "/update_weights_from_distributed", self.update),
                ("POST", "/destroy_weights_update_group", self.leave)]

    async def join(self, request: Request) -> Response:
        """Meet the other members; a group that was joined before is left."""
        from glm5.engine.broadcast import WeightGroup

        data = await self._read(request)
        backend = field(data, "backend", str, HOST_BACKEND)
        if backend not in BACKENDS:
            raise ApiError(400, f"backend: {backend!r}; expected one of {', '.join(BACKENDS)}", "invalid_request",
                           "backend")
        arguments = (field(data, "master_address", str, required=True), field(data, "master_port", int, required=True),
                     field(data, "rank_offset", int, required=True), field(data, "world_size", int, required=True),
                     backend, field(data, "timeout_s", float, 30.0))
        self._close()
        try:
            self._group = await asyncio.to_thread(WeightGroup, *arguments)
        except WeightSyncError as error:
            return _refusal(str(error))
        return JSONResponse({"success": True, "message": ""})

    async def update(self, request: Request) -> Response:
        """Receive a broadcast and swap it in."""
        from glm5.engine.broadcast import Announcement

        data = await self._read(request)
        version = field(data, "weight_version", int, required=True)
        group = self._group
        if group is None:
            return _refusal("no weight group; join one with /init_weights_update_group")
        try:
            tensors = await asyncio.to_thread(group.receive, Announcement.from_json(data))
        except WeightSyncError as error:
            self._close()
            return _refusal(str(error))
        outcome = await asyncio.to_thread(self._engine.replace_tensors, tensors, version)
        return JSONResponse(asdict(outcome), 200 if outcome.success else 400)

    async def leave(self, request: Request) -> Response:
        """Leave the group, if there is one."""
        self._close()
        return JSONResponse({"success": True, "message": ""})

    async def _read(self, request: Request) -> dict[str, Any]:
        return await read_json(request, self._config.max_body_bytes, self._config.body_timeout_s)

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _refusal(message: str) -> Response:
    return JSONResponse({"success": False, "message": message}, 400)
