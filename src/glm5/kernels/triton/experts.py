"""Routed experts in Triton: rows sorted by expert, one grouped product per projection. Letters as in ``reference``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.kernels.triton.rowwise import swiglu

_TILE = 32


@triton.jit
def _grouped(x, w, y, blocks, ends, inner, columns, w_expert, w_column, w_inner, T: tl.constexpr):
    """y[r] = x[r] . w[expert of r]^T for one block of rows of one expert and T columns."""
    expert, first = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    row, column, i = first + tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T), tl.arange(0, T)
    real = row < tl.load(ends + expert)
    total = tl.zeros([T, T], tl.float32)
    for start in range(0, inner, T):
        d = start + i
        a = tl.load(x + row[:, None] * inner + d[None, :], mask=real[:, None] & (d < inner)[None, :], other=0.0)
        b = tl.load(
            w + expert * w_expert + column[None, :] * w_column + d[:, None] * w_inner,
            mask=(column < columns)[None, :] & (d < inner)[:, None],
            other=0.0,
        )
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(
        y + row[:, None] * columns + column[None, :],
        total.to(y.dtype.element_ty),
        mask=real[:, None] & (column < columns)[None, :],
    )


@triton.jit
def _grouped_weights(x, dy, dw, ends, inner, columns, T: tl.constexpr):
    """dw[expert] = dy^T . x over the rows of one expert, in order; one program per tile of one expert."""
    expert = tl.program_id(0).to(tl.int64)
    column, d, i = tl.program_id(1) * T + tl.arange(0, T), tl.program_id(2) * T + tl.arange(0, T), tl.arange(0, T)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros([T, T], tl.float32)
    for start in range(begin, end, T):
        row = start + i
        a = tl.load(
            dy + row[None, :] * columns + column[:, None],
            mask=(row < end)[None, :] & (column < columns)[:, None],
            other=0.0,
        )
        b = tl.load(x + row[:, None] * inner + d[None, :], mask=(row < end)[:, None] & (d < inner)[None, :], other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(
        dw + expert * columns * inner + column[:, None] * inner + d[None, :],
        total.to(dw.dtype.element_ty),
        mask=(column < columns)[:, None] & (d < inner)[None, :],
    )


def _multiply(x_ND: Tensor, w_ECD: Tensor, blocks_B2: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of ``x_ND`` (in expert order) times the transpose of their expert's matrix -> y_NC."""
    y_NC = torch.empty(x_ND.shape[0], w_ECD.shape[1], dtype=x_ND.dtype, device=x_ND.device)
    if blocks_B2.shape[0]:
        _grouped[(blocks_B2.shape[0], triton.cdiv(w_ECD.shape[1], _TILE))](
            x_ND.contiguous(), w_ECD, y_NC, blocks_B2, ends_E, x_ND.shape[1], w_ECD.shape[1], *w_ECD.stride(), T=_TILE
        )
    return y_NC


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, w_ECD: Tensor, blocks_B2: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, w_ECD, blocks_B2, ends_E)
        return _multiply(x_ND, w_ECD, blocks_B2, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, w_ECD, blocks_B2, ends_E = ctx.saved_tensors
        dy_NC = dy_NC.contiguous()
        dw_ECD = torch.empty_like(w_ECD, memory_format=torch.contiguous_format)
        E, C, D = w_ECD.shape
        _grouped_weights[(E, triton.cdiv(C, _TILE), triton.cdiv(D, _TILE))](
            x_ND.contiguous(), dy_NC, dw_ECD, ends_E, D, C, T=_TILE
        )
        return _multiply(dy_NC, w_ECD.transpose(1, 2), blocks_B2, ends_E), dw_ECD, None, None


def experts(x_MD: Tensor, expert_ids_MA: Tensor, weights_MA: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
    """See ``reference.experts``."""
    M, A = expert_ids_MA.shape
    order_N = expert_ids_MA.flatten().argsort(stable=True)
    counts_E = expert_ids_MA.flatten().bincount(minlength=gate_up_EGD.shape[0])
    ends_E = counts_E.cumsum(0)
    per_expert_E = (counts_E + _TILE - 1) // _TILE
    expert_B = torch.arange(counts_E.numel(), device=x_MD.device).repeat_interleave(per_expert_E)
    number_B = torch.arange(expert_B.numel(), device=x_MD.device) - (per_expert_E.cumsum(0) - per_expert_E)[expert_B]
    blocks_B2 = torch.stack([expert_B, (ends_E - counts_E)[expert_B] + number_B * _TILE], dim=1).contiguous()
    gate_up_NG = _GroupedProduct.apply(x_MD[order_N // A], gate_up_EGD, blocks_B2, ends_E)
    y_ND = _GroupedProduct.apply(swiglu(gate_up_NG), down_EDF, blocks_B2, ends_E)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(M * A, device=order_N.device))
    return (y_ND[place_N].view(M, A, -1) * weights_MA.float().unsqueeze(-1)).sum(1).to(x_MD.dtype)
