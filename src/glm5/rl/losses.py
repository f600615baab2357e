"""Policy losses, one function per algorithm with one signature, and what a token weighs.

Names, per sampled token: ``theta`` log-prob of the policy that is trained (carries the gradient), ``old`` the trainer's
log-prob when the update of this batch began, ``mu`` the log-prob that the engine recorded when it sampled. ``A`` is the
advantage, ``c`` the coefficient: every loss is ``sum over tokens of c * token loss``.

Coefficients come from counts of the whole batch and of all sampled tokens (``token_coefficients``), not of a
micro-batch and not of the tokens that survive a mask: neither splitting nor masking changes what a token weighs.
Log-ratios are clamped to ±20 before they are exponentiated. A token whose log-prob is not finite contributes exactly 0
to loss and gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.records import Sample
from glm5.rl.config import LossConfig

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The sampled tokens of a micro-batch, flat; floats are fp32 [M]."""

    theta: Tensor
    """Log-probs under the trained policy, with gradient."""
    old: Tensor
    """Trainer's log-probs at the start of the update."""
    mu: Tensor
    """Engine's log-probs at sampling."""
    advantages: Tensor
    coefficients: Tensor
    samples: Tensor
    """Int64 [M]: which sample a token belongs to. All tokens of a sample are in one micro-batch."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss of some tokens of a batch and what the algorithm left out; all but ``loss`` are without gradient."""

    loss: Tensor
    """Scalar; the losses of all micro-batches add up to the loss of the batch."""
    log_ratio: Tensor
    """theta - mu of each token [M], clamped; 0 where it is not finite."""
    low: Tensor
    """Bool [M]: no gradient because a ratio was too low."""
    high: Tensor
    """Bool [M]: no gradient because a ratio was too high."""
    not_finite: Tensor
    """Bool [M]: no gradient because a log-prob was not finite."""


def double_sided_mask(tokens: PolicyTokens, config: LossConfig) -> PolicyLoss:
    """Asynchronous agentic RL of GLM-5 (report section 10.1): no old policy, a mask strict on both sides.

    ``r = exp(theta - mu)``, ``f = r if 1 - eps_low < r < 1 + eps_high else 0`` whatever the sign of the advantage;
    token loss ``-stop_gradient(f) * A * theta``.
    """
    finite, theta = _finite(tokens)
    ratio = _log_ratio(theta.detach(), tokens.mu, finite).exp()
    low, high = ratio <= 1 - config.eps_low, ratio >= 1 + config.eps_high
    weight = torch.where(finite & ~low & ~high, ratio, 0.0)
    return _result(tokens, finite, -weight * tokens.advantages * theta, low, high)


def ppo_clip(tokens: PolicyTokens, config: LossConfig) -> PolicyLoss:
    """PPO (arXiv:1707.06347) with separate bounds (clip-higher, arXiv:2503.14476) and optional dual clip.

    ``r = exp(theta - reference)``; token loss ``-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)``. With
    ``dual_clip = d > 1`` a token of negative advantage loses ``-d A`` at most (arXiv:1912.09729).
    """
    finite, theta = _finite(tokens)
    loss, low, high = _clipped(theta, _reference(tokens, config), tokens.advantages, finite, config)
    return _result(tokens, finite, loss, low, high)


def icepop(tokens: PolicyTokens, config: LossConfig) -> PolicyLoss:
    """Reasoning RL of GLM-5 (report section 9): PPO-clip against ``old``, weighted by the mismatch with the engine.

    ``rho = exp(old - mu)`` weighs the token where ``1/beta <= rho <= beta`` and drops it elsewhere; no gradient
    through ``rho``.
    """
    finite, theta = _finite(tokens)
    rho = _log_ratio(tokens.old, tokens.mu, finite).exp()
    too_low, too_high = rho < 1 / config.beta, rho > config.beta
    loss, low, high = _clipped(theta, tokens.old, tokens.advantages, finite, config)
    weight = torch.where(too_low | too_high, 0.0, rho)
    return _result(tokens, finite, weight * loss, low | too_low, high | too_high)


def truncated_importance_sampling(tokens: PolicyTokens, config: LossConfig) -> PolicyLoss:
    """TIS: PPO-clip against ``old``, weighted by ``clamp(exp(old - mu), tis_low, tis_high)`` without gradient."""
    finite, theta = _finite(tokens)
    weight = _log_ratio(tokens.old, tokens.mu, finite).exp().clamp(config.tis_low, config.tis_high)
    loss, low, high = _clipped(theta, tokens.old, tokens.advantages, finite, config)
    return _result(tokens, finite, weight * loss, low, high)


