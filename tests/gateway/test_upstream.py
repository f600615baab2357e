"""Calls to engines that refuse, lie, abort or hang."""

import asyncio
import time

import pytest

from glm5.gateway.dialect import RequestError
from glm5.gateway.router import Router
from glm5.gateway.transport import ConnectFailure, HttpClient
from glm5.gateway.upstream import EnginePool, with_limit
from glm5.process import bind
from glm5.records import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=8)


def generate(urls, prompt_ids, timeout_s=5.0):
    """One call through a pool of its own."""
    async def call():
        pool = EnginePool(Router(urls), timeout_s)
        try:
            return await asyncio.create_task(pool.generate("s", prompt_ids, SAMPLING)), pool.stats()
        finally:
            pool.close()
    return asyncio.run(call())


def test_a_generation_has_one_log_prob_and_version_per_id(engine, script, tokenizer):
    script("seven<|user|>", version=5)
    generation, stats = generate([engine.url], [tokenizer.special_id("<|assistant|>")])
    assert generation.output_ids == tokenizer.encode("seven<|user|>", allow_special=True)
    assert generation.versions == [5] * len(generation.output_ids) == [5] * len(generation.logprobs)
    assert (generation.finish_reason, generation.cached_tokens) == ("stop", 3)
    assert stats[0]["calls"] == 1 and stats[0]["failures"] == 0


@pytest.mark.parametrize("lie", [
    {"output_ids": [1, 2], "logprobs": [-1.0], "weight_versions": [1, 1]}, {"output_ids": []}, {"output_ids": None},
    {"output_ids": [1] * 9, "logprobs": [-1.0] * 9, "weight_versions": [1] * 9}, {"output_ids": ["a"]},
    {"logprobs": [None]}, {"logprobs": [float("nan")]}, {"weight_versions": [1.5]}, {"finish_reason": "tired"}])
def test_answers_that_cannot_be_true_are_refused(engine, script, lie):
    truth = {"output_ids": [1], "logprobs": [-1.0], "weight_versions": [1], "finish_reason": "stop"}
    script({"answer": truth})
    assert generate([engine.url], [])[0].output_ids == [1]
    if lie.get("logprobs") and lie["logprobs"][0] != lie["logprobs"][0]:
        lie = {"logprobs": [1e400]}  # JSON has no NaN; too large a number reads as infinity
    script({"answer": {**truth, **lie}}) if lie != {"logprobs": [1e400]} else script({"answer": {**truth, "logprobs": [1e308] * 1}})
