"""The one rounding code: floats to integers or e4m3 and back, for export, for inference and for training alike.

INT4 and INT8 are symmetric with levels -7..7 and -127..127. The scale is the largest magnitude of the group (INT4) or
the output row (INT8) over 7 or 127, itself rounded to bf16, the type in which engines hold it; levels are rounded
against the rounded scale, so that what a reader multiplies is what the writer rounded against. ``level * scale`` is
exact in fp32, which makes rounding a projection: rounding it again changes no bit. FP8 scales stay fp32, as published.

A scale is never below 2**-126: a group of zeros, or of numbers so small that their quotient would be subnormal, becomes
zeros whether or not the processor flushes subnormals. Weights that are not finite are refused.

Letters: O output rows, I inputs, G groups or blocks of them, M tokens, E leading dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.errors import CheckpointError
from glm5.kernels.integer import quantize_tokens
from glm5.model.quantize.plan import FP8_BLOCK, Kind, WeightFormat

_TOP: dict[Kind, float] = {"int4": 7.0, "int8": 127.0, "fp8": 448.0}
_LEAST_SCALE = 2.0**-126
_LARGEST = 3.38e38  # top * bf16(largest / top) stays finite


def quantize(weight_EOI: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Levels and scales of a matrix or a stack of them.

    Levels are int8 (for INT4 too: ``kernels.integer.pack_int4`` packs them) or e4m3, [..., O, I]. Scales: bf16 [..., O, G] for INT4, bf16
    [..., O, 1] for INT8, fp32 [..., ceil(O/128), ceil(I/128)] for FP8. Raises CheckpointError for a weight that is not
    finite.
    """
    weight_EOI = weight_EOI.float()
    largest = _block_maxima(weight_EOI, form)
    if not bool(torch.isfinite(largest).all()):
        raise CheckpointError("a weight is not a finite number and cannot be quantised; repair the checkpoint")
    scale = largest.clamp(max=_LARGEST) / _TOP[form.kind]
    scale = scale.clamp_min(_LEAST_SCALE).to(torch.float32 if form.kind == "fp8" else torch.bfloat16)
    ratio_EOI = weight_EOI / _spread(scale.float(), weight_EOI.shape, form)
    if form.kind == "fp8":
        return ratio_EOI.clamp(-_TOP["fp8"], _TOP["fp8"]).to(torch.float8_e4m3fn), scale
    return ratio_EOI.round().clamp(-_TOP[form.kind], _TOP[form.kind]).to(torch.int8), scale


def dequantize(levels_EOI: Tensor, scale: Tensor, form: WeightFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """``levels * scale`` [..., O, I] in fp32, then ``dtype``."""
    weight_EOI = levels_EOI.float() * _spread(scale.float(), levels_EOI.shape, form)
    if dtype == torch.float16:
        weight_EOI = weight_EOI.clamp(-65504.0, 65504.0)
    return weight_EOI.to(dtype)


def fake_quantize(weight_EOI: Tensor, form: WeightFormat) -> Tensor:
    """What a reader of the exported ``weight`` computes with, in the type of ``weight``."""
    return dequantize(*quantize(weight_EOI, form), form, weight_EOI.dtype)


def round_inputs(x: Tensor, form: WeightFormat) -> Tensor:
    """``x`` [..., I] as the multiplication by a matrix of ``form`` sees it: 8 bits per token (integers) or per token
    and block of 128 inputs (e4m3). The same shape and type; unchanged when ``form`` does not round inputs."""
    if not form.rounds_inputs:
        return x
    if form.kind != "fp8":
        levels, scale = quantize_tokens(x)
        return (levels.float() * scale).to(x.dtype)
    blocks = F.pad(x.float(), (0, -x.shape[-1] % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / _TOP["fp8"]).clamp_min(_LEAST_SCALE)
    rounded = (blocks / scale).clamp(-_TOP["fp8"], _TOP["fp8"]).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def _block_maxima(weight_EOI: Tensor, form: WeightFormat) -> Tensor:
    """The largest magnitude of every part that shares a scale, in the shape of the scales."""
    magnitude_EOI = weight_EOI.abs()
    if form.kind == "int8":
        return magnitude_EOI.amax(-1, keepdim=True)
    outputs, inputs = weight_EOI.shape[-2:]
    width = min(form.group_size if form.kind == "int4" else FP8_BLOCK, inputs)
    maxima_EOG = F.pad(magnitude_EOI, (0, -inputs % width)).unflatten(-1, (-1, width)).amax(-1)
    if form.kind == "int4":
        return maxima_EOG
    height = min(FP8_BLOCK, outputs)
    return F.pad(maxima_EOG, (0, 0, 0, -outputs % height)).unflatten(-2, (-1, height)).amax(-2)


def _spread(scale: Tensor, shape: torch.Size, form: WeightFormat) -> Tensor:
    """Scales repeated to one per weight (or broadcastable to that)."""
    if form.kind == "int8":
        return scale
    outputs, inputs = shape[-2:]
    width = min(form.group_size if form.kind == "int4" else FP8_BLOCK, inputs)
    spread = scale.repeat_interleave(width, dim=-1)[..., :inputs]
    if form.kind == "int4":
        return spread
    return spread.repeat_interleave(min(FP8_BLOCK, outputs), dim=-2)[..., :outputs, :]
