"""Native operations with gradients (fp32), as autograd functions around the C functions. Letters as in ``reference``.

Every backward is first order: it returns tensors without a graph. Gradients do not depend on the thread count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.kernels.cpu.inference import as_rows, pair_strides, raise_bad_expert, rope_rows
from glm5.kernels.cpu.library import native


class RmsNorm(torch.autograd.Function):
    """``apply(x, weight, eps)``"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows_MD = as_rows(x)
        y, inverse_M = torch.empty(x.shape), torch.empty(rows_MD.shape[0])
        native()["rms_norm"](rows_MD.data_ptr(), rows_MD.stride(0), weight.data_ptr(), eps, *rows_MD.shape,
                             y.data_ptr(), inverse_M.data_ptr(), torch.get_num_threads())
        ctx.save_for_backward(rows_MD, weight, inverse_M)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, weight, inverse_M = ctx.saved_tensors
        dx, dweight, dy = torch.empty(dy.shape), torch.empty(weight.shape), dy.contiguous()
        native()["rms_norm_backward"](rows_MD.data_ptr(), rows_MD.stride(0), weight.data_ptr(), inverse_M.data_ptr(),
                                      dy.data_ptr(), *rows_MD.shape, dx.data_ptr(), dweight.data_ptr(),
                                      torch.get_num_threads())
        return dx, dweight, None


