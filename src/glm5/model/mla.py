"""Multi-head latent attention restricted to the keys that the indexer selects (DSA).

Two entrances to the same layer: ``forward`` attends over packed rows (training and scoring), ``ragged`` over a paged
cache (inference). Attention has two forms. The expanded one makes keys and values of every head from the latent. The
absorbed one multiplies the queries by the key half of that matrix and the results by its value half, so that all heads
read one latent per key: what ``ragged`` and lists of selected keys do. Both scale by ``(N + R)**-0.5``.

Gradient rules: the indexer sees detached inputs, selection carries no gradient, and the KL loss that trains the indexer
compares its scores with the layer's own attention, detached. So the language-model loss never reaches the indexer and
the indexer loss reaches nothing else.

Where the kernels prefer it, sparse attention works on lists of selected keys. Otherwise it is expanded and queries are
processed span by span (``PackedRows.spans``) under masks. In long rows each span is recomputed in the backward pass, so
that no tensor of size [B, H, T, T] is ever alive.

Letters: B batch, T queries, S keys, M flattened tokens, P cache blocks, U slots, Z blocks of a slot, D hidden, H heads,
N/R nope/rope dims, V value dim, Q query latent, C kv latent, K = N + R (expanded) or C + R (absorbed), J index heads, X
index head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glm5.kernels import dispatch
from glm5.model.cache import Entries
from glm5.model.config import ModelConfig
from glm5.model.indexer import Indexer
from glm5.model.layers import PackedRows, Projection, RmsNorm, Span
from glm5.model.parts import HeadPart

_NO_SELECTION = "this layer has no indexer and got no selection; pass on what the last full layer returned"

Index = tuple[Tensor, Tensor, Tensor]
"""Index queries q_BTJX, head weights w_BTJ and keys k_BSX."""


@dataclass(frozen=True, slots=True)
class AttentionMode:
    """How ``forward`` attends."""

    sparse: bool
    """Restrict attention to the selected keys; otherwise full causal attention."""
    indexer_loss: bool
    """Compute the KL loss of the indexer: over the selected keys when sparse, over all valid keys otherwise."""


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """Output of one attention layer over packed rows."""

    out_BTD: Tensor
    selection: tuple[Tensor, ...] | None
    """Selected keys for layers that share them: a list of positions [B, T, K] for all queries, or a mask [B, t, S] for
    each span; None when attention was dense."""
    indexer_kl: Tensor | None
    """Mean KL over query rows, scalar, when asked for and this layer has an indexer."""


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """What every layer of one ragged forward shares: token m writes at (slot, position) and reads up to itself."""

    cos_MR2: Tensor
    sin_MR2: Tensor
    slots_M: Tensor
    lengths_M: Tensor
    rows_M: Tensor
    """Where token m is written: row of the cache's entries, all blocks in order."""
    table_UZ: Tensor
    blocks: Tensor | None
    """The blocks that the numbers in ``table_UZ`` stand for; None when they are the cache's own."""
    sparse: bool


