"""Losses over hidden states: the output head is applied in chunks, so that [tokens x vocabulary] never exists whole.

Two autograd functions share that rule. ``chunked_cross_entropy`` knows its gradient up to a factor while it computes
the loss, so it keeps the gradient instead of the logits: three products, no recomputation. ``token_logprobs`` returns
one value per token, whose gradients arrive later, so its backward pass computes the logits of a chunk again. Both work
only on the tokens that count.

``Objective`` sums the losses that a stage trains. Multi-token prediction (arXiv:2412.19437 section 2.2, unrolled with
shared parameters as in GLM-5): at depth j = 1..D the one MTP layer takes the hidden state of depth j - 1 (depth 0: the
main model's) and the embedding of token t + j, and predicts token t + j + 1. The loss is the mean over depths of each
depth's mean over its valid tokens.

All sums are divided by counts of the whole optimizer step, which the caller passes, so that splitting a step into
micro-batches changes nothing.

Letters: B batch, T tokens of a row, M flattened tokens, D hidden, W vocabulary, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5.data.packing import Batch
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.train.config import Attention

CHUNK_LOGITS = 1 << 21
"""Logits that one chunk may hold: 8 MB in fp32, which stays in the outer caches of a CPU."""


def chunked_cross_entropy(hidden_MD: Tensor, weight_WD: Tensor, labels: Tensor, mask: Tensor,
                          chunk_logits: int = CHUNK_LOGITS) -> Tensor:
    """Sum over the tokens with ``mask`` of -log softmax(hidden W^T)[label], in nats, fp32.

    ``labels`` int64 [M], ``mask`` bool [M]; labels outside the mask are never read. Differentiable in both matrices.
    """
    total: Tensor = _CrossEntropy.apply(hidden_MD, weight_WD, labels, mask, chunk_logits)
    return total


def token_logprobs(hidden_MD: Tensor, weight_WD: Tensor, labels: Tensor, temperature: float = 1.0,
                   chunk_logits: int = CHUNK_LOGITS) -> Tensor:
    """log softmax(hidden W^T / temperature)[label] of every token, fp32 [M], differentiable in both matrices.

    Temperature 0 (greedy sampling) gives the log-probs of the unscaled distribution, as the engine reports them.
    """
    logprobs: Tensor = _TokenLogprobs.apply(hidden_MD, weight_WD, labels, temperature or 1.0, chunk_logits)
    return logprobs


@torch.no_grad()
def token_entropy(hidden_MD: Tensor, weight_WD: Tensor, temperature: float = 1.0,
                  chunk_logits: int = CHUNK_LOGITS) -> Tensor:
    """Entropy in nats of the next-token distribution of every token, fp32 [M], without gradient."""
    entropy = torch.empty(hidden_MD.shape[0], dtype=torch.float32, device=hidden_MD.device)
    for rows in _chunks(hidden_MD.shape[0], weight_WD.shape[0], chunk_logits):
        logprobs_MW = torch.log_softmax((hidden_MD[rows] @ weight_WD.mT).float() / (temperature or 1.0), dim=-1)
        entropy[rows] = -(logprobs_MW.exp() * logprobs_MW).sum(-1)
    return entropy


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """What the sums of one optimizer step are divided by: counts over all its micro-batches."""

    rows: int
    """Rows."""
    valid: int
    """Tokens that are not padding."""
    labels: tuple[int, ...]
    """Labels of the main model, then of each MTP depth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Losses of one micro-batch, each already its share of the step's mean."""

    total: Tensor
    """What backward runs on."""
    parts: dict[str, Tensor]
    """Detached terms by their names in metrics.jsonl."""
    load_LE: Tensor
    """Tokens per expert of each sparse layer, the MTP layer's row last when it ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LmEvaluation:
    """Language-model loss over a set of batches."""

    nats: float
    """Sum over the labels of -log p, in nats."""
    tokens: int
    """Number of labels."""

    @property
    def nats_per_token(self) -> float:
        """Mean loss."""
        return self.nats / max(self.tokens, 1)

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """Mean loss per byte of text, for a text with ``bytes_per_token``."""
        return self.nats_per_token / (math.log(2) * bytes_per_token)


def mtp_mask(batch: Batch, depth: int) -> Tensor:
    """bool [B, T]: whether token t + depth + 1 is a label in the document of token t. Depth 0 is the main model."""
    if depth == 0:
        return batch.loss_mask_BT
    same_BT = batch.documents_BT == _shift(batch.documents_BT, depth, fill=-1)
    return same_BT & _shift(batch.loss_mask_BT, depth, fill=False)


def count_step(batch: Batch, mtp_steps: int,
               total: Callable[[Tensor], Tensor] = lambda counts: counts) -> StepCounts:
    """Divisors of a step from its rows, or from those of this process, which ``total`` adds to those of the others.

    A depth without labels counts 1, its sum being 0.
    """
    labels = [mtp_mask(batch, depth).sum() for depth in range(mtp_steps + 1)]
    here = torch.stack([torch.tensor(batch.ids_BT.shape[0]), (batch.documents_BT >= 0).sum(), *labels])
    rows, valid, *labels = total(here).clamp_min(1).tolist()
    return StepCounts(rows=rows, valid=valid, labels=tuple(labels))


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Which losses a stage sums, and their weights."""

    attention: Attention
    """Attention of every forward pass."""
    main: bool
    """Language-model, multi-token and balance losses."""
    indexer: bool
    """KL losses of the indexers."""
    mtp_steps: int
    """MTP depths. Without the main losses one depth reaches the MTP layer's indexer and the others are left out."""
    mtp_weight: float
    """Weight of the mean over depths."""
    balance_weight: float
    """Weight of the expert balance loss."""
    indexer_weight: float = 1.0
    """Weight of the KL losses; 0 leaves gradients of zeros, so that every process has the same ones to reduce."""

    def __call__(self, model: GlmMoeDsaForCausalLM, batch: Batch, counts: StepCounts) -> Losses:
        """Losses of ``batch``, which is a step with ``counts`` or a part of it."""
        output = model.hidden(batch.ids_BT, batch.positions_BT, batch.documents_BT, attention=self.attention,
                              indexer_loss=self.indexer)
        hidden_BTD, selection, mtp_outputs = output.hidden_BTD, None, []
        parts: dict[str, Tensor] = {}
        if self.main:
            parts["loss"] = _head_loss(model, hidden_BTD, batch, 0) / counts.labels[0]
        depths = self.mtp_steps if self.main else min(self.mtp_steps, 1)
        for depth in range(1, depths + 1):
            # Positions stay those of token t: rotation is relative, so a shift of a whole document changes nothing.
            step = model.mtp(hidden_BTD, _shift(batch.ids_BT, depth, fill=0), batch.positions_BT, batch.documents_BT,
                             attention=self.attention, indexer_loss=self.indexer, selection=selection)
            hidden_BTD, selection = step.hidden_BTD, step.selection
            mtp_outputs.append(step)
            if self.main:
                loss = _head_loss(model, hidden_BTD, batch, depth) / (counts.labels[depth] * depths)
                parts["mtp_loss"] = parts["mtp_loss"] + loss if depth > 1 else loss
        loads = [output.expert_load_LE]
        if mtp_outputs:
            loads.append(torch.stack([step.expert_load_E for step in mtp_outputs]).sum(0, keepdim=True))
        if self.indexer:
            share = int((model.part.local(batch.documents_BT) >= 0).sum()) / counts.valid
            parts["indexer_kl"] = output.indexer_kl * share
            mtp_losses = [step.indexer_kl for step in mtp_outputs if step.indexer_kl is not None]
            if mtp_losses:
                parts["mtp_indexer_kl"] = torch.stack(mtp_losses).mean() * share
        if self.main and self.balance_weight:
            balance = torch.stack([output.balance_loss, *(step.balance_loss / depths for step in mtp_outputs)]).sum()
            parts["balance_loss"] = balance * (batch.ids_BT.shape[0] / counts.rows)
        weights = {"mtp_loss": self.mtp_weight, "balance_loss": self.balance_weight,
                   "indexer_kl": self.indexer_weight, "mtp_indexer_kl": self.indexer_weight}
        total = torch.stack([weights.get(name, 1.0) * part for name, part in parts.items()]).sum()
        detached = {name: part.detach() for name, part in parts.items()}
        return Losses(total=total, parts=detached, load_LE=torch.cat(loads))