class Rope(torch.autograd.Function):
    """``apply(x_BTHR, cos_BTR2, sin_BTR2, interleaved)``; the angles get no gradient."""

    @staticmethod
    def forward(ctx: Any, x_BTHR: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor, interleaved: bool) -> Tensor:
        x_MHR, cos_M2, sin_M2 = rope_rows(x_BTHR, cos_BTR2, sin_BTR2)
        tokens, heads, size = x_MHR.shape
        ctx.save_for_backward(cos_M2, sin_M2)
        ctx.sizes, ctx.strides = (tokens, heads, size // 2), pair_strides(size, interleaved)
        y = torch.empty(x_BTHR.shape)
        native()["rope"](x_MHR.data_ptr(), x_MHR.stride(0), x_MHR.stride(1), *ctx.strides, cos_M2.data_ptr(),
                         sin_M2.data_ptr(), size // 2, *ctx.sizes, y.data_ptr(), torch.get_num_threads())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos_M2, sin_M2 = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty(dy.shape)
        native()["rope_backward"](dy.data_ptr(), cos_M2.data_ptr(), sin_M2.data_ptr(), cos_M2.shape[1], *ctx.sizes,
                                  *ctx.strides, dx.data_ptr(), torch.get_num_threads())
        return dx, None, None, None


class Swiglu(torch.autograd.Function):
    """``apply(gate_up)``"""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        y = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        ctx.save_for_backward(gate_up)
        native()["swiglu"](gate_up.data_ptr(), gate_up.shape[:-1].numel(), y.shape[-1], y.data_ptr(),
                           torch.get_num_threads())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        gate_up, = ctx.saved_tensors
        dgate_up, dy = torch.empty_like(gate_up), dy.contiguous()
        native()["swiglu_backward"](gate_up.data_ptr(), dy.data_ptr(), dy.shape[:-1].numel(), dy.shape[-1],
                                    dgate_up.data_ptr(), torch.get_num_threads())
        return dgate_up


class Experts(torch.autograd.Function):
    """``apply(x_MD, expert_ids_MA, weights_MA, gate_up_EGD, down_EDF)``"""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, expert_ids_MA: Tensor, weights_MA: Tensor, gate_up_EGD: Tensor,
                down_EDF: Tensor) -> Tensor:
        x_MD, ids_MA, weights_MA = as_rows(x_MD), expert_ids_MA.long().contiguous(), weights_MA.contiguous()
        gate_up_EGD, down_EDF = gate_up_EGD.contiguous(), down_EDF.contiguous()
        pre_NG, y_MD = torch.empty((ids_MA.numel(), gate_up_EGD.shape[1])), torch.empty(x_MD.shape)
        failed = native()["experts"](x_MD.data_ptr(), x_MD.stride(0), ids_MA.data_ptr(), weights_MA.data_ptr(),
                                     gate_up_EGD.data_ptr(), down_EDF.data_ptr(), *ids_MA.shape, *down_EDF.shape,
                                     pre_NG.data_ptr(), y_MD.data_ptr(), torch.get_num_threads())
        if failed:
            raise_bad_expert(ids_MA, down_EDF.shape[0])
        ctx.save_for_backward(x_MD, ids_MA, weights_MA, gate_up_EGD, down_EDF, pre_NG)
        return y_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, ids_MA, weights_MA, gate_up_EGD, down_EDF, pre_NG = ctx.saved_tensors
        dy_MD, dx_MD, dweights_MA = dy_MD.contiguous(), torch.empty(x_MD.shape), torch.empty(weights_MA.shape)
        dgate_up_EGD, ddown_EDF = torch.empty(gate_up_EGD.shape), torch.empty(down_EDF.shape)
        native()["experts_backward"](x_MD.data_ptr(), x_MD.stride(0), ids_MA.data_ptr(), weights_MA.data_ptr(),
                                     gate_up_EGD.data_ptr(), down_EDF.data_ptr(), pre_NG.data_ptr(), dy_MD.data_ptr(),
                                     *ids_MA.shape, *down_EDF.shape, dx_MD.data_ptr(), dweights_MA.data_ptr(),
                                     dgate_up_EGD.data_ptr(), ddown_EDF.data_ptr(), torch.get_num_threads())
        return dx_MD, None, dweights_MA, dgate_up_EGD, ddown_EDF


class IndexScores(torch.autograd.Function):
    """``apply(q_BTJX, k_BSX, w_BTJ, scale, valid_BTS)``"""

    @staticmethod
    def forward(ctx: Any, q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, valid_BTS: Tensor) -> Tensor:
        q_BTJX, k_BSX, w_BTJ, valid_BTS = q_BTJX.contiguous(), k_BSX.contiguous(), w_BTJ.contiguous(), _mask(valid_BTS)
        batches, queries, heads, size = q_BTJX.shape
        ctx.save_for_backward(q_BTJX, k_BSX, w_BTJ, valid_BTS)
        ctx.sizes, ctx.scale = (batches, queries, k_BSX.shape[1], heads, size), scale
        scores_BTS = torch.empty((batches, queries, k_BSX.shape[1]))
        native()["index_scores"](q_BTJX.data_ptr(), k_BSX.data_ptr(), w_BTJ.data_ptr(), *_mask_arguments(valid_BTS),
                                 *ctx.sizes, scale, scores_BTS.data_ptr(), torch.get_num_threads())
        return scores_BTS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores_BTS: Tensor) -> tuple[Tensor | None, ...]:
        q_BTJX, k_BSX, w_BTJ, valid_BTS = ctx.saved_tensors
        dscores_BTS = dscores_BTS.contiguous()
        dq, dk, dw = torch.empty(q_BTJX.shape), torch.empty(k_BSX.shape), torch.empty(w_BTJ.shape)
        native()["index_scores_backward"](q_BTJX.data_ptr(), k_BSX.data_ptr(), w_BTJ.data_ptr(),
                                          *_mask_arguments(valid_BTS), *ctx.sizes, ctx.scale, dscores_BTS.data_ptr(),
                                          dq.data_ptr(), dk.data_ptr(), dw.data_ptr(), torch.get_num_threads())
        return dq, dk, dw, None, None


