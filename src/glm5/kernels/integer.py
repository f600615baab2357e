"""Products with integer weights: each operation's reference and the choice of its form.

The inputs of each token are rounded to 8 bits (largest magnitude over 127, half to even) and multiplied by integer
weights; sums are exact in int32. On the CPU in fp32 a native form runs, bit-identical to the reference. A token with a
NaN or an infinity gives no finite output and disturbs no other token.

Letters: M tokens, N outputs, I inputs, G groups of inputs, W int32 words of eight 4-bit levels, each stored as
level + 8, the first in the lowest bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.device import has_integer_product
from glm5.kernels.cpu.inference import as_rows
from glm5.kernels.cpu.library import native

_LEAST_SCALE = 2.0**-126
_LEAST_ROWS = 17
"""Rows that the integer product of an accelerator wants, in multiples of 8 columns."""


def int8_linear(x_MI: Tensor, levels_NI: Tensor, scale_N1: Tensor) -> Tensor:
    """``(round8(x) . levels) * scale * scale_of_token`` -> y_MN in the type of x. Levels int8, scale bf16."""
    if not _is_native(x_MI, levels_NI, scale_N1):
        return reference_int8_linear(x_MI, levels_NI, scale_N1)
    x_MI, y_MN = as_rows(x_MI), x_MI.new_empty(x_MI.shape[0], levels_NI.shape[0])
    native()["int8_linear"](x_MI.data_ptr(), x_MI.stride(0), levels_NI.data_ptr(), scale_N1.data_ptr(), x_MI.shape[0],
                            *levels_NI.shape, y_MN.data_ptr(), torch.get_num_threads())
    return y_MN


def int4_linear(x_MI: Tensor, words_NW: Tensor, scale_NG: Tensor, group_size: int) -> Tensor:
    """``sum_g scale[g] * (round8(x) . levels)_g * scale_of_token`` -> y_MN in the type of x; groups added in double.

    ``group_size`` inputs share a scale (bf16), the last group may be smaller.
    """
    if not _is_native(x_MI, words_NW, scale_NG):
        return reference_int4_linear(x_MI, words_NW, scale_NG, group_size)
    x_MI, y_MN = as_rows(x_MI), x_MI.new_empty(x_MI.shape[0], words_NW.shape[0])
    native()["int4_linear"](x_MI.data_ptr(), x_MI.stride(0), words_NW.data_ptr(), scale_NG.data_ptr(), x_MI.shape[0],
                            words_NW.shape[0], x_MI.shape[1], min(group_size, x_MI.shape[1]), y_MN.data_ptr(),
                            torch.get_num_threads())
    return y_MN


def reference_int8_linear(x_MI: Tensor, levels_NI: Tensor, scale_N1: Tensor) -> Tensor:
    """The specification of ``int8_linear``."""
    x_levels_MI, x_scale_M1 = quantise_tokens(x_MI)
    sums_MN = _integer_product(x_levels_MI, levels_NI).float()
    return (sums_MN * scale_N1.float().T * x_scale_M1).to(x_MI.dtype)


def reference_int4_linear(x_MI: Tensor, words_NW: Tensor, scale_NG: Tensor, group_size: int) -> Tensor:
    """The specification of ``int4_linear``."""
    x_levels_MI, x_scale_M1 = quantise_tokens(x_MI)
    levels_NI = unpack_int4(words_NW, x_MI.shape[1])
    parts = zip(x_levels_MI.split(group_size, 1), levels_NI.split(group_size, 1), scale_NG.double().T, strict=True)
    sums_MN = sum(_integer_product(x_Mi, levels_Ni).double() * scale_N for x_Mi, levels_Ni, scale_N in parts)
    return (sums_MN.float() * x_scale_M1).to(x_MI.dtype)


def quantise_tokens(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """Levels int8 [..., I] and the scale fp32 [..., 1] of each token: its largest magnitude over 127."""
    x_MI = x_MI.float()
    scale_M1 = (x_MI.abs().amax(-1, keepdim=True) / 127.0).clamp_min(_LEAST_SCALE)
    return (x_MI / scale_M1).round().nan_to_num(127.0).clamp(-127, 127).to(torch.int8), scale_M1


def pack_int4(levels: Tensor) -> Tensor:
    """Levels (int8, -8..7) [..., I] as int32 words [..., ceil(I/8)]; the last word is filled up with level 0."""
    nibbles = F.pad(levels.to(torch.int32) + 8, (0, -levels.shape[-1] % 8), value=8)
    return (nibbles.unflatten(-1, (-1, 8)) << _shifts(levels)).sum(-1, dtype=torch.int32)


def unpack_int4(words: Tensor, inputs: int) -> Tensor:
    """The inverse of ``pack_int4``: levels int8 [..., inputs]."""
    nibbles = (words.unsqueeze(-1) >> _shifts(words)) & 15
    return (nibbles.flatten(-2)[..., :inputs] - 8).to(torch.int8)


def _shifts(like: Tensor) -> Tensor:
    return 4 * torch.arange(8, dtype=torch.int32, device=like.device)


def _integer_product(a_MI: Tensor, b_NI: Tensor) -> Tensor:
    """Exact integer sums [M, N]: by the integer product of PyTorch where it exists, else in double, which is exact."""
    aligned = a_MI.shape[1] % 8 == 0 and b_NI.shape[0] % 8 == 0
    if has_integer_product(a_MI.device) and a_MI.shape[0] >= _LEAST_ROWS and aligned:
        return torch._int_mm(a_MI.contiguous(), b_NI.contiguous().T)
    return a_MI.double() @ b_NI.double().T


def _is_native(x: Tensor, weight: Tensor, scale: Tensor) -> bool:
    return (x.is_cpu and x.dtype is torch.float32 and scale.dtype is torch.bfloat16 and weight.is_contiguous()
            and scale.is_contiguous())
