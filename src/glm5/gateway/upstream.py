"""Calls to the engines: ids in, ids out, over the token-level protocol, with deadlines, retries and health checks.

Every call ends: with a generation, or with an ApiError at its deadline. A call whose engine fails is made again on
the engine that the router names next; one engine that restarts is waited for. What an engine had sampled when it
aborted a request (for new weights, say) is kept, and sampling goes on after it. Cancelling a call closes its
connection, which is how the engine learns to stop.
"""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any, get_args

from glm5.dialects.protocol import ApiError
from glm5.gateway.router import Router
from glm5.gateway.tree import ids_text, join_ids_texts
from glm5.records import FinishReason, SamplingParams
from glm5.wire import ConnectFailure, HttpClient, Response, split_url

HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 5.0
FAILED_CHECKS_UNTIL_DEAD = 3
_SEED_STRIDE = 1_000_003
"""The rest of an aborted answer is drawn from a random stream of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine sampled for one prompt; the three lists have the same length."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    cached_tokens: int

    def followed_by(self, rest: Generation) -> Generation:
        """This piece of an answer and the one that was sampled after it."""
        return Generation(
            output_ids=self.output_ids + rest.output_ids, logprobs=self.logprobs + rest.logprobs,
            versions=self.versions + rest.versions, finish_reason=rest.finish_reason, cached_tokens=self.cached_tokens)


class EnginePool:
    """The engines behind one gateway."""

    def __init__(self, router: Router, timeout_s: float = 600.0) -> None:
        """``timeout_s`` is the deadline of one model call, retries included. Raises ServiceError for a URL that is
        none."""
        for url in router.engine_urls:
            split_url(url)
        self.router = router
        self.timeout_s = timeout_s
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._failed_checks: Counter[str] = Counter()
        self._running: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)
        self._evicted: set[asyncio.Task[Any]] = set()
        self._max_context: int | None = None
        self._client = HttpClient()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    async def generate(self, session_id: str, prompt: str, sampling: SamplingParams) -> Generation:
        """Sample a continuation of ``prompt``, the text of its ids (``tree.ids_text``). Must run in a task of its own.
        Raises ApiError: 400 when the engine refuses the prompt, 502 when it answers nonsense, 503 at the deadline."""
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        body = _generate_body(session_id, prompt, sampling)
        answer = await self._call(session_id, "POST", "/generate", body, deadline)
        whole = _read_generation(answer, sampling.max_new_tokens)
        while whole.finish_reason == "abort":
            known = len(whole.output_ids)
            if known == sampling.max_new_tokens:
                return replace(whole, finish_reason="length")
            seed = None if sampling.seed is None else sampling.seed + _SEED_STRIDE * known
            rest = replace(sampling, max_new_tokens=sampling.max_new_tokens - known, seed=seed)
            body = _generate_body(session_id, join_ids_texts((prompt, ids_text(whole.output_ids))), rest)
            answer = await self._call(session_id, "POST", "/generate", body, deadline)
            whole = whole.followed_by(_read_generation(answer, rest.max_new_tokens))
        return whole

    async def score(self, session_id: str, prompt_ids: list[int], output_ids: list[int]) -> Generation:
        """``output_ids`` as if they had been sampled after ``prompt_ids``: their log-probs at temperature 1, and the
        version of the weights that gave them. Raises as ``generate``."""
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        body = json.dumps({"input_ids": prompt_ids + output_ids, "return_prompt_logprob": True, "stream": False,
                           "session_id": session_id, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        answer = await self._call(session_id, "POST", "/generate", body.encode(), deadline)
        logprobs = (answer.get("prompt_logprobs") or [])[len(prompt_ids):]
        version = (answer.get("weight_versions") or [None])[0]
        scored = {"output_ids": output_ids, "logprobs": logprobs, "weight_versions": [version] * len(output_ids),
                  "finish_reason": "stop", "cached_tokens": answer.get("cached_tokens")}
        return _read_generation(scored, len(output_ids))

    async def max_context(self, session_id: str) -> int:
        """Longest prompt + output that the engines take."""
        if self._max_context is None:
            deadline = asyncio.get_running_loop().time() + self.timeout_s
            info = await self._call(session_id, "GET", "/get_model_info", None, deadline)
            value = info.get("max_context")
            if type(value) is not int or value < 1:
                raise ApiError(502, f"/get_model_info: max_context is {value!r}, expected a positive integer")
            self._max_context = value
        return self._max_context

    async def check_health(self) -> None:
        """Ask every engine whether it is well, for ever; mark those that fail."""
        while True:
            await asyncio.gather(*(self._check(url) for url in self.router.engine_urls))
            await asyncio.sleep(HEALTH_PERIOD_S)

    def stats(self) -> list[dict[str, Any]]:
        """One record per engine."""
        return [{"url": url, "alive": self.router.is_alive(url),
                 "draining": self.router.is_draining(url), "sessions": self.router.num_sessions(url),
                 "running": len(self._running[url]), "calls": self.calls[url], "failures": self.failures[url]}
                for url in self.router.engine_urls]

    async def _call(self, session_id: str, method: str, path: str, body: bytes | None,
                    deadline: float) -> dict[str, Any]:
        """JSON answer of the session's engine; tries again until the deadline, which is on the loop's clock."""
        loop = asyncio.get_running_loop()
        delay_s, cause = 0.1, "no engine is alive"
        while loop.time() < deadline:
            url = self.router.choose(session_id)
            if url is not None:
                cause = await self._attempt(url, method, path, body, deadline - loop.time())
                if isinstance(cause, dict):
                    return cause
                if self.router.choose(session_id) not in (None, url):
                    continue  # another engine takes over at once
            await asyncio.sleep(min(delay_s, max(deadline - loop.time(), 0)))
            delay_s = min(2 * delay_s, 2.0)
        raise ApiError(503, f"no engine answered within {self.timeout_s:.0f} s: {cause}", code="engine_unavailable")

    async def _attempt(self, url: str, method: str, path: str, body: bytes | None,
                       timeout_s: float) -> dict[str, Any] | str:
        """One try: the answer, or why there is none. Raises ApiError when another try cannot help."""
        self.calls[url] += 1
        try:
            response = await self._send(url, method, path, body, timeout_s)
        except OSError as error:
            self.failures[url] += 1
            if isinstance(error, (ConnectFailure, TimeoutError)):
                self.router.mark_dead(url)  # a connection that breaks may only be old: the next try shows
            return f"{url}: {str(error) or type(error).__name__}"
        if response is None:
            self.failures[url] += 1
            return f"{url}: stopped answering health checks"
        if response.status >= 500:
            self.failures[url] += 1
            return f"{url}{path}: HTTP {response.status}"
        try:
            answer = json.loads(response.body)
        except ValueError:
            raise ApiError(502, f"{url}{path}: the answer is not JSON") from None
        if response.status >= 400:
            detail = answer.get("error") or {} if isinstance(answer, dict) else {}
            raise ApiError(400, f"engine: {detail.get('message', answer)}", code=detail.get("code"))
        if not isinstance(answer, dict):
            raise ApiError(502, f"{url}{path}: the answer is not an object")
        if answer.get("finish_reason") == "abort" and not answer.get("output_ids"):
            return f"{url}: the engine aborted the request"
        return answer

    async def _send(self, url: str, method: str, path: str, body: bytes | None,
                    timeout_s: float) -> Response | None:
        """The response; None when the engine was declared dead meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._running[url].add(task)
        try:
            return await self._client.request(method, url + path, body, timeout_s)
        except asyncio.CancelledError:
            if task in self._evicted and task.cancelling() == 1:
                task.uncancel()
                return None
            raise
        finally:
            self._running[url].discard(task)
            self._evicted.discard(task)

    async def _check(self, url: str) -> None:
        try:
            response = await self._client.request("GET", f"{url}/health_generate", None, HEALTH_TIMEOUT_S)
            is_well = response.status == 200
        except OSError:
            is_well = False
        if is_well:
            self._failed_checks[url] = 0
            self.router.mark_alive(url)
            return
        self._failed_checks[url] += 1
        if self._failed_checks[url] >= FAILED_CHECKS_UNTIL_DEAD:
            self.router.mark_dead(url)
            if self.router.num_alive():  # with nobody to take over, the calls may as well wait
                self._evict(url)

    def _evict(self, url: str) -> None:
        """Take the running calls away from an engine that hangs."""
        for task in self._running[url]:
            self._evicted.add(task)
            task.cancel()


