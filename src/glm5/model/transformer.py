"""The GLM-5 language model: packed rows for training and scoring, ragged tokens over a paged cache for inference.

Parameter names equal those of a published checkpoint, except that the routed experts are stacked
(``mlp.experts.gate_up_proj`` and ``mlp.experts.down_proj``); ``checkpoint`` translates. The MTP layer is the last entry
of ``model.layers``, at index ``num_hidden_layers``.

Letters: B batch, T tokens, M flattened tokens, D hidden, W vocabulary, L sparse layers, E experts, R rotary dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from glm5.model.cache import KeyCache
from glm5.model.config import ModelConfig
from glm5.model.layers import Embedding, PackedRows, Projection, RmsNorm, rotary_tables
from glm5.model.mla import AttentionMode, RaggedStep
from glm5.model.moe import RouterStatistics
from glm5.model.mtp import DecoderLayer, MtpLayer
from glm5.model.parts import TokenPart

Attention = Literal["sparse", "dense"]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of ``forward`` and ``hidden``."""

    logits: Tensor | None
    """[B, T, W] ([B, 1, W] with ``last_only``) in the model's type; None from ``hidden``."""
    hidden_BTD: Tensor
    """After the final norm."""
    indexer_kl: Tensor | None
    """Mean over the layers with an indexer, scalar fp32; None unless asked for."""
    expert_load_LE: Tensor
    """Tokens per expert of each sparse layer, padding not counted."""
    balance_loss: Tensor
    """Mean over the sparse layers of the sequence-wise balance loss; zero without gradient mode."""


@dataclass(frozen=True, slots=True)
class MtpOutput:
    """Result of ``mtp``: one step of multi-token prediction."""

    hidden_BTD: Tensor
    """After ``shared_head.norm``: apply ``lm_head`` for logits, or feed it to the next step."""
    indexer_kl: Tensor | None
    """None unless asked for, and in a step that uses an earlier selection."""
    expert_load_E: Tensor
    balance_loss: Tensor
    selection: tuple[Tensor, ...] | None
    """For the next step, when the model shares it between steps (``index_share_for_mtp_iteration``), else None."""


