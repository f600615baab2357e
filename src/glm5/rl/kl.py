"""Estimators of KL divergence from log-probs of sampled tokens, and the mismatch metrics of a batch.

With ``delta = log pi - log reference`` and tokens drawn from pi, ``k1 = delta`` is unbiased with high variance,
``k2 = delta^2 / 2`` biased with low variance, ``k3 = exp(-delta) - 1 + delta`` unbiased and never negative
(Schulman, "Approximating KL divergence"). As a loss, k1 has zero expected gradient and k2 the gradient of the KL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.rl.losses import MAX_LOG_RATIO, PolicyLoss

_SUMS = ("tokens", "k1", "abs", "k3", "ratio", "low", "high", "not_finite")


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``delta`` of each token [M]."""
    return _delta(logprobs, reference)


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``delta^2 / 2`` of each token [M]."""
    return 0.5 * _delta(logprobs, reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``exp(-delta) - 1 + delta`` of each token [M]."""
    delta = _delta(logprobs, reference)
    return torch.expm1(-delta) + delta


def k3_value_k2_gradient(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Value of k3, gradient of k2: a non-negative number to report whose gradient is that of the KL."""
    squares = k2(logprobs, reference)
    return squares - squares.detach() + k3(logprobs, reference).detach()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1, "k2": k2, "k3": k3, "k3_value_k2_gradient": k3_value_k2_gradient}


def _delta(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Clamped difference; 0, without gradient, where either log-prob is not finite."""
    finite = torch.isfinite(logprobs.detach()) & torch.isfinite(reference)
    return torch.where(finite, torch.where(finite, logprobs, 0.0) - reference, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(slots=True)
class Mismatch:
    """How far the trained policy is from the one that sampled: sums over the tokens of a batch, by staleness.

    Tokens are drawn from the engine's ``mu``: ``k1 = mu - theta`` and ``k3`` estimate KL(mu || theta).
    """

    sums: dict[int, dict[str, float]] = field(default_factory=dict)

    def add(self, result: PolicyLoss, staleness: Tensor) -> None:
        """Add the tokens of one micro-batch; ``staleness`` int [M] in trainer steps."""
        delta = result.log_ratio.double()
        zero = torch.zeros_like(delta)
        values = {"tokens": torch.ones_like(delta), "k1": -delta, "abs": delta.abs(),
                  "k3": k3(zero, delta), "ratio": delta.exp(),
                  "low": result.low.double(), "high": result.high.double(), "not_finite": result.not_finite.double()}
        for age in staleness.unique().tolist():
            here = staleness == age
            bin_sums = self.sums.setdefault(int(age), dict.fromkeys(_SUMS, 0.0))
            for name, value in values.items():
                bin_sums[name] += float(value[here].sum())

    def metrics(self) -> dict[str, float]:
        """Means over all tokens, then over those of each staleness: ``k3``, ``k3.staleness_1``, ``masked_low`` …"""
        result: dict[str, float] = {}
        whole = {name: sum(bin_sums[name] for bin_sums in self.sums.values()) for name in _SUMS}
        for suffix, bin_sums in [("", whole), *((f".staleness_{age}", self.sums[age]) for age in sorted(self.sums))]:
            tokens = max(bin_sums["tokens"], 1.0)
            means = {"k1": bin_sums["k1"], "abs_difference": bin_sums["abs"], "k3": bin_sums["k3"],
                     "ratio": bin_sums["ratio"],
                     "masked_low": bin_sums["low"], "masked_high": bin_sums["high"],
                     "masked_not_finite": bin_sums["not_finite"]}
            result |= {f"{name}{suffix}": total / tokens for name, total in means.items()}
            result[f"sampled_tokens{suffix}"] = bin_sums["tokens"]
        return result
