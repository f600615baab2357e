"""The native forms behind ``dispatch`` against the reference: values, gradients, edges, equal bits on any threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.errors import KernelError
from glm5.kernels import dispatch, reference
from tests.kernels import naive

pytestmark = pytest.mark.usefixtures("instruction_set")


def gradients(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> list[Tensor]:
    """The output and the gradient of every floating-point argument that wants one, for a fixed random cotangent."""
    leaves = [argument for argument in arguments if isinstance(argument, Tensor) and argument.requires_grad]
    out = function(*arguments)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad((out * cotangent.to(out.dtype)).sum(), leaves)]


def doubled(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with floating-point tensors in float64."""
    result = []
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.is_floating_point():
            argument = argument.detach().double().requires_grad_(argument.requires_grad)
        result.append(argument)
    return tuple(result)


def check(native: Callable[..., Tensor], definition: Callable[..., Tensor], arguments: tuple[Any, ...],
          tolerance: float = 2e-5) -> None:
    """Values and gradients equal the float64 definition, and two and three threads give the bits of one."""
    results = gradients(native, arguments)
    for got, want in zip(results, gradients(definition, doubled(arguments)), strict=True):
        largest = max(1.0, want.abs().max().item())
        torch.testing.assert_close(got, want.float(), rtol=tolerance, atol=tolerance * largest)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(results, gradients(native, arguments), strict=True))


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def causal_mask(batch: int, size: int, empty_rows: int = 0) -> Tensor:
    mask = torch.ones(size, size, dtype=torch.bool).tril().repeat(batch, 1, 1)
    mask[:, :empty_rows] = False
    return mask


def document_mask(batch: int, size: int) -> Tensor:
    documents = (torch.rand(batch, size) < 0.1).cumsum(-1)
    return causal_mask(batch, size, empty_rows=1) & (documents[:, :, None] == documents[:, None, :])


@pytest.mark.parametrize(("rows", "size"), [(1, 128), (300, 48), (5, 7), (2, 1)])
def test_rms_norm_and_its_gradients(rows, size):
    check(dispatch.rms_norm, naive.rms_norm, (leaf(rows, size), leaf(size), 1e-5))


def test_rms_norm_reads_rows_of_a_wider_tensor():
    wide, weight = leaf(3, 5, 40), leaf(24)
    check(lambda x, w: dispatch.rms_norm(x[..., 8:32], w, 1e-6), lambda x, w: naive.rms_norm(x[..., 8:32], w, 1e-6),
          (wide, weight))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (7, 1, 8), (300, 2, 6)])
def test_rope_of_a_slice_and_its_gradient(shape, interleaved):
    wide = leaf(*shape[:-1], shape[-1] + 4)
    cos, sin = torch.randn(*shape[:-2], shape[-1] // 2), torch.randn(*shape[:-2], shape[-1] // 2)
    check(lambda x, c, s: dispatch.apply_rope(x[..., 4:], c, s, interleaved),
          lambda x, c, s: naive.rope(x[..., 4:], c, s, interleaved), (wide, cos, sin))


def test_rope_takes_angles_that_every_row_shares():
    x, cos, sin = torch.randn(3, 5, 2, 8), torch.randn(5, 4).expand(3, 5, 4), torch.randn(1, 5, 4).expand(3, 5, 4)
    torch.testing.assert_close(dispatch.apply_rope(x, cos, sin), reference.apply_rope(x, cos, sin))


@pytest.mark.parametrize(("heads", "size", "length"), [(8, 32, 70), (16, 8, 33), (3, 5, 9), (32, 128, 20)])
def test_index_scores_and_their_gradients(heads, size, length):
    arguments = (leaf(2, length, heads, size), leaf(2, length, size), leaf(2, length, heads), size**-0.5,
                 document_mask(2, length))
    check(dispatch.index_scores, naive.index_scores, arguments)


def test_index_scores_without_a_mask_score_every_pair():
    q, k, w = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 8), torch.randn(2, 3, 4)
    torch.testing.assert_close(dispatch.index_scores(q, k, w, 0.4), reference.index_scores(q, k, w, 0.4))


SPECIAL = [0.0, -0.0, 0.5, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), torch.finfo(torch.float32).min]


