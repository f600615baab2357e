"""Sparse absorbed attention over listed keys in Triton, with its gradients. Letters as in ``reference``.

A forward program takes one query and a group of heads and walks its list of keys once (online softmax). A backward pass
has two kernels: one program per query for the slopes and dq, then one per key, which walks the queries that list it in
ascending order; so every sum has one order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_KEYS = 32
"""Keys of one step of the softmax; ``tl.dot`` needs at least 16."""


@triton.jit
def _attention(
    q,
    latent,
    base,
    lists,
    counts,
    out,
    log_sums,
    scale,
    heads,
    width,
    K: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    PK: tl.constexpr,
    PC: tl.constexpr,
    N: tl.constexpr,
):
    """out[m] for H heads: q [M, heads, K]; entry i of query m lies at latent + (base[m] + list[m, i]) * K."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * H + tl.arange(0, H)
    d, c, n = tl.arange(0, PK), tl.arange(0, PC), tl.arange(0, N)
    row = m * heads + head
    query = tl.load(q + row[:, None] * K + d[None, :], mask=(head < heads)[:, None] & (d < K)[None, :], other=0.0)
    count, start = tl.load(counts + m), tl.load(base + m)
    peak, total = tl.full([H], -float("inf"), tl.float32), tl.zeros([H], tl.float32)
    sums = tl.zeros([H, PC], tl.float32)
    for first in range(0, count, N):
        listed = first + n < count
        entry = start + tl.load(lists + m * width + first + n, mask=listed, other=0).to(tl.int64)
        keys = tl.load(latent + entry[:, None] * K + d[None, :], mask=listed[:, None] & (d < K)[None, :], other=0.0)
        logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale
        logits = tl.where(listed[None, :], logits, -float("inf"))
        best = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.exp(logits - best[:, None])
        keep = tl.exp(peak - best)
        values = tl.load(latent + entry[:, None] * K + c[None, :], mask=listed[:, None] & (c < C)[None, :], other=0.0)
        sums = sums * keep[:, None] + tl.dot(weights.to(query.dtype), values.to(query.dtype), input_precision="ieee")
        total = total * keep + tl.sum(weights, 1)
        peak = best
    result = tl.where(count > 0, sums / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
    tl.store(
        out + row[:, None] * C + c[None, :],
        result.to(out.dtype.element_ty),
        mask=(head < heads)[:, None] & (c < C)[None, :],
    )
    tl.store(
        log_sums + row, tl.where(count > 0, peak + tl.log(tl.where(total == 0.0, 1.0, total)), 0.0), mask=head < heads
    )


@triton.jit
def _slopes(
    q,
    latent,
    base,
    lists,
    counts,
    dout,
    delta,
    log_sums,
    weights,
    slopes,
    dq,
    scale,
    heads,
    width,
    K: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    PK: tl.constexpr,
    PC: tl.constexpr,
    N: tl.constexpr,
):
    """Attention weights and logit slopes [M, width, heads] of every listed key, and dq."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * H + tl.arange(0, H)
    d, c, n = tl.arange(0, PK), tl.arange(0, PC), tl.arange(0, N)
    row, real = m * heads + head, head < heads
    query = tl.load(q + row[:, None] * K + d[None, :], mask=real[:, None] & (d < K)[None, :], other=0.0)
    slope = tl.load(dout + row[:, None] * C + c[None, :], mask=real[:, None] & (c < C)[None, :], other=0.0)
    shift, log_sum = tl.load(delta + row, mask=real, other=0.0), tl.load(log_sums + row, mask=real, other=0.0)
    count, start = tl.load(counts + m), tl.load(base + m)
    total = tl.zeros([H, PK], tl.float32)
    for first in range(0, count, N):
        listed = first + n < count
        entry = start + tl.load(lists + m * width + first + n, mask=listed, other=0).to(tl.int64)
        keys = tl.load(latent + entry[:, None] * K + d[None, :], mask=listed[:, None] & (d < K)[None, :], other=0.0)
        values = tl.load(latent + entry[:, None] * K + c[None, :], mask=listed[:, None] & (c < C)[None, :], other=0.0)
        logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale
        weight = tl.where(listed[None, :], tl.exp(logits - log_sum[:, None]), 0.0)
        products = tl.dot(slope.to(query.dtype), tl.trans(values.to(query.dtype)), input_precision="ieee")
        ds = weight * (products - shift[:, None]) * scale
        total += tl.dot(ds.to(query.dtype), keys.to(query.dtype), input_precision="ieee")
        place = (m * width + first + n)[None, :] * heads + head[:, None]
        tl.store(weights + place, weight, mask=listed[None, :] & real[:, None])
        tl.store(slopes + place, ds, mask=listed[None, :] & real[:, None])
    tl.store(dq + row[:, None] * K + d[None, :], total.to(dq.dtype.element_ty), mask=real[:, None] & (d < K)[None, :])


@triton.jit
def _gather_keys(
    first,
    queries,
    places,
    factors,
    rows,
    dkeys,
    heads,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
):
    """dkeys[s] += sum over the queries that list s, in order, of factors[place] . rows[query]; one program per key."""
    s, h, d = tl.program_id(0).to(tl.int64), tl.arange(0, H), tl.arange(0, P)
    total = tl.load(dkeys + s * STRIDE + d, mask=d < SIZE, other=0.0)
    for i in range(tl.load(first + s), tl.load(first + s + 1)):
        query, place = tl.load(queries + i), tl.load(places + i)
        factor = tl.load(factors + place * heads + h, mask=h < heads, other=0.0)
        row = tl.load(
            rows + (query * heads + h)[:, None] * SIZE + d[None, :],
            mask=(h < heads)[:, None] & (d < SIZE)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(factor[:, None] * row, 0)
    tl.store(dkeys + s * STRIDE + d, total, mask=d < SIZE)


def gather_keys(
    base_M: Tensor, lists_MK: Tensor, keys: int, factors_MKH: Tensor, rows_MHD: Tensor, dkeys_SD: Tensor
) -> None:
    """Add to every key (row of ``dkeys_SD``) what the queries that list it give it: ``factors[m, i] . rows[m]``."""
    query_L, column_L = (lists_MK >= 0).nonzero(as_tuple=True)
    entry_L = base_M[query_L] + lists_MK[query_L, column_L].long()
    order_L = entry_L.argsort(stable=True)  # ascending keys; equal keys stay in the order of the queries
    first = torch.zeros(keys + 1, dtype=torch.int64, device=lists_MK.device)
    first[1:] = entry_L.bincount(minlength=keys).cumsum(0)
    places_L = (query_L * lists_MK.shape[1] + column_L)[order_L].contiguous()
    heads, size = rows_MHD.shape[1:]
    if keys:
        _gather_keys[(keys,)](
            first,
            query_L[order_L].contiguous(),
            places_L,
            factors_MKH,
            rows_MHD.contiguous(),
            dkeys_SD,
            heads,
            SIZE=size,
            STRIDE=dkeys_SD.shape[1],
            H=triton.next_power_of_2(heads),
            P=triton.next_power_of_2(size),
        )


def list_counts(lists_MK: Tensor) -> Tensor:
    """Listed keys of every row."""
    return (lists_MK >= 0).sum(-1).to(torch.int32)


def _sizes(heads: int, key: int, value: int) -> dict[str, int]:
    return {
        "K": key,
        "C": value,
        "H": max(16, min(64, triton.next_power_of_2(heads))),
        "N": _KEYS,
        "PK": max(16, triton.next_power_of_2(key)),
        "PC": max(16, triton.next_power_of_2(value)),
    }


def _attend(
    q_MHK: Tensor, entries_SK: Tensor, base_M: Tensor, lists_MK: Tensor, counts_M: Tensor, scale: float, value: int
) -> tuple[Tensor, Tensor]:
    tokens, heads, key = q_MHK.shape
    out_MHC = torch.empty(tokens, heads, value, dtype=q_MHK.dtype, device=q_MHK.device)
    log_sums_MH = torch.empty(tokens, heads, dtype=torch.float32, device=q_MHK.device)
    sizes = _sizes(heads, key, value)
    if tokens:
        _attention[(tokens, triton.cdiv(heads, sizes["H"]))](
            q_MHK,
            entries_SK,
            base_M,
            lists_MK,
            counts_M,
            out_MHC,
            log_sums_MH,
            scale,
            heads,
            lists_MK.shape[1],
            **sizes,
        )
    return out_MHC, log_sums_MH


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BTHK: Tensor, latent_BSK: Tensor, positions_BTK: Tensor, scale: float, value: int
    ) -> Tensor:
        batches, queries, heads, key = q_BTHK.shape
        q_MHK, entries_SK = q_BTHK.reshape(-1, heads, key).contiguous(), latent_BSK.reshape(-1, key).contiguous()
        lists_MK = positions_BTK.to(torch.int32).flatten(0, 1).contiguous()
        base_M = (torch.arange(batches, device=q_BTHK.device) * latent_BSK.shape[1]).repeat_interleave(queries)
        out_MHC, log_sums_MH = _attend(q_MHK, entries_SK, base_M, lists_MK, list_counts(lists_MK), scale, value)
        ctx.save_for_backward(q_MHK, entries_SK, base_M, lists_MK, out_MHC, log_sums_MH)
        ctx.scale, ctx.shapes = scale, (q_BTHK.shape, latent_BSK.shape)
        return out_MHC.view(batches, queries, heads, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BTHC: Tensor) -> tuple[Tensor | None, ...]:
        q_MHK, entries_SK, base_M, lists_MK, out_MHC, log_sums_MH = ctx.saved_tensors
        dout_MHC = dout_BTHC.reshape(out_MHC.shape).contiguous()
        (tokens, heads, key), value = q_MHK.shape, out_MHC.shape[2]
        delta_MH = (dout_MHC.float() * out_MHC.float()).sum(-1)
        weights_MKH = torch.empty(*lists_MK.shape, heads, dtype=torch.float32, device=q_MHK.device)
        slopes_MKH, dq_MHK = torch.empty_like(weights_MKH), torch.empty_like(q_MHK)
        sizes = _sizes(heads, key, value)
        if tokens:
            _slopes[(tokens, triton.cdiv(heads, sizes["H"]))](
                q_MHK,
                entries_SK,
                base_M,
                lists_MK,
                list_counts(lists_MK),
                dout_MHC,
                delta_MH,
                log_sums_MH,
                weights_MKH,
                slopes_MKH,
                dq_MHK,
                ctx.scale,
                heads,
                lists_MK.shape[1],
                **sizes,
            )
        dlatent_SK = torch.zeros(entries_SK.shape, dtype=torch.float32, device=q_MHK.device)
        gather_keys(base_M, lists_MK, entries_SK.shape[0], slopes_MKH, q_MHK, dlatent_SK)
        gather_keys(base_M, lists_MK, entries_SK.shape[0], weights_MKH, dout_MHC, dlatent_SK)
        q_shape, latent_shape = ctx.shapes
        return dq_MHK.view(q_shape), dlatent_SK.to(entries_SK.dtype).view(latent_shape), None, None, None


def sparse_attention(
    q_BTHK: Tensor, latent_BSK: Tensor, positions_BTK: Tensor, scale: float, kv_lora_rank: int
) -> Tensor:
    """See ``reference.sparse_attention``."""
    return _SparseAttention.apply(q_BTHK, latent_BSK, positions_BTK, scale, kv_lora_rank)


def ragged_attention(q_MHK: Tensor, latent_PSK: Tensor, slots_M: Tensor, lengths_M: Tensor, positions_MK: Tensor | None,
                     scale: float, kv_lora_rank: int, table_UZ: Tensor | None = None) -> Tensor:
    """See ``reference.ragged_attention``."""
    if positions_MK is None:
        longest = int(lengths_M.max()) if lengths_M.numel() else 0
        positions_MK = torch.arange(longest, device=q_MHK.device).expand(slots_M.numel(), -1)
        positions_MK = positions_MK.masked_fill(positions_MK >= lengths_M[:, None], -1)
    size = latent_PSK.shape[1]
    numbers_MK = positions_MK.long().clamp_min(0) // size
    rows_MK = block_table(latent_PSK, table_UZ)[slots_M.long()].gather(1, numbers_MK) * size + positions_MK % size
    lists_MK = rows_MK.where(positions_MK >= 0, -1).to(torch.int32).contiguous()
    entries_SK = latent_PSK.flatten(0, 1).to(q_MHK.dtype)
    with torch.no_grad():
        return _attend(q_MHK.contiguous(), entries_SK, torch.zeros_like(slots_M).long(), lists_MK,
                       list_counts(lists_MK), scale, kv_lora_rank)[0]


def block_table(cache: Tensor, table_UZ: Tensor | None) -> Tensor:
    """``table_UZ`` as contiguous int32; without one slot p is block p."""
    if table_UZ is None:
        return torch.arange(cache.shape[0], dtype=torch.int32, device=cache.device).unsqueeze(1)
    return table_UZ.to(torch.int32).contiguous()


@triton.jit
def _targets(
    q,
    latent,
    base,
    lists,
    counts,
    log_sums,
    target,
    scale,
    heads,
    width,
    K: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    PK: tl.constexpr,
    PC: tl.constexpr,
    N: tl.constexpr,
):
    """target[m, i]: mean over the heads of the attention weight of its i-th listed key; one program per N keys."""
    m, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * N
    d, n = tl.arange(0, PK), tl.arange(0, N)
    listed = first + n < tl.load(counts + m)
    entry = tl.load(base + m) + tl.load(lists + m * width + first + n, mask=listed, other=0).to(tl.int64)
    keys = tl.load(latent + entry[:, None] * K + d[None, :], mask=listed[:, None] & (d < K)[None, :], other=0.0)
    total = tl.zeros([N], tl.float32)
    for group in range(0, heads, H):
        head = group + tl.arange(0, H)
        row = m * heads + head
        query = tl.load(q + row[:, None] * K + d[None, :], mask=(head < heads)[:, None] & (d < K)[None, :], other=0.0)
        logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale
        log_sum = tl.load(log_sums + row, mask=head < heads, other=float("inf"))
        total += tl.sum(tl.exp(logits - log_sum[:, None]), 0)
    tl.store(target + m * width + first + n, tl.where(listed, total / heads, 0.0), mask=first + n < width)


def sparse_targets(q_BTHK: Tensor, latent_BSK: Tensor, positions_BTK: Tensor, scale: float) -> Tensor:
    """See ``reference.sparse_targets``."""
    batches, queries, heads, key = q_BTHK.shape
    q_MHK, entries_SK = (
        q_BTHK.detach().reshape(-1, heads, key).contiguous(),
        latent_BSK.detach().reshape(-1, key).contiguous(),
    )
    lists_MK = positions_BTK.to(torch.int32).flatten(0, 1).contiguous()
    base_M = (torch.arange(batches, device=q_BTHK.device) * latent_BSK.shape[1]).repeat_interleave(queries)
    counts_M, target_MK = list_counts(lists_MK), torch.empty(lists_MK.shape, dtype=torch.float32, device=q_BTHK.device)
    _, log_sums_MH = _attend(q_MHK, entries_SK, base_M, lists_MK, counts_M, scale, key)
    if lists_MK.numel():
        _targets[(lists_MK.shape[0], triton.cdiv(lists_MK.shape[1], _KEYS))](
            q_MHK,
            entries_SK,
            base_M,
            lists_MK,
            counts_M,
            log_sums_MH,
            target_MK,
            scale,
            heads,
            lists_MK.shape[1],
            **_sizes(heads, key, key),
        )
    return target_MK.view(positions_BTK.shape)
