"""The lightning indexer in Triton: scores, exact top-k, scores of listed keys with gradients, the KL loss.

Selection writes the scores of a few queries at a time (``_SCORE_BYTES``), never a [queries, keys] tensor of a whole
call. Letters as in ``reference``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.kernels.triton.attention import block_table, gather_keys, list_counts

_SCORE_BYTES = 1 << 26
_KEYS = 64


@triton.jit
def _scores(
    q,
    k,
    w,
    slots,
    table,
    starts,
    lengths,
    out,
    scale,
    heads,
    width,
    blocks,
    block,
    X: tl.constexpr,
    PX: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
):
    """out[m, s] for N keys of one query; -inf outside [starts[m], lengths[m]). table: [slots, blocks], block ids."""
    m, s = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    d = tl.arange(0, PX)
    visible = (s >= tl.load(starts + m)) & (s < tl.load(lengths + m))
    number = tl.load(table + tl.load(slots + m) * blocks + s // block, mask=visible, other=0).to(tl.int64)
    entry = number * block + s % block
    keys = tl.load(k + entry[:, None] * X + d[None, :], mask=visible[:, None] & (d < X)[None, :], other=0.0).to(
        tl.float32
    )
    total = tl.zeros([N], tl.float32)
    for first in range(0, heads, H):
        head = first + tl.arange(0, H)
        query = tl.load(
            q + (m * heads + head)[:, None] * X + d[None, :], mask=(head < heads)[:, None] & (d < X)[None, :], other=0.0
        ).to(tl.float32)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where(logits < 0.0, 0.0, logits)  # NaN stays NaN
        weight = tl.load(w + m * heads + head, mask=head < heads, other=0.0)
        total += tl.sum(tl.where((head < heads)[:, None], weight[:, None] * logits, 0.0), 0)
    tl.store(out + m * width + s, tl.where(visible, total, -float("inf")), mask=s < width)


@triton.jit
def _select(scores, starts, lengths, positions, k, width, BLOCK: tl.constexpr):
    """The k best visible positions of one row, ascending, ties towards the lower: bisection on the scores' bits."""
    m, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start, length = tl.load(starts + m), tl.load(lengths + m)
    lowest = tl.full([], -2147483648, tl.int64)
    low, high = lowest, tl.full([], 2147483647, tl.int64)
    wanted = tl.minimum(k, length - start)
    for _ in range(33):  # largest threshold that at least `wanted` keys reach
        middle = low + (high - low + 1) // 2
        count = tl.zeros([], tl.int64)
        for first in range(0, length, BLOCK):
            key = _order_keys(scores + m * width, first + n, start, length)
            count += tl.sum((key >= middle).to(tl.int64), 0)
        enough = count >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    above = tl.zeros([], tl.int64)
    for first in range(0, length, BLOCK):
        above += tl.sum((_order_keys(scores + m * width, first + n, start, length) > low).to(tl.int64), 0)
    written, room = tl.zeros([], tl.int64), wanted - above
    for first in range(0, length, BLOCK):
        s = first + n
        key = _order_keys(scores + m * width, s, start, length)
        tied = (key == low) & (s >= start) & (s < length)
        chosen = (key > low) | (tied & (tl.cumsum(tied.to(tl.int64), 0) <= room))
        place = written + tl.cumsum(chosen.to(tl.int64), 0) - 1
        tl.store(positions + m * k + place, s.to(tl.int32), mask=chosen)
        written += tl.sum(chosen.to(tl.int64), 0)
        room -= tl.sum(tied.to(tl.int64), 0)


@triton.jit
def _order_keys(scores, s, start, length):
    """int64 keys that order like the scores: NaN and -inf as the lowest float, invisible ones below every score."""
    visible = (s >= start) & (s < length)
    value = tl.load(scores + s, mask=visible, other=0.0) + 0.0
    value = tl.where(value > -3.402823466e38, value, -3.402823466e38)
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(visible, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64), -2147483649)


