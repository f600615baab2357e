"""Choosing the next token of many sequences at once.

``kernels.dispatch.sample`` draws each row with one uniform number. Here that number is a hash of (the request's seed,
how many tokens it has), so a seeded request samples the same tokens whatever else is in the batch, in whatever order
steps ran.

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

from glm5.kernels import dispatch

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
    min_p: np.ndarray
    """float32; 0 keeps all."""
    seed: np.ndarray
    """uint64, from ``mix_seed``."""
    counter: np.ndarray
    """uint64: tokens the request has produced so far."""

    def at(self, rows: np.ndarray, offset: np.ndarray | int | None = None) -> RowSettings:
        """Those of ``rows``, ``offset`` tokens later; None is no token."""
        counter = self.counter[rows]
        if offset is not None:
            counter = counter + np.asarray(offset, np.uint64)
        return RowSettings(
            self.temperature[rows], self.top_p[rows], self.top_k[rows], self.min_p[rows], self.seed[rows], counter
        )


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
    """(ids [B] int64, logprobs [B] fp32) for fp32 ``logits_BW``; see ``kernels.reference.sample``."""
    uniform = uniforms(settings.seed, settings.counter)
    rows = (settings.temperature, settings.top_k, settings.top_p, settings.min_p, uniform)
    return dispatch.sample(logits_BW, *(torch.from_numpy(row).to(logits_BW.device) for row in rows))


def log_probs(logits_BW: Tensor, ids: Tensor) -> Tensor:
    """Log-prob [B] of ``ids`` [B] under ``softmax(logits_BW)``."""
    return logits_BW.gather(-1, ids[:, None])[:, 0] - logits_BW.logsumexp(-1)


def top_log_probs(logits_W: Tensor, count: int) -> list[tuple[int, float]]:
    """The ``count`` most likely ids under ``softmax(logits_W)`` and their log-probs; ties go to the lower id."""
    ids = torch.sort(logits_W, descending=True, stable=True).indices[:count]
    return list(zip(ids.tolist(), (logits_W[ids] - logits_W.logsumexp(-1)).tolist(), strict=True))
