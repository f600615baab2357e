"""Inference engines of others, as the adapter calls them: SGLang and vLLM over HTTP. Free of torch.

Both are asked for ids and given ids, without streaming. What differs between them is here: names of fields, where
log-probs and versions stand in an answer, and how weights are swapped while requests run.

- **SGLang** aborts what runs when it is paused; the rest of such an answer is sampled by a later request. So all ids
  of one answer stem from the version that was in force when it was asked for.
- **vLLM** freezes what runs, and goes on after the swap; it reports a version per token. Every swap gives
  its prefix cache a new salt, so that no request finds keys of other weights. It must have been started with
  ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-scale-out``.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any, Literal, Protocol

from glm5.dialects.protocol import ApiError
from glm5.errors import EngineError, Glm5Error, ServiceError
from glm5.records import Completion, FinishReason, SamplingParams
from glm5.serve.token_protocol import GenerateRequest
from glm5.wire import HttpClient

ExternalKind = Literal["sglang", "vllm"]
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_LOAD_TIMEOUT_S = 600.0


class ExternalEngine(Protocol):
    """What the adapter needs of an engine."""

    async def describe(self) -> int:
        """Longest prompt plus answer. Raises ServiceError when the engine is not there or lacks what is needed."""
        ...

    async def check_health(self) -> None:
        """Return when the engine is well. Raises ServiceError otherwise."""
        ...

    async def generate(self, wanted: GenerateRequest, version: int) -> Completion:
        """Sample; ``version`` is in force. Raises ApiError."""
        ...

    async def load(self, directory: Path, version: int) -> None:
        """Swap weights between two steps. Raises EngineError."""
        ...

    async def pause(self) -> None:
        """Sample nothing until ``resume``."""
        ...

    async def resume(self) -> None:
        """Undo ``pause``."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class _Http:
    """Calls to one engine."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self._http, self._timeout_s = url.rstrip("/"), HttpClient(), timeout_s

    def close(self) -> None:
        self._http.close()

    async def get(self, path: str) -> Any:
        return await self._http.get(f"{self.url}{path}", 10.0)

    async def call(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        return await self._http.post(f"{self.url}{path}", body, timeout_s or self._timeout_s)

    async def generate(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An answer to a prompt. Raises ApiError: what the engine refused keeps its status."""
        try:
            response = await self._http.request("POST", f"{self.url}{path}", json.dumps(body).encode(),
                                                self._timeout_s)
        except OSError as error:
            raise ApiError(503, f"{self.url}: {str(error) or type(error).__name__}", "engine_unavailable") from None
        if response.status >= 400:
            status = response.status if response.status < 500 else 503
            said = response.body[:200].decode("utf-8", "replace")
            raise ApiError(status, f"{self.url}{path}: HTTP {response.status} {said}")
        answer: dict[str, Any] = response.json()
        return answer

    async def max_model_len(self) -> int:
        """Longest context, from the list of models that both engines have."""
        page = await self.get("/v1/models")
        try:
            return int(page["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise ServiceError(f"{self.url}/v1/models: expected data[0].max_model_len, got {str(page)[:120]}") from None


class Sglang:
    """A server of SGLang."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        self._http = _Http(url, timeout_s)

    async def describe(self) -> int:
        """See ``ExternalEngine``."""
        return await self._http.max_model_len()

    async def check_health(self) -> None:
        """See ``ExternalEngine``."""
        await self._http.get("/health")

    async def generate(self, wanted: GenerateRequest, version: int) -> Completion:
        """See ``ExternalEngine``."""
        params = wanted.params
        body: dict[str, Any] = {"input_ids": wanted.ids, "return_logprob": True, "stream": False, "sampling_params": {
            **_common(params), "max_new_tokens": params.max_new_tokens, "sampling_seed": params.seed}}
        if wanted.wants_prompt_logprobs:
            body["logprob_start_len"] = 0
        answer = await self._http.generate("/generate", body)
        try:
            meta = answer["meta_info"]
            ids, logprobs = list(answer["output_ids"]), [float(item[0]) for item in meta["output_token_logprobs"]]
            reason = _REASONS.get(meta["finish_reason"]["type"])
            scored = [None if item[0] is None else float(item[0]) for item in meta["input_token_logprobs"]] \
                if wanted.wants_prompt_logprobs else []
            cached = int(meta.get("cached_tokens") or 0)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise _odd(self._http.url, error, answer) from None
        return _completion(wanted, ids, logprobs, [version] * len(ids), reason, cached, scored)

    async def load(self, directory: Path, version: int) -> None:
        """See ``ExternalEngine``."""
        await self.pause()
        try:
            answer = await self._http.call("/update_weights_from_disk", {
                "model_path": str(directory), "weight_version": str(version), "flush_cache": True}, _LOAD_TIMEOUT_S)
            if not answer.get("success"):
                raise EngineError(f"{self._http.url}: did not load {directory}: {answer.get('message')}")
        finally:
            await self.resume()

    async def pause(self) -> None:
        """See ``ExternalEngine``; what runs is aborted."""
        await self._http.call("/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        """See ``ExternalEngine``."""
        await self._http.call("/continue_generation", {})

    def close(self) -> None:
        """See ``ExternalEngine``."""
        self._http.close()


class Vllm:
    """A server of vLLM."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        self._http = _Http(url, timeout_s)
        self._salt = secrets.token_hex(8)

    async def describe(self) -> int:
        """See ``ExternalEngine``."""
        max_context = await self._http.max_model_len()
        try:
            await self._http.get("/is_paused")
        except Glm5Error as error:
            raise ServiceError(f"{self._http.url}: cannot swap weights ({error}); start vLLM with "
                               "VLLM_SERVER_DEV_MODE=1 and --enable-scale-out") from None
        return max_context

    async def check_health(self) -> None:
        """See ``ExternalEngine``."""
        await self._http.get("/health")

    async def generate(self, wanted: GenerateRequest, version: int) -> Completion:
        """See ``ExternalEngine``. At least one id is sampled, and left out where none was asked for."""
        params = wanted.params
        sampling = {**_common(params), "max_tokens": max(params.max_new_tokens, 1), "seed": params.seed, "logprobs": 0}
        if wanted.wants_prompt_logprobs:
            sampling["prompt_logprobs"] = 0
        answer = await self._http.generate("/inference/v1/generate", {
            "token_ids": wanted.ids, "sampling_params": sampling, "cache_salt": self._salt})
        try:
            choice = answer["choices"][0]
            ids = list(choice["token_ids"] or [])
            logprobs = [float(item["logprob"]) for item in choice["logprobs"]["content"]] if ids else []
            versions = _spread(choice.get("weight_versions"), len(ids), version)
            reason = _REASONS.get(choice["finish_reason"])
            scored = [None if item is None else float(item[str(token)]["logprob"]) for token, item in zip(
                wanted.ids, answer["prompt_logprobs"], strict=True)] if wanted.wants_prompt_logprobs else []
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise _odd(self._http.url, error, answer) from None
        if params.max_new_tokens == 0:
            ids, logprobs, versions, reason = [], [], [], "length"
        return _completion(wanted, ids, logprobs, versions, reason, 0, scored)

    async def load(self, directory: Path, version: int) -> None:
        """See ``ExternalEngine``. What runs is frozen and goes on with the keys it has."""
        await self.pause()
        try:
            # always with the path: without one, vLLM loads the last path again
            await self._http.call("/collective_rpc", {
                "method": "reload_weights", "kwargs": {"weights_path": str(directory)}}, _LOAD_TIMEOUT_S)
            await self._http.call("/update_weight_version", {"new_version": str(version)})
            self._salt = secrets.token_hex(8)
        except ServiceError as error:
            raise EngineError(f"{self._http.url}: did not load {directory}: {error}") from None
        finally:
            await self.resume()

    async def pause(self) -> None:
        """See ``ExternalEngine``."""
        await self._http.call("/pause?mode=keep", {})

    async def resume(self) -> None:
        """See ``ExternalEngine``."""
        await self._http.call("/resume", {})

    def close(self) -> None:
        """See ``ExternalEngine``."""
        self._http.close()


ENGINES: dict[str, type[Sglang] | type[Vllm]] = {"sglang": Sglang, "vllm": Vllm}


async def wait_until_well(engine: ExternalEngine, url: str, timeout_s: float) -> int:
    """The engine's longest context, once it answers. Raises ServiceError past the deadline."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            await engine.check_health()
            return await engine.describe()
        except ServiceError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise ServiceError(f"{url}: no engine answers there ({error}); start it first, or correct "
                                   "engine.url") from None
        await asyncio.sleep(0.5)


def _common(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters that both engines call by one name. Raises ApiError for those that are not passed on."""
    if params.grammar or params.logit_bias or params.top_logprobs:
        raise ApiError(400, "sampling_params: grammar, logit_bias and top_logprobs are not passed on to an external "
                            "engine; leave them out", "unsupported")
    return {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty, "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty, "stop_token_ids": list(params.stop_token_ids or ())}


def _spread(spans: Any, length: int, version: int) -> list[int]:
    """Version of each id from vLLM's spans; ids that it does not name were sampled by the version in force."""
    versions = [version] * length
    for span in spans or []:
        if str(span["version"]).isdigit():
            versions[span["start"]:span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    return versions[:length]


def _completion(wanted: GenerateRequest, ids: list[int], logprobs: list[float], versions: list[int],
                reason: FinishReason | None, cached: int, scored: list[float | None]) -> Completion:
    if reason is None or len(ids) != len(logprobs):
        raise ApiError(502, f"engine: {len(ids)} ids with {len(logprobs)} log-probs and finish reason {reason}")
    return Completion(output_ids=ids, logprobs=logprobs, weight_versions=versions, finish_reason=reason,
                      prompt_tokens=len(wanted.ids), cached_tokens=cached, prompt_logprobs=scored)


def _odd(url: str, error: Exception, answer: Any) -> ApiError:
    return ApiError(502, f"{url}: unexpected answer ({type(error).__name__}: {error}): {str(answer)[:200]}")
