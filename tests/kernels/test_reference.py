"""The plain PyTorch forms against the formulas written out in float64, and the selection and masking rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.kernels import fused, reference
from tests.kernels import naive

CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, -1, -1)


def test_rms_norm_normalises_in_fp32_and_casts_before_it_multiplies():
    x, weight = torch.randn(5, 24) * 30, torch.randn(24)
    expected = naive.rms_norm(x.double(), weight.double(), 1e-5).float()
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected)
    half, half_weight = x.bfloat16(), weight.bfloat16()
    normal = half.float() / (half.float().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.equal(reference.rms_norm(half, half_weight, 1e-5), half_weight * normal.bfloat16())


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_rotates_pairs_and_writes_halves(interleaved):
    x, cos, sin = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(reference.apply_rope(x, cos, sin, interleaved), naive.rope(x, cos, sin, interleaved))


def test_rope_of_a_quarter_turn_by_hand():
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    out = reference.apply_rope(x, torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
    assert out.flatten().tolist() == [-2.0, -4.0, 1.0, 3.0]


def test_index_scores_apply_relu_per_head_and_zero_invalid_pairs():
    q, k, w = torch.randn(2, 9, 4, 6), torch.randn(2, 9, 6), torch.randn(2, 9, 4)
    expected = naive.index_scores(q.double(), k.double(), w.double(), 0.3, CAUSAL).float()
    torch.testing.assert_close(reference.index_scores(q, k, w, 0.3, CAUSAL), expected)
    assert reference.index_scores(q, k, w, 0.3).count_nonzero() > expected.count_nonzero()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, -0.0, 1.0, 2.5, -1.0, float("inf"), float("-inf"), float("nan")]),
                          st.booleans()), min_size=1, max_size=20), st.integers(-1, 22))
def test_select_topk_keeps_the_best_and_breaks_ties_towards_the_lower_position(row, k):
    scores, valid = [score for score, _ in row], [is_valid for _, is_valid in row]
    selected = reference.select_topk(torch.tensor([[scores]]), torch.tensor([[valid]]), k)
    assert selected[0, 0].tolist() == naive.select_topk(scores, valid, k)


def test_masked_attention_gives_zeros_and_no_nan_gradient_for_a_row_without_keys():
    mask = CAUSAL.clone()
    mask[0, 3] = False
    for form in (reference.masked_attention, fused.masked_attention):
        q, k, v = (torch.randn(2, 9, 3, size, requires_grad=True) for size in (8, 8, 6))
        out = form(q, k, v, mask, 0.4)
        expected = naive.masked_attention(q.double(), k.double(), v.double(), mask, 0.4)
        torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
        assert out[0, 3].abs().max() == 0
        out.sum().backward()
        assert all(torch.isfinite(tensor.grad).all() for tensor in (q, k, v))


def test_attention_targets_are_the_mean_attention_of_the_heads():
    q, k = torch.randn(2, 9, 3, 8), torch.randn(2, 9, 3, 8)
    mask = CAUSAL.clone()
    mask[1, 0] = False
    target = reference.attention_targets(q, k, mask, 0.4)
    torch.testing.assert_close(target, naive.attention_weights(q.double(), k.double(), mask, 0.4).mean(1).float())
    assert target.sum(-1)[1, 0] == 0
    assert target.sum(-1)[0].allclose(torch.ones(9))


def test_indexer_kl_and_its_gradient_are_those_of_the_definition():
    mask = CAUSAL.clone()
    mask[0, 5] = False
    target = reference.attention_targets(torch.randn(2, 9, 3, 8), torch.randn(2, 9, 3, 8), mask, 1.0)
    scores = torch.randn(2, 9, 9, requires_grad=True)
    loss = reference.indexer_kl(scores, target, mask)
    loss.backward()
    torch.testing.assert_close(loss, naive.indexer_kl(scores.double(), target.double(), mask).float())
    share = scores.detach().masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(scores.grad, (share - target) / 17)


def test_indexer_kl_without_any_valid_row_is_zero():
    scores = torch.randn(1, 2, 3, requires_grad=True)
    loss = reference.indexer_kl(scores, torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert scores.grad.abs().max() == 0


@pytest.mark.parametrize("form", [reference.experts, fused.experts])
def test_experts_equal_the_sum_over_single_tokens_and_so_do_their_gradients(form):
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(13)])
    ids[ids == 3] = 4  # expert 3 gets no token; a token may name one expert twice
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((13, 16), (13, 2), (5, 16, 16), (5, 16, 8))]
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out = form(inputs[0], ids, *inputs[1:])
    expected = naive.experts(doubles[0], ids, *doubles[1:])
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
    out.square().sum().backward()
    expected.square().sum().backward()
    for got, want in zip(inputs, doubles, strict=True):
        torch.testing.assert_close(got.grad, want.grad.float(), rtol=1e-4, atol=1e-3)
    assert inputs[2].grad[3].abs().max() == 0


def test_ragged_attention_equals_attention_over_the_expanded_cache():
    latent, index_keys = torch.randn(3, 12, 10), torch.randn(3, 12, 6)
    slots, lengths = torch.tensor([2, 0, 2, 1]), torch.tensor([12, 5, 3, 0])
    q, iq, iw = torch.randn(4, 2, 10), torch.randn(4, 4, 6), torch.randn(4, 4)
    out = reference.ragged_dsa(q, iq, iw, latent, index_keys, slots, lengths, 4, 0.3, 8)
    valid = torch.arange(12) < lengths[:, None]
    scores = naive.index_scores(iq[:, None], index_keys[slots], iw[:, None], 1.0, valid[:, None])
    rows = [naive.select_topk(scores[m, 0].tolist(), valid[m].tolist(), 4) for m in range(4)]
    keys = latent[slots].unsqueeze(2).expand(-1, -1, 2, -1)
    expected = naive.masked_attention(q[:, None], keys, keys[..., :8], torch.tensor(rows)[:, None], 0.3)[:, 0]
    torch.testing.assert_close(out, expected)
    assert out[3].abs().max() == 0


def test_ragged_attention_never_reads_entries_past_the_length():
    latent = torch.full((1, 8, 6), float("nan"))
    latent[0, :3] = torch.randn(3, 6)
    slots, lengths = torch.zeros(2, dtype=torch.int64), torch.tensor([3, 2])
    out = reference.ragged_attention(torch.randn(2, 2, 6), latent, slots, lengths, None, 1.0, 4)
    assert torch.isfinite(out).all()
