"""The engine against the model it runs: results, log-probs, reuse, weight swaps, aborts, failures."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from glm5.engine.config import EngineConfig
from glm5.engine.engine import Engine
from glm5.engine.generation import Generation
from glm5.engine.replacement import load_weights
from glm5.engine.requests import ContextLengthError, EngineClosedError, InvalidRequestError, QueueFullError
from glm5.errors import ConfigError, EngineError
from glm5.model.cache import bytes_per_token
from glm5.model.checkpoint import save_model
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.records import Completion, SamplingParams
from glm5.train.losses import token_logprobs

from .conftest import STOP, VOCABULARY, MakeEngine, make_model

WAIT_S = 60


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(STOP) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def greedy(new: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=new, stop_token_ids=())


def sampled(new: int = 12, seed: int | None = None) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, stop_token_ids=(), seed=seed)


def results(handles: list[Generation]) -> list[Completion]:
    return [handle.result(WAIT_S) for handle in handles]


def cache_bytes(model: GlmMoeDsaForCausalLM, tokens: int, with_mtp: bool = False) -> int:
    return tokens * bytes_per_token(model.config, torch.float32, 128, with_mtp)


def by_full_forward(model: GlmMoeDsaForCausalLM, prompt: list[int], new: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def log_softmax_of(model: GlmMoeDsaForCausalLM, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = model(torch.tensor([ids])).logits[0].float() / temperature
    return torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_batched_greedy_equals_the_full_forward_one_at_a_time(
    model: GlmMoeDsaForCausalLM, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    asked = prompts(20)
    found = results([engine.submit(prompt, greedy()) for prompt in asked])
    with torch.no_grad():
        assert [item.output_ids for item in found] == [by_full_forward(model, prompt, 12) for prompt in asked]
    assert all(
        item.finish_reason == "length" and item.prompt_tokens == len(prompt)
        for item, prompt in zip(found, asked, strict=True)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_log_probs_equal_the_forward_pass(
    model: GlmMoeDsaForCausalLM, make_engine: MakeEngine, temperature: float
) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=temperature, max_new_tokens=30, stop_token_ids=())
    asked = prompts(10, seed=1)
    for prompt, item in zip(asked, results([engine.submit(prompt, params) for prompt in asked]), strict=True):
        expected = log_softmax_of(model, prompt + item.output_ids, temperature or 1.0)[len(prompt) - 1 :]
        assert (torch.tensor(item.logprobs) - expected).abs().max() < 1e-4


def test_prompt_log_probs_equal_the_forward_pass_across_chunks(
    model: GlmMoeDsaForCausalLM, make_engine: MakeEngine
) -> None:
    engine = make_engine(prefill_chunk=7)
    asked = prompts(5, seed=2, low=20, high=60)
    params = SamplingParams(max_new_tokens=0)
    for prompt, item in zip(
        asked, results([engine.submit(prompt, params, prompt_logprobs=True) for prompt in asked]), strict=True
    ):
        assert item.output_ids == [] and item.finish_reason == "length"
        assert item.prompt_logprobs[0] is None and len(item.prompt_logprobs) == len(prompt)
        assert (torch.tensor(item.prompt_logprobs[1:]) - log_softmax_of(model, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_the_trainers(model: GlmMoeDsaForCausalLM, make_engine: MakeEngine, temperature: float) -> None:
    """Chosen, most likely and prompt tokens, in batches and chunks, against what the loss of the trainer sees."""
    engine = make_engine(prefill_chunk=9)
    params = SamplingParams(temperature=temperature, max_new_tokens=20, stop_token_ids=(), top_logprobs=3)
    for prompt, handle in [(prompt, engine.submit(prompt, params, prompt_logprobs=True)) for prompt in prompts(8, 15)]:
        item = handle.result(WAIT_S)
        ids = torch.tensor(prompt + item.output_ids)
        with torch.no_grad():
            hidden_MD = model.hidden(ids[None]).hidden_BTD[0]
            expected = token_logprobs(hidden_MD[:-1], model.lm_head.weight, ids[1:], temperature)
            everything = (model.lm_head(hidden_MD[len(prompt) - 1 : -1]) / temperature).log_softmax(-1)
        found = torch.tensor(item.prompt_logprobs[1:] + item.logprobs)
        assert (found - expected).abs().max() < 1e-5
        best = everything.topk(3, dim=-1)
        tops = handle.sequence.top_logprobs
        assert [[token for token, _ in top] for top in tops] == best.indices.tolist()
        assert (torch.tensor([[value for _, value in top] for top in tops]) - best.values).abs().max() < 1e-5


def test_a_seeded_request_gives_the_same_tokens_in_any_company(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=16)
    prompt = prompts(1, seed=3)[0]
    alone = engine.submit(prompt, sampled(30, seed=7)).result(WAIT_S)
    others = [engine.submit(other, sampled(25)) for other in prompts(9, seed=4)]
    crowded = engine.submit(prompt, sampled(30, seed=7)).result(WAIT_S)
    results(others)
    assert crowded.output_ids == alone.output_ids
    assert engine.submit(prompt, sampled(30, seed=8)).result(WAIT_S).output_ids != alone.output_ids


def test_unseeded_requests_differ(make_engine: MakeEngine) -> None:
    engine = make_engine()
    found = results([engine.submit([1, 2, 3], sampled(20)) for _ in range(8)])
    assert len({tuple(item.output_ids) for item in found}) == 8


def test_a_stop_id_ends_the_answer_and_is_its_last_id(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = engine.submit([5, 6, 7], greedy(20)).result(WAIT_S)
    stop = free.output_ids[4]
    first = free.output_ids.index(stop)
    params = SamplingParams(temperature=0, max_new_tokens=20, stop_token_ids=(stop,))
    item = engine.submit([5, 6, 7], params).result(WAIT_S)
    assert item.output_ids == free.output_ids[: first + 1] and item.finish_reason == "stop"
    assert len(item.logprobs) == len(item.weight_versions) == first + 1


def test_many_more_requests_than_slots_all_finish(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=3)
    asked = prompts(40, seed=5)
    found = results([engine.submit(prompt, greedy(6)) for prompt in asked])
    roomy = make_engine(max_slots=40)
    expected = results([roomy.submit(prompt, greedy(6)) for prompt in asked])
    assert [item.output_ids for item in found] == [item.output_ids for item in expected]
    assert engine.stats().running == engine.stats().queued == 0


def test_preemption_loses_nothing(model: GlmMoeDsaForCausalLM, make_engine: MakeEngine) -> None:
    asked = prompts(24, seed=12, low=5, high=40)
    params = [sampled(20, seed=seed) if seed % 2 else greedy(20) for seed in range(24)]
    small = make_engine(block_size=8, cache_bytes=cache_bytes(model, 160))
    expected = make_engine(max_slots=24, prefix_cache=False)
    pairs = zip(asked, params, strict=True)
    handles = [small.submit(prompt, one, priority=n % 3) for n, (prompt, one) in enumerate(pairs)]
    for handle, prompt, one in zip(handles, asked, params, strict=True):
        found, wanted = handle.result(WAIT_S), expected.submit(prompt, one).result(WAIT_S)
        assert found.output_ids == wanted.output_ids and len(found.weight_versions) == 20
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    stats = small.stats()
    assert stats.preemptions > 0 and stats.cache_bytes <= cache_bytes(model, 160)
    assert stats.cache_blocks_used <= stats.cache_blocks == 20


def test_a_preempted_request_keeps_its_penalties_prompt_scores_and_versions(
    model: GlmMoeDsaForCausalLM, make_engine: MakeEngine, checkpoints: tuple[Path, Path]
) -> None:
    engine = make_engine(max_slots=1, prefill_chunk=8)
    prompt = prompts(1, seed=13, low=30, high=31)[0]
    params = SamplingParams(
        temperature=0, max_new_tokens=30, stop_token_ids=(), frequency_penalty=1.5, repetition_penalty=1.3
    )
    alone = engine.submit(prompt, params, prompt_logprobs=True).result(WAIT_S)
    low = engine.submit(prompt, params, prompt_logprobs=True)
    for known in (1, 10, 20):
        while len(low.sequence.versions) < known:
            time.sleep(0.0005)
        engine.submit([7, 8], greedy(2), priority=1).result(WAIT_S)
    found = low.result(WAIT_S)
    assert engine.stats().preemptions >= 1
    assert found.output_ids == alone.output_ids and found.prompt_logprobs[0] is None
    assert found.prompt_logprobs[1:] == pytest.approx(alone.prompt_logprobs[1:], abs=1e-5)


def test_a_prompt_that_no_cache_can_hold_is_refused(model: GlmMoeDsaForCausalLM, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_bytes=cache_bytes(model, 64))
    assert engine.max_context == 64
    with pytest.raises(ContextLengthError, match="64 tokens and the prompt has 64"):
        engine.submit([1] * 64)
    assert len(engine.submit([1] * 60, greedy(50)).result(WAIT_S).output_ids) == 4
    with pytest.raises(ConfigError, match="cache_bytes=100: holds 0 blocks"):
        make_engine(cache_bytes=100)


def test_the_prefix_cache_changes_no_token(make_engine: MakeEngine) -> None:
    cached, plain = make_engine(), make_engine(prefix_cache=False)
    chat = prompts(1, seed=6, low=30, high=31)[0]
    for turn in range(4):
        with_cache = cached.submit(chat, greedy(8), session_id="s").result(WAIT_S)
        without = plain.submit(chat, greedy(8)).result(WAIT_S)
        assert with_cache.output_ids == without.output_ids and without.cached_tokens == 0
        assert torch.tensor(with_cache.logprobs).sub(torch.tensor(without.logprobs)).abs().max() < 1e-4
        if turn:
            assert with_cache.cached_tokens == len(chat) - 4  # all but the last sampled id and the three new ones
        chat = chat + with_cache.output_ids + [turn, turn + 1, turn + 2]
    assert cached.stats().cached_tokens > 0 and plain.stats().cached_tokens == 0


def test_a_group_shares_its_prompt_and_gets_the_same_greedy_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_chunk=64)
    prompt = prompts(1, seed=7, low=40, high=41)[0]
    expected = make_engine(prefix_cache=False).submit(prompt, greedy()).result(WAIT_S).output_ids
    found = results([engine.submit(prompt, greedy()) for _ in range(8)])
    assert [item.output_ids for item in found] == [expected] * 8
    assert engine.stats().prefilled_tokens == len(prompt) + 7


def test_a_swap_in_the_middle_marks_versions_and_uses_the_new_weights(
    model: GlmMoeDsaForCausalLM, make_engine: MakeEngine, checkpoints: tuple[Path, Path]
) -> None:
    engine = make_engine()
    handle = engine.submit([1, 2, 3], greedy(100))
    while len(handle.sequence.versions) < 5:
        time.sleep(0.001)
    engine.pause()  # on a busy machine the request could be over before the weights are read
    outcome = engine.update_weights(checkpoints[1], 4)
    engine.resume()
    assert outcome.success and outcome.weight_version == 4 and engine.weight_version == 4
    item = handle.result(WAIT_S)
    switch = item.weight_versions.index(4)
    assert item.weight_versions == [0] * switch + [4] * (100 - switch) and switch >= 5
    fresh = engine.submit([1, 2, 3], greedy()).result(WAIT_S)
    with torch.no_grad():
        assert item.output_ids[:switch] == by_full_forward(model, [1, 2, 3], switch)
        assert fresh.output_ids == by_full_forward(make_model(1), [1, 2, 3], 12)
    assert fresh.weight_versions == [4] * 12 and fresh.cached_tokens == 0


def test_keys_of_old_weights_are_not_reused(make_engine: MakeEngine, checkpoints: tuple[Path, Path]) -> None:
    engine = make_engine()
    prompt = prompts(1, seed=8, low=30, high=31)[0]
    engine.submit(prompt, greedy()).result(WAIT_S)
    assert engine.update_weights(checkpoints[1], 1).success
    item = engine.submit(prompt, greedy()).result(WAIT_S)
    assert item.cached_tokens == 0
    with torch.no_grad():
        assert item.output_ids == by_full_forward(make_model(1), prompt, 12)


def test_half_precision_weights_run_in_fp32_on_a_cpu_unless_told_otherwise(tmp_path: Path) -> None:
    save_model(make_model(0).bfloat16(), tmp_path / "half")
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        config = EngineConfig(dtype=dtype, device="cpu")
        assert load_weights(tmp_path / "half", config).lm_head.weight.dtype == expected


def break_file(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def break_name(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def remove_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [break_file, break_name, remove_weights, shutil.rmtree])
def test_a_bad_checkpoint_keeps_the_old_weights(
    make_engine: MakeEngine, checkpoints: tuple[Path, Path], tmp_path: Path, damage
) -> None:
    engine = make_engine()
    before = engine.submit([4, 5, 6], greedy()).result(WAIT_S).output_ids
    bad = tmp_path / "bad"
    shutil.copytree(checkpoints[1], bad)
    damage(bad)
    outcome = engine.update_weights(bad, 9)
    assert not outcome.success and "bad" in outcome.message and outcome.weight_version == 0
    after = engine.submit([4, 5, 6], greedy()).result(WAIT_S)
    assert after.output_ids == before and set(after.weight_versions) == {0}


def test_weights_that_are_not_finite_or_older_are_refused(
    make_engine: MakeEngine, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = make_model(2)
    with torch.no_grad():
        broken.lm_head.weight[3, 3] = torch.nan
    save_model(broken, tmp_path / "nan")
    engine = make_engine()
    assert "not finite" in engine.update_weights(tmp_path / "nan", 1).message
    assert engine.update_weights(checkpoints[1], 5).success
    assert "versions only grow" in engine.update_weights(checkpoints[0], 4).message
    assert "expected 0 to 2147483647" in engine.update_weights(checkpoints[0], 2**70).message
    assert engine.weight_version == 5


def test_files_that_do_not_match_their_manifest_are_refused(
    make_engine: MakeEngine, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    target = tmp_path / "published"
    shutil.copytree(checkpoints[1], target)
    checksum = hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    manifest = target / "manifest.json"
    engine = make_engine()
    for sums, complaint in (
        ({"model.safetensors": "0" * 64}, "SHA-256"),
        ({"gone.safetensors": checksum}, "gone"),
        (3, "unreadable"),
    ):
        manifest.write_text(json.dumps({"sha256": sums}))
        assert complaint in engine.update_weights(target, 1).message
    manifest.write_text(json.dumps({"sha256": {"model.safetensors": checksum}}))
    assert engine.weight_version == 0 and engine.update_weights(target, 1).success


def test_abort_keeps_what_was_sampled_and_frees_the_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=1)
    long = engine.submit([1], greedy(120))
    waiting = engine.submit([2], greedy(3))
    never = engine.submit([3], greedy(3))
    never.abort()
    while len(long.sequence.versions) < 3:
        time.sleep(0.001)
    long.abort()
    item = long.result(WAIT_S)
    assert item.finish_reason == "abort" and 3 <= len(item.output_ids) < 120
    assert never.result(WAIT_S).finish_reason == "abort" and never.sequence.output_ids == []
    assert waiting.result(WAIT_S).finish_reason == "length"


def test_a_defect_outside_of_a_step_fails_every_request_and_is_kept(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    handle = engine.submit([1, 2, 3], greedy(200))

    def plan() -> None:
        raise OverflowError("a defect")

    monkeypatch.setattr(engine._scheduler, "plan", plan)
    with pytest.raises(EngineError, match=r"its thread ended \(OverflowError: a defect\); start it again"):
        handle.result(WAIT_S)
    assert "OverflowError" in str(engine.failure)
    with pytest.raises(EngineClosedError):
        engine.submit([1, 2, 3], greedy())


def test_a_request_with_broken_logits_fails_and_the_others_go_on(make_engine: MakeEngine) -> None:
    poisoned = make_model(0)
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[50] = torch.nan
    engine = make_engine(poisoned, max_slots=4)
    good = [token for token in range(20) if token != 50]
    params = SamplingParams(temperature=0, max_new_tokens=10, stop_token_ids=(50,))
    expected = results([engine.submit(good[n:], params) for n in range(2)])
    handles = [
        engine.submit(good, params),
        engine.submit([1, 50, 2], params),
        engine.submit(good[1:], params),
        engine.submit([50, 50] * 10, SamplingParams(max_new_tokens=0), prompt_logprobs=True),
    ]
    for bad in (handles[1], handles[3]):
        with pytest.raises(EngineError, match="not finite"):
            bad.result(WAIT_S)
    assert [handles[0].result(WAIT_S).output_ids, handles[2].result(WAIT_S).output_ids] == [
        item.output_ids for item in expected
    ]
    again = results([engine.submit(good[n:], params) for n in range(2) for _ in range(3)])
    assert [item.output_ids for item in again] == [expected[0].output_ids] * 3 + [expected[1].output_ids] * 3


def test_wrong_requests_are_refused_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ContextLengthError, match="maximum context length is 128 tokens and the prompt has 128"):
        engine.submit([1] * 128)
    for wrong in ([], [VOCABULARY], [-1], [1.5], [[1]], ["a"], [2**70]):
        with pytest.raises(InvalidRequestError, match="input_ids"):
            engine.submit(wrong)
    for name, value in {
        "temperature": 1e-30,
        "top_p": 0.0,
        "top_k": 0,
        "max_new_tokens": -1,
        "stop_token_ids": (VOCABULARY,),
    }.items():
        with pytest.raises(InvalidRequestError, match=name):
            engine.submit([1], SamplingParams(**{name: value}))
    with pytest.raises(ConfigError, match="max_slots"):
        EngineConfig(max_slots=0)


def test_an_answer_ends_where_the_context_ends(make_engine: MakeEngine) -> None:
    item = make_engine(max_context=32).submit([1] * 20, greedy(500)).result(WAIT_S)
    assert len(item.output_ids) == 12 and item.finish_reason == "length"


def test_a_full_queue_fails_the_handle(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=1, max_waiting=2)
    engine.pause()
    handles = [engine.submit([1], greedy(2)) for _ in range(5)]
    engine.resume()
    failed = 0
    for handle in handles:
        try:
            handle.result(WAIT_S)
        except QueueFullError:
            failed += 1
    assert failed in (2, 3)


def test_pausing_stops_all_tokens_until_resumed(make_engine: MakeEngine, checkpoints: tuple[Path, Path]) -> None:
    engine = make_engine()
    handle = engine.submit([1, 2], greedy(100))
    while len(handle.sequence.versions) < 3:
        time.sleep(0.001)
    engine.pause()
    engine.ping(WAIT_S)
    known = len(handle.sequence.versions)
    assert known < 100 and engine.stats().is_paused
    assert engine.update_weights(checkpoints[1], 1).success
    time.sleep(0.05)
    assert len(handle.sequence.versions) == known
    engine.resume()
    assert handle.result(WAIT_S).weight_versions == [0] * known + [1] * (100 - known)


def test_streams_and_waits_see_every_token_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked = prompts(12, seed=9)

    async def read(prompt: list[int]) -> tuple[list[int], list[float], list[str | None]]:
        ids: list[int] = []
        logprobs: list[float] = []
        reasons: list[str | None] = []
        async for chunk in engine.submit(prompt, greedy()).stream():
            ids += chunk.output_ids
            logprobs += chunk.logprobs
            reasons.append(chunk.finish_reason)
        return ids, logprobs, reasons

    async def both() -> tuple[list, list[Completion]]:
        streams = asyncio.gather(*(read(prompt) for prompt in asked))
        waits = asyncio.gather(*(engine.submit(prompt, greedy()).wait() for prompt in asked))
        return await streams, await waits

    streamed, waited = asyncio.run(both())
    assert [item[0] for item in streamed] == [item.output_ids for item in waited]
    assert all(reasons[-1] == "length" and set(reasons[:-1]) <= {None} for _, _, reasons in streamed)
    assert any(len(reasons) > 3 for _, _, reasons in streamed)


def test_leaving_a_stream_and_passing_a_deadline_abort(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def leave() -> Generation:
        generation = engine.submit([1], greedy(120))
        stream = generation.stream()
        await anext(stream)
        await stream.aclose()
        return generation

    left = asyncio.run(leave())
    assert left.result(WAIT_S).finish_reason == "abort"
    engine.pause()
    late = engine.submit([1], greedy(5))
    with pytest.raises(EngineError, match="not finished after"):
        asyncio.run(late.wait(timeout_s=0.05))
    with pytest.raises(EngineError, match="not finished after"):
        engine.submit([1], greedy(5)).result(timeout_s=0.05)
    assert late.result(WAIT_S).finish_reason == "abort"


def test_closing_ends_every_request_and_refuses_new_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=2)
    handles = [engine.submit([1], greedy(120)) for _ in range(6)]
    engine.close()
    assert {handle.result(WAIT_S).finish_reason for handle in handles} <= {"abort", "length"}
    with pytest.raises(EngineClosedError):
        engine.submit([1])
    with pytest.raises(EngineClosedError):
        engine.ping(1)


def test_many_threads_may_submit_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = engine.submit([number, 2, 3], greedy()).result(WAIT_S).output_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == {number: engine.submit([number, 2, 3], greedy()).result(WAIT_S).output_ids for number in range(16)}


def test_stats_count_tokens_and_busy_time(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    results([engine.submit([1, 2, 3, 4], greedy(10)) for _ in range(3)])
    stats = engine.stats()
    assert (stats.generated_tokens, stats.prefilled_tokens, stats.cached_tokens) == (30, 12, 0)
    assert 0 < stats.busy_s <= stats.uptime_s and stats.cache_bytes > 0


def test_a_failing_step_fails_its_requests_only(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    fragile = make_model(0)
    engine: Engine = make_engine(fragile)
    weight = fragile.lm_head.weight
    fragile.lm_head.weight = torch.nn.Parameter(weight[:, :8])
    with pytest.raises(EngineError, match="a step failed"):
        engine.submit([1], greedy(3)).result(WAIT_S)
    fragile.lm_head.weight = weight
    assert len(engine.submit([1], greedy(3)).result(WAIT_S).output_ids) == 3
    assert "a step failed" in caplog.text
