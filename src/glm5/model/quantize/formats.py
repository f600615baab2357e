"""The one rounding code: floats to integers or e4m3 and back, for export, for inference and for training alike.

INT4 and INT8 are symmetric with levels -7..7 and -127..127. The scale is the largest magnitude of the group (INT4) or
the output row (INT8) over 7 or 127, itself rounded to bf16, the type in which engines hold it; levels are rounded
against the rounded scale, so that what a reader multiplies is what the writer rounded against. ``level * scale`` is
exact in fp32, which makes rounding a projection: rounding it again changes no bit. FP8 is the published format, `fp8`.

A scale is never below 2**-126: a group of zeros, or of numbers so small that their quotient would be subnormal, becomes
zeros whether or not the processor flushes subnormals. Weights that are not finite are refused.

Letters: O output rows, I inputs, G groups of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.errors import CheckpointError
from glm5.kernels.integer import quantise_tokens
from glm5.model import fp8
from glm5.model.counts import FP8_BLOCK
from glm5.model.quantize.plan import WeightFormat

_TOP = {"int4": 7.0, "int8": 127.0}
_FP8_TOP = torch.finfo(fp8.FP8).max
_LEAST_SCALE = 2.0**-126
_LARGEST = 3.38e38  # top * bf16(largest / top) stays finite


def quantise(weight: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Levels and scales of a matrix [O, I] or a stack of them [..., O, I].

    Levels are int8 (for INT4 too: ``kernels.integer.pack_int4`` packs them) or e4m3, [..., O, I]. Scales: bf16
    [..., O, G] for INT4, bf16 [..., O, 1] for INT8, fp32 [..., ceil(O/128), ceil(I/128)] for FP8. Raises
    CheckpointError for a weight that is not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError("a weight is not a finite number and cannot be quantised; repair the checkpoint")
    if form.kind == "fp8":
        parts = [fp8.quantise(matrix_OI) for matrix_OI in weight.flatten(0, -3)] if weight.dim() > 2 else None
        if parts is None:
            return fp8.quantise(weight)
        levels, scales = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
        return levels.view(weight.shape), scales.view(*weight.shape[:-2], *scales.shape[-2:])
    top, width = _TOP[form.kind], _width(weight.shape[-1], form)
    grouped = F.pad(weight.float(), (0, -weight.shape[-1] % width)).unflatten(-1, (-1, width))
    scale = (grouped.abs().amax(-1).clamp(max=_LARGEST) / top).clamp_min(_LEAST_SCALE).bfloat16()
    levels = (grouped / scale.float().unsqueeze(-1)).round().clamp(-top, top).to(torch.int8)
    return levels.flatten(-2)[..., : weight.shape[-1]], scale


def dequantise(levels: Tensor, scale: Tensor, form: WeightFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """``levels * scale`` [..., O, I] in fp32, then ``dtype``."""
    if form.kind == "fp8":
        if levels.dim() == 2:
            return fp8.dequantise(levels, scale, dtype)
        pairs = zip(levels.flatten(0, -3), scale.flatten(0, -3), strict=True)
        return torch.stack([fp8.dequantise(*pair, dtype) for pair in pairs]).view(levels.shape)
    width = _width(levels.shape[-1], form)
    grouped = F.pad(levels, (0, -levels.shape[-1] % width)).unflatten(-1, (-1, width))
    weight = (grouped.float() * scale.float().unsqueeze(-1)).flatten(-2)[..., : levels.shape[-1]]
    if dtype == torch.float16:
        weight = weight.clamp(-65504.0, 65504.0)  # a rounded-up scale may reach just past the largest fp16 number
    return weight.to(dtype)


def fake_quantise(weight: Tensor, form: WeightFormat) -> Tensor:
    """What a reader of the exported ``weight`` [..., O, I] computes with, in the type of ``weight``."""
    return dequantise(*quantise(weight, form), form, weight.dtype)


def round_inputs(x: Tensor, form: WeightFormat) -> Tensor:
    """``x`` [..., I] as the multiplication by a matrix of ``form`` sees it: 8 bits per token (integers) or per token
    and block of 128 inputs (e4m3). The same shape and type; unchanged when ``form`` does not round inputs."""
    if not form.rounds_inputs:
        return x
    if form.kind != "fp8":
        levels, scale = quantise_tokens(x)
        return (levels.float() * scale).to(x.dtype)
    blocks = F.pad(x.float(), (0, -x.shape[-1] % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    levels, scale = round_rows_to_fp8(blocks)
    return (levels.float() * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def round_rows_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 numbers [..., I] and one fp32 scale [..., 1] per row: its largest magnitude over 448."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / _FP8_TOP).clamp_min(_LEAST_SCALE)
    return (x / scale).clamp(-_FP8_TOP, _FP8_TOP).to(fp8.FP8), scale


def _width(inputs: int, form: WeightFormat) -> int:
    """Inputs that share a scale: the whole row for INT8, a group of at most the row for INT4."""
    return min(form.group_size, inputs) if form.kind == "int4" else inputs
