"""Operations over listed keys, SwiGLU and sampling: native forms against the reference, edges, equal bits."""

from __future__ import annotations

import pytest
import torch

from glm5.errors import KernelError
from glm5.kernels import dispatch, reference
from tests.kernels.test_dispatch import check, leaf
from tests.kernels.triton_cases import lists

pytestmark = pytest.mark.usefixtures("instruction_set")

SHAPES = [(2, 70, 90, 16, 40, 24, 30), (1, 5, 9, 3, 7, 5, 4), (1, 130, 150, 20, 33, 16, 100)]
"""Batches, queries, keys, heads, key dim, latent, listed keys."""


@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_attention_and_its_gradients(shape):
    batches, queries, keys, heads, dim, latent, width = shape
    arguments = (
        leaf(batches, queries, heads, dim),
        leaf(batches, keys, dim),
        lists(batches, queries, keys, width),
        0.3,
        latent,
    )
    check(dispatch.sparse_attention, _definition, arguments)


def _definition(q_BTHK, latent_BSK, positions_BTK, scale, latent):
    """Written as dense attention under a mask, in the type of the arguments."""
    mask_BTS = torch.zeros(*positions_BTK.shape[:2], latent_BSK.shape[1] + 1, dtype=torch.bool)
    mask_BTS.scatter_(2, positions_BTK.long() % mask_BTS.shape[2], True)
    mask_BTS = mask_BTS[..., :-1]
    logits_BHTS = torch.einsum("bthk,bsk->bhts", q_BTHK, latent_BSK) * scale
    weights_BHTS = logits_BHTS.exp() * mask_BTS.unsqueeze(1)
    weights_BHTS = weights_BHTS / weights_BHTS.sum(-1, keepdim=True).clamp_min(1e-30)
    return torch.einsum("bhts,bsc->bthc", weights_BHTS, latent_BSK[..., :latent])


def test_sparse_attention_equals_the_reference():
    arguments = (torch.randn(2, 9, 3, 12), torch.randn(2, 11, 12), lists(2, 9, 11, 5), 0.3, 8)
    torch.testing.assert_close(dispatch.sparse_attention(*arguments), reference.sparse_attention(*arguments))


@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_scores_and_their_gradients(shape):
    batches, queries, keys, heads, dim, _, width = shape
    positions = lists(batches, queries, keys, width)
    check(
        dispatch.sparse_scores,
        _scores_definition,
        (leaf(batches, queries, heads, dim), leaf(batches, keys, dim), leaf(batches, queries, heads), 0.3, positions),
    )


def _scores_definition(q_BTJX, k_BSX, w_BTJ, scale, positions_BTK):
    logits_BTJS = torch.einsum("btjx,bsx->btjs", q_BTJX, k_BSX) * scale
    scores_BTS = torch.einsum("btj,btjs->bts", w_BTJ, logits_BTJS.clamp_min(0))
    return scores_BTS.gather(2, positions_BTK.long().clamp_min(0)) * (positions_BTK >= 0)