def gspo(tokens: PolicyTokens, config: LossConfig) -> PolicyLoss:
    """GSPO (arXiv:2507.18071): one ratio per sample, ``s = exp(mean of theta - reference)``, clipped as in PPO.

    The gradient reaches each token through the value-neutral term ``theta - stop_gradient(theta)``. Useful bounds are
    far below those of token ratios (3e-4, 4e-4).
    """
    finite, theta = _finite(tokens)
    log_ratio = _log_ratio(theta.detach(), _reference(tokens, config), finite)
    count = int(tokens.samples.max()) + 1 if tokens.samples.numel() else 0
    sums = log_ratio.new_zeros(count).index_add_(0, tokens.samples, log_ratio)
    sizes = log_ratio.new_zeros(count).index_add_(0, tokens.samples, finite.to(log_ratio.dtype))
    means = (sums / sizes.clamp_min(1.0))[tokens.samples]
    loss, low, high = _clipped(theta, theta.detach() - means, tokens.advantages, finite, config)
    return _result(tokens, finite, loss, low, high)


def cispo(tokens: PolicyTokens, config: LossConfig) -> PolicyLoss:
    """CISPO (arXiv:2506.13585): the ratio is clipped, not the update: ``-stop_gradient(clip(r)) * A * theta``.

    Clipped tokens keep a gradient, so ``low`` and ``high`` only tell how many ratios were clipped.
    """
    finite, theta = _finite(tokens)
    ratio = _log_ratio(theta.detach(), _reference(tokens, config), finite).exp()
    low, high = 1 - config.eps_low, 1 + config.eps_high
    weight = torch.where(finite, ratio.clamp(low, high), 0.0)
    return _result(tokens, finite, -weight * tokens.advantages * theta, ratio < low, ratio > high)


LOSSES: dict[str, Callable[[PolicyTokens, LossConfig], PolicyLoss]] = {
    "double_sided": double_sided_mask, "ppo": ppo_clip, "icepop": icepop, "tis": truncated_importance_sampling,
    "gspo": gspo, "cispo": cispo}
"""By ``loss.kind``."""


def token_coefficients(samples: Sequence[Sample], episodes: int) -> list[float]:
    """Per sample, what each of its sampled tokens weighs in the loss of a batch of ``episodes`` episodes: the mean over
    episodes of the mean over an episode's sampled tokens, those of sibling samples together."""
    return [sample.weight / sum(sample.trajectory.loss_mask) / episodes for sample in samples]


def teacher_advantages(teacher: Tensor, student: Tensor) -> Tensor:
    """On-policy distillation (GLM-5 report section 12): ``log pi_teacher - log pi_student`` of each sampled token [M],
    without gradient.

    The teacher's log-probs come from its engine, the student's from the trainer. Values that are not finite give 0.
    """
    difference = teacher - student.detach()
    return torch.where(torch.isfinite(difference), difference, 0.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, coefficients: Tensor, clip: float) -> Tensor:
    """Critic loss ``sum of c/2 * max((V - R)^2, (clip(V, V_old ± clip) - R)^2)``, all fp32 [M]; a scalar."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    squares = torch.maximum((values - returns).square(), (clipped - returns).square())
    return 0.5 * (coefficients * squares).sum()


def _finite(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Which tokens may be learned from, and theta with 0 in place of the others: NaN times 0 would be NaN."""
    finite = torch.isfinite(tokens.theta.detach()) & torch.isfinite(tokens.old) & torch.isfinite(tokens.mu)
    return finite, torch.where(finite, tokens.theta, 0.0)


def _log_ratio(above: Tensor, below: Tensor, finite: Tensor) -> Tensor:
    return torch.where(finite, above - below, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _reference(tokens: PolicyTokens, config: LossConfig) -> Tensor:
    return tokens.mu if config.reference == "engine" else tokens.old


def _clipped(theta: Tensor, reference: Tensor, advantages: Tensor, finite: Tensor,
             config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Token losses of PPO-clip, and which tokens it leaves without gradient for a low and for a high ratio."""
    ratio = _log_ratio(theta, reference, finite).exp()
    low, high = 1 - config.eps_low, 1 + config.eps_high
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    is_low, is_high = (ratio.detach() < low) & (advantages < 0), (ratio.detach() > high) & (advantages > 0)
    if config.dual_clip:
        ceiling = -config.dual_clip * advantages
        is_high = is_high | ((advantages < 0) & (loss.detach() > ceiling))
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return torch.where(finite, loss, 0.0), is_low, is_high


def _result(tokens: PolicyTokens, finite: Tensor, token_loss: Tensor, low: Tensor, high: Tensor) -> PolicyLoss:
    return PolicyLoss((token_loss * tokens.coefficients).sum(), _log_ratio(tokens.theta.detach(), tokens.mu, finite),
                      finite & low, finite & high, ~finite)
