"""Attention over lists of selected keys against the plain forms, and the selection bit for bit."""

import pytest
import torch

from glm5.kernels import dispatch, reference

pytestmark = pytest.mark.usefixtures("instruction_set")

SHAPES = [  # batch, tokens, index heads, index dim, kept, heads, key dim, value dim
    (2, 70, 8, 32, 16, 4, 32, 32), (1, 300, 5, 7, 40, 2, 9, 5), (1, 1100, 16, 64, 128, 3, 32, 20),
    (1, 9, 1, 2, 32, 1, 4, 4),
]


def index_inputs(batch, tokens, heads, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q_BTJX, k_BSX, w_BTJ = (torch.randn(batch, tokens, *rest, generator=generator, requires_grad=True)
                            for rest in ((heads, dim), (dim,), (heads,)))
    first_BT = torch.zeros(batch, tokens, dtype=torch.int32)
    first_BT[:, tokens // 2 :] = tokens // 3
    first_BT[:, -1] = tokens  # padding sees nothing
    last_BT = torch.arange(1, tokens + 1, dtype=torch.int32).expand(batch, -1).clone()
    return q_BTJX, k_BSX, w_BTJ, first_BT, last_BT


def by_masks(q_BTJX, k_BSX, w_BTJ, first_BT, last_BT, k):
    """The mask that scoring every key with the native operation gives."""
    tokens_S = torch.arange(k_BSX.shape[1])
    valid_BTS = (tokens_S >= first_BT[..., None]) & (tokens_S < last_BT[..., None])
    return dispatch.select_topk(dispatch.index_scores(q_BTJX, k_BSX, w_BTJ, 0.3, valid_BTS).detach(), valid_BTS, k)


def mask_of(positions_BTK, keys):
    mask_BTS = torch.zeros(*positions_BTK.shape[:2], keys, dtype=torch.bool)
    for row, query, column in (positions_BTK >= 0).nonzero().tolist():
        mask_BTS[row, query, positions_BTK[row, query, column]] = True
    return mask_BTS


@pytest.mark.parametrize("shape", SHAPES)
def test_the_lists_are_the_keys_that_scoring_every_key_selects(shape):
    batch, tokens, heads, dim, k = shape[:5]
    inputs = index_inputs(batch, tokens, heads, dim)
    positions_BTK = dispatch.select_positions(*inputs[:3], 0.3, *inputs[3:], k)
    assert torch.equal(mask_of(positions_BTK, tokens), by_masks(*inputs, k))
    assert torch.equal(positions_BTK, reference.select_positions(*inputs[:3], 0.3, *inputs[3:], k))
    listed = positions_BTK >= 0
    assert torch.equal(listed, listed.int().cummin(-1).values.bool())  # no gap
    assert (positions_BTK.diff(dim=-1)[listed[..., 1:]] > 0).all()  # ascending


@pytest.mark.parametrize("case", ["ties", "one huge key", "tiny differences", "nan key", "inf query", "zero keys"])
def test_scores_that_integers_cannot_tell_apart_are_still_chosen_exactly(case):
    q_BTJX, k_BSX, w_BTJ, first_BT, last_BT = index_inputs(1, 700, 8, 16)
    q_BTJX, k_BSX = q_BTJX.detach(), k_BSX.detach()
    if case == "ties":
        k_BSX[:] = k_BSX[:, :3].repeat(1, 234, 1)[:, :700]
    elif case == "one huge key":
        k_BSX[0, 5] *= 1e6
    elif case == "tiny differences":
        k_BSX[:] = k_BSX[:, :1] + 1e-6 * k_BSX
    elif case == "nan key":
        k_BSX[0, 17, 3] = float("nan")
    elif case == "inf query":
        q_BTJX[0, 600, 2, 1] = float("inf")
    else:
        k_BSX.zero_()
    positions_BTK = dispatch.select_positions(q_BTJX, k_BSX, w_BTJ.detach(), 0.3, first_BT, last_BT, 32)
    expected_BTS = by_masks(q_BTJX, k_BSX, w_BTJ.detach(), first_BT, last_BT, 32)
    assert torch.equal(mask_of(positions_BTK, 700), expected_BTS)
    assert (expected_BTS.sum(-1).amax() == 32)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_targets_and_loss_over_lists_equal_the_plain_forms(shape):
    batch, tokens, index_heads, index_dim, k, heads, key_dim, value_dim = shape
    q_BTJX, k_BSX, w_BTJ, first_BT, last_BT = index_inputs(batch, tokens, index_heads, index_dim)
    positions_BTK = dispatch.select_positions(q_BTJX, k_BSX, w_BTJ, 0.3, first_BT, last_BT, k)
    generator = torch.Generator().manual_seed(1)
    q_BTHK, k_BSHK, kv_BSHE = (torch.randn(batch, tokens, heads, width, generator=generator, requires_grad=True)
                               for width in (key_dim, key_dim, value_dim + 3))
    v_BSHV = kv_BSHE[..., 3:]  # rows that are not contiguous, as in the model
    results = []
    for form in (dispatch, reference):
        out_BTHV, target_BTK = form.selected_attention(q_BTHK, k_BSHK, v_BSHV, positions_BTK, 0.2)
        loss = form.selected_kl(q_BTJX, k_BSX, w_BTJ, 0.3, positions_BTK, target_BTK)
        total = (out_BTHV * torch.linspace(-1, 1, out_BTHV.numel()).view_as(out_BTHV)).sum() + 3 * loss
        gradients = torch.autograd.grad(total, (q_BTHK, k_BSHK, kv_BSHE, q_BTJX, k_BSX, w_BTJ))
        results.append((out_BTHV, target_BTK, loss, *gradients))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=3e-5, rtol=1e-4)
    sums_BT = results[0][1].sum(-1)
    torch.testing.assert_close(sums_BT, (positions_BTK[..., 0] >= 0).float())


def test_gradients_do_not_depend_on_the_thread_count():
    q_BTJX, k_BSX, w_BTJ, first_BT, last_BT = index_inputs(1, 333, 8, 16)
    positions_BTK = dispatch.select_positions(q_BTJX, k_BSX, w_BTJ, 0.3, first_BT, last_BT, 32)
    target_BTK = (positions_BTK >= 0).float() / (positions_BTK >= 0).sum(-1, keepdim=True).clamp_min(1)
    gradients = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        loss = dispatch.selected_kl(q_BTJX, k_BSX, w_BTJ, 0.3, positions_BTK, target_BTK)
        gradients.append(torch.autograd.grad(loss, (q_BTJX, k_BSX, w_BTJ)))
    torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
