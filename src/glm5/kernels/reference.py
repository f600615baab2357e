"""Every operation of the model in plain PyTorch: the specification that the other forms are tested against.

Formulas follow the ``glm_moe_dsa`` model of Transformers: RMSNorm casts before it multiplies, rotary embedding reads
interleaved pairs and writes de-interleaved halves, index scores are fp32, expert outputs are weighted and summed in
fp32. Everything here is differentiable by autograd unless its docstring says "no gradient".

Invariants: results do not depend on how rows are grouped into calls except by floating-point rounding; equal index
scores are resolved towards the lower position; a row without any valid key gives zeros, never NaN.

Letters: B batch, T queries, S keys, M flattened tokens, P cache blocks, U slots, Z blocks of a slot, D hidden, H heads,
N/R nope/rope dims, V value dim, C kv latent, K key dim of attention (C + R when absorbed, N + R when expanded) or
selected keys (``positions_MK``), J index heads, X index head dim, E experts, A experts per token, F expert hidden, G =
2F (gate rows first, then up).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GATHER_ELEMENTS = 1 << 24
"""Cache elements that one chunk of ``ragged_*`` may copy (64 MiB in fp32)."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` over the last dimension: normalised in fp32, cast to ``x.dtype``, then multiplied.

    Shapes: x [..., D], weight [D] -> [..., D] in the type of ``weight * x``.
    """
    x_fp32 = x.float()
    variance = x_fp32.square().mean(-1, keepdim=True)
    return weight * (x_fp32 * torch.rsqrt(variance + eps)).to(x.dtype)


def apply_rope(x_BTHR: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor, interleaved: bool = True) -> Tensor:
    """Rotate R/2 pairs of every head by the angle of its token. Any number of leading dimensions.

    ``interleaved``: pair j is (x[2j], x[2j+1]); otherwise it is (x[j], x[j+R/2]). The output is always de-interleaved:
    first the R/2 rotated first elements, then the R/2 rotated second elements.
    Shapes: x [..., H, R], cos and sin [..., R/2] in the type of x -> [..., H, R].
    """
    cos, sin = cos_BTR2.unsqueeze(-2), sin_BTR2.unsqueeze(-2)
    first, second = (x_BTHR[..., 0::2], x_BTHR[..., 1::2]) if interleaved else x_BTHR.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def index_scores(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, valid_BTS: Tensor | None = None) -> Tensor:
    """Lightning-indexer scores in fp32: ``sum_j w[t, j] * relu(scale * q[t, j] . k[s])`` -> scores_BTS.

    ``w`` carries the factor n_heads**-0.5, ``scale`` is head_dim**-0.5. With ``valid``, pairs outside it are not needed
    and are 0, which lets a form skip them.
    """
    B, T, J, X = q_BTJX.shape
    logits_BTJS = torch.matmul(q_BTJX.float().reshape(B, T * J, X), k_BSX.float().transpose(1, 2)).view(B, T, J, -1)
    scores_BTS = torch.matmul(w_BTJ.float().unsqueeze(2), F.relu(logits_BTJS * scale)).squeeze(2)
    return scores_BTS if valid_BTS is None else scores_BTS.masked_fill(~valid_BTS, 0.0)


def select_topk(scores_BTS: Tensor, valid_BTS: Tensor, k: int) -> Tensor:
    """Mark the ``min(k, number of valid keys)`` best valid keys of each row -> selected_BTS bool. No gradient.

    Equal scores: the lower position wins. NaN and -inf count as the lowest score (still selectable when too few others
    are valid). ``k <= 0`` or ``k >= S`` selects every valid key. Broadcasting of ``valid`` is allowed.
    """
    if k <= 0 or k >= scores_BTS.shape[-1]:
        return valid_BTS.expand(scores_BTS.shape).clone()
    lowest = torch.finfo(scores_BTS.dtype).min
    keys_BTS = scores_BTS.detach().nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)
    keys_BTS = keys_BTS.masked_fill(~valid_BTS, -torch.inf)
    threshold_BT1 = keys_BTS.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    selected_BTS = (keys_BTS >= threshold_BT1) & valid_BTS
    crowded_BT = selected_BTS.sum(-1) > k  # more keys tie at the threshold than fit
    if crowded_BT.any():
        rows_US, threshold_U1 = keys_BTS[crowded_BT], threshold_BT1[crowded_BT]
        above_US, tied_US = rows_US > threshold_U1, rows_US == threshold_U1
        room_U1 = k - above_US.sum(-1, keepdim=True)
        selected_BTS[crowded_BT] = above_US | (tied_US & (tied_US.cumsum(-1) <= room_U1))
    return selected_BTS


def masked_attention(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    """Softmax attention with one boolean mask for all heads -> out_BTHV. A fully masked row gives zeros.

    Softmax in fp32, cast to the type of q before the values are weighted.
    """
    logits_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK).float() * scale
    weights_BHTS = _masked_softmax(logits_BHTS, mask_BTS.unsqueeze(1)).to(q_BTHK.dtype)
    return torch.einsum("bhts,bshv->bthv", weights_BHTS, v_BSHV)


def attention_targets(q_BTHK: Tensor, k_BSHK: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    """What the indexer learns to predict: the head-sum of the attention weights, normalised to 1 -> p_BTS fp32.

    A fully masked row is all zeros. No gradient.
    """
    with torch.no_grad():
        logits_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK.float(), k_BSHK.float()) * scale
        return _masked_softmax(logits_BHTS, mask_BTS.unsqueeze(1)).mean(1)


def indexer_kl(scores_BTS: Tensor, target_BTS: Tensor, mask_BTS: Tensor) -> Tensor:
    """Mean over rows with a valid key of ``KL(target || softmax of scores over the mask)`` -> scalar fp32.

    ``target`` is a distribution over the mask (see ``attention_targets``); only ``scores`` gets a gradient, which is
    ``(softmax - target) / rows`` on the mask and zero elsewhere. Zero without any valid row.
    """
    masked_BTS = scores_BTS.float().masked_fill(~mask_BTS, torch.finfo(torch.float32).min)
    log_p_BTS = masked_BTS.log_softmax(-1)
    target_BTS = target_BTS.detach().masked_fill(~mask_BTS, 0.0)
    cross_BT = torch.where(target_BTS > 0, target_BTS * log_p_BTS, 0.0).sum(-1)
    rows = mask_BTS.any(-1).sum().clamp_min(1)
    return (torch.xlogy(target_BTS, target_BTS).sum() - cross_BT.sum()) / rows


def select_positions(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, first_BT: Tensor, last_BT: Tensor,
                     k: int) -> Tensor:
    """The selected keys as lists -> positions_BTK int32, K = ``k``: ascending, padded with -1. No gradient.

    Query t sees the keys ``first[t] <= s < last[t]`` and keeps those that ``select_topk`` marks by ``index_scores``.
    """
    tokens_S = torch.arange(k_BSX.shape[1], device=k_BSX.device)
    valid_BTS = (tokens_S >= first_BT.unsqueeze(-1)) & (tokens_S < last_BT.unsqueeze(-1))
    with torch.no_grad():
        selected_BTS = select_topk(index_scores(q_BTJX, k_BSX, w_BTJ, scale, valid_BTS), valid_BTS, k)
    positions_BTK = torch.full((*q_BTJX.shape[:2], k), -1, dtype=torch.int32, device=q_BTJX.device)
    row, query, position = selected_BTS.nonzero(as_tuple=True)
    positions_BTK[row, query, selected_BTS.cumsum(-1)[row, query, position] - 1] = position.to(torch.int32)
    return positions_BTK


def sparse_attention(q_BTHK: Tensor, latent_BSK: Tensor, positions_BTK: Tensor, scale: float,
                     kv_lora_rank: int) -> Tensor:
    """Absorbed attention of every query over its listed keys -> out_BTHC, C = ``kv_lora_rank``.

    ``positions`` are ascending, padded with -1 at the end. Logits are ``scale * q . latent`` over all K = C + R dims,
    the output is the weighted sum of the first C. A query without keys gives zeros. Gradients flow to q and latent.
    """
    keys_BTsK, listed_BTs = _listed_keys(latent_BSK, positions_BTK)
    logits_BTHs = torch.einsum("bthk,btsk->bths", q_BTHK.float(), keys_BTsK.float()) * scale
    weights_BTHs = _masked_softmax(logits_BTHs, listed_BTs.unsqueeze(2))
    return torch.einsum("bths,btsc->bthc", weights_BTHs, keys_BTsK[..., :kv_lora_rank].float()).to(q_BTHK.dtype)


def sparse_scores(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, scale: float, positions_BTK: Tensor) -> Tensor:
    """``index_scores`` of the listed keys only -> scores_BTK fp32, 0 for padding. Gradients flow to q, k and w."""
    keys_BTsX, listed_BTs = _listed_keys(k_BSX, positions_BTK)
    logits_BTJs = torch.einsum("btjx,btsx->btjs", q_BTJX.float(), keys_BTsX.float()) * scale
    return torch.einsum("btj,btjs->bts", w_BTJ.float(), F.relu(logits_BTJs)).masked_fill(~listed_BTs, 0.0)


def sparse_targets(q_BTHK: Tensor, latent_BSK: Tensor, positions_BTK: Tensor, scale: float) -> Tensor:
    """``attention_targets`` over the listed keys of absorbed attention -> p_BTK fp32, 0 for padding. No gradient."""
    with torch.no_grad():
        keys_BTsK, listed_BTs = _listed_keys(latent_BSK, positions_BTK)
        logits_BTHs = torch.einsum("bthk,btsk->bths", q_BTHK.float(), keys_BTsK.float()) * scale
        return _masked_softmax(logits_BTHs, listed_BTs.unsqueeze(2)).mean(2)


def experts(x_MD: Tensor, expert_ids_MA: Tensor, weights_MA: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
    """``y[m] = sum_a weights[m, a] * down_e(silu(gate_e x[m]) * up_e x[m])`` with e = expert_ids[m, a] -> y_MD.

    Each expert runs once over its tokens; its outputs are weighted (weights in fp32), summed over a in fp32 and cast to
    ``x.dtype``. Experts without tokens cost nothing and get a zero gradient.
    """
    M, A = expert_ids_MA.shape
    order = expert_ids_MA.flatten().argsort(stable=True)
    counts = expert_ids_MA.flatten().bincount(minlength=gate_up_EGD.shape[0]).tolist()
    outputs = []
    for expert, rows_ND in enumerate(x_MD[order // A].split(counts)):
        gate_NF, up_NF = F.linear(rows_ND, gate_up_EGD[expert]).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate_NF) * up_NF, down_EDF[expert]))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(M * A, device=order.device))
    y_MAD = torch.cat(outputs)[place].view(M, A, -1)
    return (y_MAD * weights_MA.float().unsqueeze(-1)).sum(1).to(x_MD.dtype)


def ragged_select(iq_MJX: Tensor, iw_MJ: Tensor, index_keys_PSX: Tensor, slots_M: Tensor, lengths_M: Tensor,
                  index_topk: int, table_UZ: Tensor | None = None) -> Tensor | None:
    """Cache positions that each query attends to -> positions_MK, int32, ascending, padded with -1; None = all of them.

    Query m sees the first ``lengths[m]`` entries of slot ``slots[m]`` and keeps the ``index_topk`` best by
    ``sum_j iw[m, j] * relu(iq[m, j] . key)`` (all scale factors folded into ``iw``). Ties go to the lower position.
    Returns None when ``index_topk <= 0`` or no query sees more than ``index_topk`` keys. No gradient.

    The cache is paged: entry s of slot u is entry ``s % S`` of block ``table_UZ[u, s // S]``; without a table slot p is
    block p.
    """
    longest = int(lengths_M.max()) if lengths_M.numel() else 0
    if index_topk <= 0 or longest <= index_topk:
        return None
    positions_MK = torch.full((slots_M.numel(), index_topk), -1, dtype=torch.int32, device=slots_M.device)
    with torch.no_grad():
        for start, stop in _chunks(slots_M.numel(), longest * index_keys_PSX.shape[-1]):
            rows_mS = _cache_rows(index_keys_PSX, table_UZ, slots_M[start:stop], lengths_M[start:stop], longest)
            keys_msX = index_keys_PSX.flatten(0, 1)[rows_mS]
            scores_mS = index_scores(iq_MJX[start:stop, None], keys_msX, iw_MJ[start:stop, None], 1.0).squeeze(1)
            selected_mS = select_topk(scores_mS, _within(lengths_M[start:stop], longest), index_topk)
            row, position = selected_mS.nonzero(as_tuple=True)
            column = selected_mS.cumsum(-1)[row, position] - 1
            positions_MK[start + row, column] = position.to(torch.int32)
    return positions_MK


def ragged_attention(q_MHK: Tensor, latent_PSK: Tensor, slots_M: Tensor, lengths_M: Tensor, positions_MK: Tensor | None,
                     scale: float, kv_lora_rank: int, table_UZ: Tensor | None = None) -> Tensor:
    """Absorbed attention over a paged cache (see ``ragged_select``) -> out_MHC in the type of q. No gradient.

    Query m attends to entries ``positions[m]`` (those that are not -1) of slot ``slots[m]``, or to its first
    ``lengths[m]`` entries when ``positions`` is None. Logits are ``scale * q . latent`` over all K = C + R dims; the
    output is the weighted sum of the first C = ``kv_lora_rank`` dims. A query without keys gives zeros.
    """
    out_MHC = q_MHK.new_empty(*q_MHK.shape[:2], kv_lora_rank)
    longest = max(int(lengths_M.max()), 1) if lengths_M.numel() else 1
    with torch.no_grad():
        width = longest if positions_MK is None else positions_MK.shape[1]
        for start, stop in _chunks(slots_M.numel(), width * latent_PSK.shape[-1]):
            rows_mS = _cache_rows(latent_PSK, table_UZ, slots_M[start:stop], lengths_M[start:stop], longest)
            valid_mS = _within(lengths_M[start:stop], longest)
            if positions_MK is not None:
                valid_mS = positions_MK[start:stop] >= 0
                rows_mS = rows_mS.gather(1, positions_MK[start:stop].long().clamp_min(0))
            keys_msK = latent_PSK.flatten(0, 1)[rows_mS].float()
            logits_mHS = torch.matmul(q_MHK[start:stop].float(), keys_msK.transpose(1, 2)) * scale
            weights_mHS = _masked_softmax(logits_mHS, valid_mS.unsqueeze(1))
            keys_msC = keys_msK[..., :kv_lora_rank].masked_fill(~valid_mS.unsqueeze(-1), 0.0)  # unwritten may be NaN
            out_MHC[start:stop] = torch.matmul(weights_mHS, keys_msC).to(q_MHK.dtype)
    return out_MHC


def ragged_dsa(q_MHK: Tensor, iq_MJX: Tensor, iw_MJ: Tensor, latent_PSK: Tensor, index_keys_PSX: Tensor,
               slots_M: Tensor, lengths_M: Tensor, index_topk: int, scale: float, kv_lora_rank: int,
               table_UZ: Tensor | None = None) -> Tensor:
    """``ragged_select`` then ``ragged_attention``: one sparse attention layer over a paged cache -> out_MHC."""
    positions_MK = ragged_select(iq_MJX, iw_MJ, index_keys_PSX, slots_M, lengths_M, index_topk, table_UZ)
    return ragged_attention(q_MHK, latent_PSK, slots_M, lengths_M, positions_MK, scale, kv_lora_rank, table_UZ)


def _cache_rows(cache: Tensor, table_UZ: Tensor | None, slots_M: Tensor, lengths_M: Tensor, longest: int) -> Tensor:
    """Rows in ``cache.flatten(0, 1)`` of the first ``longest`` entries of each query's slot; past its length row 0."""
    positions_S = torch.arange(longest, device=cache.device)
    blocks_US = torch.arange(cache.shape[0], device=cache.device)[:, None] if table_UZ is None else table_UZ.long()
    size = cache.shape[1]
    number_S = positions_S // size
    rows_MS = (blocks_US[slots_M.long()][:, number_S] - number_S) * size + positions_S
    return rows_MS.where(positions_S < lengths_M[:, None], 0)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last dimension: [..., 2F] -> [..., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sample(logits_BW: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor,
           uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """(ids_B int64, logprobs_B fp32): one token per row, by one uniform number in [0, 1) and the inverse of the row's
    cumulative distribution in the order of the ids.

    The distribution is ``softmax(logits / temperature)``, cut to the ``top_k`` likeliest tokens (below 1: all), then to
    the smallest set of the likeliest that holds ``top_p`` of what is left, then to tokens of at least ``min_p`` times
    the largest probability. Equal logits rank by id. Temperature 0 takes the likeliest token. The log-prob is that of
    the chosen token before any cut, unscaled for temperature 0. Sums are fp64. Broken rows (NaN, +inf, nothing above
    -inf) give a log-prob that is not finite.
    """
    greedy_B = temperature_B == 0
    scaled_BW = logits_BW.float() / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    peak_B1 = scaled_BW.amax(-1, keepdim=True)
    weights_BW = (scaled_BW - peak_B1).exp().double()
    order_BW = scaled_BW.argsort(dim=-1, descending=True, stable=True)
    rank_W, width = torch.arange(logits_BW.shape[-1], device=logits_BW.device), logits_BW.shape[-1]
    limit_B1 = torch.where(top_k_B > 0, top_k_B.clamp(max=width), width)[:, None]
    ranked_BW = weights_BW.gather(-1, order_BW).masked_fill(rank_W >= limit_B1, 0.0)
    before_BW = ranked_BW.cumsum(-1) - ranked_BW
    kept_BW = (before_BW < top_p_B.double()[:, None] * ranked_BW.sum(-1, keepdim=True)) & (rank_W < limit_B1)
    kept_BW &= ranked_BW >= min_p_B.double()[:, None]
    kept_BW[:, :1] = True
    kept_BW &= ~(greedy_B[:, None] & (rank_W > 0))
    weights_cut_BW = torch.zeros_like(weights_BW).scatter_(-1, order_BW, ranked_BW * kept_BW)
    cumulative_BW = weights_cut_BW.cumsum(-1)
    target_B1 = uniform_B.double()[:, None] * cumulative_BW[:, -1:]
    ids_B = torch.searchsorted(cumulative_BW, target_B1, right=True)[:, 0].clamp(max=width - 1)
    chosen_B = (scaled_BW - peak_B1).gather(-1, ids_B[:, None])[:, 0]
    return ids_B, (chosen_B - weights_BW.sum(-1).log()).float()


def _listed_keys(keys_BSK: Tensor, positions_BTK: Tensor) -> tuple[Tensor, Tensor]:
    """The listed keys of every query [B, T, K, dims] and which of them exist [B, T, K]."""
    rows_B11 = torch.arange(keys_BSK.shape[0], device=keys_BSK.device)[:, None, None]
    return keys_BSK[rows_B11, positions_BTK.long().clamp_min(0)], positions_BTK >= 0


def _masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last dimension restricted to ``mask``; rows without a valid entry are zero, also in backward."""
    weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
    return weights.masked_fill(~mask, 0.0)


def _within(lengths_M: Tensor, longest: int) -> Tensor:
    """valid_MS: position s is below ``lengths[m]``."""
    return torch.arange(longest, device=lengths_M.device) < lengths_M[:, None]


def _chunks(rows: int, elements_per_row: int) -> list[tuple[int, int]]:
    """Row ranges whose gathered cache stays below ``_GATHER_ELEMENTS``."""
    step = max(1, _GATHER_ELEMENTS // max(1, elements_per_row))
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]
