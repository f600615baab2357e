"""Native operations over listed keys (fp32): what sparse attention trains with, none of size [T, S].

``positions_BTK`` is int32 or int64, ascending, padded with -1 at the end of a row. Every batch entry is a slot of one
block of a cache. Letters as in ``reference``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.errors import KernelError
from glm5.kernels.cpu.library import native


class SparseAttention(torch.autograd.Function):
    """``apply(q_BTHK, latent_BSK, positions_BTK, scale, kv_lora_rank)``"""

    @staticmethod
    def forward(ctx: Any, q_BTHK: Tensor, latent_BSK: Tensor, positions_BTK: Tensor, scale: float,
                kv_lora_rank: int) -> Tensor:
        q, latent, positions = q_BTHK.contiguous(), latent_BSK.contiguous(), listed(positions_BTK, latent_BSK.shape[1])
        batches, queries, heads = q.shape[:3]
        slots_M, table_U1 = _slots(batches, queries)
        lengths_M = torch.full_like(slots_M, latent.shape[1])
        out_BTHC = torch.empty(batches, queries, heads, kv_lora_rank)
        log_sums_BTH = torch.empty(batches, queries, heads)
        native()["ragged_attention"](
            False, q.data_ptr(), heads, latent.data_ptr(), *latent.shape, kv_lora_rank, table_U1.data_ptr(), batches, 1,
            slots_M.data_ptr(), lengths_M.data_ptr(), slots_M.numel(), positions.data_ptr(), positions.shape[2], scale,
            out_BTHC.data_ptr(), log_sums_BTH.data_ptr(), torch.get_num_threads())
        ctx.save_for_backward(q, latent, positions, out_BTHC, log_sums_BTH)
        ctx.scale = scale
        return out_BTHC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BTHC: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, positions, out_BTHC, log_sums_BTH = ctx.saved_tensors
        dout_BTHC = dout_BTHC.contiguous()
        dq, dlatent = torch.empty_like(q), torch.empty_like(latent)
        batches, queries, heads, dim = q.shape
        native()["sparse_attention_backward"](
            q.data_ptr(), latent.data_ptr(), positions.data_ptr(), batches, queries, latent.shape[1], heads, dim,
            out_BTHC.shape[3], positions.shape[2], ctx.scale, out_BTHC.data_ptr(), log_sums_BTH.data_ptr(),
            dout_BTHC.data_ptr(), dq.data_ptr(), dlatent.data_ptr(), torch.get_num_threads())
        return dq, dlatent, None, None, None


class SparseScores(torch.autograd.Function):
    """``apply(q_BTJX, k_BSX, w_BTJ, scale, positions_BTK)``"""

    @staticmethod
    def forward(ctx: Any, q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, positions_BTK: Tensor) -> Tensor:
        q, k, w = q_BTJX.contiguous(), k_BSX.contiguous(), w_BTJ.contiguous()
        positions = listed(positions_BTK, k.shape[1])
        scores_BTK = torch.empty(positions.shape)
        ctx.save_for_backward(q, k, w, positions)
        ctx.sizes, ctx.scale = _sizes(q, k, positions), scale
        native()["sparse_scores"](q.data_ptr(), k.data_ptr(), w.data_ptr(), positions.data_ptr(), *ctx.sizes, scale,
                                  scores_BTK.data_ptr(), torch.get_num_threads())
        return scores_BTK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores_BTK: Tensor) -> tuple[Tensor | None, ...]:
        q, k, w, positions = ctx.saved_tensors
        dscores_BTK = dscores_BTK.contiguous()
        dq, dk, dw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)
        native()["sparse_scores_backward"](q.data_ptr(), k.data_ptr(), w.data_ptr(), positions.data_ptr(), *ctx.sizes,
                                           ctx.scale, dscores_BTK.data_ptr(), dq.data_ptr(), dk.data_ptr(),
                                           dw.data_ptr(), torch.get_num_threads())
        return dq, dk, dw, None, None


def select_positions(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, first_BT: Tensor, last_BT: Tensor,
                     k: int) -> Tensor:
    """``reference.select_positions`` in fp32 with 0 < k; no gradient. Raises KernelError for keys that do not exist."""
    q, keys, w = (q_BTJX.detach() * scale).contiguous(), k_BSX.detach().contiguous(), w_BTJ.detach().contiguous()
    batches, queries, heads, _ = q.shape
    first, last = (bound.long().expand(batches, queries) for bound in (first_BT, last_BT))
    first, last = first.contiguous(), torch.maximum(first, last)
    slots_M, table_U1 = _slots(batches, queries)
    positions_BTK = torch.empty((batches, queries, k), dtype=torch.int32)
    outside = native()["ragged_select"](
        False, q.data_ptr(), w.data_ptr(), heads, keys.data_ptr(), *keys.shape, table_U1.data_ptr(), batches, 1,
        slots_M.data_ptr(), first.data_ptr(), last.data_ptr(), slots_M.numel(), k, positions_BTK.data_ptr(),
        torch.get_num_threads())
    if outside:
        row, query = divmod(outside - 1, queries)
        raise KernelError(f"selection: query {query} of row {row} sees the keys {int(first[row, query])} to "
                          f"{int(last[row, query])}; there are {keys.shape[1]}; check the packing")
    return positions_BTK


def sparse_targets(q_BTHK: Tensor, latent_BSK: Tensor, positions_BTK: Tensor, scale: float) -> Tensor:
    """``reference.sparse_targets`` in fp32; no gradient."""
    q, latent = q_BTHK.detach().contiguous(), latent_BSK.detach().contiguous()
    positions = listed(positions_BTK, latent.shape[1])
    target_BTK = torch.empty(positions.shape)
    native()["sparse_targets"](q.data_ptr(), latent.data_ptr(), positions.data_ptr(), *_sizes(q, latent, positions),
                               scale, target_BTK.data_ptr(), torch.get_num_threads())
    return target_BTK


def listed(positions_BTK: Tensor, keys: int) -> Tensor:
    """The list as contiguous int32. Raises KernelError when it names a key that does not exist."""
    if positions_BTK.numel() and not -1 <= int(positions_BTK.min()) <= int(positions_BTK.max()) < keys:
        raise KernelError(f"sparse attention: positions reach from {int(positions_BTK.min())} to "
                          f"{int(positions_BTK.max())}; expected -1 (none) to {keys - 1}; check the selection")
    return positions_BTK.to(torch.int32).contiguous()


def _slots(batches: int, queries: int) -> tuple[Tensor, Tensor]:
    """The slot of every query, and the block table."""
    return torch.arange(batches).repeat_interleave(queries), torch.arange(batches, dtype=torch.int32)


def _sizes(q: Tensor, keys: Tensor, positions: Tensor) -> tuple[int, ...]:
    """Batches, queries, keys, heads, dim, listed keys: in C order."""
    return q.shape[0], q.shape[1], keys.shape[1], q.shape[2], q.shape[3], positions.shape[2]
