from __future__ import annotations

import pytest
import torch

from glm5.kernels import dispatch
from glm5.model.cache import KeyCache
from glm5.model.checkpoint import state_dict_published
from glm5.model.config import preset
from glm5.model.indexer import Indexer, KeyNorm
from glm5.model.layers import rotary_tables
from glm5.model.transformer import GlmMoeDsaForCausalLM
from model.tiny import random_ids, tiny_config, tiny_model


def random_indexer(**changes) -> Indexer:
    indexer = Indexer(tiny_config(**changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return indexer


@pytest.mark.parametrize("interleaved", [True, False])
@torch.no_grad()
def test_rope_turns_neighbours_or_halves_of_the_first_dims_of_an_index_head(interleaved: bool) -> None:
    """By hand: 8 rotary dims of 16, at position 3; the other 8 are not turned."""
    indexer = random_indexer(indexer_rope_interleave=interleaved)
    x_BTD = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1))
    cos, sin = rotary_tables(torch.arange(4)[None], 8, 10_000.0, torch.float32)
    keys_BTX = indexer.keys(x_BTD, cos, sin)
    plain = indexer.k_norm(indexer.wk(x_BTD))[0, 3]
    for pair in range(4):
        angle = torch.tensor(3.0 * 10_000 ** (-2 * pair / 8))
        first, second = (plain[2 * pair], plain[2 * pair + 1]) if interleaved else (plain[pair], plain[pair + 4])
        torch.testing.assert_close(keys_BTX[0, 3, pair], first * angle.cos() - second * angle.sin())
        torch.testing.assert_close(keys_BTX[0, 3, pair + 4], second * angle.cos() + first * angle.sin())
    assert torch.equal(keys_BTX[0, 3, 8:], plain[8:])


@torch.no_grad()
def test_half_split_index_rope_runs_packed_and_cached_alike_and_differs_from_interleaved() -> None:
    model = tiny_model(indexer_rope_interleave=False)
    ids = random_ids(1, 64)
    logits = model(ids).logits[0]
    cached = model.ragged(ids[0], torch.arange(64), torch.zeros(64, dtype=torch.long), KeyCache(model.config, 1, 64))
    torch.testing.assert_close(cached, logits, rtol=0, atol=1e-4)
    assert (tiny_model()(ids).logits[0] - logits).abs().max() > 0.1


@torch.no_grad()
def test_index_keys_pass_a_layer_norm_with_bias_not_a_root_mean_square_norm() -> None:
    norm = KeyNorm(4)
    norm.bias.copy_(torch.tensor([0.5, 0.0, 0.0, -1.0]))
    norm.weight.copy_(torch.tensor([1.0, 2.0, 1.0, 1.0]))
    found = norm(torch.tensor([101.0, 103.0, 99.0, 101.0]))  # the mean is removed: deviations 0 2 -2 0, variance 2
    root = 2**0.5
    torch.testing.assert_close(found, torch.tensor([0.5, 2 * root, -root, -1.0]))
    prefix = "model.layers.0.self_attn.indexer.k_norm"
    assert {f"{prefix}.bias", f"{prefix}.weight"} <= set(state_dict_published(tiny_model()))


@torch.no_grad()
def test_keys_of_small_variance_show_that_the_norm_has_epsilon_1e_6() -> None:
    """Logit tests do not notice another epsilon, because ordinary keys vary much more than it."""
    x = torch.tensor([1e-3, -1e-3])  # variance 1e-6
    torch.testing.assert_close(KeyNorm(2)(x), x / (2e-6) ** 0.5)


@torch.no_grad()
def test_head_weights_are_fp32_before_they_are_scaled() -> None:
    """In bf16, scaling first would round two near scores to one and let their order flip."""
    indexer = random_indexer(index_n_heads=24).to(torch.bfloat16)
    x_BTD = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    cos, sin = rotary_tables(torch.arange(5)[None], 8, 10_000.0, torch.bfloat16)
    _, w_BTJ = indexer.queries(x_BTD, torch.zeros(1, 5, 24, dtype=torch.bfloat16), cos, sin)
    projected = indexer.weights_proj(x_BTD)
    assert w_BTJ.dtype == torch.float32 and torch.equal(w_BTJ, projected.float() * 24**-0.5)
    rounded = (projected * 24**-0.5).float()
    assert (rounded != w_BTJ).float().mean() > 0.5


