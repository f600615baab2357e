"""Mixture of experts: sigmoid router with a selection bias, routed experts, a shared expert (DeepSeek-V3, 2.1.2).

``s = sigmoid(W x)`` in fp32; the experts with the largest ``s + bias`` are chosen, in models with groups only from the
``topk_group`` groups whose two largest ``s + bias`` have the largest sum; their weights are ``s`` without the bias,
normalised to sum 1 and scaled. The bias is a buffer that stays fp32 whatever the module is cast to (published values
near 6.9 would lose the differences in bf16); it learns by a sign rule, ``update_router_bias``, not by gradient.

Letters: M flattened tokens, D hidden, E experts, A experts per token, F expert hidden, G = 2F, L sparse layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glm5.kernels import dispatch
from glm5.model.config import ModelConfig
from glm5.model.layers import Mlp
from glm5.model.parts import TokenPart


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """What one sparse layer reports besides its output."""

    load_E: Tensor
    """Tokens that chose each expert, fp32, padding not counted."""
    balance_loss: Tensor
    """Sequence-wise balance loss, scalar; without gradient mode zero."""


class Router(nn.Module):
    """Chooses A of E experts for each token."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        self.num_groups, self.top_groups = config.n_group, config.topk_group
        self.normalise, self.scaling = config.norm_topk_prob, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(self.num_experts, dtype=torch.float32))

    def forward(self, x_MD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Expert ids [M, A], their weights [M, A] and the logits of all scores [M, E], the last two fp32."""
        logits_ME = nn.functional.linear(x_MD.float(), self.weight.float())
        scores_ME = logits_ME.sigmoid()
        choice_ME = scores_ME.detach() + self.e_score_correction_bias
        if self.top_groups < self.num_groups:
            choice_ME = self._within_best_groups(choice_ME)
        ids_MA = choice_ME.topk(self.top_k, dim=-1, sorted=False).indices
        weights_MA = scores_ME.gather(1, ids_MA)
        if self.normalise:
            weights_MA = weights_MA / (weights_MA.sum(-1, keepdim=True) + 1e-20)
        return ids_MA, weights_MA * self.scaling, logits_ME

    def _within_best_groups(self, choice_ME: Tensor) -> Tensor:
        """``choice`` with -inf outside the best groups of each token."""
        grouped_MGe = choice_ME.unflatten(-1, (self.num_groups, -1))
        best_MG = grouped_MGe.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1, sorted=False).indices
        closed_MG = torch.ones(grouped_MGe.shape[:2], dtype=torch.bool, device=choice_ME.device)
        closed_MG.scatter_(1, best_MG, False)
        return grouped_MGe.masked_fill(closed_MG.unsqueeze(-1), -torch.inf).flatten(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts and moves of ``nn.Module`` pass here: follow the device, keep the bias in fp32."""
        exact_E = self.e_score_correction_bias
        result = super()._apply(fn, recurse)
        if self.e_score_correction_bias.dtype != torch.float32:
            self.e_score_correction_bias = exact_E.to(self.e_score_correction_bias.device)
        return result


class Experts(nn.Module):
    """The routed experts, stacked: gate rows first, then up rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, x_MD: Tensor, ids_MA: Tensor, weights_MA: Tensor) -> Tensor:
        """Weighted sum of the chosen experts -> y_MD."""
        return dispatch.experts(x_MD, ids_MA, weights_MA, self.gate_up_proj, self.down_proj)


class SparseMlp(nn.Module):
    """Router, routed experts and shared expert of one layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = Mlp(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None,
                part: TokenPart | None = None) -> tuple[Tensor, RouterStatistics]:
        """``counted_BT`` False marks tokens (padding) that statistics leave out; None counts all. ``part`` says which
        tokens of a row ``x_BTD`` holds; None for all."""
        x_MD = x_BTD.flatten(0, 1)
        ids_MA, weights_MA, logits_ME = self.gate(x_MD)
        y_BTD = self.experts(x_MD, ids_MA, weights_MA).view_as(x_BTD) + self.shared_experts(x_BTD)
        return y_BTD, _statistics(ids_MA, logits_ME, x_BTD.shape[:2], counted_BT, part or TokenPart())

    def tokens(self, x_MD: Tensor) -> Tensor:
        """The output alone, for inference."""
        ids_MA, weights_MA, _ = self.gate(x_MD)
        return self.experts(x_MD, ids_MA, weights_MA) + self.shared_experts(x_MD)


def _statistics(ids_MA: Tensor, logits_ME: Tensor, shape: tuple[int, int], counted_BT: Tensor | None,
                part: TokenPart) -> RouterStatistics:
    """Load of each expert by local tokens, and the balance loss ``sum_e f_e P_e`` averaged over the rows of the batch.

    f_e is the share of a row's tokens that chose e times E / A, P_e the mean normalised score (DeepSeek-V3 eq. 17-20).
    The shares of a token are normalised through logarithms: they sum to 1 however small the scores are, so that the
    loss cannot be lowered by making all scores vanish. Where a row is spread over processes, f_e and the number of its
    tokens are those of the whole row and P_e has the local tokens only, so that the losses of the processes add up to
    that of the row.
    """
    chosen_ME = torch.zeros_like(logits_ME, requires_grad=False).scatter_(1, ids_MA, 1.0)
    if counted_BT is not None:
        chosen_ME = chosen_ME * counted_BT.reshape(-1, 1)
    chosen_BE = chosen_ME.view(*shape, -1).sum(1)
    load_E = chosen_BE.sum(0)
    if not torch.is_grad_enabled():
        return RouterStatistics(load_E, chosen_BE.new_zeros(()))
    share_ME = nn.functional.logsigmoid(logits_ME).softmax(-1)
    if counted_BT is not None:
        share_ME = share_ME * counted_BT.reshape(-1, 1)
    share_BE = share_ME.view(*shape, -1).sum(1)
    chosen_BE = part.sum(chosen_BE)
    counts_B1 = chosen_BE.new_full((1, 1), shape[1]) if counted_BT is None else counted_BT.sum(1, keepdim=True)
    counts_B1 = part.sum(counts_B1).clamp_min(1)
    experts, per_token = logits_ME.shape[-1], ids_MA.shape[-1]
    loss = ((chosen_BE / counts_B1) * (share_BE / counts_B1)).sum() * (experts / (per_token * shape[0]))
    return RouterStatistics(load_E, loss)


@torch.no_grad()
def update_router_bias(model: nn.Module, expert_load_LE: Tensor, rate: float) -> None:
    """Raise the bias of under-used experts by ``rate`` and lower that of over-used ones, sparse layers in order.

    ``expert_load_LE`` has one row for each router of ``model`` in layer order (append the MTP layer's row when it has
    one), or fewer rows: then the last routers are left alone.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if len(expert_load_LE) > len(routers):
        raise ValueError(f"expert_load_LE has {len(expert_load_LE)} rows for {len(routers)} routers")
    for router, load_E in zip(routers, expert_load_LE, strict=False):
        load_E = load_E.to(router.e_score_correction_bias)
        router.e_score_correction_bias += rate * (load_E.mean() - load_E).sign()
