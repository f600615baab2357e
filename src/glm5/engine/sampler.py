"""Choosing the next token of many sequences at once.

Each row uses one uniform number and the inverse of its cumulative distribution, which costs one pass over the
vocabulary instead of one random number per entry. The uniform of a row is a hash of (its request's seed, how many
tokens it has), so a seeded request samples the same tokens whatever else is in the batch, in whatever order steps
ran.

The log-prob of the chosen token is that of ``softmax(logits / temperature)`` over the whole vocabulary, before top-k,
top-p and min-p cut it: what a trainer computes from the same logits. A greedy row (temperature 0) reports the log-prob
under the unscaled distribution.

Letters: B rows, W vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling parameters by row, as arrays of length B."""

    temperature: np.ndarray
    """float32; 0 is greedy."""
    top_p: np.ndarray
    """float32; 1 keeps all."""
    top_k: np.ndarray
    """int64; -1 keeps all."""
    seed: np.ndarray
    """uint64, from ``mix_seed``."""
    counter: np.ndarray
    """uint64: tokens the request has produced so far."""
    min_p: np.ndarray | None = None
    """float32; 0 keeps all, and so does None."""

    def at(self, rows: np.ndarray, offset: np.ndarray | int) -> RowSettings:
        """Those of ``rows``, ``offset`` tokens later."""
        min_p = None if self.min_p is None else self.min_p[rows]
        counter = self.counter[rows] + np.asarray(offset, np.uint64)
        return RowSettings(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.seed[rows], counter, min_p)


def mix_seed(seed: int) -> int:
    """A 64-bit state for ``seed`` (any integer), far from those of its neighbours."""
    x = (seed + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniforms(seed: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """float32 in [0, 1), a function of (seed, counter) alone (SplitMix64)."""
    x = seed + (counter + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def sample(logits_BW: Tensor, settings: RowSettings) -> tuple[Tensor, Tensor]:
    """(ids [B] int64, logprobs [B] fp32) for fp32 ``logits_BW``. Broken logits give a log-prob that is not finite."""
    is_greedy = settings.temperature == 0
    if is_greedy.all():
        ids = logits_BW.argmax(-1)
        return ids, log_probs(logits_BW, ids)
    temperature = np.where(is_greedy, np.float32(1), settings.temperature)
    if (temperature != 1).any():
        scaled_BW = logits_BW / torch.from_numpy(temperature).to(logits_BW.device)[:, None]
    else:
        scaled_BW = logits_BW
    top_BT = scaled_BW.amax(-1, keepdim=True)
    weights_BW = (scaled_BW - top_BT).exp_()
    cumulative_BW = weights_BW.cumsum(-1)
    total = cumulative_BW[:, -1]
    uniform = torch.from_numpy(uniforms(settings.seed, settings.counter)).to(logits_BW.device)
    ids = _invert(cumulative_BW, uniform)
    min_p = np.zeros_like(settings.top_p) if settings.min_p is None else settings.min_p
    is_cut = ((settings.top_p < 1) | (settings.top_k > 0) | (min_p > 0)) & ~is_greedy
    if is_cut.any():
        rows = torch.from_numpy(np.flatnonzero(is_cut)).to(logits_BW.device)
        cut_ids = _sample_truncated(
            weights_BW[rows], uniform[rows], settings.top_k[is_cut], settings.top_p[is_cut], min_p[is_cut]
        )
        ids.index_copy_(0, rows, cut_ids)
    if is_greedy.any():
        ids = torch.where(torch.from_numpy(is_greedy).to(logits_BW.device), logits_BW.argmax(-1), ids)
    chosen = scaled_BW.gather(-1, ids[:, None])
    return ids, (chosen - top_BT)[:, 0] - total.log()


def log_probs(logits_BW: Tensor, ids: Tensor) -> Tensor:
    """Log-prob [B] of ``ids`` [B] under ``softmax(logits_BW)``."""
    return logits_BW.gather(-1, ids[:, None])[:, 0] - logits_BW.logsumexp(-1)


def top_log_probs(logits_W: Tensor, count: int) -> list[tuple[int, float]]:
    """The ``count`` most likely ids under ``softmax(logits_W)`` and their log-probs; ties go to the lower id."""
    ids = torch.sort(logits_W, descending=True, stable=True).indices[:count]
    return list(zip(ids.tolist(), (logits_W[ids] - logits_W.logsumexp(-1)).tolist(), strict=True))


def _invert(cumulative_BW: Tensor, uniform: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds ``uniform`` times the total: never one of weight zero."""
    total = cumulative_BW[:, -1]
    # The product may round up to the total, which no entry exceeds.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative_BW, target[:, None], right=True)[:, 0]
    return ids.clamp_(max=cumulative_BW.shape[-1] - 1)


def _sample_truncated(
    weights_BW: Tensor, uniform: Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> Tensor:
    """Ids [B] from the k most likely tokens, then from the smallest set of these that holds ``top_p`` of their mass,
    without those whose weight is below ``min_p`` times the largest.

    Equal weights rank by id. The most likely token always stays.
    """
    width = weights_BW.shape[-1]
    limit = np.where(top_k > 0, np.minimum(top_k, width), width)
    sorted_BW, order_BW = torch.sort(weights_BW, dim=-1, descending=True, stable=True)
    rank = torch.arange(width, device=weights_BW.device)
    sorted_BW = sorted_BW * (rank < torch.from_numpy(limit).to(rank.device)[:, None])
    cumulative_BW = sorted_BW.cumsum(-1)
    mass = torch.from_numpy(top_p.astype(np.float32)).to(rank.device)[:, None] * cumulative_BW[:, -1:]
    # A token stays when the mass before it has not reached top_p yet.
    kept_BW = sorted_BW * (((cumulative_BW - sorted_BW) < mass) | (rank == 0))
    kept_BW *= sorted_BW >= torch.from_numpy(min_p.astype(np.float32)).to(rank.device)[:, None] * sorted_BW[:, :1]
    return order_BW.gather(-1, _invert(kept_BW.cumsum(-1), uniform)[:, None])[:, 0]
