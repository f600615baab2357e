"""Critic PPO: a value for the prefix of every sampled token, learned beside the policy, instead of a group to compare
with (``advantage = "critic"``).

The critic is a scalar head of zeros on a trunk of its own, which starts as the policy does (Ouyang et al.,
arXiv:2203.02155); its indexers stay frozen too. In every step it looks at the same micro-batches as the policy, just
before it: values → GAE over the sampled tokens → advantages for the policy, returns for itself. In the first
``warmup_steps`` steps only the critic learns, because advantages of a head of zeros are the rewards themselves (VAPO,
arXiv:2504.05118). One update per batch, so the old values of the clipped critic loss are the present ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.model.reward import RewardModel
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.rl.advantages import gae, length_adaptive_lambda
from glm5.rl.credit import CriticConfig
from glm5.rl.losses import value_loss
from glm5.rl.packing import MicroBatch
from glm5.train.optimizers import Optimizer

_PREFIX = "critic."


@dataclass(slots=True)
class _Sums:
    """Over the sampled tokens of a batch, each weighed as in the loss."""

    loss: float = 0.0
    weight: float = 0.0
    returns: float = 0.0
    squares: float = 0.0
    errors: float = 0.0


@dataclass(slots=True)
class Critic:
    """Value model and its optimizer; ``trunk`` must have frozen what the policy freezes."""

    trunk: GlmMoeDsaForCausalLM
    config: CriticConfig
    _model: RewardModel = field(init=False)
    _optimizer: Optimizer = field(init=False)
    _sums: _Sums = field(init=False, default_factory=_Sums)

    def __post_init__(self) -> None:
        self._model = RewardModel(self.trunk)
        self.trunk.lm_head.weight.requires_grad_(False)
        trained = {name: parameter for name, parameter in self.trunk.named_parameters() if parameter.requires_grad}
        self._optimizer = Optimizer({**trained, "value_head.weight": self._model.weight}, self.trunk.config,
                                    self.config.optimizer)

    def begin(self) -> None:
        """A new batch."""
        self._optimizer.zero_grad()
        self._sums = _Sums()

    def look(self, part: MicroBatch) -> Tensor:
        """Advantages fp32 [M] of the sampled tokens of ``part``, whose ``advantages`` are rewards; adds the gradient of
        the critic's own loss."""
        values_M = self._model(part.ids_BT, part.positions_BT, part.documents_BT, part.predictors)
        old_M = values_M.detach()
        advantages_M, returns_M = estimate(part.advantages, old_M, part.samples, self.config)
        loss = value_loss(values_M, old_M, returns_M, part.coefficients, self.config.clip)
        torch.autograd.backward(loss)
        sums, weight_M = self._sums, part.coefficients
        sums.loss += float(loss.detach())
        sums.weight += float(weight_M.sum())
        sums.returns += float((weight_M * returns_M).sum())
        sums.squares += float((weight_M * returns_M.square()).sum())
        sums.errors += float((weight_M * (returns_M - old_M).square()).sum())
        return advantages_M

    def step(self) -> dict[str, float]:
        """Update on what was looked at since ``begin``; nothing changes when the gradient is not finite. Metrics:
        ``value_loss``, ``value_grad_norm`` and ``explained``, the share of the variance of the returns that the values
        of the sampled tokens knew before (0 where there is none)."""
        norms = self._optimizer.clip_gradients()
        if norms.finite:
            self._optimizer.step()
        sums = self._sums
        variance = sums.squares / sums.weight - (sums.returns / sums.weight) ** 2
        explained = 1 - sums.errors / sums.weight / variance if variance > 1e-9 else 0.0
        return {"value_loss": sums.loss, "value_grad_norm": norms.main, "explained": explained}

    def state_dict(self) -> dict[str, Tensor]:
        """Trained weights and moments."""
        return {**{f"weights.{name}": tensor.detach() for name, tensor in self._weights().items()},
                **{f"moments.{name}": tensor for name, tensor in self._optimizer.state_dict().items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state_dict``. Raises CheckpointError when it is that of another critic."""
        self._optimizer.load_state_dict(_below("moments.", state))
        for name, tensor in _below("weights.", state).items():
            self._weights()[name].copy_(tensor)

    def _weights(self) -> dict[str, Tensor]:
        trained = {name: parameter for name, parameter in self.trunk.named_parameters() if parameter.requires_grad}
        return {**trained, "value_head.weight": self._model.weight}


def estimate(rewards_M: Tensor, values_M: Tensor, samples_M: Tensor, config: CriticConfig) -> tuple[Tensor, Tensor]:
    """(advantages, returns), fp32 [M], of sampled tokens that stand in order, those of a sample together."""
    advantages: list[float] = []
    returns: list[float] = []
    sizes = torch.unique_consecutive(samples_M, return_counts=True)[1].tolist()
    for rewards, values in zip(rewards_M.split(sizes), values_M.split(sizes), strict=True):
        new_advantages, new_returns = _estimate_one(rewards.tolist(), values.tolist(), config)
        advantages += new_advantages
        returns += new_returns
    return rewards_M.new_tensor(advantages), rewards_M.new_tensor(returns)


def _estimate_one(rewards: Sequence[float], values: Sequence[float],
                  config: CriticConfig) -> tuple[list[float], list[float]]:
    """Of one sample. The returns of the critic have lambda 1: its target is what was earned, not its own guess."""
    sampled = [True] * len(rewards)  # what the environment wrote between the turns is not among the tokens
    lam = length_adaptive_lambda(len(rewards), config.length_alpha) if config.length_alpha else config.lam
    advantages, _ = gae(rewards, values, sampled, gamma=config.gamma, lam=lam)
    _, returns = gae(rewards, values, sampled, gamma=config.gamma, lam=1.0)
    return advantages, returns


class Together:
    """State of the policy's optimizer and of the critic, if there is one, in one file of a checkpoint."""

    def __init__(self, optimizer: Optimizer, critic: Critic | None) -> None:
        self._optimizer, self._critic = optimizer, critic

    def state_dict(self) -> dict[str, Tensor]:
        """Both; the critic's names begin with ``critic.``."""
        critic = self._critic.state_dict() if self._critic is not None else {}
        return {**self._optimizer.state_dict(), **{f"{_PREFIX}{name}": tensor for name, tensor in critic.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state_dict``. Raises CheckpointError when names or shapes differ."""
        critic = _below(_PREFIX, state)
        others = {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX)}
        if self._critic is None:
            self._optimizer.load_state_dict(state)
            return
        self._optimizer.load_state_dict(others)
        self._critic.load_state_dict(critic)


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