@pytest.mark.parametrize("k", [1, 2, 7, 64, 199, 200, 201, 0, -1])
def test_select_topk_equals_the_reference_with_ties_nan_and_infinities(k):
    scores = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (2, 40, 200))]
    scores[1] = torch.randn(40, 200).mul(4).round().div(4)
    valid = torch.rand(2, 40, 200) < torch.rand(2, 40, 1)
    expected = reference.select_topk(scores, valid, k)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(dispatch.select_topk(scores, valid, k), expected)


@pytest.mark.parametrize("scores", ["random", "rising", "equal", "two values"])
def test_select_topk_of_long_rows(scores):
    length = 9001
    rows = {"random": torch.randn(length), "rising": torch.arange(length) * 1e-3, "equal": torch.zeros(length),
            "two values": (torch.arange(length) % 3 == 0).float()}
    row = rows[scores].view(1, 1, -1)
    valid = torch.ones(1, 1, length, dtype=torch.bool)
    assert torch.equal(dispatch.select_topk(row, valid, 2048), reference.select_topk(row, valid, 2048))


@pytest.mark.parametrize("mask", ["causal", "documents", "sparse", "one key", "nothing"])
@pytest.mark.parametrize(("heads", "size", "width", "length"),
                         [(4, 48, 32, 70), (3, 7, 5, 33), (1, 64, 64, 8), (2, 16, 8, 301)])
def test_masked_attention_and_its_gradients(mask, heads, size, width, length):
    masks = {"causal": causal_mask(2, length, empty_rows=2), "documents": document_mask(2, length),
             "sparse": torch.rand(2, length, length) < 0.1, "nothing": torch.zeros(2, length, length, dtype=torch.bool),
             "one key": torch.eye(length, dtype=torch.bool).repeat(2, 1, 1)}
    arguments = (leaf(2, length, heads, size), leaf(2, length, heads, size), leaf(2, length, heads, width), masks[mask],
                 size**-0.5)
    check(dispatch.masked_attention, naive.masked_attention, arguments)


def test_masked_attention_takes_fewer_queries_than_keys_and_shared_masks():
    mask = causal_mask(1, 40)[:, 30:].expand(3, -1, -1)
    arguments = (leaf(3, 10, 2, 16), leaf(3, 40, 2, 16), leaf(3, 40, 2, 8), mask, 0.3)
    check(dispatch.masked_attention, naive.masked_attention, arguments)


def test_masked_attention_reads_projections_without_copying_them():
    kv = leaf(2, 20, 3, 24)
    check(lambda q, kv, m: dispatch.masked_attention(q, kv[..., :16], kv[..., 16:], m, 0.25),
          lambda q, kv, m: naive.masked_attention(q, kv[..., :16], kv[..., 16:], m, 0.25),
          (leaf(2, 20, 3, 16), kv, causal_mask(2, 20)))


def test_masked_attention_with_large_logits_stays_exact():
    q, k, v = torch.randn(3, 1, 30, 2, 16)
    arguments = (q * 40, k, v, causal_mask(1, 30), 1.0)
    expected = reference.masked_attention(*arguments)
    torch.testing.assert_close(dispatch.masked_attention(*arguments), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", [causal_mask(2, 70, empty_rows=1), document_mask(2, 301), torch.rand(2, 70, 70) < 0.1])
def test_attention_targets_equal_the_reference(mask):
    q, k = torch.randn(2, 2, mask.shape[1], 4, 48)
    target = dispatch.attention_targets(q, k, mask, 0.2)
    torch.testing.assert_close(target, reference.attention_targets(q, k, mask, 0.2), rtol=1e-5, atol=1e-6)
    torch.set_num_threads(2)
    assert torch.equal(target, dispatch.attention_targets(q, k, mask, 0.2))


@pytest.mark.parametrize("mask", [causal_mask(2, 41, empty_rows=1), document_mask(2, 41)])
def test_indexer_kl_and_its_gradient(mask):
    target = reference.attention_targets(torch.randn(2, 41, 4, 8), torch.randn(2, 41, 4, 8), mask, 1.0)
    check(dispatch.indexer_kl, naive.indexer_kl, (leaf(2, 41, 41), target, mask))


def test_indexer_kl_without_any_valid_row_is_zero():
    scores = leaf(1, 2, 3)
    dispatch.indexer_kl(scores, torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, dtype=torch.bool)).backward()
    assert scores.grad.abs().max() == 0


