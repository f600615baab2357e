"""The key cache of inference: latent keys for every layer and slot, index keys where a layer has an indexer.

A slot holds one sequence; position s of a slot is token s of that sequence. Entries past what a sequence has written
are undefined and never read. The latent entry is ``cat[kv latent, rotated key]``, the index entry the key after norm
and rotation, so that a prefix can be copied from slot to slot without recomputing anything.

Letters: L layers, P slots, S positions, K = kv latent + rotary dims, X index head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.device import HOST
from glm5.model.config import ModelConfig


class SlotCache:
    """Preallocated cache of ``num_slots`` sequences of up to ``max_length`` tokens."""

    def __init__(self, config: ModelConfig, num_slots: int, max_length: int, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = HOST) -> None:
        self.num_slots, self.max_length = num_slots, max_length
        latent_dim = config.kv_lora_rank + config.qk_rope_head_dim
        self.latent_LPSK: list[Tensor] = []
        self.index_keys_LPSX: list[Tensor] = []
        for kind in config.indexer_schedule:
            self.latent_LPSK.append(torch.zeros(num_slots, max_length, latent_dim, dtype=dtype, device=device))
            slots = num_slots if kind == "full" and max_length > config.index_topk else 0  # else never read
            index_shape = (slots, max_length, config.index_head_dim)
            self.index_keys_LPSX.append(torch.zeros(index_shape, dtype=dtype, device=device))

    @property
    def bytes(self) -> int:
        """Memory of all entries."""
        return sum(tensor.nbytes for tensor in (*self.latent_LPSK, *self.index_keys_LPSX))

    def copy_prefix(self, src_slot: int, dst_slot: int, length: int) -> None:
        """Copy the first ``length`` entries of one slot to another, in every layer."""
        for tensor in (*self.latent_LPSK, *self.index_keys_LPSX):
            if tensor.shape[0]:
                tensor[dst_slot, :length] = tensor[src_slot, :length]