class IndexerKl(torch.autograd.Function):
    """``apply(scores_BTS, target_BTS, mask_BTS)``; the gradient is formed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, scores_BTS: Tensor, target_BTS: Tensor, mask_BTS: Tensor) -> Tensor:
        scores_BTS, target_BTS, mask_BTS = scores_BTS.contiguous(), target_BTS.contiguous(), _mask(mask_BTS)
        losses_M, slope_BTS = torch.empty(scores_BTS.shape[:2].numel()), torch.empty(scores_BTS.shape)
        rows = torch.empty((), dtype=torch.int64)
        native()["indexer_kl"](scores_BTS.data_ptr(), target_BTS.data_ptr(), *_mask_arguments(mask_BTS),
                               *scores_BTS.shape, losses_M.data_ptr(), slope_BTS.data_ptr(), rows.data_ptr(),
                               torch.get_num_threads())
        ctx.save_for_backward(slope_BTS)
        return losses_M.sum() / rows.clamp_min(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * dloss, None, None


class MaskedAttention(torch.autograd.Function):
    """``apply(q_BTHK, k_BSHK, v_BSHV, mask_BTS, scale)``"""

    @staticmethod
    def forward(ctx: Any, q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
        q, k, v, mask_BTS = _elements(q_BTHK), _elements(k_BSHK), _elements(v_BSHV), _mask(mask_BTS)
        out_BTHV = torch.empty((*q.shape[:3], v.shape[3]))
        log_sums_BTH = torch.empty(q.shape[:3])
        native()["masked_attention"](*_problem(q, k, v, mask_BTS, scale), out_BTHV.data_ptr(), log_sums_BTH.data_ptr(),
                                     torch.get_num_threads())
        ctx.save_for_backward(q, k, v, mask_BTS, out_BTHV, log_sums_BTH)
        ctx.scale = scale
        return out_BTHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BTHV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask_BTS, out_BTHV, log_sums_BTH = ctx.saved_tensors
        dout_BTHV = dout_BTHV.contiguous()
        dq, dk, dv = torch.empty(q.shape), torch.empty(k.shape), torch.empty(v.shape)
        native()["masked_attention_backward"](*_problem(q, k, v, mask_BTS, ctx.scale), out_BTHV.data_ptr(),
                                              log_sums_BTH.data_ptr(), dout_BTHV.data_ptr(), dq.data_ptr(),
                                              dk.data_ptr(), dv.data_ptr(), torch.get_num_threads())
        return dq, dk, dv, None, None


def attention_targets(q_BTHK: Tensor, k_BSHK: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    """``reference.attention_targets`` in fp32; no gradient."""
    q, k, mask_BTS = _elements(q_BTHK.detach()), _elements(k_BSHK.detach()), _mask(mask_BTS)
    target_BTS = torch.empty((*q.shape[:2], k.shape[1]))
    native()["attention_targets"](*_problem(q, k, k, mask_BTS, scale), target_BTS.data_ptr(), torch.get_num_threads())
    return target_BTS


def select_topk(scores_BTS: Tensor, valid_BTS: Tensor, k: int) -> Tensor:
    """``reference.select_topk`` of fp32 scores with 0 < k; no gradient."""
    scores_BTS, valid_BTS = scores_BTS.detach().contiguous(), _mask(valid_BTS.expand(scores_BTS.shape))
    selected_BTS = torch.empty(scores_BTS.shape, dtype=torch.bool)
    native()["select_topk"](scores_BTS.data_ptr(), *_mask_arguments(valid_BTS), *scores_BTS.shape, k,
                            selected_BTS.data_ptr(), torch.get_num_threads())
    return selected_BTS


def _elements(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask(mask_BTS: Tensor) -> Tensor:
    return mask_BTS if mask_BTS.stride(2) == 1 else mask_BTS.contiguous()


def _mask_arguments(mask_BTS: Tensor) -> tuple[int, int, int]:
    return mask_BTS.data_ptr(), mask_BTS.stride(0), mask_BTS.stride(1)


def _problem(q: Tensor, k: Tensor, v: Tensor, mask_BTS: Tensor, scale: float) -> tuple[int | float, ...]:
    """The arguments that the three attention functions share, in their C order."""
    batches, queries, heads, dim = q.shape
    return (q.data_ptr(), *q.stride()[:3], k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3],
            *_mask_arguments(mask_BTS), batches, queries, k.shape[1], heads, dim, v.shape[3], scale)
