"""Calls to engines that refuse, lie, abort or hang."""

import asyncio
import hashlib
import json
import time

import pytest

from glm5.dialects.protocol import ApiError
from glm5.errors import ServiceError
from glm5.gateway.router import Router
from glm5.gateway.tree import ids_text
from glm5.gateway.upstream import EnginePool, with_limit
from glm5.process import bind
from glm5.records import SamplingParams
from glm5.wire import ConnectFailure, HttpClient

SAMPLING = SamplingParams(max_new_tokens=8)


def generate(urls, prompt_ids, timeout_s=5.0, tokenizer_sha256=None):
    """One call through a pool of its own."""
    async def call():
        pool = EnginePool(Router(urls), timeout_s, tokenizer_sha256)
        try:
            return await asyncio.create_task(pool.generate("s", ids_text(prompt_ids), SAMPLING)), pool.stats()
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


def test_an_engine_with_another_tokenizer_gets_no_prompt(engine, script, engine_log, tokenizer_dir):
    script("seven<|user|>")
    own = hashlib.sha256((tokenizer_dir / "tokenizer.json").read_bytes()).hexdigest()
    assert generate([engine.url], [], tokenizer_sha256=own)[0].finish_reason == "stop"
    script("seven<|user|>")
    with pytest.raises(ApiError, match=f"SHA-256 {own[:12]}…, the gateway's 000000000000…") as caught:
        generate([engine.url], [], tokenizer_sha256="0" * 64)
    assert (caught.value.status, caught.value.code) == (502, "tokenizer_mismatch") and not engine_log()["requests"]


@pytest.mark.parametrize("lie", [
    {"output_ids": [1, 2], "logprobs": [-1.0], "weight_versions": [1, 1]}, {"output_ids": []}, {"output_ids": None},
    {"output_ids": [1] * 9, "logprobs": [-1.0] * 9, "weight_versions": [1] * 9}, {"output_ids": ["a"]},
    {"logprobs": [None]}, {"logprobs": [float("nan")]}, {"weight_versions": [1.5]}, {"finish_reason": "tired"}])
def test_answers_that_cannot_be_true_are_refused(engine, script, lie):
    truth = {"output_ids": [1], "logprobs": [-1.0], "weight_versions": [1], "finish_reason": "stop"}
    script({"answer": json.dumps(truth)})
    assert generate([engine.url], [])[0].output_ids == [1]
    script({"answer": json.dumps({**truth, **lie})})
    with pytest.raises(ApiError, match="engine: ") as caught:
        generate([engine.url], [])
    assert caught.value.status == 502


@pytest.mark.parametrize(("reply", "status", "named"), [
    ({"answer": "<html>"}, 502, "not JSON"), ({"answer": "[1]"}, 502, "not an object"),
    ({"text": "", "status": 422}, 400, "scripted failure"), ({"text": "", "status": 500}, 503, "HTTP 500"),
    ({"answer": '{"finish_reason": "abort"}'}, 503, "aborted")])
def test_refusals_are_final_and_failures_are_tried_again(engine, script, engine_log, reply, status, named):
    script(reply)
    with pytest.raises(ApiError, match=named) as caught:
        generate([engine.url], [], timeout_s=0.5)
    assert caught.value.status == status
    assert (len(engine_log()["requests"]) > 1) == (status == 503)


def test_a_dead_engine_is_left_for_one_that_lives(engine, script):
    script("seven<|user|>")
    dead = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{dead.getsockname()[1]}"
    dead.close()
    for order in ([url, engine.url], [engine.url, url]):
        generation, _ = generate(order, [])
        assert generation.finish_reason == "stop"
    with pytest.raises(ApiError, match=r"no engine answered within 0 s: .*(no engine is alive|cannot connect)"):
        generate([url], [], timeout_s=0.3)


def test_a_hung_engine_ends_at_the_deadline(engine):
    silent = bind("127.0.0.1", 0)  # accepts by the kernel's backlog, never answers
    try:
        started = time.monotonic()
        with pytest.raises(ApiError) as caught:
            generate([f"http://127.0.0.1:{silent.getsockname()[1]}"], [], timeout_s=0.3)
        assert caught.value.status == 503 and time.monotonic() - started < 3
    finally:
        silent.close()


def test_calls_are_taken_away_from_an_engine_that_hangs_when_another_lives(engine, script, monkeypatch):
    monkeypatch.setattr("glm5.gateway.upstream.HEALTH_PERIOD_S", 0.05)
    monkeypatch.setattr("glm5.gateway.upstream.HEALTH_TIMEOUT_S", 0.2)
    script("seven<|user|>")
    silent = bind("127.0.0.1", 0)
    hung = f"http://127.0.0.1:{silent.getsockname()[1]}"

    async def call():
        router = Router([hung, engine.url])
        pool = EnginePool(router, 20.0)
        session = next(name for name in map(str, range(100)) if Router([hung, engine.url]).choose(name) == hung)
        health = asyncio.create_task(pool.check_health())
        generation = await asyncio.create_task(pool.generate(session, "", SAMPLING))
        health.cancel()
        await asyncio.gather(health, return_exceptions=True)
        pool.close()
        return generation, router.is_alive(hung), router.is_alive(engine.url)

    try:
        generation, hung_is_alive, other_is_alive = asyncio.run(call())
    finally:
        silent.close()
    assert generation.finish_reason == "stop"
    assert (hung_is_alive, other_is_alive) == (False, True)


def test_the_client_keeps_connections_and_closes_them_when_cancelled(engine, script, engine_log):
    script({"text": "seven<|user|>", "delay_s": 5})

    async def use():
        client = HttpClient()
        for _ in range(3):
            response = await client.request("GET", f"{engine.url}/get_model_info", None, 5.0)
        body = b'{"input_ids": [], "sampling_params": {"max_new_tokens": 3}}'
        task = asyncio.create_task(client.request("POST", f"{engine.url}/generate", body, 5.0))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        client.close()
        return response

    assert asyncio.run(use()).status == 200
    deadline = time.monotonic() + 5
    while engine_log()["aborted"] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine_log()["aborted"] == 1
    with pytest.raises(ConnectFailure):
        asyncio.run(HttpClient().request("GET", "http://127.0.0.1:1/", None, 1.0))


def test_urls_that_are_none_are_named():
    with pytest.raises(ServiceError, match="'localhost:8000': expected http://HOST:PORT"):
        EnginePool(Router(["localhost:8000"]))


def test_every_call_has_a_limit_stop_ids_and_a_seed_of_its_own():
    sampling = with_limit(SamplingParams(seed=10), 5, (1, 2), 3)
    assert (sampling.max_new_tokens, sampling.stop_token_ids, sampling.seed) == (5, (1, 2), 13)
    own = with_limit(SamplingParams(stop_token_ids=(9,)), 5, (1, 2), 3)
    assert (own.stop_token_ids, own.seed) == ((9,), None)