def test_listed_scores_have_the_bits_that_selection_saw():
    q, k, w = torch.randn(1, 4, 5, 9), torch.randn(1, 60, 9), torch.randn(1, 4, 5)
    every = torch.arange(60).expand(1, 4, 60)
    scores = dispatch.sparse_scores(q, k, w, 1.0, every)
    best = dispatch.ragged_select(q[0], w[0], k, torch.zeros(4, dtype=torch.int64), torch.full((4,), 60), 7)
    expected = reference.select_topk(scores, torch.ones_like(scores, dtype=torch.bool), 7)
    assert torch.equal(torch.zeros_like(expected).scatter_(2, best.long().unsqueeze(0), True), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_targets_equal_the_reference(shape):
    batches, queries, keys, heads, dim, _, width = shape
    arguments = (
        torch.randn(batches, queries, heads, dim),
        torch.randn(batches, keys, dim),
        lists(batches, queries, keys, width),
        0.3,
    )
    target = dispatch.sparse_targets(*arguments)
    torch.testing.assert_close(target, reference.sparse_targets(*arguments), rtol=1e-5, atol=1e-6)
    torch.set_num_threads(2)
    assert torch.equal(target, dispatch.sparse_targets(*arguments))


def test_a_listed_key_that_does_not_exist_is_refused():
    positions = torch.tensor([[[0, 9]]])
    with pytest.raises(KernelError, match=r"reach from 0 to 9; expected -1 .* to 8"):
        dispatch.sparse_attention(torch.randn(1, 1, 2, 8), torch.randn(1, 9, 8), positions, 0.3, 4)


@pytest.mark.parametrize("order", ["random", "rising", "falling", "equal", "two values"])
def test_a_long_context_is_selected_exactly_whatever_the_order_of_its_scores(order):
    length = 20000
    values = {
        "random": torch.rand(length),
        "rising": torch.arange(length) / length,
        "equal": torch.ones(length),
        "falling": 1 - torch.arange(length) / length,
        "two values": (torch.arange(length) % 7 == 0).float(),
    }[order]
    keys, one = values.view(1, length, 1), torch.ones(1, 1, 1)
    expected = reference.select_topk(values.view(1, 1, -1), torch.ones(1, 1, length, dtype=torch.bool), 300)[
        0, 0
    ].nonzero()[:, 0]
    for threads in (1, 2, 3):  # several threads share the keys of a single query
        torch.set_num_threads(threads)
        best = dispatch.ragged_select(one, one[0], keys, torch.zeros(1, dtype=torch.int64), torch.tensor([length]), 300)
        assert torch.equal(best[0].long(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_many_parts_has_the_same_bits_alone_and_in_a_batch(dtype):
    latent, q = torch.randn(1, 3000, 40).to(dtype), torch.randn(9, 4, 40)
    slots, lengths = torch.zeros(9, dtype=torch.int64), torch.tensor([3000, 1024, 1025, 0, 2048, 1, 2999, 64, 63])
    together = dispatch.ragged_attention(q, latent, slots, lengths, None, 0.3, 24)
    expected = reference.ragged_attention(q, latent, slots, lengths, None, 0.3, 24)
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)
    torch.set_num_threads(2)
    for m in range(9):
        one = slice(m, m + 1)
        alone = dispatch.ragged_attention(q[one], latent, slots[one], lengths[one], None, 0.3, 24)
        assert torch.equal(alone[0], together[m])


def test_a_nan_in_one_key_spoils_only_the_queries_that_see_it():
    latent = torch.randn(1, 50, 16)
    latent[0, 30] = float("nan")
    out = dispatch.ragged_attention(
        torch.randn(2, 3, 16), latent, torch.zeros(2, dtype=torch.int64), torch.tensor([50, 30]), None, 0.3, 8
    )
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("shape", [(3, 20), (1, 2), (2, 5, 34)])
def test_swiglu_and_its_gradient(shape):
    check(
        dispatch.swiglu, lambda x: x.chunk(2, -1)[0].sigmoid() * x.chunk(2, -1)[0] * x.chunk(2, -1)[1], (leaf(*shape),)
    )


def _settings(rows: int) -> tuple[torch.Tensor, ...]:
    """Temperature, top-k, top-p, min-p and uniforms of every kind."""
    return (
        torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 1.0, 1.0]).repeat(rows)[:rows],
        torch.tensor([-1, 2, 50, -1, 8, -1, 1000]).repeat(rows)[:rows],
        torch.tensor([1.0, 1.0, 0.8, 0.5, 0.9, 1.0]).repeat(rows)[:rows],
        torch.tensor([0.0, 0.0, 0.0, 0.05, 0.3]).repeat(rows)[:rows],
        torch.rand(rows),
    )


@pytest.mark.parametrize("width", [1, 7, 300])
def test_sampling_equals_the_reference(width):
    logits = torch.randn(105, width).mul(3).round().div(2)  # many equal logits
    if width > 1:
        logits[5, width // 2] = -float("inf")
    settings = _settings(105)
    ids, logprobs = dispatch.sample(logits, *settings)
    want_ids, want_logprobs = reference.sample(logits, *settings)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(logprobs, want_logprobs, rtol=1e-5, atol=1e-5)


def test_samples_follow_the_distribution_after_the_cuts():
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0, 1.5]])
    uniforms = (torch.arange(4000) + 0.5) / 4000
    ids, _ = dispatch.sample(
        logits.expand(4000, -1), torch.ones(4000), torch.full((4000,), 3), torch.ones(4000), torch.zeros(4000), uniforms
    )
    expected = torch.tensor([2.0, -torch.inf, 1.0, -torch.inf, 1.5]).softmax(-1)
    torch.testing.assert_close(ids.bincount(minlength=5) / 4000, expected, atol=5e-4, rtol=0)


def test_broken_logits_give_a_log_prob_that_is_not_finite():
    logits = torch.randn(3, 9)
    logits[0, 4], logits[1, 2], logits[2] = float("nan"), float("inf"), -float("inf")
    for form in (dispatch.sample, reference.sample):
        _, logprobs = form(logits, torch.ones(3), torch.full((3,), -1), torch.ones(3), torch.zeros(3), torch.rand(3))
        assert not logprobs.isfinite().any()