EXPERT_SHAPES = [(1, 1, 4, 2, 16, 8), (77, 8, 2, 2, 128, 96), (5, 3, 3, 3, 7, 5), (200, 2, 1, 1, 40, 24)]


def expert_arguments(tokens: int, experts: int, choices: int, used: int, size: int, hidden: int) -> tuple[Tensor, ...]:
    """``used``: how many of the experts any token may choose."""
    ids = torch.randint(min(used * choices, experts), (tokens, choices))
    gate_up, down = torch.randn(experts, 2 * hidden, size) * 0.2, torch.randn(experts, size, hidden) * 0.2
    return leaf(tokens, size), ids, leaf(tokens, choices), gate_up.requires_grad_(), down.requires_grad_()


@pytest.mark.parametrize("shape", EXPERT_SHAPES)
def test_experts_and_their_gradients(shape):
    check(dispatch.experts, naive.experts, expert_arguments(*shape))


def test_experts_of_a_token_do_not_depend_on_its_batch():
    arguments = [argument.detach() for argument in expert_arguments(77, 8, 2, 4, 128, 96)]
    together = dispatch.experts(*arguments)
    alone = [dispatch.experts(arguments[0][m : m + 1], arguments[1][m : m + 1], arguments[2][m : m + 1], *arguments[3:])
             for m in range(77)]
    assert torch.equal(together, torch.cat(alone))


def test_experts_of_no_tokens_are_empty():
    arguments = [argument.detach() for argument in expert_arguments(0, 8, 2, 4, 16, 8)]
    assert dispatch.experts(*arguments).shape == (0, 16)


def test_experts_name_an_id_that_does_not_exist():
    arguments = [argument.detach() for argument in expert_arguments(5, 4, 2, 2, 16, 8)]
    arguments[1][3, 1] = 4
    with pytest.raises(KernelError, match="reach from 0 to 4; expected 0 to 3"):
        dispatch.experts(*arguments)


class Cache:
    """A slot cache with queries of every kind: empty, short, as long as the selection, full."""

    def __init__(self, heads: int = 4, latent: int = 48, rope: int = 16, index_heads: int = 8, index_dim: int = 32,
                 length: int = 150, topk: int = 64, dtype: torch.dtype = torch.float32) -> None:
        tokens = 23
        self.latent_PSK = torch.randn(5, length, latent + rope).to(dtype)
        self.index_keys_PSX = torch.randn(5, length, index_dim).to(dtype)
        self.slots_M = torch.randint(5, (tokens,))
        self.lengths_M = torch.randint(length + 1, (tokens,))
        self.lengths_M[:7] = torch.tensor([0, 1, topk - 1, topk, topk + 1, length, length]).clamp(0, length)
        self.q_MHK = torch.randn(tokens, heads, latent + rope).to(dtype)
        self.iq_MJX = torch.randn(tokens, index_heads, index_dim).to(dtype)
        self.iw_MJ = torch.randn(tokens, index_heads)
        self.latent, self.topk = latent, topk

    def sparse(self, form: Callable[..., Tensor]) -> Tensor:
        return form(self.q_MHK, self.iq_MJX, self.iw_MJ, self.latent_PSK, self.index_keys_PSX, self.slots_M,
                    self.lengths_M, self.topk, 0.15, self.latent)

    def select(self, form: Callable[..., Tensor], topk: int) -> Tensor:
        return form(self.iq_MJX, self.iw_MJ, self.index_keys_PSX, self.slots_M, self.lengths_M, topk)