@torch.no_grad()
def evaluate_lm(model: GlmMoeDsaForCausalLM, batches: Iterable[Batch], attention: Attention) -> LmEvaluation:
    """Language-model loss of ``model`` on ``batches``."""
    nats, tokens = 0.0, 0
    for batch in batches:
        output = model.hidden(batch.ids_BT, batch.positions_BT, batch.documents_BT, attention=attention)
        nats += float(_head_loss(model, output.hidden_BTD, batch, 0))
        tokens += int(model.part.local(batch.loss_mask_BT).sum())
    return LmEvaluation(nats=nats, tokens=tokens)


def _head_loss(model: GlmMoeDsaForCausalLM, hidden_BTD: Tensor, batch: Batch, depth: int) -> Tensor:
    labels_BT = model.part.local(_shift(batch.ids_BT, depth + 1, fill=0))
    return chunked_cross_entropy(hidden_BTD.flatten(0, 1), model.lm_head.weight, labels_BT.flatten(),
                                 model.part.local(mtp_mask(batch, depth)).flatten())


def _shift(x_BT: Tensor, by: int, fill: int | bool) -> Tensor:
    """``x`` moved ``by`` places to the left within each row, ``fill`` at the end."""
    return torch.nn.functional.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])), value=fill)


def _chunks(tokens: int, vocabulary: int, chunk_logits: int) -> Iterator[slice]:
    size = max(chunk_logits // vocabulary, 1)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


class _CrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one pass over chunks; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, weight_WD: Tensor, labels: Tensor, mask: Tensor,
                chunk_logits: int) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_MD = torch.zeros_like(hidden_MD) if needs_hidden else None
        grad_weight_WD = torch.zeros_like(weight_WD, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        counted = mask.nonzero().squeeze(1)
        for rows in _chunks(counted.shape[0], weight_WD.shape[0], chunk_logits):
            tokens = counted[rows]
            x_MD, label_M1 = hidden_MD[tokens], labels[tokens].unsqueeze(1)
            logprobs_MW = torch.log_softmax((x_MD @ weight_WD.mT).float(), dim=-1)
            total -= logprobs_MW.gather(1, label_M1).sum()
            if not (needs_hidden or needs_weight):
                continue
            slope_MW = logprobs_MW.exp_()
            slope_MW.scatter_add_(1, label_M1, slope_MW.new_full(label_M1.shape, -1.0))
            slope_MW = slope_MW.to(hidden_MD.dtype)
            if grad_hidden_MD is not None:
                grad_hidden_MD[tokens] = slope_MW @ weight_WD
            if grad_weight_WD is not None:
                grad_weight_WD += slope_MW.mT @ x_MD
        ctx.grads = (grad_hidden_MD, None if grad_weight_WD is None else grad_weight_WD.to(weight_WD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if kept is None else kept * grad.to(kept.dtype) for kept in ctx.grads]
        return (*scaled, None, None, None)


class _TokenLogprobs(torch.autograd.Function):
    """Log-prob of each label; backward computes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, weight_WD: Tensor, labels: Tensor, temperature: float,
                chunk_logits: int) -> Tensor:
        logprobs = torch.empty(hidden_MD.shape[0], dtype=torch.float32, device=hidden_MD.device)
        for rows in _chunks(hidden_MD.shape[0], weight_WD.shape[0], chunk_logits):
            logits_MW = (hidden_MD[rows] @ weight_WD.mT).float() / temperature
            logprobs[rows] = torch.log_softmax(logits_MW, dim=-1).gather(1, labels[rows].unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(hidden_MD, weight_WD, labels)
        ctx.temperature, ctx.chunk_logits = temperature, chunk_logits
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_WD, labels = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_MD = torch.empty_like(hidden_MD) if needs_hidden else None
        grad_weight_WD = torch.zeros_like(weight_WD, dtype=torch.float32) if needs_weight else None
        for rows in _chunks(hidden_MD.shape[0], weight_WD.shape[0], ctx.chunk_logits):
            logits_MW = (hidden_MD[rows] @ weight_WD.mT).float() / ctx.temperature
            scaled_M1 = grad[rows].unsqueeze(1) / ctx.temperature
            slope_MW = torch.softmax(logits_MW, dim=-1).mul_(-scaled_M1)
            slope_MW.scatter_add_(1, labels[rows].unsqueeze(1), scaled_M1)
            slope_MW = slope_MW.to(hidden_MD.dtype)
            if grad_hidden_MD is not None:
                grad_hidden_MD[rows] = slope_MW @ weight_WD
            if grad_weight_WD is not None:
                grad_weight_WD += slope_MW.mT @ hidden_MD[rows]
        return grad_hidden_MD, None if grad_weight_WD is None else grad_weight_WD.to(weight_WD.dtype), None, None, None
