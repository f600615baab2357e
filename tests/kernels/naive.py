"""Each differentiable operation written out in float64, one element at a time where that is clearest."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rope(x_BTHR: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor, interleaved: bool) -> Tensor:
    half = x_BTHR.shape[-1] // 2
    first, second = [], []
    for j in range(half):
        a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        c, s = cos_BTR2[..., j, None], sin_BTR2[..., j, None]
        first.append(x_BTHR[..., a] * c - x_BTHR[..., b] * s)
        second.append(x_BTHR[..., b] * c + x_BTHR[..., a] * s)
    return torch.stack(first + second, dim=-1)


def index_scores(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, valid_BTS: Tensor) -> Tensor:
    logits_BTJS = torch.einsum("btjx,bsx->btjs", q_BTJX, k_BSX) * scale
    return torch.einsum("btj,btjs->bts", w_BTJ, logits_BTJS.clamp_min(0)) * valid_BTS


def attention_weights(q_BTHK: Tensor, k_BSHK: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    """[B, H, T, S], zero off the mask and in rows without a key."""
    logits_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) * scale
    exponents_BHTS = logits_BHTS.exp() * mask_BTS.unsqueeze(1)
    return exponents_BHTS / exponents_BHTS.sum(-1, keepdim=True).clamp_min(1e-30)


def masked_attention(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    return torch.einsum("bhts,bshv->bthv", attention_weights(q_BTHK, k_BSHK, mask_BTS, scale), v_BSHV)


def indexer_kl(scores_BTS: Tensor, target_BTS: Tensor, mask_BTS: Tensor) -> Tensor:
    losses = []
    for scores_S, target_S, mask_S in zip(scores_BTS.flatten(0, 1), target_BTS.flatten(0, 1), mask_BTS.flatten(0, 1),
                                          strict=True):
        if mask_S.any():
            log_p_s, target_s = scores_S[mask_S].log_softmax(-1), target_S[mask_S]
            some = target_s > 0
            losses.append((target_s[some] * (target_s[some].log() - log_p_s[some])).sum())
    return torch.stack(losses).mean()


def experts(x_MD: Tensor, expert_ids_MA: Tensor, weights_MA: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
    hidden = down_EDF.shape[2]
    rows = []
    for m in range(x_MD.shape[0]):
        total = torch.zeros_like(x_MD[m])
        for a, expert in enumerate(expert_ids_MA[m].tolist()):
            both_G = gate_up_EGD[expert] @ x_MD[m]
            gate_F, up_F = both_G[:hidden], both_G[hidden:]
            total = total + weights_MA[m, a] * (down_EDF[expert] @ (gate_F * gate_F.sigmoid() * up_F))
        rows.append(total)
    return torch.stack(rows)


def select_topk(scores_S: list[float], valid_S: list[bool], k: int) -> list[bool]:
    """One row by sorting: best first, NaN and -inf last, ties by position."""
    lowest = torch.finfo(torch.float32).min
    ranked = sorted((s for s in range(len(scores_S)) if valid_S[s]),
                    key=lambda s: (-max(scores_S[s], lowest) if scores_S[s] == scores_S[s] else -lowest, s))
    kept = set(ranked[:k] if k > 0 else ranked)
    return [s in kept for s in range(len(scores_S))]