@pytest.mark.parametrize("length", [15, 16, 17, 32])
@torch.no_grad()
def test_a_key_like_the_query_is_found_at_any_depth_around_index_topk(length: int) -> None:
    """The needle has the largest score; it must be selected whatever the context length, packed and cached."""
    generator = torch.Generator().manual_seed(length)
    q_BTJX = torch.randn(1, 1, 16, 16, generator=generator)
    w_BTJ = torch.rand(1, 1, 16, generator=generator)
    for needle in {0, 1, length // 2, length - 1}:
        keys_BSX = 0.1 * torch.randn(1, length, 16, generator=generator)
        keys_BSX[0, needle] = q_BTJX[0, 0].mean(0) * 50
        valid_BTS = torch.ones(1, 1, length, dtype=torch.bool)
        scores_BTS = dispatch.index_scores(q_BTJX, keys_BSX, w_BTJ, 0.25, valid_BTS)
        assert dispatch.select_topk(scores_BTS, valid_BTS, 16)[0, 0, needle]
        slots, lengths = torch.zeros(1, dtype=torch.long), torch.tensor([length])
        positions_MK = dispatch.ragged_select(q_BTJX[0], w_BTJ[0] * 0.25, keys_BSX, slots, lengths, 16)
        assert positions_MK is None if length <= 16 else needle in positions_MK[0].tolist()


@pytest.mark.parametrize("boundary", [15, 16, 17, 32])
@torch.no_grad()
def test_a_sequence_that_crosses_index_topk_between_two_steps_keeps_its_logits(boundary: int) -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=("full", "shared", "full", "shared"))
    ids = random_ids(1, boundary + 8)
    cache = KeyCache(model.config, 2, 64)
    steps = [(0, boundary - 1), (boundary - 1, boundary), (boundary, boundary + 1), (boundary + 1, boundary + 8)]
    logits = [model.ragged(ids[0, start:stop], torch.arange(start, stop), torch.ones(stop - start, dtype=torch.long),
                           cache) for start, stop in steps]
    torch.testing.assert_close(torch.cat(logits), model(ids).logits[0], rtol=0, atol=1e-4)


def test_published_layers_with_an_indexer_and_no_others_have_its_tensors() -> None:
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(preset("glm-5.2").replace(n_routed_experts=8))
    layers = {int(name.split(".")[2]) for name in state_dict_published(model) if ".indexer." in name}
    assert sorted(layers) == [0, 1, *range(2, 78, 4), 78]
    assert len(model.model.layers) == 79 and model.config.num_hidden_layers == 78


def test_dims_without_a_native_tile_give_the_logits_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd and prime sizes everywhere: no kernel may assume 576, 128 or a multiple of anything."""
    model = tiny_model(hidden_size=27, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=11, kv_lora_rank=13,
                       qk_nope_head_dim=5, qk_rope_head_dim=2, v_head_dim=7, index_head_dim=3, index_n_heads=17,
                       moe_intermediate_size=9, intermediate_size=19, vocab_size=64, index_topk=7)
    ids = random_ids(2, 30)
    native = model(ids, indexer_loss=True)
    with torch.no_grad():
        cached = model.ragged(ids[0], torch.arange(30), torch.zeros(30, dtype=torch.long),
                              KeyCache(model.config, 1, 30))
    monkeypatch.setattr(dispatch, "_native", lambda _tensor: False)
    plain = model(ids, indexer_loss=True)
    torch.testing.assert_close(native.logits, plain.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(native.indexer_kl, plain.indexer_kl, rtol=1e-4, atol=0)
    torch.testing.assert_close(cached, plain.logits[0].detach(), rtol=0, atol=1e-4)
