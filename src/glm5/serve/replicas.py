"""``glm5 serve --replicas N``: N engine processes behind one address. Free of torch.

This process has the routes of a single server and passes requests on: generating ones where their beginning is
probably cached (``routing``), weight updates and pauses to all, statistics from all together. A replica that exits or
misses its heartbeats is stopped by its process id and started again with the weights in force. Its requests go to
another replica when nothing of their answer has been sent, and otherwise end with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from glm5.dialects.protocol import ApiError, dump, field, read_json
from glm5.errors import ConfigError, Glm5Error
from glm5.process import bind, serve_app, spawn, stop, wait_ready
from glm5.serve.config import ServeConfig
from glm5.serve.connection import deadline_protocol
from glm5.serve.events import CLIENT_GONE, error_event, open_stream, unless_gone
from glm5.serve.front import GENERATING, assemble
from glm5.serve.metrics import Metrics, add_stats
from glm5.serve.routing import PrefixRouter

_START_S, _UPDATE_S = 300.0, 300.0
_HEARTBEAT_S, _HEARTBEAT_TIMEOUT_S, _MISSED_UNTIL_DEAD = 1.0, 15.0, 2
_RETRY_START_S = 2.0
_SENT_ON = ("authorization", "x-api-key", "x-request-id", "content-type", "anthropic-version", "x-glm5-collect")
_PROMPT_FIELDS = ("system", "instructions", "tools", "messages", "prompt", "input", "input_ids")
"""What a prompt is made of, in its order, over all dialects."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Replica:
    """One engine process."""

    process: subprocess.Popen[bytes]
    url: str = ""


