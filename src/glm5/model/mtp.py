"""The decoder layer, and the multi-token-prediction layer built on it (DeepSeek-V3 section 2.2).

The MTP layer is stored as layer number ``num_hidden_layers``. It predicts token t+2 from the final hidden state at t
(after ``model.norm``) and the embedding of token t+1: ``eh_proj(cat[enorm(embedding), hnorm(hidden)])``, one sparse
decoder layer with an indexer of its own, ``shared_head.norm``, then the main head. Chained steps feed its normalised
output back as ``hidden``. It never uses a selection of the main model; with ``index_share_for_mtp_iteration`` chained
steps use the selection of its own first step.

Letters: B batch, T tokens, M flattened tokens, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glm5.model.config import ModelConfig
from glm5.model.layers import Mlp, PackedRows, Projection, RmsNorm
from glm5.model.mla import AttentionMode, MultiHeadLatentAttention, RaggedStep
from glm5.model.moe import RouterStatistics, SparseMlp


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Output of one decoder layer over packed rows."""

    hidden_BTD: Tensor
    selection: tuple[Tensor, ...] | None
    indexer_kl: Tensor | None
    router: RouterStatistics | None
    """None for a dense layer."""


class DecoderLayer(nn.Module):
    """Pre-norm residual block: latent attention, then a dense or sparse feed-forward."""

    def __init__(self, config: ModelConfig, sparse_mlp: bool, has_indexer: bool, lends_selection: bool) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MultiHeadLatentAttention(config, has_indexer, lends_selection)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMlp(config) if sparse_mlp else Mlp(config.hidden_size, config.intermediate_size)
        self.recomputes = False
        """Keep only the input of the layer for the backward pass and compute the rest again there."""

    def forward(self, hidden_BTD: Tensor, packed: PackedRows, mode: AttentionMode,
                shared: tuple[Tensor, ...] | None = None) -> LayerResult:
        """``shared`` is an earlier selection to attend to instead of making one."""
        if self.recomputes and torch.is_grad_enabled():
            result: LayerResult = checkpoint(self._block, hidden_BTD, packed, mode, shared, use_reentrant=False,
                                             preserve_rng_state=False)
            return result
        return self._block(hidden_BTD, packed, mode, shared)

    def _block(self, hidden_BTD: Tensor, packed: PackedRows, mode: AttentionMode,
               shared: tuple[Tensor, ...] | None) -> LayerResult:
        attention = self.self_attn(self.input_layernorm(hidden_BTD), packed, mode, shared)
        hidden_BTD = hidden_BTD + attention.out_BTD
        normed_BTD = self.post_attention_layernorm(hidden_BTD)
        if isinstance(self.mlp, SparseMlp):
            update_BTD, router = self.mlp(normed_BTD, packed.counted_tokens(), packed.part)
        else:
            update_BTD, router = self.mlp(normed_BTD), None
        return LayerResult(hidden_BTD + update_BTD, attention.selection, attention.indexer_kl, router)

    def ragged(self, hidden_MD: Tensor, step: RaggedStep, latent_PSK: Tensor, index_keys_PSX: Tensor,
               shared: Sequence[Tensor | None]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The same block over a paged cache; see ``MultiHeadLatentAttention.ragged``."""
        x_MD = self.input_layernorm(hidden_MD)
        out_MD, shared = self.self_attn.ragged(x_MD, step, latent_PSK, index_keys_PSX, shared)
        hidden_MD = hidden_MD + out_MD
        normed_MD = self.post_attention_layernorm(hidden_MD)
        update_MD = self.mlp.tokens(normed_MD) if isinstance(self.mlp, SparseMlp) else self.mlp(normed_MD)
        return hidden_MD + update_MD, shared


class SharedHead(nn.Module):
    """Holds ``shared_head.norm``; the head itself is the main model's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class MtpLayer(DecoderLayer):
    """A sparse decoder layer with its own indexer, fed by the next token's embedding and a hidden state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, sparse_mlp=True, has_indexer=True, lends_selection=False)
        self.enorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Projection(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)

    def merge(self, embedding_BTD: Tensor, hidden_BTD: Tensor) -> Tensor:
        """Input of the decoder layer: the embedding half first."""
        return self.eh_proj(torch.cat([self.enorm(embedding_BTD), self.hnorm(hidden_BTD)], dim=-1))
