"""One update of the policy on a leased batch: micro-batches, loss of the configured family, one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5.model.families import CausalLM
from glm5.rl.config import RLConfig
from glm5.rl.critic import Critic
from glm5.rl.kl import Mismatch
from glm5.rl.ledger import LeasedBatch
from glm5.rl.losses import LOSSES, PolicyTokens, teacher_advantages
from glm5.rl.packing import micro_batches
from glm5.train.losses import token_entropy, token_logprobs
from glm5.train.optimizers import Optimizer


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    metrics: dict[str, float]
    tokens: int
    """Tokens trained on, padding not counted."""
    finite: bool
    """Whether the update was applied."""


def policy_step(model: CausalLM, optimizer: Optimizer, batch: LeasedBatch, config: RLConfig,
                lr_scale: float, critic: Critic | None = None) -> StepResult:
    """One update on ``batch``; nothing changes when loss or gradient is not finite. ``lr_scale`` 0 leaves the policy as
    it is, for a critic that learns first."""
    optimizer.zero_grad()
    if critic is not None:
        critic.begin()
    mismatch = Mismatch()
    policy_loss = LOSSES[config.loss.kind]
    loss = entropy = behind = 0.0
    tokens = padded = 0
    for packed in micro_batches(batch, config.max_tokens_per_microbatch):
        part = packed.to(model.lm_head.weight.device)
        hidden_BTD = model.hidden(part.ids_BT, part.positions_BT, part.documents_BT, attention="sparse").hidden_BTD
        hidden_MD = hidden_BTD.flatten(0, 1)[part.predictors]
        logprobs = token_logprobs(hidden_MD, model.lm_head.weight, part.labels, config.temperature)
        advantages = part.advantages
        if config.teachers:
            advantages = teacher_advantages(part.teacher, logprobs)
        elif critic is not None:
            advantages = critic.look(part)
        # one update per batch: the policy is still the old one while its gradient is taken
        result = policy_loss(PolicyTokens(logprobs, logprobs.detach(), part.behaviour, advantages, part.coefficients,
                                          part.samples), config.loss)
        torch.autograd.backward(result.loss)
        mismatch.add(result, part.staleness)
        loss += float(result.loss.detach())
        entropy += float(token_entropy(hidden_MD.detach(), model.lm_head.weight, config.temperature).sum())
        behind += float((part.coefficients * advantages).sum())
        tokens += part.tokens
        padded += part.ids_BT.numel()
    norms = optimizer.clip_gradients()
    if norms.finite and lr_scale:
        optimizer.step(lr_scale)
    metrics = mismatch.metrics()
    metrics |= {"loss": loss, "grad_norm": norms.main, "entropy": entropy / max(metrics["sampled_tokens"], 1.0),
                "lr": config.optimizer.lr * lr_scale, "packing": tokens / padded}
    if config.teachers:
        metrics["teacher_kl"] = -behind  # of the student from its teachers, on what it sampled
    if critic is not None:
        metrics |= critic.step()
    return StepResult(metrics, tokens, norms.finite)