class MultiHeadLatentAttention(nn.Module):
    """One attention layer with the published parameter names.

    A layer without an indexer uses the selection of the last layer that has one and ``lends_selection``. Selections
    travel as arguments and results, never as state, so that a layer may run alone or be recomputed.
    """

    def __init__(self, config: ModelConfig, has_indexer: bool, lends_selection: bool) -> None:
        super().__init__()
        self.lends_selection = lends_selection
        self.part = HeadPart()
        self.heads, self.latent_dim = config.num_attention_heads, config.kv_lora_rank
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.index_topk = config.index_topk
        self.scale = config.qk_head_dim**-0.5
        self.q_a_proj = Projection(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RmsNorm(config.q_lora_rank, config.latent_norm_eps)
        self.q_b_proj = Projection(config.q_lora_rank, self.heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Projection(config.hidden_size, self.latent_dim + self.rope_dim)
        self.kv_a_layernorm = RmsNorm(self.latent_dim, config.latent_norm_eps)
        self.kv_b_proj = Projection(self.latent_dim, self.heads * (self.nope_dim + self.value_dim))
        self.o_proj = Projection(self.heads * self.value_dim, config.hidden_size)
        self.indexer = Indexer(config) if has_indexer else None

    def forward(self, x_BTD: Tensor, packed: PackedRows, mode: AttentionMode,
                shared: tuple[Tensor, ...] | None = None) -> AttentionResult:
        """Attend over packed rows. ``shared`` is an earlier selection to attend to instead of making one.

        Raises ValueError when sparse attention has neither an indexer nor ``shared``.
        """
        if mode.sparse and self.indexer is None and shared is None:
            raise ValueError(_NO_SELECTION)
        q_latent_BTQ = self.q_a_layernorm(self.q_a_proj(x_BTD))
        q_BTHK = self._queries(self.part.enter(q_latent_BTQ), packed.cos_BTR2, packed.sin_BTR2)
        latent_BSC, rope_BSR = (self.part.enter(packed.part.gather(keys_BTX)) for keys_BTX
                                in self._latents(x_BTD, packed.cos_BTR2, packed.sin_BTR2))
        index = self._index(x_BTD, q_latent_BTQ, packed, mode) if shared is None else None
        if self._selects(packed, mode) and dispatch.prefers_lists(q_BTHK):
            positions_BTK = shared[0] if shared is not None else None
            keys_BSK = torch.cat([latent_BSC, rope_BSR], dim=-1)
            return self._attend_lists(q_BTHK, keys_BSK, index, positions_BTK, packed, mode)

        kv_BSHE = self.kv_b_proj(latent_BSC).unflatten(-1, (self.heads, self.nope_dim + self.value_dim))
        k_nope_BSHN, v_BSHV = kv_BSHE.split([self.nope_dim, self.value_dim], dim=-1)
        k_BSHK = torch.cat([k_nope_BSHN, rope_BSR.unsqueeze(2).expand(-1, -1, self.heads, -1)], dim=-1)
        outputs, selections, kl_sums = [], [], []
        for number, span in enumerate(packed.spans):
            inherited = shared[number] if mode.sparse and shared is not None else None
            part = None
            if index is not None:
                part = index[0][:, span.queries], index[1][:, span.queries], index[2][:, span.keys]
            arguments = (q_BTHK[:, span.queries], k_BSHK[:, span.keys], v_BSHV[:, span.keys], part, inherited, packed,
                         span, mode)
            if packed.is_short or not torch.is_grad_enabled():
                out_BtHV, selected_BtS, kl = self._attend(*arguments)
            else:
                out_BtHV, selected_BtS, kl = checkpoint(self._attend, *arguments, use_reentrant=False,
                                                        preserve_rng_state=False)
            outputs.append(out_BtHV)
            selections.append(selected_BtS)
            if kl is not None:
                kl_sums.append(kl * packed.query_rows(span))
        out_BTHV = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        kl = torch.stack(kl_sums).sum() / max(sum(map(packed.query_rows, packed.spans)), 1) if kl_sums else None
        out_BTD = self.part.leave(self.o_proj(out_BTHV.flatten(2)))
        return AttentionResult(out_BTD, tuple(selections) if mode.sparse else None, kl)

    def ragged(self, x_MD: Tensor, step: RaggedStep, latents: Entries, index_keys: Entries,
               shared: Sequence[Tensor | None]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Append the keys of M tokens to the cache, then attend from each token over its slot up to itself.

        ``shared`` holds the selected positions (``[positions_MK or None]``) of the last full layer and is empty before
        the first; the second result is what the next layer gets. No gradient. Raises ValueError as ``forward`` does.
        """
        if step.sparse and self.indexer is None and not shared:
            raise ValueError(_NO_SELECTION)
        q_latent_MQ = self.q_a_layernorm(self.q_a_proj(x_MD))
        latent_MC, rope_MR = self._latents(x_MD, step.cos_MR2, step.sin_MR2)
        latents.write(step.rows_M, torch.cat([latent_MC, rope_MR], dim=-1))
        latent_PSK = latents.read(step.blocks)
        up_HEC = self.kv_b_proj.weight.unflatten(0, (self.heads, self.nope_dim + self.value_dim))
        q_MHE = self.q_b_proj(q_latent_MQ).unflatten(-1, (self.heads, self.nope_dim + self.rope_dim))
        absorbed_HMC = torch.bmm(q_MHE[..., : self.nope_dim].transpose(0, 1), up_HEC[:, : self.nope_dim])
        q_rope_MHR = dispatch.apply_rope(q_MHE[..., self.nope_dim :], step.cos_MR2, step.sin_MR2)
        q_MHK = torch.cat([absorbed_HMC.transpose(0, 1), q_rope_MHR], dim=-1)
        place = (step.slots_M, step.lengths_M)
        out_MHC = None
        if step.sparse and self.indexer is not None:
            index_keys.write(step.rows_M, self.indexer.keys(x_MD, step.cos_MR2, step.sin_MR2))
            index_keys_PSX = index_keys.read(step.blocks)
            iq_MJX, iw_MJ = self.indexer.queries(x_MD, q_latent_MQ, step.cos_MR2, step.sin_MR2)
            iw_MJ = iw_MJ * self.indexer.scale
            if self.lends_selection:
                shared = [dispatch.ragged_select(iq_MJX, iw_MJ, index_keys_PSX, *place, self.index_topk, step.table_UZ)]
            else:
                out_MHC = dispatch.ragged_dsa(q_MHK, iq_MJX, iw_MJ, latent_PSK, index_keys_PSX, *place, self.index_topk,
                                              self.scale, self.latent_dim, step.table_UZ)
        if out_MHC is None:
            positions_MK = shared[0] if step.sparse else None
            out_MHC = dispatch.ragged_attention(q_MHK, latent_PSK, *place, positions_MK, self.scale, self.latent_dim,
                                                step.table_UZ)
        out_HMV = torch.bmm(out_MHC.transpose(0, 1), up_HEC[:, self.nope_dim :].transpose(1, 2))
        return self.part.leave(self.o_proj(out_HMV.transpose(0, 1).flatten(1))), shared

    def _queries(self, q_latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [..., H, N + R]."""
        q = self.q_b_proj(q_latent).unflatten(-1, (self.heads, self.nope_dim + self.rope_dim))
        return torch.cat([q[..., : self.nope_dim], dispatch.apply_rope(q[..., self.nope_dim :], cos, sin)], dim=-1)

    def _latents(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised key-value latent [..., C] and the rotated key part [..., R] that all heads share."""
        latent, rope = self.kv_a_proj_with_mqa(x).split([self.latent_dim, self.rope_dim], dim=-1)
        return self.kv_a_layernorm(latent), dispatch.apply_rope(rope.unsqueeze(-2), cos, sin).squeeze(-2)

    def _index(self, x_BTD: Tensor, q_latent_BTQ: Tensor, packed: PackedRows, mode: AttentionMode) -> Index | None:
        """Index queries, head weights and keys, when selection or the loss needs them: detached from the main path."""
        if self.indexer is None or not (mode.indexer_loss or self._selects(packed, mode)):
            return None
        with torch.set_grad_enabled(mode.indexer_loss and torch.is_grad_enabled()):
            x_BTD = x_BTD.detach()
            q_BTJX, w_BTJ = self.indexer.queries(x_BTD, q_latent_BTQ.detach(), packed.cos_BTR2, packed.sin_BTR2)
            keys_BTX = self.indexer.keys(x_BTD, packed.cos_BTR2, packed.sin_BTR2)
            return q_BTJX, w_BTJ, packed.part.gather(keys_BTX)

    def _selects(self, packed: PackedRows, mode: AttentionMode) -> bool:
        """Whether some query, local or not, sees more keys than sparse attention keeps."""
        return mode.sparse and packed.longest > self.index_topk

    def _attend_lists(self, q_BTHK: Tensor, keys_BSK: Tensor, index: Index | None, positions_BTK: Tensor | None,
                      packed: PackedRows, mode: AttentionMode) -> AttentionResult:
        """Absorbed sparse attention by lists of keys, those given or those that the indexer selects.

        Time but for the selection, and memory, are proportional to the length of the lists: no mask, no recomputation.
        """
        if positions_BTK is None:
            assert index is not None and self.indexer is not None
            positions_BTK = dispatch.select_positions(index[0], index[2], index[1], self.indexer.scale,
                                                      *packed.visible_keys(), self.index_topk)
        # By a product with the unit matrix, because a weight that is sharded is whole only while its module runs.
        unit_CC = torch.eye(self.latent_dim, dtype=q_BTHK.dtype, device=q_BTHK.device)
        up_HEC = self.kv_b_proj(unit_CC).T.unflatten(0, (self.heads, self.nope_dim + self.value_dim))
        absorbed_BTHC = torch.einsum("bthn,hnc->bthc", q_BTHK[..., : self.nope_dim], up_HEC[:, : self.nope_dim])
        q_BTHK = torch.cat([absorbed_BTHC, q_BTHK[..., self.nope_dim :]], dim=-1)
        out_BTHC = dispatch.sparse_attention(q_BTHK, keys_BSK, positions_BTK, self.scale, self.latent_dim)
        out_BTHV = torch.einsum("bthc,hvc->bthv", out_BTHC, up_HEC[:, self.nope_dim :])
        kl = None
        if mode.indexer_loss and index is not None and self.indexer is not None:
            target_BTK = self.part.mean(dispatch.sparse_targets(q_BTHK, keys_BSK, positions_BTK, self.scale))
            scores_BTK = dispatch.sparse_scores(index[0], index[2], index[1], self.indexer.scale, positions_BTK)
            kl = dispatch.indexer_kl(scores_BTK, target_BTK, positions_BTK >= 0)
        return AttentionResult(self.part.leave(self.o_proj(out_BTHV.flatten(2))), (positions_BTK,), kl)

    def _attend(self, q_BtHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, index: Index | None, inherited_BtS: Tensor | None,
                packed: PackedRows, span: Span, mode: AttentionMode) -> tuple[Tensor, Tensor, Tensor | None]:
        """One span: output, the keys that it attended to, and the mean KL of its queries.

        The mask is made here, so that a recomputed span keeps none alive. Keys are only scored when more are visible
        than the indexer keeps, or when the scores are to be trained.
        """
        mask_BtS = packed.mask(span) if inherited_BtS is None else inherited_BtS
        if index is None or self.indexer is None or not (mode.indexer_loss or span.longest > self.index_topk):
            return dispatch.masked_attention(q_BtHK, k_BSHK, v_BSHV, mask_BtS, self.scale), mask_BtS, None
        scores_BtS = dispatch.index_scores(index[0], index[2], index[1], self.indexer.scale, mask_BtS)
        if mode.sparse and span.longest > self.index_topk:
            mask_BtS = dispatch.select_topk(scores_BtS.detach(), mask_BtS, self.index_topk)
        out_BtHV = dispatch.masked_attention(q_BtHK, k_BSHK, v_BSHV, mask_BtS, self.scale)
        if not mode.indexer_loss:
            return out_BtHV, mask_BtS, None
        target_BtS = dispatch.attention_targets(q_BtHK.detach(), k_BSHK.detach(), mask_BtS, self.scale)
        target_BtS = self.part.mean(target_BtS)
        return out_BtHV, mask_BtS, dispatch.indexer_kl(scores_BtS, target_BtS, mask_BtS)