class Replicas:
    """The processes and the routes in front of them."""

    def __init__(self, count: int, directory: Path, weight_version: int, arguments: Sequence[str],
                 config: ServeConfig, scratch: Path, model_name: str = "") -> None:
        """``arguments`` are options of ``glm5 serve`` for every replica."""
        self.metrics, self.router = Metrics(), PrefixRouter(count)
        self._directory, self._version = directory, weight_version
        self._arguments = [*arguments, "--model-name", model_name or directory.resolve().name]
        self._config, self._scratch = config, scratch
        self._is_paused = False
        self._update_lock = asyncio.Lock()
        self._replicas = [_Replica(self._spawn(number)) for number in range(count)]
        self._own_key = {"authorization": f"Bearer {config.api_keys[0]}"} if config.api_keys else {}
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(config.request_timeout_s + 10, connect=5, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256), trust_env=False)

    def wait_ready(self) -> None:
        """Return when all serve. Raises ServiceError with a replica's last words."""
        for number, replica in enumerate(self._replicas):
            replica.url = wait_ready(replica.process, self._ready(number), self._log_path(number), _START_S)
            self.router.is_alive[number] = True

    def stop(self) -> None:
        """End all processes."""
        for replica in self._replicas:
            stop(replica.process, self._config.shutdown_timeout_s + 5)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Watch the replicas while the server runs."""
        tasks = [asyncio.create_task(self._watch(number)) for number in range(len(self._replicas))]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        await asyncio.to_thread(self.stop)  # also ends the wait for one that is being started

    def routes(self) -> list[Route]:
        """Those of ``app.Api``."""
        own = (("POST", "/update_weights_from_disk", self.update_weights), ("POST", "/pause_generation", self.pause),
               ("POST", "/continue_generation", self.resume), ("GET", "/health", self.health),
               ("GET", "/health_generate", self.health), ("GET", "/stats", self.stats),
               ("GET", "/metrics", self.metrics_page))
        posts = (*GENERATING, "/v1/messages/count_tokens", "/v1/embeddings",
                 *(["/feedback"] if self._config.collect else []))
        gets = ("/get_model_info", "/openapi.json", "/docs", "/v1/models", "/v1/models/{model_id:path}")
        return [
            *(Route(path, endpoint, methods=[method]) for method, path, endpoint in own),
            *(Route(path, self.generate, methods=["POST"]) for path in posts),
            *(Route(path, self.ask_any, methods=["GET"]) for path in gets),
            Route("/v1/responses/{response_id}", self.stored_response, methods=["GET", "DELETE"]),
        ]

    async def generate(self, request: Request) -> Response:
        """A request with a body, where its beginning may be cached or its previous response is stored."""
        data = await read_json(request, self._config.max_body_bytes, self._config.body_timeout_s)
        holder = None
        if isinstance(previous := data.get("previous_response_id"), str):
            holder = await self._holder(request, previous)
        prompt = b"".join(dump(data[name]) for name in _PROMPT_FIELDS if name in data)
        return await self._pass_on(request, dump(data), prompt, holder)

    async def ask_any(self, request: Request) -> Response:
        """What every replica answers alike."""
        return await self._pass_on(request)

    async def stored_response(self, request: Request) -> Response:
        """A stored response, from the replica that has it."""
        return await self._pass_on(request, holder=await self._holder(request, request.path_params["response_id"]))

    async def update_weights(self, request: Request) -> Response:
        """Swap weights everywhere. A checkpoint that no replica takes changes nothing; a replica that fails where
        another succeeds is started again with the new weights."""
        data = await read_json(request, self._config.max_body_bytes, self._config.body_timeout_s)
        directory = field(data, "model_path", str, required=True)
        version = field(data, "weight_version", int, required=True)
        async with self._update_lock:
            answers = await self._ask_all("POST", "/update_weights_from_disk", data)
            good = [number for number, answer in answers.items() if answer.get("weight_version") == version
                    and answer.get("success")]
            if not good:
                refusal = next(iter(answers.values()), {"success": False, "message": "no replica is alive"})
                return _json(refusal, 400)
            self._directory, self._version = Path(directory), version
            bad = [number for number in answers if number not in good]
            for number in bad:
                self.router.forget(number)
                self._replicas[number].process.kill()  # its watcher starts it again
        outcome = answers[good[0]]
        if bad:
            outcome["message"] = f"replicas {bad} refused the weights and start again with them"
        return _json({**outcome, "load_ms": max(answers[number]["load_ms"] for number in good)})

    async def pause(self, request: Request) -> Response:
        """Run no more steps, in any replica."""
        self._is_paused = True
        return _json(_agreement(await self._ask_all("POST", "/pause_generation")))

    async def resume(self, request: Request) -> Response:
        """Go on after ``pause_generation``."""
        self._is_paused = False
        return _json(_agreement(await self._ask_all("POST", "/continue_generation")))

    async def health(self, request: Request) -> Response:
        """200 while a replica is alive."""
        alive = sum(self.router.is_alive)
        body = {"status": "ok" if alive else "down", "weight_version": self._version, "replicas_alive": alive,
                "replicas": len(self._replicas)}
        return _json(body, 200 if alive else 503)

    async def stats(self, request: Request) -> Response:
        """Statistics of all replicas together, and of each."""
        answers = await self._ask_all("GET", "/stats")
        processes = [{"number": number, "pid": replica.process.pid, "url": replica.url, **answers.get(number, {})}
                     for number, replica in enumerate(self._replicas)]
        return _json({**add_stats(list(answers.values())), "replicas": processes})

    async def metrics_page(self, request: Request) -> Response:
        """The same for Prometheus."""
        page = self.metrics.render(add_stats(list((await self._ask_all("GET", "/stats")).values())))
        page += "# HELP glm5_replica_up 1 while the replica serves\n# TYPE glm5_replica_up gauge\n"
        for number, alive in enumerate(self.router.is_alive):
            page += f'glm5_replica_up{{replica="{number}"}} {int(alive)}\n'
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def _pass_on(self, request: Request, body: bytes = b"", prompt: bytes = b"",
                       holder: int | None = None) -> Response:
        """The answer of the replica that is chosen; of another one when that fails before it has said anything."""
        tried: list[int] = []
        while True:
            if holder is not None and not tried and self.router.is_alive[holder]:
                number: int | None = holder
                self.router.take(holder)
            else:
                number = self.router.choose(prompt, tried)
            if number is None:
                raise ApiError(503, f"no replica answers ({len(tried)} tried); they start again, retry later",
                               "no_replica")
            tried.append(number)
            try:
                return await self._relay(number, request, body)
            except httpx.TransportError as error:
                _log.warning("replica %d: %s; trying another one", number, type(error).__name__)

    async def _relay(self, number: int, request: Request, body: bytes) -> Response:
        """Replica ``number``'s answer. Raises httpx.TransportError when it ends before the first event, or within a
        body that is no stream."""
        is_open = False
        try:
            headers = {name: request.headers[name] for name in _SENT_ON if name in request.headers}
            query = f"?{request.url.query}" if request.url.query else ""
            url = f"{self._replicas[number].url}{request.url.path}{query}"
            sent = self._client.build_request(request.method, url, headers=headers, content=body)
            answer = await unless_gone(request.receive, self._client.send(sent, stream=True))
            if answer is None:
                return Response(status_code=CLIENT_GONE)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                is_open = True
                return await open_stream(request, self._events(number, answer, request.url.path))
            try:
                content = await unless_gone(request.receive, answer.aread())
            finally:
                await answer.aclose()
            if content is None:
                return Response(status_code=CLIENT_GONE)
            kept = {name: answer.headers[name] for name in ("content-type", "retry-after") if name in answer.headers}
            return Response(content, answer.status_code, kept)
        finally:
            if not is_open:
                self.router.finish(number)

    async def _events(self, number: int, answer: httpx.Response, path: str) -> AsyncGenerator[bytes, None]:
        """The events of a stream, whole ones only, so that an error can follow. Raises a failure before the first."""
        has_begun, rest = False, b""
        try:
            async for part in answer.aiter_raw():
                whole, mark, rest = (rest + part).rpartition(b"\n\n")
                if mark:
                    has_begun = True
                    yield whole + mark
        except httpx.TransportError:
            if not has_begun:
                raise
            yield error_event(ApiError(502, f"replica {number} failed during the answer; send the request again",
                                       "replica_failed"), path)
        finally:
            await answer.aclose()
            self.router.finish(number)

    async def _holder(self, request: Request, response_id: str) -> int | None:
        """The replica that stores a response of this client."""
        headers = {name: request.headers[name] for name in _SENT_ON if name in request.headers}
        path = f"/v1/responses/{quote(response_id, safe='')}"
        for number, alive in enumerate(self.router.is_alive):
            if alive:
                try:
                    answer = await self._client.get(self._replicas[number].url + path, headers=headers)
                    if answer.status_code == 200:
                        return number
                except httpx.TransportError:
                    continue
        return None

    async def _ask_all(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[int, dict[str, Any]]:
        """The JSON of every living replica by its number; what fails says so under ``message``."""
        numbers = [number for number, alive in enumerate(self.router.is_alive) if alive]
        asked: list[Coroutine[Any, Any, dict[str, Any]]] = [self._ask(number, method, path, body) for number in numbers]
        return dict(zip(numbers, await asyncio.gather(*asked), strict=True))

    async def _ask(self, number: int, method: str, path: str, body: dict[str, Any] | None = None,
                   timeout_s: float = _UPDATE_S) -> dict[str, Any]:
        url = self._replicas[number].url + path
        try:
            answer = (await self._client.request(method, url, json=body, headers=self._own_key,
                                                 timeout=timeout_s)).json()
            return answer if isinstance(answer, dict) else {"success": False, "message": f"replica {number}: no object"}
        except (httpx.HTTPError, ValueError) as error:
            return {"success": False, "message": f"replica {number}: {type(error).__name__}: {error}"}

    async def _watch(self, number: int) -> None:
        """Heartbeats of one replica; start it again when it is gone."""
        missed = 0
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            replica = self._replicas[number]
            if replica.process.poll() is None and self.router.is_alive[number]:
                answer = await self._ask(number, "GET", "/health", timeout_s=_HEARTBEAT_TIMEOUT_S)
                missed = 0 if answer.get("status") == "ok" else missed + 1
                if missed < _MISSED_UNTIL_DEAD:
                    continue
            self.router.forget(number)
            _log.warning("replica %d (process %d) is gone or silent; starting it again", number, replica.process.pid)
            await asyncio.to_thread(stop, replica.process)
            try:
                await self._start_again(number)
                missed = 0
            except (Glm5Error, OSError) as error:
                _log.warning("%s", error)
                await asyncio.sleep(_RETRY_START_S)

    async def _start_again(self, number: int) -> None:
        version = self._version
        self._ready(number).unlink(missing_ok=True)
        process = self._spawn(number)
        self._replicas[number] = _Replica(process)
        url = await asyncio.to_thread(wait_ready, process, self._ready(number), self._log_path(number), _START_S)
        self._replicas[number].url = url
        async with self._update_lock:
            if self._version != version:
                body = {"model_path": str(self._directory), "weight_version": self._version}
                answer = await self._ask(number, "POST", "/update_weights_from_disk", body)
                if not answer.get("success"):
                    raise ConfigError(f"replica {number}: {answer.get('message')}")
            if self._is_paused:
                await self._ask(number, "POST", "/pause_generation")
            self.router.is_alive[number] = True

    def _spawn(self, number: int) -> subprocess.Popen[bytes]:
        arguments = ["serve", str(self._directory), "--port", "0", "--ready-file", str(self._ready(number)),
                     "--weight-version", str(self._version), *self._arguments]
        return spawn(arguments, self._log_path(number))

    def _ready(self, number: int) -> Path:
        return self._scratch / f"{number}.json"

    def _log_path(self, number: int) -> Path:
        return self._scratch / f"replica {number}.log"


def serve_replicas(directory: Path, count: int, host: str, port: int, ready_file: Path | None, weight_version: int,
                   model_name: str, arguments: Sequence[str], config: ServeConfig) -> None:
    """Serve ``directory`` with ``count`` engines until SIGTERM; ``arguments`` are options of ``glm5 serve`` for each.

    Raises ConfigError for a role, ServiceError for a taken port or an engine that does not start.
    """
    if count < 1 or "WORLD_SIZE" in os.environ:
        raise ConfigError(f"replicas={count}: expected 1 or more, and no torchrun around them; correct it")
    if config.role != "both":
        raise ConfigError(f"replicas={count} with role={config.role!r}: start one server for each role instead")
    if port:
        bind(host, port).close()  # a taken port is reported before weights are loaded
    with tempfile.TemporaryDirectory(prefix="glm5-replicas-") as scratch:
        replicas = Replicas(count, directory, weight_version, arguments, config, Path(scratch), model_name)
        try:
            replicas.wait_ready()
            app = assemble(replicas.routes(), config, replicas.metrics, replicas.lifespan)
            serve_app(app, host, port, ready_file, grace_s=config.shutdown_timeout_s,
                      protocol=deadline_protocol(config.header_timeout_s))
        finally:
            replicas.stop()


def _agreement(answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return {"success": bool(answers) and all(answer.get("success") for answer in answers.values())}


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(dump(body), status, media_type="application/json")
