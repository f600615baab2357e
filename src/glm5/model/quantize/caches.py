"""Key caches in 8 bits: each token's entry in blocks of channels with one scale each, INT8 or e4m3.

A latent entry is rounded in blocks of the kv latent; its rotated key part, small and with a few large channels, stays
exact (DeepSeek-V3.2 stores its FP8 cache so). An index key is one block. Hadamard rotations that ``hadamard`` folds
into the weights spread the outliers of the latent, and ``hadamard.hadamard`` those of index queries and keys alike,
which leaves their products unchanged.

Rounding a token looks at that token only, so an entry does not depend on when or with what it was written, and a
prefix may be copied. ``error_bound`` states what a reader may rely on.

Letters: P slots, S positions, M tokens, K channels of an entry, G blocks of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.device import HOST
from glm5.errors import ConfigError
from glm5.kernels.integer import quantise_tokens
from glm5.model.fp8 import FP8
from glm5.model.quantize.formats import round_rows_to_fp8


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """How the entries of a cache are stored."""

    kind: Literal["int8", "fp8"]
    block: int = 128
    """Channels that share a scale; the last block may be smaller."""
    exact_tail: int = 0
    """Trailing channels that are kept in bf16: the rotated part of a latent entry."""

    def __post_init__(self) -> None:
        if self.kind not in ("int8", "fp8") or self.block < 1 or self.exact_tail < 0:
            raise ConfigError(f"cache format {self.kind!r} with block={self.block} and exact_tail={self.exact_tail}: "
                              "expected int8 or fp8, a positive block and a tail of 0 or more channels")


def quantise_entries(x: Tensor, form: CacheFormat) -> tuple[Tensor, Tensor]:
    """Levels [..., K] (int8 or e4m3) and scales fp32 [..., G] of entries without exact tail."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % form.block)).unflatten(-1, (-1, form.block))
    levels, scale = quantise_tokens(blocks) if form.kind == "int8" else round_rows_to_fp8(blocks)
    return levels.flatten(-2)[..., : x.shape[-1]].contiguous(), scale.squeeze(-1)


def dequantise_entries(levels: Tensor, scale: Tensor, form: CacheFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """``levels * scale`` [..., K] in ``dtype``."""
    return (levels.float() * scale.repeat_interleave(form.block, -1)[..., : levels.shape[-1]]).to(dtype)


def error_bound(x: Tensor, form: CacheFormat) -> Tensor:
    """The largest possible error of each channel of ``x`` [..., K] (exact tail left out), in fp32.

    INT8: half a step of its block. e4m3 has 3 bits after the leading one: a sixteenth of the number, or half the
    spacing of the subnormal numbers (2**-10) times the scale where that is more.
    """
    scale = quantise_entries(x, form)[1].repeat_interleave(form.block, -1)[..., : x.shape[-1]]
    slack = 1 + 2.0**-20  # the division and the multiplication by the scale round too
    if form.kind == "int8":
        return scale * (0.5 + 127 * 2.0**-22) * slack
    return torch.maximum(x.float().abs() / 16, scale * 2.0**-10) * slack


class QuantisedEntries:
    """One layer's cache of ``slots`` sequences of up to ``length`` entries of ``width`` channels."""

    def __init__(self, slots: int, length: int, width: int, form: CacheFormat, device: torch.device | str = HOST
                 ) -> None:
        self.form, self._rounded = form, width - form.exact_tail
        if self._rounded < 1:
            raise ConfigError(f"exact_tail={form.exact_tail} leaves nothing of {width} channels to round; lower it")
        blocks = -(-self._rounded // form.block)
        self.levels_PSK = torch.zeros(slots, length, self._rounded, device=device,
                                      dtype=torch.int8 if form.kind == "int8" else FP8)
        self.scale_PSG = torch.zeros(slots, length, blocks, device=device)
        self.tail_PSK = torch.zeros(slots, length, form.exact_tail, device=device, dtype=torch.bfloat16)

    @property
    def bytes(self) -> int:
        """Memory of all entries."""
        return sum(tensor.nbytes for tensor in (self.levels_PSK, self.scale_PSG, self.tail_PSK))

    def write(self, slots_M: Tensor, positions_M: Tensor, x_MK: Tensor) -> None:
        """Store token m at (slot, position)."""
        levels_MK, scale_MG = quantise_entries(x_MK[:, : self._rounded], self.form)
        place = slots_M.long(), positions_M.long()
        self._bytes(self.levels_PSK)[place] = self._bytes(levels_MK)
        self.scale_PSG[place] = scale_MG
        self.tail_PSK[place] = x_MK[:, self._rounded :].to(torch.bfloat16)

    def read(self, slots: Tensor, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The entries [..., K] at (slot, position), which broadcast against each other, in ``dtype``."""
        place = slots.long(), positions.long()
        levels = self._bytes(self.levels_PSK)[place].view(self.levels_PSK.dtype)
        rounded = dequantise_entries(levels, self.scale_PSG[place], self.form, dtype)
        return torch.cat([rounded, self.tail_PSK[place].to(dtype)], dim=-1)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` entries of one slot to another."""
        for tensor in (self._bytes(self.levels_PSK), self.scale_PSG, self.tail_PSK):
            tensor[target, :length] = tensor[source, :length]

    @staticmethod
    def _bytes(levels: Tensor) -> Tensor:
        """The same memory as int8: e4m3 tensors cannot be indexed on every device."""
        return levels.view(torch.int8)
