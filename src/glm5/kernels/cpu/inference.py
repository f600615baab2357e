"""Native operations without gradients, for the engine: tensors in, tensors out, contracts as in ``reference``.

The caller (``dispatch``) has checked device and type: fp32 everywhere, except that both caches may be bf16, and then
the queries too. Letters as in ``reference``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.errors import KernelError
from glm5.kernels.cpu.library import native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``reference.rms_norm`` of fp32 rows."""
    rows_MD = as_rows(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    native()["rms_norm"](rows_MD.data_ptr(), rows_MD.stride(0), weight.data_ptr(), eps, *rows_MD.shape, y.data_ptr(),
                         None, torch.get_num_threads())
    return y


def apply_rope(x_BTHR: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor, interleaved: bool) -> Tensor:
    """``reference.apply_rope`` in fp32."""
    x_MHR, cos_M2, sin_M2 = rope_rows(x_BTHR, cos_BTR2, sin_BTR2)
    tokens, heads, size = x_MHR.shape
    y = torch.empty_like(x_BTHR, memory_format=torch.contiguous_format)
    native()["rope"](x_MHR.data_ptr(), x_MHR.stride(0), x_MHR.stride(1), *pair_strides(size, interleaved),
                     cos_M2.data_ptr(), sin_M2.data_ptr(), size // 2, tokens, heads, size // 2, y.data_ptr(),
                     torch.get_num_threads())
    return y


def experts(x_MD: Tensor, expert_ids_MA: Tensor, weights_MA: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
    """``reference.experts`` in fp32."""
    x_MD, ids_MA, weights_MA = as_rows(x_MD), expert_ids_MA.long().contiguous(), weights_MA.contiguous()
    y_MD = torch.empty_like(x_MD, memory_format=torch.contiguous_format)
    failed = native()["experts"](x_MD.data_ptr(), x_MD.stride(0), ids_MA.data_ptr(), weights_MA.data_ptr(),
                                 gate_up_EGD.contiguous().data_ptr(), down_EDF.contiguous().data_ptr(), *ids_MA.shape,
                                 *down_EDF.shape, None, y_MD.data_ptr(), torch.get_num_threads())
    if failed:
        raise_bad_expert(ids_MA, down_EDF.shape[0])
    return y_MD


def ragged_select(iq_MJX: Tensor, iw_MJ: Tensor, index_keys_PSX: Tensor, slots_M: Tensor, lengths_M: Tensor,
                  index_topk: int, table_UZ: Tensor | None = None) -> Tensor | None:
    """``reference.ragged_select``: queries fp32, keys fp32 or bf16, contiguous."""
    if index_topk <= 0 or not lengths_M.numel() or int(lengths_M.max()) <= index_topk:
        return None
    slots_M, lengths_M = slots_M.long().contiguous(), lengths_M.long().contiguous()
    half = _half(index_keys_PSX, iq_MJX)
    iq_MJX, iw_MJ = iq_MJX.float().contiguous(), iw_MJ.float().contiguous()
    table_UZ = _table(table_UZ, index_keys_PSX)
    positions_MK = torch.empty((slots_M.numel(), index_topk), dtype=torch.int32)
    outside = native()["ragged_select"](
        half, iq_MJX.data_ptr(), iw_MJ.data_ptr(), iq_MJX.shape[1],
        index_keys_PSX.data_ptr(), *index_keys_PSX.shape, table_UZ.data_ptr(), *table_UZ.shape, slots_M.data_ptr(),
        None, lengths_M.data_ptr(), slots_M.numel(), index_topk, positions_MK.data_ptr(), torch.get_num_threads())
    _check(outside, slots_M, lengths_M, index_keys_PSX, table_UZ)
    return positions_MK


def ragged_attention(q_MHK: Tensor, latent_PSK: Tensor, slots_M: Tensor, lengths_M: Tensor, positions_MK: Tensor | None,
                     scale: float, kv_lora_rank: int, table_UZ: Tensor | None = None) -> Tensor:
    """``reference.ragged_attention``: cache fp32 or bf16, contiguous."""
    slots_M, lengths_M, q = slots_M.long().contiguous(), lengths_M.long().contiguous(), q_MHK.float().contiguous()
    out_MHC = torch.empty(q.shape[0], q.shape[1], kv_lora_rank)
    table_UZ = _table(table_UZ, latent_PSK)
    positions = None if positions_MK is None else positions_MK.to(torch.int32).contiguous()
    outside = native()["ragged_attention"](
        _half(latent_PSK, q_MHK), q.data_ptr(), q.shape[1], latent_PSK.data_ptr(), *latent_PSK.shape,
        kv_lora_rank, table_UZ.data_ptr(), *table_UZ.shape, slots_M.data_ptr(), lengths_M.data_ptr(), q.shape[0],
        None if positions is None else positions.data_ptr(), 0 if positions is None else positions.shape[1], scale,
        out_MHC.data_ptr(), None, torch.get_num_threads())
    _check(outside, slots_M, lengths_M, latent_PSK, table_UZ)
    return out_MHC.to(q_MHK.dtype)


def ragged_dsa(q_MHK: Tensor, iq_MJX: Tensor, iw_MJ: Tensor, latent_PSK: Tensor, index_keys_PSX: Tensor,
               slots_M: Tensor, lengths_M: Tensor, index_topk: int, scale: float, kv_lora_rank: int,
               table_UZ: Tensor | None = None) -> Tensor:
    """``reference.ragged_dsa`` without the intermediate positions; both caches of one type."""
    if index_topk <= 0:
        return ragged_attention(q_MHK, latent_PSK, slots_M, lengths_M, None, scale, kv_lora_rank, table_UZ)
    assert latent_PSK.shape[:2] == index_keys_PSX.shape[:2], "latents and index keys of one cache"
    slots_M, lengths_M, q = slots_M.long().contiguous(), lengths_M.long().contiguous(), q_MHK.float().contiguous()
    half = _half(latent_PSK, q_MHK, iq_MJX)
    iq_MJX, iw_MJ = iq_MJX.float().contiguous(), iw_MJ.float().contiguous()
    table_UZ = _table(table_UZ, latent_PSK)
    out_MHC = torch.empty(q.shape[0], q.shape[1], kv_lora_rank)
    outside = native()["ragged_dsa"](
        half, q.data_ptr(), q.shape[1], iq_MJX.data_ptr(), iw_MJ.data_ptr(),
        iq_MJX.shape[1], latent_PSK.data_ptr(), *latent_PSK.shape, kv_lora_rank, index_keys_PSX.data_ptr(),
        index_keys_PSX.shape[2], table_UZ.data_ptr(), *table_UZ.shape, slots_M.data_ptr(), lengths_M.data_ptr(),
        q.shape[0], index_topk, scale, out_MHC.data_ptr(), torch.get_num_threads())
    _check(outside, slots_M, lengths_M, latent_PSK, table_UZ)
    return out_MHC.to(q_MHK.dtype)


def sample(logits_BW: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor,
           uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """``reference.sample`` of fp32 logits."""
    logits_BW = logits_BW.contiguous()
    ids_B, logprobs_B = torch.empty(logits_BW.shape[0], dtype=torch.int64), torch.empty(logits_BW.shape[0])
    settings = (temperature_B.float(), top_k_B.long(), top_p_B.float(), min_p_B.float(), uniform_B.float())
    settings = tuple(setting.contiguous() for setting in settings)
    native()["sample"](logits_BW.data_ptr(), *logits_BW.shape, *(setting.data_ptr() for setting in settings),
                       ids_B.data_ptr(), logprobs_B.data_ptr(), torch.get_num_threads())
    return ids_B, logprobs_B


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., D] as [M, D] with contiguous elements; a view when its memory allows."""
    rows_MD = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return rows_MD if rows_MD.stride(1) == 1 else rows_MD.contiguous()


def rope_rows(x_BTHR: Tensor, cos_BTR2: Tensor, sin_BTR2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as [M, H, R] with contiguous elements, cos and sin as [M, R/2] contiguous."""
    x_MHR = x_BTHR if x_BTHR.dim() == 3 else x_BTHR.reshape(-1, *x_BTHR.shape[-2:])
    if x_MHR.stride(2) != 1:
        x_MHR = x_MHR.contiguous()
    cos_M2, sin_M2 = (angle if angle.dim() == 2 else angle.expand(*x_BTHR.shape[:-2], -1).reshape(-1, angle.shape[-1])
                      for angle in (cos_BTR2, sin_BTR2))
    return x_MHR, cos_M2.contiguous(), sin_M2.contiguous()


def pair_strides(size: int, interleaved: bool) -> tuple[int, int]:
    """Distance between pairs and between the partners of a pair."""
    return (2, 1) if interleaved else (1, size // 2)


def raise_bad_expert(ids_MA: Tensor, count: int) -> None:
    """Report which expert ids the router gave."""
    raise KernelError(f"experts: ids reach from {int(ids_MA.min())} to {int(ids_MA.max())}; expected 0 to {count - 1}; "
                      "check the router")


def _half(cache: Tensor, *queries: Tensor) -> int:
    """What the C functions call ``half``: 0 fp32 caches, 1 bf16 caches, 2 bf16 caches and queries."""
    if cache.dtype != torch.bfloat16:
        return 0
    return 2 if all(query.dtype == torch.bfloat16 for query in queries) else 1


def _table(table_UZ: Tensor | None, cache: Tensor) -> Tensor:
    """``table_UZ`` as int32; without one slot p is block p."""
    if table_UZ is None:
        return torch.arange(cache.shape[0], dtype=torch.int32).unsqueeze(1)
    return table_UZ.to(torch.int32).contiguous()


def _check(outside: int, slots_M: Tensor, lengths_M: Tensor, cache: Tensor, table_UZ: Tensor) -> None:
    if outside:
        query = outside - 1
        raise KernelError(f"ragged attention: query {query} reads {int(lengths_M[query])} entries of slot "
                          f"{int(slots_M[query])}; the cache has {table_UZ.shape[0]} slots of {table_UZ.shape[1]} "
                          f"blocks of {cache.shape[1]} entries, {cache.shape[0]} blocks in all; check the scheduler")