@pytest.mark.parametrize("options", [
    {}, {"topk": 0}, {"topk": -1}, {"topk": 1}, {"topk": 150}, {"topk": 1000}, {"dtype": torch.bfloat16},
    {"heads": 5, "latent": 13, "rope": 6, "index_heads": 3, "index_dim": 7},
    {"heads": 1, "latent": 64, "rope": 8, "index_heads": 33, "index_dim": 16, "dtype": torch.bfloat16},
    {"length": 1, "topk": 4}, {"heads": 16, "latent": 128, "rope": 32, "length": 400, "topk": 200},
    {"heads": 5, "latent": 13, "rope": 6, "index_heads": 3, "index_dim": 7, "dtype": torch.bfloat16},
    {"heads": 20, "latent": 96, "rope": 32, "index_dim": 64, "length": 2100, "topk": 1300, "dtype": torch.bfloat16},
    {"heads": 2, "length": 2100, "topk": 0, "dtype": torch.bfloat16},
])
def test_ragged_dsa_equals_the_reference(options):
    cache = Cache(**options)
    tolerance = 2e-2 if cache.q_MHK.dtype == torch.bfloat16 else 2e-5
    out = cache.sparse(dispatch.ragged_dsa)
    torch.testing.assert_close(out, cache.sparse(reference.ragged_dsa), rtol=tolerance, atol=tolerance)
    assert out.dtype == cache.q_MHK.dtype
    assert out[0].abs().max() == 0
    torch.set_num_threads(2)
    assert torch.equal(out, cache.sparse(dispatch.ragged_dsa))


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
def test_ragged_selection_then_attention_has_the_bits_of_the_fused_operation(dtype):
    cache = Cache(dtype=dtype)
    positions = cache.select(dispatch.ragged_select, 64)
    assert torch.equal(positions, cache.select(reference.ragged_select, 64))
    out = dispatch.ragged_attention(cache.q_MHK, cache.latent_PSK, cache.slots_M, cache.lengths_M, positions, 0.15, 48)
    assert torch.equal(out, cache.sparse(dispatch.ragged_dsa))


@pytest.mark.parametrize("form", [dispatch, reference])
@pytest.mark.parametrize(("block", "dtype"), [(16, torch.float32), (30, torch.float32), (50, torch.bfloat16)])
def test_a_paged_cache_gives_the_bits_of_a_contiguous_one(form, block, dtype):
    cache = Cache(dtype=dtype)
    count = 150 // block
    table = torch.randperm(5 * count, dtype=torch.int32).view(5, count)
    cache.lengths_M.clamp_(max=count * block)
    paged = []
    for tensor in (cache.latent_PSK, cache.index_keys_PSX):
        blocks = torch.full((5 * count + 3, block, tensor.shape[2]), float("nan"), dtype=dtype)
        blocks[table.long()] = tensor[:, : count * block].unflatten(1, (count, block))
        paged.append(blocks)
    query = cache.q_MHK, cache.iq_MJX, cache.iw_MJ
    place = cache.slots_M, cache.lengths_M, 64, 0.15, 48
    assert torch.equal(form.ragged_dsa(*query, *paged, *place, table), cache.sparse(form.ragged_dsa))
    positions = form.ragged_select(*query[1:], paged[1], *place[:3], table)
    assert torch.equal(positions, cache.select(form.ragged_select, 64))
    everything = form.ragged_attention(query[0], paged[0], *place[:2], None, *place[3:], table)
    assert torch.equal(everything, form.ragged_attention(query[0], cache.latent_PSK, *place[:2], None, *place[3:]))


def test_a_block_outside_of_the_cache_is_refused():
    cache = Cache()
    for wrong in (5, -1):
        table = torch.tensor([[0], [1], [2], [3], [wrong]])
        with pytest.raises(KernelError, match="entries of slot 4"):
            dispatch.ragged_attention(cache.q_MHK, cache.latent_PSK, torch.full_like(cache.slots_M, 4),
                                      torch.ones_like(cache.lengths_M), None, 0.15, 48, table)


@DTYPES
def test_ragged_selection_breaks_ties_towards_the_lower_position(dtype):
    cache = Cache(dtype=dtype)
    cache.index_keys_PSX[:] = torch.randint(-1, 2, cache.index_keys_PSX.shape) // 2  # few distinct scores, many zeros
    cache.iq_MJX, cache.iw_MJ = cache.iq_MJX.sign(), cache.iw_MJ.sign()
    assert torch.equal(cache.select(dispatch.ragged_select, 20), cache.select(reference.ragged_select, 20))


@DTYPES
def test_ragged_selection_ranks_nan_and_minus_infinity_last(dtype):
    cache = Cache(dtype=dtype)
    cache.index_keys_PSX[:, 3::7] = float("nan")
    cache.index_keys_PSX[:, 5::7] = float("inf")
    assert torch.equal(cache.select(dispatch.ragged_select, 30), cache.select(reference.ragged_select, 30))


