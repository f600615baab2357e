"""Exchanges between processes that gradients pass through. Every process of a group must call them in the same order.

Letters: B batch rows, T tokens of a row, t local tokens, N rows of any matrix, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def sum_gradients(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` itself, held alike by all processes; its gradient is the sum of theirs."""
    same: Tensor = _SumGradients.apply(x, group)
    return same


def sum_outputs(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of ``x`` over the processes, all of which go on alike with it; the gradient passes unchanged."""
    total: Tensor = _SumOutputs.apply(x, group)
    return total


def gather_tokens(x_Bt: Tensor, group: dist.ProcessGroup, order: Tensor) -> Tensor:
    """Whole rows [B, T, ...] from the local tokens [B, t, ...] of each process; gradients are summed and scattered.

    ``order`` [T] says where, among the local tokens of all processes one after the other, each token of a row is.
    """
    x_BT: Tensor = _GatherTokens.apply(x_Bt, group, order)
    return x_BT


def exchange_rows(x_ND: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``sent[p]`` rows to process p, in order, and give the ``received[p]`` rows of each process p, in order.

    Counts may be zero. Gradients travel back the same way.
    """
    y_ND: Tensor = _ExchangeRows.apply(x_ND, list(sent), list(received), group)
    return y_ND


def all_to_all(x_N: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """``exchange_rows`` without a gradient."""
    y_N = x_N.new_empty(sum(received), *x_N.shape[1:])
    dist.all_to_all_single(y_N, x_N.contiguous(), received, sent, group=group)
    return y_N


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Bt: Tensor, group: dist.ProcessGroup, order: Tensor) -> Tensor:
        ctx.group, ctx.order = group, order
        parts = [torch.empty_like(x_Bt, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x_Bt.contiguous(), group=group)
        return torch.cat(parts, dim=1)[:, order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None, None]:
        by_process_BT = torch.empty_like(grad_BT, memory_format=torch.contiguous_format)
        by_process_BT[:, ctx.order] = grad_BT
        parts = [part.contiguous() for part in by_process_BT.chunk(ctx.group.size(), dim=1)]
        grad_Bt = torch.empty_like(parts[0])
        dist.reduce_scatter(grad_Bt, parts, group=ctx.group)
        return grad_Bt, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all(x_ND, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad_ND, ctx.received, ctx.sent, ctx.group), None, None, None
