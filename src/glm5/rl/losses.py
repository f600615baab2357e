"""The double-sided importance-sampling mask: policy loss of asynchronous agentic RL, and its mismatch metrics.

    r    = exp(clamp(log pi_theta - log mu, -20, 20))       mu: log-prob recorded by the engine when it sampled
    f    = r if 1 - eps_low < r < 1 + eps_high else 0       strict on both sides, whatever the sign of the advantage
    loss = - sum over tokens  coefficient * stop_gradient(f) * A * log pi_theta

No old policy is recomputed. The coefficient of a token is 1 / (sampled tokens of its episode) * 1 / (episodes of the
batch), from counts of the whole batch and of the sampled tokens, not of the surviving ones: neither micro-batching nor
masking changes what a token weighs. Everything is NaN-safe: a token outside the mask, or whose log-prob is not finite,
contributes exactly 0 to loss and gradient.

Mismatch per token, with Delta = log pi_theta - log mu and tokens drawn from mu: ``k1 = -Delta`` and
``k3 = exp(Delta) - 1 - Delta`` are estimates of KL(mu || pi_theta), the second one never negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.records import Sample

MAX_LOG_RATIO = 20.0
_SUMS = ("tokens", "k1", "k3", "ratio", "low", "high", "not_finite")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss of some tokens of a batch and what the mask did; all but ``loss`` are without gradient."""

    loss: Tensor
    """Scalar; the losses of all micro-batches add up to the loss of the batch."""
    log_ratio: Tensor
    """Delta of each token [M], clamped; 0 where it is not finite."""
    low: Tensor
    """Bool [M]: masked because the ratio was too low."""
    high: Tensor
    """Bool [M]: masked because the ratio was too high."""
    not_finite: Tensor
    """Bool [M]: masked because a log-prob was not finite."""


def double_sided_mask_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, coefficients: Tensor, *,
                           eps_low: float, eps_high: float) -> PolicyLoss:
    """Loss over the sampled tokens of a micro-batch, all arguments fp32 [M]; ``logprobs`` carries the gradient."""
    theta, mu = logprobs.detach(), behaviour.detach()
    finite = torch.isfinite(theta) & torch.isfinite(mu)
    log_ratio = torch.where(finite, theta - mu, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high = finite & (ratio <= 1 - eps_low), finite & (ratio >= 1 + eps_high)
    keep = finite & ~low & ~high
    weight = torch.where(keep, ratio * advantages * coefficients, 0.0)
    loss = -(weight * torch.where(keep, logprobs, 0.0)).sum()
    return PolicyLoss(loss, log_ratio, low, high, ~finite)


def token_coefficients(samples: Sequence[Sample], episodes: int) -> list[float]:
    """Per sample, what each of its sampled tokens weighs in the loss of a batch of ``episodes`` episodes."""
    return [sample.weight / sum(sample.trajectory.loss_mask) / episodes for sample in samples]


@dataclass(slots=True)
class Mismatch:
    """Sums of the mismatch metrics over the tokens of a batch, by staleness."""

    sums: dict[int, dict[str, float]] = field(default_factory=dict)

    def add(self, result: PolicyLoss, staleness: Tensor) -> None:
        """Add the tokens of one micro-batch; ``staleness`` int [M] in trainer steps."""
        delta = result.log_ratio.double()
        values = {"tokens": torch.ones_like(delta), "k1": -delta, "k3": delta.exp() - 1 - delta, "ratio": delta.exp(),
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
            means = {"k1": bin_sums["k1"], "k3": bin_sums["k3"], "ratio": bin_sums["ratio"],
                     "masked_low": bin_sums["low"], "masked_high": bin_sums["high"],
                     "masked_not_finite": bin_sums["not_finite"]}
            result |= {f"{name}{suffix}": total / tokens for name, total in means.items()}
            result[f"sampled_tokens{suffix}"] = bin_sums["tokens"]
        return result
