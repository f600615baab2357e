"""One function per operation: picks the fastest form for the device, type and size at hand.

The contract of every operation is its docstring in ``reference``. On a CPU in fp32 (and over bf16 caches) the native
form runs, up to the sizes where PyTorch's own kernels overtake it; where Triton compiles for the device, its form;
everything else runs ``fused`` or ``reference``. The crossovers were measured with ``benchmarks/bench_kernels.py
--crossovers``. A missing native library or Triton is a ``KernelError``, not a slower form. ``prefer`` overrules the
choice in a block.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from glm5.device import HOST, has_triton
from glm5.errors import ConfigError, KernelError
from glm5.kernels import fused, reference
from glm5.kernels.cpu import inference, sparse, training
from glm5.kernels.cpu.library import native

FORMS = ("auto", "reference", "native", "triton")
_FORM: ContextVar[str] = ContextVar("form", default="auto")

_EXPERT_ELEMENTS = 256 * 256
"""Hidden x expert hidden size up to which the native experts win: above, a blocked GEMM reuses the caches better."""

_HEAD_ELEMENTS = 1024 * 192
"""Keys x key dim up to which native dense attention wins; sparse masks win at any size."""

_SPARSE_SHARE = 8
"""A mask counts as sparse when at most one pair in this many is set."""


@contextmanager
def prefer(form: str) -> Iterator[None]:
    """Within the block, use one of ``FORMS`` wherever it can run the operation at hand, whatever is fastest.

    ``reference`` always can; ``native`` takes CPU tensors in fp32 (caches also in bf16), without regard to crossovers;
    ``triton`` takes tensors of any device (on a CPU only in Triton's interpreter). Raises ConfigError for other names.
    """
    if form not in FORMS:
        raise ConfigError(f"kernel form {form!r}; expected one of {', '.join(FORMS)}")
    token = _FORM.set(form)
    try:
        yield
    finally:
        _FORM.reset(token)


def require_forms(device: torch.device) -> None:
    """Raises KernelError unless the forms that this module would choose on ``device`` are there and up to date."""
    if device.type == HOST:
        native()
    elif has_triton(device):
        _triton("rowwise")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    if _uses_triton(x):
        return _triton("rowwise").rms_norm(x, weight, eps)
    if not (_native(x) and _native(weight)):
        return reference.rms_norm(x, weight, eps)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return training.RmsNorm.apply(x, weight, eps)
    return inference.rms_norm(x, weight, eps)


def apply_rope(x_BTHR: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor, interleaved: bool = True) -> Tensor:
    """See ``reference.apply_rope``."""
    if _uses_triton(x_BTHR):
        return _triton("rowwise").apply_rope(x_BTHR, cos_BTR2, sin_BTR2, interleaved)
    if not (_native(x_BTHR) and _native(cos_BTR2)):
        return reference.apply_rope(x_BTHR, cos_BTR2, sin_BTR2, interleaved)
    if torch.is_grad_enabled() and x_BTHR.requires_grad:
        return training.Rope.apply(x_BTHR, cos_BTR2, sin_BTR2, interleaved)
    return inference.apply_rope(x_BTHR, cos_BTR2, sin_BTR2, interleaved)


def index_scores(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, valid_BTS: Tensor | None = None) -> Tensor:
    """See ``reference.index_scores``. Pass ``valid``: pairs outside it are skipped."""
    needs_gradient = torch.is_grad_enabled() and (q_BTJX.requires_grad or k_BSX.requires_grad or w_BTJ.requires_grad)
    if _uses_triton(q_BTJX) and not needs_gradient:
        return _triton("indexing").index_scores(q_BTJX, k_BSX, w_BTJ, scale, valid_BTS)
    if not (_native(q_BTJX) and _native(k_BSX) and _native(w_BTJ)):
        return reference.index_scores(q_BTJX, k_BSX, w_BTJ, scale, valid_BTS)
    if valid_BTS is None:
        valid_BTS = torch.ones((), dtype=torch.bool)
    return training.IndexScores.apply(q_BTJX, k_BSX, w_BTJ, scale, valid_BTS.expand(*q_BTJX.shape[:2], k_BSX.shape[1]))


def select_topk(scores_BTS: Tensor, valid_BTS: Tensor, k: int) -> Tensor:
    """See ``reference.select_topk``."""
    if k <= 0 or k >= scores_BTS.shape[-1] or not _native(scores_BTS):
        return reference.select_topk(scores_BTS, valid_BTS, k)
    return training.select_topk(scores_BTS, valid_BTS, k)


def masked_attention(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    """See ``reference.masked_attention``."""
    if _native(q_BTHK) and _native(k_BSHK) and _native(v_BSHV):
        small = _FORM.get() == "native" or k_BSHK.shape[1] * k_BSHK.shape[3] <= _HEAD_ELEMENTS
        if small or int(mask_BTS.sum()) * _SPARSE_SHARE <= mask_BTS.numel():
            return training.MaskedAttention.apply(q_BTHK, k_BSHK, v_BSHV, mask_BTS, scale)
    form = reference if _FORM.get() == "reference" else fused
    return form.masked_attention(q_BTHK, k_BSHK, v_BSHV, mask_BTS, scale)


def attention_targets(q_BTHK: Tensor, k_BSHK: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    """See ``reference.attention_targets``."""
    if not (_native(q_BTHK) and _native(k_BSHK)):
        return reference.attention_targets(q_BTHK, k_BSHK, mask_BTS, scale)
    return training.attention_targets(q_BTHK, k_BSHK, mask_BTS, scale)


def indexer_kl(scores_BTS: Tensor, target_BTS: Tensor, mask_BTS: Tensor) -> Tensor:
    """See ``reference.indexer_kl``."""
    if _uses_triton(scores_BTS):
        return _triton("indexing").indexer_kl(scores_BTS, target_BTS, mask_BTS)
    if not (_native(scores_BTS) and _native(target_BTS)):
        return reference.indexer_kl(scores_BTS, target_BTS, mask_BTS)
    return training.IndexerKl.apply(scores_BTS, target_BTS, mask_BTS)


def prefers_lists(x: Tensor) -> bool:
    """Whether sparse attention over tensors like ``x`` is faster by lists of selected keys than by masks."""
    return _native(x) or _uses_triton(x)


def select_positions(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, first_BT: Tensor, last_BT: Tensor,
                     k: int) -> Tensor:
    """See ``reference.select_positions``."""
    arguments = (q_BTJX, k_BSX, w_BTJ, scale, first_BT, last_BT, k)
    if k > 0 and _uses_triton(q_BTJX):
        return _triton("indexing").select_positions(*arguments)
    native = k > 0 and _native(q_BTJX) and _native(k_BSX) and _native(w_BTJ)
    return (sparse if native else reference).select_positions(*arguments)


def sparse_attention(q_BTHK: Tensor, latent_BSK: Tensor, positions_BTK: Tensor, scale: float,
                     kv_lora_rank: int) -> Tensor:
    """See ``reference.sparse_attention``."""
    arguments = (q_BTHK, latent_BSK, positions_BTK, scale, kv_lora_rank)
    if _uses_triton(q_BTHK):
        return _triton("attention").sparse_attention(*arguments)
    if _native(q_BTHK) and _native(latent_BSK):
        return sparse.SparseAttention.apply(*arguments)
    return reference.sparse_attention(*arguments)


def sparse_scores(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, positions_BTK: Tensor) -> Tensor:
    """See ``reference.sparse_scores``."""
    arguments = (q_BTJX, k_BSX, w_BTJ, scale, positions_BTK)
    if _uses_triton(q_BTJX):
        return _triton("indexing").sparse_scores(*arguments)
    if _native(q_BTJX) and _native(k_BSX) and _native(w_BTJ):
        return sparse.SparseScores.apply(*arguments)
    return reference.sparse_scores(*arguments)


def sparse_targets(q_BTHK: Tensor, latent_BSK: Tensor, positions_BTK: Tensor, scale: float) -> Tensor:
    """See ``reference.sparse_targets``."""
    arguments = (q_BTHK, latent_BSK, positions_BTK, scale)
    if _uses_triton(q_BTHK):
        return _triton("attention").sparse_targets(*arguments)
    return (sparse if _native(q_BTHK) and _native(latent_BSK) else reference).sparse_targets(*arguments)


def experts(x_MD: Tensor, expert_ids_MA: Tensor, weights_MA: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
    """See ``reference.experts``."""
    arguments = (x_MD, expert_ids_MA, weights_MA, gate_up_EGD, down_EDF)
    if _uses_triton(x_MD):
        return _triton("experts").experts(*arguments)
    if _FORM.get() == "reference":
        return reference.experts(*arguments)
    native = _native(x_MD) and _native(weights_MA) and _native(gate_up_EGD) and _native(down_EDF)
    if native and (_FORM.get() == "native" or down_EDF.shape[1] * down_EDF.shape[2] <= _EXPERT_ELEMENTS):
        if torch.is_grad_enabled() and (x_MD.requires_grad or weights_MA.requires_grad or gate_up_EGD.requires_grad
                                        or down_EDF.requires_grad):
            return training.Experts.apply(*arguments)
        return inference.experts(*arguments)
    aligned = down_EDF.shape[1] % fused.GROUPED_ALIGNMENT == 0 and down_EDF.shape[2] % fused.GROUPED_ALIGNMENT == 0
    return fused.experts(*arguments) if aligned and x_MD.numel() else reference.experts(*arguments)


def ragged_select(iq_MJX: Tensor, iw_MJ: Tensor, index_keys_PSX: Tensor, slots_M: Tensor, lengths_M: Tensor,
                  index_topk: int, table_UZ: Tensor | None = None) -> Tensor | None:
    """See ``reference.ragged_select``."""
    arguments = (iq_MJX, iw_MJ, index_keys_PSX, slots_M, lengths_M, index_topk, table_UZ)
    if _uses_triton(iq_MJX):
        return _triton("indexing").ragged_select(*arguments)
    return (inference if _native_cache(index_keys_PSX) else reference).ragged_select(*arguments)


def ragged_attention(q_MHK: Tensor, latent_PSK: Tensor, slots_M: Tensor, lengths_M: Tensor, positions_MK: Tensor | None,
                     scale: float, kv_lora_rank: int, table_UZ: Tensor | None = None) -> Tensor:
    """See ``reference.ragged_attention``."""
    arguments = (q_MHK, latent_PSK, slots_M, lengths_M, positions_MK, scale, kv_lora_rank, table_UZ)
    if _uses_triton(q_MHK):
        return _triton("attention").ragged_attention(*arguments)
    return (inference if _native_cache(latent_PSK) else reference).ragged_attention(*arguments)


def ragged_dsa(q_MHK: Tensor, iq_MJX: Tensor, iw_MJ: Tensor, latent_PSK: Tensor, index_keys_PSX: Tensor,
               slots_M: Tensor, lengths_M: Tensor, index_topk: int, scale: float, kv_lora_rank: int,
               table_UZ: Tensor | None = None) -> Tensor:
    """See ``reference.ragged_dsa``."""
    if _uses_triton(q_MHK):
        positions_MK = ragged_select(iq_MJX, iw_MJ, index_keys_PSX, slots_M, lengths_M, index_topk, table_UZ)
        return ragged_attention(q_MHK, latent_PSK, slots_M, lengths_M, positions_MK, scale, kv_lora_rank, table_UZ)
    arguments = (q_MHK, iq_MJX, iw_MJ, latent_PSK, index_keys_PSX, slots_M, lengths_M, index_topk, scale, kv_lora_rank,
                 table_UZ)
    native = _native_cache(latent_PSK) and latent_PSK.dtype == index_keys_PSX.dtype
    return inference.ragged_dsa(*arguments) if native else reference.ragged_dsa(*arguments)


def swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``."""
    if _uses_triton(gate_up):
        return _triton("rowwise").swiglu(gate_up)
    return training.Swiglu.apply(gate_up) if _native(gate_up) else reference.swiglu(gate_up)


def sample(logits_BW: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor,
           uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.sample``."""
    arguments = (logits_BW, temperature_B, top_k_B, top_p_B, min_p_B, uniform_B)
    if _uses_triton(logits_BW):
        return _triton("rowwise").sample(*arguments)
    return (inference if _native(logits_BW) else reference).sample(*arguments)


def _native(x: Tensor) -> bool:
    return x.is_cpu and x.dtype is torch.float32 and _FORM.get() in ("auto", "native")


def _native_cache(cache: Tensor) -> bool:
    known = cache.dtype is torch.float32 or cache.dtype is torch.bfloat16
    return cache.is_cpu and known and cache.is_contiguous() and _FORM.get() in ("auto", "native")


def _uses_triton(x: Tensor) -> bool:
    return _FORM.get() == "triton" or (not x.is_cpu and _FORM.get() == "auto" and has_triton(x.device))


def _triton(module: str) -> ModuleType:
    """A module of the Triton forms. Raises KernelError when Triton is not installed."""
    try:
        return importlib.import_module(f"glm5.kernels.triton.{module}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise KernelError("kernels: Triton is not installed; run 'pip install glm5[gpu]', or choose the form "
                          "'reference'") from None
