"""The key cache of inference: latent keys for every layer, index keys where a layer has an indexer, in pages.

The cache is P blocks of S positions. A slot holds one sequence; row u of the block table says which blocks hold its
positions, in order, so that sequences share the blocks of a common prefix. Entries past what a sequence has written
are undefined and never read. The latent entry is ``cat[kv latent, rotated key]``, the index entry the key after norm
and rotation: both depend on the tokens up to their own and on nothing else, so that a block may be copied or sent to
another process.

Entries are kept as they are, or rounded to 8 bits (``quantize.caches``). Attention reads rounded ones from a copy of
the blocks that a step needs, one layer at a time: ``view`` names these blocks and numbers them anew. So the rounded
cache costs a pass over the keys of the running sequences per layer and step, and the memory of one layer's share of
them.

Letters: L layers, P blocks, S positions of a block, U slots, Z blocks of a slot, M tokens, K = kv latent + rotary dims,
X index head dim, D channels of an entry.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from glm5.device import HOST
from glm5.model.config import ModelConfig
from glm5.model.quantize.caches import CacheFormat, QuantisedEntries

CacheKind = Literal["auto", "int8", "fp8"]
"""``auto`` keeps entries in the type of the cache, the others round them."""


class Entries(Protocol):
    """The entries of one kind in one layer."""

    def write(self, rows_M: Tensor, x_MD: Tensor) -> None:
        """Store token m at row ``rows[m]`` of all blocks in order."""

    def read(self, blocks: Tensor | None) -> Tensor:
        """Entries [P, S, D] of the blocks that ``KeyCache.view`` named; None stands for all."""

    def tensors(self) -> list[Tensor]:
        """What is stored, each [P, S, ...]."""


class ExactEntries:
    """Entries as they were written."""

    def __init__(self, num_blocks: int, block_size: int, width: int, dtype: torch.dtype,
                 device: torch.device | str = HOST) -> None:
        self.values_PSD = torch.zeros(num_blocks, block_size, width, dtype=dtype, device=device)

    def write(self, rows_M: Tensor, x_MD: Tensor) -> None:
        """See ``Entries``."""
        self.values_PSD.view(-1, x_MD.shape[-1]).index_copy_(0, rows_M, x_MD.to(self.values_PSD.dtype))

    def read(self, blocks: Tensor | None) -> Tensor:
        """See ``Entries``; there is no copy, so all blocks keep their numbers."""
        return self.values_PSD

    def tensors(self) -> list[Tensor]:
        """See ``Entries``."""
        return [self.values_PSD]


class KeyCache:
    """Preallocated cache of ``num_blocks`` blocks of ``block_size`` tokens.

    ``table_UZ`` is int32 on the cache's device and may change between calls; without it slot p is block p.
    ``with_mtp`` adds the MTP layer's keys as the last layer. ``dtype`` is the type in which attention reads entries.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = HOST, *, table_UZ: Tensor | None = None, with_mtp: bool = False,
                 kind: CacheKind = "auto") -> None:
        if table_UZ is None:
            table_UZ = torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(1)
        self.table_UZ, self.block_size = table_UZ, block_size
        self._num_blocks, self._kind = num_blocks, kind
        self.latents: list[Entries] = []
        """By layer."""
        self.index_keys: list[Entries] = []
        """By layer; without blocks where they are never read."""
        schedule = (*config.indexer_schedule, "full") if with_mtp else config.indexer_schedule

        def entries(blocks: int, width: int, exact_tail: int) -> Entries:
            if kind == "auto":
                return ExactEntries(blocks, block_size, width, dtype, device)
            form = CacheFormat(kind=kind, exact_tail=exact_tail)
            return QuantisedEntries(blocks, block_size, width, form, dtype, device)

        for name in schedule:
            width = config.kv_lora_rank + config.qk_rope_head_dim
            self.latents.append(entries(num_blocks, width, config.qk_rope_head_dim))
            is_read = name == "full" and self.max_length > config.index_topk
            self.index_keys.append(entries(num_blocks if is_read else 0, config.index_head_dim, 0))

    @property
    def max_length(self) -> int:
        """Tokens that one slot can hold."""
        return self.table_UZ.shape[1] * self.block_size

    @property
    def bytes(self) -> int:
        """Memory of all entries."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def layer(self, number: int) -> tuple[Entries, Entries]:
        """Latents (K channels) and index keys (X channels) of a layer."""
        return self.latents[number], self.index_keys[number]

    def view(self, slots_M: Tensor, lengths_M: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is read by tokens that see the first ``lengths[m]`` positions of slot ``slots[m]``: a block table, and
        the blocks that its numbers stand for; None means all."""
        if self._kind == "auto":
            return self.table_UZ, None
        table_UZ = self.table_UZ.long()
        lengths_U = lengths_M.new_zeros(len(table_UZ)).scatter_reduce(0, slots_M, lengths_M, "amax")
        starts_Z = torch.arange(table_UZ.shape[1], device=table_UZ.device) * self.block_size
        is_read_UZ = starts_Z < lengths_U[:, None]
        blocks = table_UZ[is_read_UZ].unique()
        numbers_P = table_UZ.new_zeros(self._num_blocks)
        numbers_P[blocks] = torch.arange(len(blocks), device=blocks.device)
        return (numbers_P[table_UZ.clamp(0, self._num_blocks - 1)] * is_read_UZ).int(), blocks

    def rows(self, slots_M: Tensor, positions_M: Tensor) -> Tensor:
        """Row of each (slot, position) among the entries of all blocks, int64 [M]."""
        number_M = positions_M // self.block_size
        return positions_M + (self.table_UZ[slots_M, number_M] - number_M) * self.block_size

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block to another, in every layer."""
        for tensor in self._tensors():
            if tensor.shape[0]:
                _bytes(tensor)[target] = _bytes(tensor)[source]

    def read_blocks(self, blocks: Tensor) -> list[Tensor]:
        """The entries of ``blocks``, in the order of kinds and layers: what ``write_blocks`` takes."""
        return [_bytes(tensor)[blocks].view(tensor.dtype) for tensor in self._tensors() if tensor.shape[0]]

    def write_blocks(self, blocks: Tensor, entries: list[Tensor]) -> None:
        """Store what ``read_blocks`` gave in ``blocks``. Raises ValueError for entries of another kind of cache."""
        targets = [tensor for tensor in self._tensors() if tensor.shape[0]]
        expected = [((len(blocks), *tensor.shape[1:]), tensor.dtype) for tensor in targets]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in entries]
        if found != expected:
            raise ValueError(f"cache entries of shapes and types {found}; expected {expected}: use equal engines")
        for target, tensor in zip(targets, entries, strict=True):
            _bytes(target)[blocks] = _bytes(tensor.to(target.device))

    def _tensors(self) -> list[Tensor]:
        return [tensor for entries in (*self.latents, *self.index_keys) for tensor in entries.tensors()]


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory; 8-bit floats, which cannot be indexed on every device, as integers."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, max_length: int, with_mtp: bool = False,
                    kind: CacheKind = "auto") -> int:
    """Cache memory of one token in all layers of a ``KeyCache`` with slots of ``max_length``."""
    table = torch.zeros(1, max_length, dtype=torch.int32)
    return KeyCache(config, 1, 1, dtype, table_UZ=table, with_mtp=with_mtp, kind=kind).bytes