def ragged_select(iq_MJX: Tensor, iw_MJ: Tensor, index_keys_PSX: Tensor, slots_M: Tensor, lengths_M: Tensor,
                  index_topk: int, table_UZ: Tensor | None = None) -> Tensor | None:
    """See ``reference.ragged_select``."""
    if index_topk <= 0 or not lengths_M.numel() or int(lengths_M.max()) <= index_topk:
        return None
    bounds = torch.zeros_like(lengths_M), lengths_M
    table_UZ = block_table(index_keys_PSX, table_UZ)
    return _selection(iq_MJX, index_keys_PSX, iw_MJ, slots_M, *bounds, index_topk, 1.0, table_UZ)


def select_positions(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, first_BT: Tensor, last_BT: Tensor,
                     k: int) -> Tensor:
    """See ``reference.select_positions`` with 0 < k. Every row of the batch is a slot of one block."""
    batches, queries = q_BTJX.shape[:2]
    slots_M = torch.arange(batches, device=q_BTJX.device).repeat_interleave(queries)
    bounds = (bound.expand(batches, queries).flatten() for bound in (first_BT, last_BT))
    with torch.no_grad():
        return _selection(q_BTJX.flatten(0, 1), k_BSX, w_BTJ.flatten(0, 1), slots_M, *bounds, k, scale,
                          block_table(k_BSX, None)).view(batches, queries, k)


