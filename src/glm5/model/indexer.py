"""The lightning indexer: cheap scores that say which keys each query attends to (DeepSeek-V3.2 section 2.1).

``I[t, s] = sum_j w[t, j] * relu(q_I[t, j] . k_I[s] * X**-0.5)`` with ``w = weights_proj(x) * J**-0.5`` in fp32. Queries
come from the normalised query latent, the single key head from the block input through a LayerNorm (eps 1e-6, with
bias). Unlike in the main attention the rotary part of a head comes first.

Letters: B batch, T queries, S keys, D hidden, Q query latent, J index heads, X index head dim, R rotary dims.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5.kernels import dispatch
from glm5.model.config import ModelConfig
from glm5.model.layers import Projection

_KEY_NORM_EPS = 1e-6


class KeyNorm(nn.Module):
    """LayerNorm with weight and bias over the index key."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., X] -> the same shape."""
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, _KEY_NORM_EPS)


class Indexer(nn.Module):
    """Projections of the index queries, head weights and keys of one layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.rotary_dim, self.interleaved = config.qk_rope_head_dim, config.indexer_rope_interleave
        self.scale = self.head_dim**-0.5
        self.wq_b = Projection(config.q_lora_rank, self.heads * self.head_dim)
        self.wk = Projection(config.hidden_size, self.head_dim)
        self.k_norm = KeyNorm(self.head_dim)
        self.weights_proj = Projection(config.hidden_size, self.heads)

    def queries(self, x_BTD: Tensor, q_latent_BTQ: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries q_BTJX after rotation and head weights w_BTJ (fp32, including J**-0.5, not X**-0.5)."""
        q_BTJX = self.wq_b(q_latent_BTQ).unflatten(-1, (self.heads, self.head_dim))
        w_BTJ = self.weights_proj(x_BTD).float() * self.heads**-0.5
        return self._rotate(q_BTJX, cos_BTR2, sin_BTR2), w_BTJ

    def keys(self, x_BSD: Tensor, cos_BSR2: Tensor, sin_BSR2: Tensor) -> Tensor:
        """Index keys k_BSX after norm and rotation: what the cache stores."""
        k_BS1X = self.k_norm(self.wk(x_BSD)).unsqueeze(-2)
        return self._rotate(k_BS1X, cos_BSR2, sin_BSR2).squeeze(-2)

    def _rotate(self, x_BTJX: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor) -> Tensor:
        rotated = dispatch.apply_rope(x_BTJX[..., : self.rotary_dim], cos_BTR2, sin_BTR2, self.interleaved)
        return torch.cat([rotated, x_BTJX[..., self.rotary_dim :]], dim=-1)
