"""Forms built from PyTorch's own fused kernels, for any device and type: what runs where no native form does.

Contracts and letters as in ``reference``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_ALIGNMENT = 8
"""``grouped_mm`` needs row strides of 16 bytes: hidden sizes that are multiples of this always have them."""


def masked_attention(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    """``reference.masked_attention`` by ``scaled_dot_product_attention``, values padded to the key dim if shorter."""
    missing = q_BTHK.shape[-1] - v_BSHV.shape[-1]
    padded_BSHK = F.pad(v_BSHV, (0, missing)) if missing > 0 else v_BSHV  # equal dims select the flash kernel
    out_BHTK = F.scaled_dot_product_attention(q_BTHK.transpose(1, 2), k_BSHK.transpose(1, 2),
                                              padded_BSHK.transpose(1, 2), attn_mask=mask_BTS.unsqueeze(1), scale=scale)
    out_BTHV = out_BHTK.transpose(1, 2)[..., : v_BSHV.shape[-1]]
    return out_BTHV.masked_fill(~mask_BTS.any(-1)[..., None, None], 0.0)


def experts(x_MD: Tensor, expert_ids_MA: Tensor, weights_MA: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
    """``reference.experts`` by ``grouped_mm``: one launch per projection whatever the number of experts."""
    M, A = expert_ids_MA.shape
    order = expert_ids_MA.flatten().argsort(stable=True)
    ends_E = expert_ids_MA.flatten().bincount(minlength=gate_up_EGD.shape[0]).cumsum(0).to(torch.int32)
    gate_NF, up_NF = F.grouped_mm(x_MD[order // A], gate_up_EGD.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    y_ND = F.grouped_mm(F.silu(gate_NF) * up_NF, down_EDF.transpose(1, 2), offs=ends_E)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(M * A, device=order.device))
    return (y_ND[place].view(M, A, -1) * weights_MA.float().unsqueeze(-1)).sum(1).to(x_MD.dtype)
