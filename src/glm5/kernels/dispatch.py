"""One function per operation: picks the fastest form for the device, type and size at hand.

The contract of every operation is its docstring in ``reference``.
"""

from __future__ import annotations

from glm5.kernels.reference import (
    apply_rope,
    attention_targets,
    experts,
    index_scores,
    indexer_kl,
    masked_attention,
    ragged_attention,
    ragged_dsa,
    ragged_select,
    rms_norm,
    select_topk,
)

__all__ = [
    "apply_rope",
    "attention_targets",
    "experts",
    "index_scores",
    "indexer_kl",
    "masked_attention",
    "ragged_attention",
    "ragged_dsa",
    "ragged_select",
    "rms_norm",
    "select_topk",
]