def _generate_body(session_id: str, prompt: str, sampling: SamplingParams) -> bytes:
    rest = json.dumps({
        "return_logprob": True, "stream": False, "session_id": session_id,
        "sampling_params": {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens, "stop_token_ids": sampling.stop_token_ids,
            "seed": sampling.seed}})
    return f'{{"input_ids": [{prompt}], {rest[1:]}'.encode()


def with_limit(sampling: SamplingParams, max_new_tokens: int, default_stop_ids: tuple[int, ...],
               call: int) -> SamplingParams:
    """Sampling of one call: the session's, with this call's token limit, stop ids and a seed of its own."""
    seed = None if sampling.seed is None else sampling.seed + call
    stop_token_ids = default_stop_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
    return replace(sampling, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, seed=seed)


def _read_generation(answer: dict[str, Any], max_new_tokens: int) -> Generation:
    """Check what an engine returned: wrong records must not reach the trainer."""
    lists = [answer.get(key) for key in ("output_ids", "logprobs", "weight_versions")]
    lengths = [len(item) if isinstance(item, list) else -1 for item in lists]
    if not lengths[0] == lengths[1] == lengths[2] or not 1 <= lengths[0] <= max_new_tokens:
        raise ApiError(502, f"engine: output_ids, logprobs, weight_versions have lengths {lengths}; expected equal "
                                f"lengths from 1 to {max_new_tokens}")
    try:
        array("i", [*answer["output_ids"], *answer["weight_versions"]])
        is_finite = math.isfinite(sum(answer["logprobs"]))
    except (TypeError, OverflowError):
        is_finite = False
    if not is_finite:
        raise ApiError(502, "engine: ids and versions must be integers, log-probs finite numbers")
    if answer.get("finish_reason") not in get_args(FinishReason):
        raise ApiError(502, f"engine: finish_reason is {answer.get('finish_reason')!r}")
    return Generation(output_ids=answer["output_ids"], logprobs=answer["logprobs"], versions=answer["weight_versions"],
                      finish_reason=answer["finish_reason"], cached_tokens=int(answer.get("cached_tokens") or 0))
