"""The key cache of inference: latent keys for every layer, index keys where a layer has an indexer, in pages.

The cache is P blocks of S positions. A slot holds one sequence; row u of the block table says which blocks hold its
positions, in order, so that sequences share the blocks of a common prefix. Entries past what a sequence has written
are undefined and never read. The latent entry is ``cat[kv latent, rotated key]``, the index entry the key after norm
and rotation: both depend on the tokens up to their own and on nothing else, so that a block may be copied or sent to
another process.

Letters: L layers, P blocks, S positions of a block, U slots, Z blocks of a slot, M tokens, K = kv latent + rotary dims,
X index head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.device import HOST
from glm5.model.config import ModelConfig


class KeyCache:
    """Preallocated cache of ``num_blocks`` blocks of ``block_size`` tokens.

    ``table_UZ`` is int32 on the cache's device and may change between calls; without it slot p is block p.
    ``with_mtp`` adds the MTP layer's keys as the last layer.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = HOST, *, table_UZ: Tensor | None = None, with_mtp: bool = False) -> None:
        if table_UZ is None:
            table_UZ = torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(1)
        self.table_UZ, self.block_size = table_UZ, block_size
        self.latent_LPSK: list[Tensor] = []
        self.index_keys_LPSX: list[Tensor] = []
        schedule = (*config.indexer_schedule, "full") if with_mtp else config.indexer_schedule
        latent_shape = (num_blocks, block_size, config.kv_lora_rank + config.qk_rope_head_dim)
        for kind in schedule:
            self.latent_LPSK.append(torch.zeros(latent_shape, dtype=dtype, device=device))
            blocks = num_blocks if kind == "full" and self.max_length > config.index_topk else 0  # else never read
            index_shape = (blocks, block_size, config.index_head_dim)
            self.index_keys_LPSX.append(torch.zeros(index_shape, dtype=dtype, device=device))

    @property
    def max_length(self) -> int:
        """Tokens that one slot can hold."""
        return self.table_UZ.shape[1] * self.block_size

    @property
    def bytes(self) -> int:
        """Memory of all entries."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Latents [P, S, K] and index keys [P or 0, S, X] of a layer."""
        return self.latent_LPSK[number], self.index_keys_LPSX[number]

    def rows(self, slots_M: Tensor, positions_M: Tensor) -> Tensor:
        """Row of each (slot, position) among the entries of all blocks, int64 [M]."""
        number_M = positions_M // self.block_size
        return positions_M + (self.table_UZ[slots_M, number_M] - number_M) * self.block_size

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block to another, in every layer."""
        for tensor in self._tensors():
            if tensor.shape[0]:
                tensor[target] = tensor[source]

    def read_blocks(self, blocks: Tensor) -> list[Tensor]:
        """The entries of ``blocks``, one tensor [blocks, S, K or X] for each kind and layer: what ``write_blocks`` takes."""
        return [tensor[blocks] for tensor in self._tensors() if tensor.shape[0]]

    def write_blocks(self, blocks: Tensor, entries: list[Tensor]) -> None:
        """Store what ``read_blocks`` gave in ``blocks``. Raises ValueError for entries of another kind of cache."""
        targets = [tensor for tensor in self._tensors() if tensor.shape[0]]
        expected = [((len(blocks), *tensor.shape[1:]), tensor.dtype) for tensor in targets]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in entries]
        if found != expected:
            raise ValueError(f"cache entries of shapes and types {found}; expected {expected}: use equal engines")
        for target, tensor in zip(targets, entries, strict=True):
            target[blocks] = tensor.to(target.device)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.latent_LPSK, *self.index_keys_LPSX)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, max_length: int, with_mtp: bool = False) -> int:
    """Cache memory of one token in all layers of a ``KeyCache`` with slots of ``max_length``."""
    table = torch.zeros(1, max_length, dtype=torch.int32)
    return KeyCache(config, 1, 1, dtype, table_UZ=table, with_mtp=with_mtp).bytes