@DTYPES
@pytest.mark.parametrize("topk", [64, 0])
def test_ragged_queries_do_not_depend_on_their_batch(dtype, topk):
    """In any order; queries of one slot that follow one another are computed together."""
    cache = Cache(dtype=dtype, topk=topk, length=300)
    order_M = cache.slots_M.argsort()
    for name in ("slots_M", "lengths_M", "q_MHK", "iq_MJX", "iw_MJ"):
        setattr(cache, name, getattr(cache, name)[order_M])
    together = cache.sparse(dispatch.ragged_dsa)
    for m in range(23):
        one = slice(m, m + 1)
        alone = dispatch.ragged_dsa(cache.q_MHK[one], cache.iq_MJX[one], cache.iw_MJ[one], cache.latent_PSK,
                                    cache.index_keys_PSX, cache.slots_M[one], cache.lengths_M[one], topk, 0.15, 48)
        assert torch.equal(together[m], alone[0])


@DTYPES
@pytest.mark.parametrize("topk", [64, 0])
def test_ragged_attention_never_reads_entries_past_the_length(dtype, topk):
    cache = Cache(dtype=dtype, topk=topk)
    out = cache.sparse(dispatch.ragged_dsa)
    longest = {slot: int(cache.lengths_M[cache.slots_M == slot].max()) for slot in set(cache.slots_M.tolist())}
    for slot in range(5):
        cache.latent_PSK[slot, longest.get(slot, 0) :] = float("nan")
        cache.index_keys_PSX[slot, longest.get(slot, 0) :] = float("nan")
    assert torch.equal(out, cache.sparse(dispatch.ragged_dsa))


@DTYPES
def test_a_nan_in_a_key_reaches_only_the_queries_that_see_it(dtype):
    """A causal prefill: every query sees one key more than the one before."""
    latent_PSK, q_MHK = torch.randn(1, 60, 64).to(dtype), torch.randn(60, 4, 64).to(dtype)
    slots_M, lengths_M = torch.zeros(60, dtype=torch.int64), torch.arange(1, 61)
    clean = dispatch.ragged_attention(q_MHK, latent_PSK, slots_M, lengths_M, None, 0.15, 48)
    latent_PSK[0, 37, 5] = float("nan")
    out = dispatch.ragged_attention(q_MHK, latent_PSK, slots_M, lengths_M, None, 0.15, 48)
    assert torch.equal(out[:37], clean[:37]) and out[37:].isnan().any(-1).all()


def test_ragged_operations_of_no_queries_are_empty():
    nothing = torch.zeros(0, dtype=torch.int64)
    cache = Cache()
    cache.q_MHK, cache.iq_MJX, cache.iw_MJ = cache.q_MHK[:0], cache.iq_MJX[:0], cache.iw_MJ[:0]
    cache.slots_M = cache.lengths_M = nothing
    assert cache.sparse(dispatch.ragged_dsa).shape == (0, 4, 48)
    assert cache.select(dispatch.ragged_select, 64) is None


@pytest.mark.parametrize(("slot", "length"), [(5, 3), (-1, 3), (0, 151), (0, -1)])
def test_ragged_operations_refuse_what_lies_outside_the_cache(slot, length):
    cache = Cache()
    cache.slots_M[2], cache.lengths_M[2] = slot, length
    with pytest.raises(KernelError, match=f"query 2 reads {length} entries of slot {slot}"):
        cache.sparse(dispatch.ragged_dsa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_without_a_native_form_run_the_other_forms(dtype):
    x, weight = torch.randn(3, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    torch.testing.assert_close(dispatch.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    q, k, v = (torch.randn(1, 9, 2, 16, dtype=dtype) for _ in range(3))
    out = dispatch.masked_attention(q, k, v, causal_mask(1, 9), 0.3)
    torch.testing.assert_close(out, reference.masked_attention(q, k, v, causal_mask(1, 9), 0.3), rtol=2e-2, atol=2e-2)


def test_bf16_experts_agree_with_the_reference():
    arguments = [argument.detach() for argument in expert_arguments(30, 8, 2, 4, 64, 32)]
    halves = [argument.bfloat16() if argument.is_floating_point() else argument for argument in arguments]
    halves[2] = arguments[2]
    torch.testing.assert_close(dispatch.experts(*halves), reference.experts(*halves), rtol=3e-2, atol=3e-2)