def _selection(q_MJX: Tensor, keys_PSX: Tensor, w_MJ: Tensor, slots_M: Tensor, starts_M: Tensor, lengths_M: Tensor,
               topk: int, scale: float, table_UZ: Tensor) -> Tensor:
    positions_MK = torch.full((slots_M.numel(), topk), -1, dtype=torch.int32, device=q_MJX.device)
    longest = int(lengths_M.max()) if lengths_M.numel() else 0
    step = max(1, _SCORE_BYTES // (4 * max(1, longest)))
    for first in range(0, slots_M.numel() if longest else 0, step):
        part = slice(first, first + step)
        bounds = starts_M[part].long().contiguous(), lengths_M[part].long().contiguous()
        scores_mS = _visible_scores(q_MJX[part], keys_PSX, w_MJ[part], slots_M[part], *bounds, longest, scale, table_UZ)
        _select[(scores_mS.shape[0],)](scores_mS, *bounds, positions_MK[part], topk, longest, BLOCK=1024)
    return positions_MK


def index_scores(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, valid_BTS: Tensor | None = None) -> Tensor:
    """See ``reference.index_scores``; no gradient (``sparse_scores`` has one)."""
    (batches, queries), keys = q_BTJX.shape[:2], k_BSX.shape[1]
    slots_M = torch.arange(batches, device=q_BTJX.device).repeat_interleave(queries)
    bounds = torch.zeros_like(slots_M), torch.full_like(slots_M, keys)
    q_MJX, w_MJ = q_BTJX.detach().flatten(0, 1), w_BTJ.detach().flatten(0, 1)
    scores_BTS = _visible_scores(q_MJX, k_BSX.detach(), w_MJ, slots_M, *bounds, keys, scale, block_table(k_BSX, None))
    scores_BTS = scores_BTS.view(batches, queries, keys)
    return scores_BTS if valid_BTS is None else scores_BTS.masked_fill(~valid_BTS, 0.0)


def _visible_scores(q_MJX: Tensor, keys_PSX: Tensor, w_MJ: Tensor, slots_M: Tensor, starts_M: Tensor, lengths_M: Tensor,
                    longest: int, scale: float, table_UZ: Tensor) -> Tensor:
    tokens, heads, size = q_MJX.shape
    scores_MS = torch.empty(tokens, longest, dtype=torch.float32, device=q_MJX.device)
    if scores_MS.numel():
        _scores[(tokens, triton.cdiv(longest, _KEYS))](
            q_MJX.contiguous(), keys_PSX.contiguous(), w_MJ.float().contiguous(), slots_M.long().contiguous(), table_UZ,
            starts_M, lengths_M, scores_MS, scale, heads, longest, table_UZ.shape[1], keys_PSX.shape[1], X=size,
            PX=max(16, triton.next_power_of_2(size)), H=16, N=_KEYS)
    return scores_MS


@triton.jit
def _listed_scores(
    q,
    k,
    w,
    base,
    lists,
    counts,
    dscores,
    out,
    slopes,
    dq,
    dw,
    scale,
    heads,
    width,
    X: tl.constexpr,
    PX: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Scores of the listed keys of one query or, BACKWARD, the slopes [M, width, heads], dq and dw."""
    m, head = tl.program_id(0).to(tl.int64), tl.arange(0, H)
    d, n = tl.arange(0, PX), tl.arange(0, N)
    real = head < heads
    at_query = (m * heads + head)[:, None] * X + d[None, :]
    query = tl.load(q + at_query, mask=real[:, None] & (d < X)[None, :], other=0.0).to(tl.float32)
    weight = tl.load(w + m * heads + head, mask=real, other=0.0).to(tl.float32)
    count, start = tl.load(counts + m), tl.load(base + m)
    dquery, dweight = tl.zeros([H, PX], tl.float32), tl.zeros([H], tl.float32)
    for first in range(0, count, N):
        listed = first + n < count
        entry = start + tl.load(lists + m * width + first + n, mask=listed, other=0).to(tl.int64)
        keys = tl.load(k + entry[:, None] * X + d[None, :], mask=listed[:, None] & (d < X)[None, :], other=0.0).to(
            tl.float32
        )
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if BACKWARD:
            g = tl.load(dscores + m * width + first + n, mask=listed, other=0.0)
            dweight += tl.sum(g[None, :] * tl.where(logits > 0.0, logits, 0.0), 1)
            slope = tl.where(logits > 0.0, g[None, :] * weight[:, None] * scale, 0.0)
            dquery += tl.dot(slope, keys, input_precision="ieee")
            place = (m * width + first + n)[None, :] * heads + head[:, None]
            tl.store(slopes + place, slope, mask=listed[None, :] & real[:, None])
        else:
            total = tl.sum(weight[:, None] * tl.where(logits < 0.0, 0.0, logits), 0)
            tl.store(out + m * width + first + n, total, mask=listed)
    if BACKWARD:
        tl.store(dq + at_query, dquery, mask=real[:, None] & (d < X)[None, :])
        tl.store(dw + m * heads + head, dweight, mask=real)


class _SparseScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, positions_BTK: Tensor) -> Tensor:
        batches, queries, heads, size = q_BTJX.shape
        q_MJX, w_MJ = q_BTJX.reshape(-1, heads, size).contiguous(), w_BTJ.reshape(-1, heads).contiguous()
        keys_SX, lists_MK = (
            k_BSX.reshape(-1, size).contiguous(),
            positions_BTK.to(torch.int32).flatten(0, 1).contiguous(),
        )
        base_M = (torch.arange(batches, device=q_BTJX.device) * k_BSX.shape[1]).repeat_interleave(queries)
        scores_MK = torch.zeros(lists_MK.shape, dtype=torch.float32, device=q_BTJX.device)
        ctx.save_for_backward(q_MJX, keys_SX, w_MJ, base_M, lists_MK)
        ctx.scale, ctx.shapes = scale, (q_BTJX.shape, k_BSX.shape, w_BTJ.shape)
        _run_listed(q_MJX, keys_SX, w_MJ, base_M, lists_MK, scale, scores_MK, None)
        return scores_MK.view(positions_BTK.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores_BTK: Tensor) -> tuple[Tensor | None, ...]:
        q_MJX, keys_SX, w_MJ, base_M, lists_MK = ctx.saved_tensors
        slopes_MKJ = torch.empty(*lists_MK.shape, q_MJX.shape[1], dtype=torch.float32, device=q_MJX.device)
        dq, dw = torch.zeros_like(q_MJX, dtype=torch.float32), torch.zeros_like(w_MJ, dtype=torch.float32)
        _run_listed(
            q_MJX, keys_SX, w_MJ, base_M, lists_MK, ctx.scale, None, (dscores_BTK.contiguous(), slopes_MKJ, dq, dw)
        )
        dk = torch.zeros(keys_SX.shape, dtype=torch.float32, device=q_MJX.device)
        gather_keys(base_M, lists_MK, keys_SX.shape[0], slopes_MKJ, q_MJX, dk)
        gradients = zip((dq, dk, dw), (q_MJX, keys_SX, w_MJ), ctx.shapes, strict=True)
        return *(gradient.to(x.dtype).view(shape) for gradient, x, shape in gradients), None, None


def _run_listed(
    q_MJX: Tensor,
    keys_SX: Tensor,
    w_MJ: Tensor,
    base_M: Tensor,
    lists_MK: Tensor,
    scale: float,
    scores_MK: Tensor | None,
    backward: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    tokens, heads, size = q_MJX.shape
    dscores, slopes, dq, dw = backward or (q_MJX, q_MJX, q_MJX, q_MJX)
    if tokens:
        _listed_scores[(tokens,)](
            q_MJX,
            keys_SX,
            w_MJ,
            base_M,
            lists_MK,
            list_counts(lists_MK),
            dscores,
            q_MJX if scores_MK is None else scores_MK,
            slopes,
            dq,
            dw,
            scale,
            heads,
            lists_MK.shape[1],
            X=size,
            PX=max(16, triton.next_power_of_2(size)),
            H=max(16, triton.next_power_of_2(heads)),
            N=32,
            BACKWARD=backward is not None,
        )


def sparse_scores(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, positions_BTK: Tensor) -> Tensor:
    """See ``reference.sparse_scores``."""
    return _SparseScores.apply(q_BTJX, k_BSX, w_BTJ, scale, positions_BTK)


@triton.jit
def _kl(scores, target, mask, losses, slope, share, width, BLOCK: tl.constexpr):
    row, s = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    valid = tl.load(mask + row * width + s, mask=s < width, other=0) != 0
    x = tl.where(valid, tl.load(scores + row * width + s, mask=s < width, other=0.0).to(tl.float32), -float("inf"))
    t = tl.where(valid, tl.load(target + row * width + s, mask=s < width, other=0.0), 0.0)
    some = tl.sum(valid.to(tl.int32), 0) > 0
    peak = tl.where(some, tl.max(x, 0), 0.0)
    p = tl.where(valid, tl.exp(x - peak), 0.0)
    total = tl.where(some, tl.sum(p, 0), 1.0)
    log_p = tl.where(valid, x - peak - tl.log(total), 0.0)
    loss = tl.sum(tl.where(t > 0.0, t * (tl.log(tl.where(t > 0.0, t, 1.0)) - log_p), 0.0), 0)
    tl.store(losses + row, loss)
    tl.store(slope + row * width + s, tl.where(valid, (p / total - t) * tl.load(share), 0.0), mask=s < width)


class _IndexerKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_BTS: Tensor, target_BTS: Tensor, mask_BTS: Tensor) -> Tensor:
        mask_BTS = mask_BTS.expand(scores_BTS.shape).contiguous()
        losses_BT = torch.empty(scores_BTS.shape[:2], dtype=torch.float32, device=scores_BTS.device)
        slope_BTS = torch.empty(scores_BTS.shape, dtype=torch.float32, device=scores_BTS.device)
        share = 1.0 / mask_BTS.any(-1).sum().clamp_min(1).float()
        if scores_BTS.numel():
            _kl[(losses_BT.numel(),)](
                scores_BTS.contiguous(),
                target_BTS.float().contiguous(),
                mask_BTS.view(torch.uint8),
                losses_BT,
                slope_BTS,
                share,
                scores_BTS.shape[-1],
                BLOCK=triton.next_power_of_2(scores_BTS.shape[-1]),
            )
        ctx.save_for_backward(slope_BTS)
        ctx.type = scores_BTS.dtype
        return losses_BT.sum() * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.saved_tensors[0] * dloss).to(ctx.type), None, None


def indexer_kl(scores_BTS: Tensor, target_BTS: Tensor, mask_BTS: Tensor) -> Tensor:
    """See ``reference.indexer_kl``."""
    return _IndexerKl.apply(scores_BTS, target_BTS, mask_BTS)
