from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from glm5.kernels import dispatch
from glm5.model import layers
from glm5.model.cache import KeyCache
from glm5.model.mla import AttentionMode, RaggedStep
from glm5.model.transformer import GlmMoeDsaForCausalLM
from model.tiny import random_ids, tiny_model


def gradients(model: GlmMoeDsaForCausalLM, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def lm_loss(model: GlmMoeDsaForCausalLM, ids: torch.Tensor, **options) -> torch.Tensor:
    return F.cross_entropy(model(ids, **options).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def test_sparse_equals_dense_while_the_context_fits_in_index_topk() -> None:
    model = tiny_model()
    ids = random_ids(2, 40)
    sparse, dense = model(ids).logits, model(ids, attention="dense").logits
    # The absorbed form multiplies in another order than the expanded one; in double precision they are equal.
    assert (sparse - dense)[:, :16].abs().max() <= 5e-6 * dense.abs().max()
    exact = tiny_model().double()
    with dispatch.prefer("reference"):
        assert (exact(ids).logits - exact(ids, attention="dense").logits)[:, :16].abs().max() <= 1e-12
    assert (sparse - dense)[:, 20:].abs().max() > 0.1
    assert torch.equal(model(ids[:, :16]).logits, model(ids[:, :16], attention="dense").logits)


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_lm_loss_and_indexer_loss_reach_disjoint_parameters(attention: str) -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=("full", "shared", "full", "full"))
    ids = random_ids(2, 40)
    alone = gradients(model, lm_loss(model, ids, attention=attention))
    kl_only = gradients(model, model(ids, attention=attention, indexer_loss=True).indexer_kl)
    output = model(ids, attention=attention, indexer_loss=True)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    together = gradients(model, loss + output.indexer_kl)
    assert not set(alone) & set(kl_only)
    indexers = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert set(kl_only) == {name for name in indexers if "layers.4" not in name}
    assert all(grad.abs().sum() > 0 for grad in kl_only.values())
    for name, grad in {**alone, **kl_only}.items():
        torch.testing.assert_close(together[name], grad, rtol=1e-4, atol=1e-6)


def plain_attention_and_scores(model: GlmMoeDsaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention logits [B, H, T, S] and index scores [B, T, S] of layer 0, written out from the formulas."""
    config, layer = model.config, model.model.layers[0]
    attention, indexer = layer.self_attn, layer.self_attn.indexer
    half = config.qk_rope_head_dim // 2

    def norm(x, weight, eps):
        return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

    def rotate(x):  # [B, T, heads, R], pairs (2j, 2j + 1) turned by position * theta ** (-j / half)
        angle = torch.arange(x.shape[1])[:, None] * config.rope_theta ** (-torch.arange(half) / half)
        pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones(()), angle)[:, None]).flatten(-2)

    x = norm(model.model.embed_tokens.weight[ids], layer.input_layernorm.weight, 1e-5)
    latent = norm(x @ attention.q_a_proj.weight.T, attention.q_a_layernorm.weight, 1e-6)
    q = (latent @ attention.q_b_proj.weight.T).unflatten(-1, (config.num_attention_heads, -1))
    kv, k_rope = (x @ attention.kv_a_proj_with_mqa.weight.T).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
    expanded = norm(kv, attention.kv_a_layernorm.weight, 1e-6) @ attention.kv_b_proj.weight.T
    k_nope = expanded.unflatten(-1, (config.num_attention_heads, -1))[..., : config.qk_nope_head_dim]
    n = config.qk_nope_head_dim
    logits = torch.einsum("bthn,bshn->bhts", q[..., :n], k_nope)
    logits = logits + torch.einsum("bthr,bsxr->bhts", rotate(q[..., n:]), rotate(k_rope.unsqueeze(2)))
    iq = (latent @ indexer.wq_b.weight.T).unflatten(-1, (config.index_n_heads, -1))
    k_norm = indexer.k_norm
    ik = F.layer_norm(x @ indexer.wk.weight.T, (config.index_head_dim,), k_norm.weight, k_norm.bias, 1e-6)
    r = config.qk_rope_head_dim
    dots = torch.einsum("btjx,bsyx->btjs", rotate(iq[..., :r]), rotate(ik[..., :r].unsqueeze(2)))
    dots = dots + torch.einsum("btjx,bsx->btjs", iq[..., r:], ik[..., r:])
    weights = x @ indexer.weights_proj.weight.T * config.index_n_heads**-0.5
    scores = torch.einsum("btj,btjs->bts", weights, (dots * config.index_head_dim**-0.5).relu())
    return logits * config.qk_head_dim**-0.5, scores


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_indexer_loss_and_its_gradient_equal_the_formula(attention: str) -> None:
    model = tiny_model(num_hidden_layers=1, first_k_dense_replace=1)
    ids = random_ids(2, 40)
    logits, scores = plain_attention_and_scores(model, ids)
    causal = torch.ones(40, 40, dtype=torch.bool).tril().expand(2, -1, -1)
    kept = causal
    if attention == "sparse":
        chosen = scores.masked_fill(~causal, -torch.inf).topk(16, dim=-1).indices
        kept = torch.zeros_like(causal).scatter(-1, chosen, True) & causal
    target = logits.masked_fill(~kept[:, None], -torch.inf).softmax(-1).mean(1).detach()
    log_p = scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
    expected = torch.where(kept & (target > 0), target * (target.clamp_min(1e-30).log() - log_p), 0.0).sum() / (2 * 40)
    found = model(ids, attention=attention, indexer_loss=True).indexer_kl
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    indexer = model.model.layers[0].self_attn.indexer
    want = torch.autograd.grad(expected, [indexer.wk.weight, indexer.weights_proj.weight, indexer.wq_b.weight])
    have = torch.autograd.grad(found, [indexer.wk.weight, indexer.weights_proj.weight, indexer.wq_b.weight])
    for left, right in zip(have, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("row", [50, 49])  # in short rows spans are kept, in long ones recomputed
@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_spans_change_neither_outputs_nor_gradients(monkeypatch: pytest.MonkeyPatch, attention: str, row: int) -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=("full", "shared", "full", "full"))
    ids = random_ids(2, 50)
    documents = torch.tensor([[0] * 30 + [1] * 20, [-1] * 5 + [0] * 45])

    def run() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        output = model(ids, None, documents, attention=attention, indexer_loss=True)
        loss = output.logits.square().mean() + output.indexer_kl
        return output.logits.detach(), output.indexer_kl.detach(), gradients(model, loss)

    logits, kl, grads = run()
    monkeypatch.setattr(layers, "SHORT_ROW", row)
    monkeypatch.setattr(layers, "QUERY_SPAN", 7)
    split_logits, split_kl, split_grads = run()
    torch.testing.assert_close(split_logits, logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(split_kl, kl)
    assert split_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(split_grads[name], grad, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_shared_layers_attend_to_the_selection_of_the_last_full_layer() -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=("full", "shared", "shared", "full"))
    names = {name.split(".")[2] for name, _ in model.named_parameters() if ".indexer." in name}
    assert names == {"0", "3", "4"}
    ids = random_ids(1, 60)
    logits = model(ids).logits
    model.model.layers[0].self_attn.indexer.weights_proj.weight.mul_(-1)
    assert (model(ids).logits - logits).abs().max() > 0.1


@torch.no_grad()
def test_padding_and_other_documents_do_not_change_a_document() -> None:
    model = tiny_model()
    ids = random_ids(1, 60)
    documents = torch.tensor([[3] * 25 + [7] * 30 + [-1] * 5])
    positions = torch.tensor([[*range(25), *range(30), *([0] * 5)]])
    output = model(ids, positions, documents)
    assert torch.isfinite(output.logits).all()
    torch.testing.assert_close(output.logits[:, 25:55], model(ids[:, 25:55]).logits, rtol=0, atol=1e-4)
    assert output.expert_load_LE.sum(1).tolist() == [55 * 2, 55 * 2]


@torch.no_grad()
def test_left_padding_changes_no_logit_of_the_text() -> None:
    """A batch of prompts that end together, as generation pads them: each row equals its prompt alone."""
    model = tiny_model()
    prompts = [random_ids(1, length, seed=length)[0] for length in (1, 17, 40)]  # below, at and above index_topk
    ids, positions = torch.zeros(2, 3, 40, dtype=torch.int64)
    documents = torch.full((3, 40), -1)
    for row, prompt in enumerate(prompts):
        ids[row, 40 - len(prompt):], documents[row, 40 - len(prompt):] = prompt, 0
        positions[row, 40 - len(prompt):] = torch.arange(len(prompt))
    output = model(ids, positions, documents)
    assert torch.isfinite(output.logits).all()
    for row, prompt in enumerate(prompts):
        alone = model(prompt[None]).logits[0]
        torch.testing.assert_close(output.logits[row, 40 - len(prompt):], alone, rtol=0, atol=1e-4)
    assert output.expert_load_LE.sum(1).tolist() == [58 * 2, 58 * 2]


def test_an_unknown_kind_of_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="attention='spars'"):
        tiny_model()(random_ids(1, 4), attention="spars")


@torch.no_grad()
def test_last_only_and_hidden_agree_with_forward() -> None:
    model = tiny_model()
    ids = random_ids(2, 20)
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, last_only=True).logits, logits[:, -1:])
    hidden = model.hidden(ids)
    assert hidden.logits is None and hidden.indexer_kl is None
    torch.testing.assert_close(model.lm_head(hidden.hidden_BTD), logits)


def test_mtp_trains_its_own_layer_the_embedding_and_the_trunk() -> None:
    model = tiny_model()
    ids = random_ids(2, 40)
    output = model.hidden(ids[:, :-2])
    step = model.mtp(output.hidden_BTD, ids[:, 1:-1], indexer_loss=True)
    loss = F.cross_entropy(model.lm_head(step.hidden_BTD).flatten(0, 1), ids[:, 2:].flatten())
    grads = gradients(model, loss)
    assert {"model.layers.3.eh_proj.weight", "model.embed_tokens.weight", "lm_head.weight",
            "model.layers.0.self_attn.o_proj.weight"} <= set(grads)
    kl = gradients(model, model.mtp(output.hidden_BTD.detach(), ids[:, 1:-1], indexer_loss=True).indexer_kl)
    assert {name.rsplit(".", 2)[0] for name in kl} <= {"model.layers.3.self_attn.indexer",
                                                      "model.layers.3.self_attn.indexer.k_norm"}
    assert step.expert_load_E.sum() == 2 * 38 * 2
    without = tiny_model(num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0"):
        without.mtp(output.hidden_BTD, ids[:, 1:-1])


@torch.no_grad()
def test_bf16_computes_close_to_fp32_and_keeps_the_router_bias() -> None:
    model = tiny_model(initializer_range=0.1)
    biases = [layer.mlp.gate.e_score_correction_bias.clone() for layer in model.model.layers[1:]]
    ids = random_ids(1, 16)
    reference = model(ids).logits
    model.to(torch.bfloat16)
    logits = model(ids).logits
    assert logits.dtype == torch.bfloat16
    assert F.cosine_similarity(logits.float().flatten(), reference.flatten(), dim=0) > 0.98
    assert model(random_ids(2, 40)).logits.isfinite().all()
    for layer, bias in zip(model.model.layers[1:], biases, strict=True):
        assert torch.equal(layer.mlp.gate.e_score_correction_bias, bias)


def test_equal_seeds_give_equal_models_and_norms_start_at_one() -> None:
    config = tiny_model().config
    first, second = (GlmMoeDsaForCausalLM(config, torch.Generator().manual_seed(3)) for _ in range(2))
    for (name, left), right in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
        if left.dim() == 1:
            assert torch.equal(left, torch.full_like(left, 0.0 if name.endswith("bias") else 1.0))


def test_recomputed_layers_get_the_selection_of_the_last_full_layer() -> None:
    """Activation checkpointing runs a layer again alone, so a selection kept as state would be gone or another's."""
    model = tiny_model(num_hidden_layers=4, indexer_types=("full", "shared", "shared", "full"))
    ids = random_ids(2, 40)
    expected = gradients(model, lm_loss(model, ids))
    for layer in model.model.layers:
        plain = layer.forward
        layer.forward = lambda *arguments, plain=plain: checkpoint(plain, *arguments, use_reentrant=False)
    found = gradients(model, lm_loss(model, ids))
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_layers_run_one_by_one_and_a_shared_layer_without_a_selection_is_refused() -> None:
    model = tiny_model(num_hidden_layers=3, indexer_types=("full", "shared", "full"))
    ids = random_ids(1, 40)
    packed, mode = model._packed(ids, None, None), AttentionMode(sparse=True, indexer_loss=False)
    first = model.model.layers[0](model.model.embed_tokens(ids), packed, mode)
    with pytest.raises(ValueError, match="no indexer and got no selection"):
        model.model.layers[1](first.hidden_BTD, packed, mode)
    second = model.model.layers[1](first.hidden_BTD, packed, mode, first.selection)
    third = model.model.layers[2](second.hidden_BTD, packed, mode)
    logits = model.lm_head(model.model.norm(third.hidden_BTD))
    assert torch.equal(logits, model(ids).logits)
    cache = KeyCache(model.config, 1, 40)
    places = torch.arange(40), torch.zeros(40, dtype=torch.long)
    step = RaggedStep(*model._rotary(places[0], torch.float32), places[1], places[0] + 1, places[0], cache.table_UZ,
                      None, True)
    with pytest.raises(ValueError, match="no indexer and got no selection"):
        model.model.layers[1].ragged(first.hidden_BTD[0], step, *cache.layer(1), ())


def test_backward_beyond_index_topk_gives_the_indexer_no_gradient_from_the_language_loss() -> None:
    model = tiny_model()
    grads = gradients(model, lm_loss(model, random_ids(1, 48)))
    assert not any(".indexer." in name for name in grads)
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert set(grads) == {name for name, _ in model.named_parameters()
                          if ".indexer." not in name and "layers.3" not in name}


def test_an_indexer_loss_of_weight_zero_leaves_zero_gradients_not_missing_ones() -> None:
    """Where gradients are exchanged between processes, a missing one would be waited for."""
    model = tiny_model()
    ids = random_ids(2, 40)
    output = model(ids, indexer_loss=True)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.0 * output.indexer_kl
    grads = gradients(model, loss)
    indexers = [name for name, _ in model.named_parameters() if ".indexer." in name and "layers.3" not in name]
    assert indexers and all(not grads[name].any() for name in indexers)
