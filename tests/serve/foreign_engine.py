"""Servers that answer as vLLM and SGLang do, over an engine of ours with a tiny dense model.

What they answer follows the shapes that those servers were seen to send.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.engine.engine import Engine
from glm5.records import SamplingParams


class ForeignEngine:
    """Common part; ``raw_logprobs`` reports log-probs before the temperature, as vLLM does by default."""

    def __init__(self, engine: Engine, raw_logprobs: bool = False) -> None:
        self.engine, self.raw_logprobs = engine, raw_logprobs
        self.label = {engine.weight_version: "default"}
        self.log: list[Any] = []
        self.running: set[Any] = set()

    async def sample(self, ids: list[int], sampling: dict[str, Any], limit: str, scored: bool) -> Any:
        params = SamplingParams(temperature=sampling["temperature"], max_new_tokens=sampling[limit],
                                stop_token_ids=tuple(sampling["stop_token_ids"]), seed=7)
        generation = self.engine.submit(ids, params, prompt_logprobs=scored)
        self.running.add(generation)
        try:
            done = await generation.wait(60)
        finally:
            self.running.discard(generation)
        if not self.raw_logprobs or params.temperature == 1.0:
            return done, done.logprobs
        again = self.engine.submit(ids + done.output_ids, SamplingParams(max_new_tokens=0), prompt_logprobs=True)
        return done, (await again.wait(60)).prompt_logprobs[len(ids):]

    async def load(self, path: str) -> Any:
        outcome = await asyncio.to_thread(self.engine.update_weights, path, self.engine.weight_version + 1)
        self.label[self.engine.weight_version] = self.label.get(self.engine.weight_version - 1, "default")
        return outcome

    async def well(self, request: Request) -> JSONResponse:
        return JSONResponse({})

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "m", "max_model_len": self.engine.max_context}]})


class FakeVllm(ForeignEngine):
    def app(self) -> Starlette:
        return Starlette(routes=[
            Route("/health", self.well), Route("/v1/models", self.models), Route("/is_paused", self.well),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/pause", self.pause, methods=["POST"]), Route("/resume", self.resume, methods=["POST"]),
            Route("/collective_rpc", self.rpc, methods=["POST"]),
            Route("/update_weight_version", self.name, methods=["POST"])])

    async def generate(self, request: Request) -> JSONResponse:
        data = await request.json()
        self.log.append(data)
        sampling = data["sampling_params"]
        done, logprobs = await self.sample(data["token_ids"], sampling, "max_tokens", "prompt_logprobs" in sampling)
        spans: list[dict[str, Any]] = []
        for index, version in enumerate(done.weight_versions):
            if not spans or spans[-1]["version"] != self.label[version]:
                spans.append({"version": self.label[version], "start": index, "end": index})
            spans[-1]["end"] = index + 1
        content = [{"token_id": token, "logprob": value, "rank": 1}
                   for token, value in zip(done.output_ids, logprobs, strict=True)]
        scored = [None if value is None else {str(token): {"logprob": value, "rank": 1}}
                  for token, value in zip(data["token_ids"], done.prompt_logprobs, strict=False)]
        return JSONResponse({"prompt_logprobs": scored or None, "choices": [{
            "token_ids": done.output_ids, "logprobs": {"content": content}, "finish_reason": done.finish_reason,
            "weight_versions": spans}]})

    async def pause(self, request: Request) -> JSONResponse:
        self.log.append(request.url.query)
        self.engine.pause()
        await asyncio.to_thread(self.engine.ping, 10)
        return JSONResponse({})

    async def resume(self, request: Request) -> JSONResponse:
        self.engine.resume()
        return JSONResponse({})

    async def rpc(self, request: Request) -> JSONResponse:
        data = await request.json()
        outcome = await self.load(data["kwargs"]["weights_path"])
        return JSONResponse({"results": [None]}) if outcome.success else JSONResponse({"error": "dead"}, 500)

    async def name(self, request: Request) -> JSONResponse:
        self.label[self.engine.weight_version] = (await request.json())["new_version"]
        return JSONResponse({})


class FakeSglang(ForeignEngine):
    def app(self) -> Starlette:
        return Starlette(routes=[
            Route("/health", self.well), Route("/v1/models", self.models),
            Route("/generate", self.generate, methods=["POST"]),
            Route("/pause_generation", self.pause, methods=["POST"]),
            Route("/continue_generation", self.resume, methods=["POST"]),
            Route("/update_weights_from_disk", self.update, methods=["POST"])])

    async def generate(self, request: Request) -> JSONResponse:
        data = await request.json()
        self.log.append(data)
        scored = data.get("logprob_start_len") == 0
        done, logprobs = await self.sample(data["input_ids"], data["sampling_params"], "max_new_tokens", scored)
        meta = {"finish_reason": {"type": done.finish_reason}, "cached_tokens": done.cached_tokens,
                "output_token_logprobs": [[value, token, None] for token, value in zip(
                    done.output_ids, logprobs, strict=True)]}
        if scored:
            meta["input_token_logprobs"] = [[value, token, None] for token, value in zip(
                data["input_ids"], done.prompt_logprobs, strict=True)]
        return JSONResponse({"output_ids": done.output_ids, "meta_info": meta})

    async def pause(self, request: Request) -> JSONResponse:
        for generation in list(self.running):
            generation.abort()
        await asyncio.to_thread(self.engine.ping, 10)
        return JSONResponse({})

    async def resume(self, request: Request) -> JSONResponse:
        return JSONResponse({})

    async def update(self, request: Request) -> JSONResponse:
        outcome = await self.load((await request.json())["model_path"])
        return JSONResponse({"success": outcome.success, "message": outcome.message})


FAKES = {"vllm": FakeVllm, "sglang": FakeSglang}
