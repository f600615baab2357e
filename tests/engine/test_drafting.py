"""Drafting changes no token, whatever is drafted; what is sampled follows the model's distribution; the control."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from glm5.engine.config import EngineConfig
from glm5.engine.drafting import DraftControl
from glm5.engine.engine import Engine
from glm5.errors import ConfigError
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.records import Completion, SamplingParams

from .conftest import MakeEngine, make_model
from .test_engine import WAIT_S, cache_bytes, prompts, results


@torch.no_grad()
def chain_model(noise: float) -> GlmMoeDsaForCausalLM:
    """A model whose next token depends on the last one only, and whose MTP layer knows it up to ``noise``."""
    model = make_model(0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()  # nothing is added to the embedding
    width = model.config.hidden_size
    model.lm_head.weight.mul_(2)
    projection = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    model.model.layers[-1].eh_proj.weight.copy_(projection + noise * torch.randn(width, 2 * width, generator=generator))
    return model


@torch.no_grad()
def transition(model: GlmMoeDsaForCausalLM) -> torch.Tensor:
    """P[a, b]: probability of b after a in a ``chain_model``."""
    return model(torch.arange(model.config.vocab_size)[:, None]).logits[:, 0].double().softmax(-1)


def ask(engine: Engine, seeds: range = range(12)) -> list[Completion]:
    kinds = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 5, "min_p": 0.02},
        {"frequency_penalty": 1.0},
        {"stop_token_ids": (3, 7, 11)},
    ]
    requests = prompts(len(seeds), seed=11)
    handles = []
    for seed, prompt in zip(seeds, requests, strict=True):
        settings = {"stop_token_ids": (), "max_new_tokens": 8 + seed, "seed": seed, **kinds[seed % len(kinds)]}
        handles.append(engine.submit(prompt, SamplingParams(**settings)))
    return results(handles)


@pytest.mark.parametrize(("noise", "drafts"), [(0.02, 3), (0.1, 7), (0.3, 1)])
def test_drafting_changes_no_token_and_no_log_prob(make_engine: MakeEngine, noise: float, drafts: int) -> None:
    model = chain_model(noise)
    plain, drafting = make_engine(model), make_engine(model, speculative=drafts)
    for expected, found in zip(ask(plain), ask(drafting), strict=True):
        assert found.output_ids == expected.output_ids and found.finish_reason == expected.finish_reason
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    stats = drafting.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert 1 < stats.acceptance_length <= drafts + 1
    assert plain.stats().acceptance_length == plain.stats().drafted_tokens == 0


def test_a_right_mtp_layer_has_all_its_greedy_drafts_accepted(make_engine: MakeEngine) -> None:
    engine = make_engine(chain_model(0.0), speculative=4)
    params = SamplingParams(temperature=0, max_new_tokens=31, stop_token_ids=())
    assert len(engine.submit([5, 6], params).result(WAIT_S).output_ids) == 31
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens == 24 and stats.steps == 7  # the first token, then 5 a step


def test_a_real_model_with_caching_chunks_and_a_small_cache_keeps_its_tokens(
    model: GlmMoeDsaForCausalLM, make_engine: MakeEngine
) -> None:
    plain = make_engine(prefix_cache=False)
    room = cache_bytes(model, 100, with_mtp=True)
    small = make_engine(speculative=2, prefill_chunk=5, block_size=8, cache_bytes=room)
    expected = ask(plain)
    for _ in range(2):  # the second time from the prefix cache
        assert [item.output_ids for item in ask(small)] == [item.output_ids for item in expected]
    assert small.stats().cached_tokens > 0 and small.stats().preemptions > 0


def test_samples_follow_the_models_distribution(make_engine: MakeEngine) -> None:
    """Chi-squared test of the third token, a verified draft in most cases, against the exact distribution."""
    model, count = chain_model(0.05), 1500
    engine = make_engine(model, speculative=3, max_slots=64)
    params = [SamplingParams(max_new_tokens=4, stop_token_ids=(), seed=seed) for seed in range(count)]
    found = results([engine.submit([9], one) for one in params])
    assert engine.stats().accepted_tokens > count / 2
    step = transition(model)
    expected = (step[9] @ step @ step) * count
    observed = torch.bincount(torch.tensor([item.output_ids[2] for item in found]), minlength=len(expected)).double()
    often = expected >= 5
    cells = torch.stack([torch.cat([x[often], x[~often].sum()[None]]) for x in (observed, expected)])
    statistic = float(((cells[0] - cells[1]) ** 2 / cells[1]).sum())
    freedom = cells.shape[1] - 1
    # 99.9% quantile by Wilson and Hilferty's approximation.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert freedom >= 10 and statistic < limit


def test_new_weights_in_the_middle_of_drafting(make_engine: MakeEngine, checkpoints: tuple[Path, Path]) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=60, stop_token_ids=())
    engine = make_engine(speculative=3)
    handle = engine.submit([1, 2, 3], params)
    assert engine.update_weights(checkpoints[1], 1).success
    item = handle.result(WAIT_S)
    assert len(item.output_ids) == 60 and set(item.weight_versions) <= {0, 1}
    fresh, expected = engine.submit([1, 2, 3], params), make_engine(make_model(1)).submit([1, 2, 3], params)
    assert fresh.result(WAIT_S).output_ids == expected.result(WAIT_S).output_ids


def test_drafting_needs_an_mtp_layer_and_a_sensible_length(make_engine: MakeEngine) -> None:
    from dataclasses import replace

    from .conftest import tiny_config

    bare = GlmMoeDsaForCausalLM(replace(tiny_config(), num_nextn_predict_layers=0)).eval()
    with pytest.raises(ConfigError, match="no MTP layer"):
        make_engine(bare, speculative=2)
    with pytest.raises(ConfigError, match="expected 0 to 7"):
        EngineConfig(speculative=8)


def test_the_control_stays_with_the_faster_mode_and_tries_the_other_again() -> None:
    control = DraftControl()
    seconds = {True: 0.02, False: 0.01}
    modes: list[bool] = []
    for step in range(1000):
        if step == 500:
            seconds = {True: 0.01, False: 0.02}
        modes.append(control.is_drafting)
        control.observe(seconds[control.is_drafting], 1)
    assert modes[:16] == [True] * 16 and modes[16:32] == [False] * 16
    assert sum(modes[32:500]) <= 2 * control.SHORT
    assert sum(modes[800:]) >= 200 - 2 * control.SHORT
    assert control.speedup == pytest.approx(2.0)