class GlmMoeDsaModel(nn.Module):
    """Container that gives the published names: embedding, layers (the MTP layer last), final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        layers: list[DecoderLayer] = []
        indexers = (*config.indexer_schedule, "full")
        for number, mlp in enumerate(config.mlp_schedule):
            lends = indexers[number + 1] == "shared"
            layers.append(DecoderLayer(config, mlp == "sparse", indexers[number] == "full", lends))
        layers += [MtpLayer(config) for _ in range(config.num_nextn_predict_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class GlmMoeDsaForCausalLM(nn.Module):
    """``model(input_ids).logits``; see the module docstring. ``generator`` draws the fresh weights."""

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.part = TokenPart()
        self.model = GlmMoeDsaModel(config)
        self.lm_head = Projection(config.hidden_size, config.vocab_size)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Matrices ~ normal(0, initializer_range), those that write to the residual stream divided by
        sqrt(2 * layers), which lowers the early loss; norm weights 1, biases 0. Does nothing on the meta device."""
        deviation = self.config.initializer_range
        residual = deviation / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                writes_residual = "o_proj" in name or "down_proj" in name
                parameter.normal_(0.0, residual if writes_residual else deviation, generator=generator)

    def forward(self, input_ids_BT: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None, *,
                attention: Attention = "sparse", indexer_loss: bool = False, last_only: bool = False) -> ModelOutput:
        """Logits of packed rows.

        ``documents_BT`` is an int document id per token, -1 for padding; attention is causal within a document.
        ``positions_BT`` default to the position in the row. ``last_only`` gives the logits of the last token of a row.
        Ids, documents and positions are those of whole rows; results are those of the tokens of ``part``.
        """
        output = self.hidden(input_ids_BT, positions_BT, documents_BT, attention=attention, indexer_loss=indexer_loss)
        logits = self.lm_head(output.hidden_BTD[:, -1:] if last_only else output.hidden_BTD)
        return ModelOutput(logits, output.hidden_BTD, output.indexer_kl, output.expert_load_LE, output.balance_loss)

    def hidden(self, input_ids_BT: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None, *,
               attention: Attention = "sparse", indexer_loss: bool = False) -> ModelOutput:
        """``forward`` without the head: a caller applies ``lm_head`` in chunks."""
        hidden_BTD = self.model.embed_tokens(self.part.local(input_ids_BT))
        packed = self._packed(input_ids_BT, positions_BT, documents_BT)
        mode = AttentionMode(_is_sparse(attention), indexer_loss)
        selection: tuple[Tensor, ...] | None = None
        losses: list[Tensor] = []
        routers: list[RouterStatistics] = []
        for layer in self._decoder_layers():
            result = layer(hidden_BTD, packed, mode, selection if layer.self_attn.indexer is None else None)
            hidden_BTD, selection = result.hidden_BTD, result.selection
            if result.indexer_kl is not None:
                losses.append(result.indexer_kl)
            if result.router is not None:
                routers.append(result.router)
        hidden_BTD = self.model.norm(hidden_BTD)
        load_LE, balance_loss = _summarise(routers, self.config.n_routed_experts, hidden_BTD)
        return ModelOutput(None, hidden_BTD, torch.stack(losses).mean() if losses else None, load_LE, balance_loss)

    def mtp(self, hidden_BTD: Tensor, next_ids_BT: Tensor, positions_BT: Tensor | None = None,
            documents_BT: Tensor | None = None, *, attention: Attention = "sparse", indexer_loss: bool = False,
            selection: tuple[Tensor, ...] | None = None) -> MtpOutput:
        """One MTP step: from the hidden state of token t (after the final norm, or of the last step) and the id of
        token t+1, the hidden state that predicts token t+2. Pass the ``selection`` of the step before to a chained
        step. Raises ValueError when the model has no MTP layer."""
        layer = self._mtp_layer()
        embedding_BTD = self.model.embed_tokens(self.part.local(next_ids_BT))
        if self.config.mtp_zero_first_embedding:
            positions_BT = self._positions(next_ids_BT) if positions_BT is None else positions_BT
            first_BT = self.part.local(positions_BT == 0)
            embedding_BTD = embedding_BTD.masked_fill(first_BT.unsqueeze(-1), 0.0)
        packed = self._packed(next_ids_BT, positions_BT, documents_BT)
        mode = AttentionMode(_is_sparse(attention), indexer_loss)
        result = layer(layer.merge(embedding_BTD, hidden_BTD), packed, mode, selection)
        shared = result.selection if self.config.index_share_for_mtp_iteration else None
        return MtpOutput(layer.shared_head.norm(result.hidden_BTD), result.indexer_kl, result.router.load_E,
                         result.router.balance_loss, shared)

    def new_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, *,
                  table_UZ: Tensor, with_mtp: bool = False) -> KeyCache:
        """A cache for ``ragged``."""
        return KeyCache(self.config, num_blocks, block_size, dtype, device, table_UZ=table_UZ, with_mtp=with_mtp)

    @torch.inference_mode()
    def ragged(self, ids_M: Tensor, positions_M: Tensor, slots_M: Tensor, cache: KeyCache, rows: Tensor | None = None,
               attention: Attention = "sparse") -> Tensor:
        """Prefill and decode tokens in one call -> logits fp32 [rows or M, W]; see ``ragged_hidden``."""
        return self.lm_head(self.ragged_hidden(ids_M, positions_M, slots_M, cache, rows, attention)).float()

    @torch.inference_mode()
    def ragged_hidden(self, ids_M: Tensor, positions_M: Tensor, slots_M: Tensor, cache: KeyCache,
                      rows: Tensor | None = None, attention: Attention = "sparse") -> Tensor:
        """Hidden states after the final norm [rows or M, D].

        Token m is written at position ``positions[m]`` of slot ``slots[m]`` and attends to that slot up to itself; in
        each layer all keys are appended before any token attends, so the tokens of one slot may be a chunk of its
        prompt. ``rows`` are the indices into M whose states are wanted. A slot is filled and read with one kind of
        ``attention``.
        """
        hidden_MD = self.model.embed_tokens(ids_M)
        step = self._ragged_step(positions_M, slots_M, cache, attention)
        shared: Sequence[Tensor | None] = ()
        for number, layer in enumerate(self._decoder_layers()):
            hidden_MD, shared = layer.ragged(hidden_MD, step, *cache.layer(number), shared)
        if rows is not None:
            hidden_MD = hidden_MD[rows]
        return self.model.norm(hidden_MD)

    @torch.inference_mode()
    def ragged_mtp(self, hidden_MD: Tensor, next_ids_M: Tensor, positions_M: Tensor, slots_M: Tensor, cache: KeyCache,
                   attention: Attention = "sparse") -> Tensor:
        """``mtp`` over a cache that has the MTP layer -> hidden_MD: apply ``lm_head``, or feed it to the next step.

        The entry that token m leaves at its position depends on the id after it as well.
        """
        layer = self._mtp_layer()
        embedding_MD = self.model.embed_tokens(next_ids_M)
        if self.config.mtp_zero_first_embedding:
            embedding_MD = embedding_MD.masked_fill((positions_M == 0).unsqueeze(-1), 0.0)
        step = self._ragged_step(positions_M, slots_M, cache, attention)
        keys = cache.layer(self.config.num_hidden_layers)
        out_MD, _ = layer.ragged(layer.merge(embedding_MD, hidden_MD), step, *keys, ())
        return layer.shared_head.norm(out_MD)

    def _ragged_step(self, positions_M: Tensor, slots_M: Tensor, cache: KeyCache, attention: str) -> RaggedStep:
        cos_MR2, sin_MR2 = self._rotary(positions_M, self.model.embed_tokens.weight.dtype)
        sparse = _is_sparse(attention) and cache.max_length > self.config.index_topk
        rows_M = cache.rows(slots_M, positions_M)
        return RaggedStep(cos_MR2, sin_MR2, slots_M, positions_M + 1, rows_M, cache.table_UZ, sparse)

    def _decoder_layers(self) -> list[DecoderLayer]:
        return list(self.model.layers)[: self.config.num_hidden_layers]

    def _mtp_layer(self) -> MtpLayer:
        layer = self.model.layers[-1]
        if not isinstance(layer, MtpLayer):
            raise ValueError("num_nextn_predict_layers=0: this model has no MTP layer; build or load one that has")
        return layer

    def _packed(self, ids_BT: Tensor, positions_BT: Tensor | None, documents_BT: Tensor | None) -> PackedRows:
        if positions_BT is None:
            positions_BT = self._positions(ids_BT)
        cos_BTR2, sin_BTR2 = self._rotary(self.part.local(positions_BT), self.model.embed_tokens.weight.dtype)
        return PackedRows(cos_BTR2, sin_BTR2, documents_BT, (ids_BT.shape[0], ids_BT.shape[1]), self.part)

    @staticmethod
    def _positions(ids_BT: Tensor) -> Tensor:
        return torch.arange(ids_BT.shape[1], device=ids_BT.device).expand(ids_BT.shape)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotary_tables(positions, self.config.qk_rope_head_dim, self.config.rope_theta, dtype)


def _is_sparse(attention: str) -> bool:
    if attention not in ("sparse", "dense"):
        raise ValueError(f"attention={attention!r}: expected 'sparse' or 'dense'")
    return attention == "sparse"


def _summarise(routers: list[RouterStatistics], experts: int, like: Tensor) -> tuple[Tensor, Tensor]:
    if not routers:
        return like.new_zeros(0, experts, dtype=torch.float32), like.new_zeros((), dtype=torch.float32)
    load_LE = torch.stack([router.load_E for router in routers])
    return load_LE, torch.stack([router.balance_loss for router in routers]).mean()
