"""Proves a form of the native kernels on the machine at hand: tiny inputs, at least one function of every C++ source.

A library is built on one machine and runs on others, whose instruction sets nobody may have tested; so a form is used
only where its results are those of ``reference`` (of exact arithmetic for integers). Takes a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glm5.kernels import reference

if TYPE_CHECKING:
    from glm5.kernels.cpu.library import NativeFunctions

_RTOL, _ATOL = 1e-4, 1e-5
"""More than the order of fp32 sums can change, less than any wrong product does."""


def disagreement(functions: NativeFunctions) -> str | None:
    """Name of the first proven function whose results are wrong; None when all are right."""
    for name, results in CHECKS.items():
        got, expected = results(functions, torch.Generator().manual_seed(0))
        if not torch.allclose(got, expected, rtol=_RTOL, atol=_ATOL):
            return name
    return None


def _rms_norm(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x_MD, weight_D = torch.randn(3, 37, generator=generator), torch.randn(37, generator=generator)
    y_MD = torch.zeros_like(x_MD)
    functions["rms_norm"](x_MD.data_ptr(), 37, weight_D.data_ptr(), 1e-5, 3, 37, y_MD.data_ptr(), None, 1)
    return y_MD, reference.rms_norm(x_MD, weight_D, 1e-5)


def _swiglu(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    gate_up_MG, y_MF = torch.randn(2, 74, generator=generator), torch.zeros(2, 37)
    functions["swiglu"](gate_up_MG.data_ptr(), 2, 37, y_MF.data_ptr(), 1)
    return y_MF, reference.swiglu(gate_up_MG)


def _experts(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x_MD, weights_MA = torch.randn(7, 20, generator=generator), torch.rand(7, 2, generator=generator)
    gate_up_EGD, down_EDF = (torch.randn(3, *sizes, generator=generator) for sizes in ((36, 20), (20, 18)))
    ids_MA, y_MD = torch.arange(14).view(7, 2) % 3, torch.zeros(7, 20)
    functions["experts"](x_MD.data_ptr(), 20, ids_MA.data_ptr(), weights_MA.data_ptr(), gate_up_EGD.data_ptr(),
                         down_EDF.data_ptr(), 7, 2, 3, 20, 18, None, y_MD.data_ptr(), 1)
    return y_MD, reference.experts(x_MD, ids_MA, weights_MA, gate_up_EGD, down_EDF)


def _sample(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    logits_BW, uniform_B = torch.randn(4, 45, generator=generator), torch.rand(4, generator=generator)
    settings = (torch.tensor([0.0, 1.0, 0.7, 1.0]), torch.tensor([0, 0, 20, 0]), torch.tensor([1.0, 1.0, 0.9, 0.5]),
                torch.tensor([0.0, 0.0, 0.0, 0.1]), uniform_B)
    ids_B, logprobs_B = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    functions["sample"](logits_BW.data_ptr(), 4, 45, *(setting.data_ptr() for setting in settings), ids_B.data_ptr(),
                        logprobs_B.data_ptr(), 1)
    expected_ids_B, expected_B = reference.sample(logits_BW, *settings)
    return torch.cat((ids_B, logprobs_B)), torch.cat((expected_ids_B, expected_B))


def _index_scores(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    q_BTJX, k_BSX, w_BTJ = (torch.randn(1, *sizes, generator=generator) for sizes in ((3, 5, 18), (21, 18), (3, 5)))
    valid_BTS, scores_BTS = torch.ones(1, 3, 21, dtype=torch.bool).tril(18), torch.zeros(1, 3, 21)
    functions["index_scores"](q_BTJX.data_ptr(), k_BSX.data_ptr(), w_BTJ.data_ptr(), valid_BTS.data_ptr(), 63, 21,
                              1, 3, 21, 5, 18, 0.5, scores_BTS.data_ptr(), 1)
    expected_BTS = reference.index_scores(q_BTJX, k_BSX, w_BTJ, 0.5, valid_BTS)
    return scores_BTS[valid_BTS], expected_BTS[valid_BTS]


def _masked_attention(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shapes = ((1, 5, 3, 18), (1, 21, 3, 18), (1, 21, 3, 9))
    q_BTHK, k_BSHK, v_BSHV = (torch.randn(shape, generator=generator) for shape in shapes)
    mask_BTS, log_sums_BTH = torch.ones(1, 5, 21, dtype=torch.bool).tril(16), torch.zeros(1, 5, 3)
    out_BTHV = torch.zeros(1, 5, 3, 9)
    functions["masked_attention"](
        q_BTHK.data_ptr(), *q_BTHK.stride()[:3], k_BSHK.data_ptr(), *k_BSHK.stride()[:3], v_BSHV.data_ptr(),
        *v_BSHV.stride()[:3], mask_BTS.data_ptr(), *mask_BTS.stride()[:2], 1, 5, 21, 3, 18, 9, 0.3, out_BTHV.data_ptr(),
        log_sums_BTH.data_ptr(), 1)
    return out_BTHV, reference.masked_attention(q_BTHK, k_BSHK, v_BSHV, mask_BTS, 0.3)


def _sparse_scores(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    q_BTJX, k_BSX, w_BTJ = (torch.randn(1, *sizes, generator=generator) for sizes in ((3, 5, 18), (21, 18), (3, 5)))
    positions_BTK, scores_BTK = (torch.arange(57, dtype=torch.int32) % 21).view(1, 3, 19), torch.zeros(1, 3, 19)
    functions["sparse_scores"](q_BTJX.data_ptr(), k_BSX.data_ptr(), w_BTJ.data_ptr(), positions_BTK.data_ptr(), 1, 3,
                               21, 5, 18, 19, 0.5, scores_BTK.data_ptr(), 1)
    return scores_BTK, reference.sparse_scores(q_BTJX, k_BSX, w_BTJ, 0.5, positions_BTK)


def _int8_linear(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x_MI, levels_NI = (torch.randint(-127, 128, (rows, 67), generator=generator, dtype=torch.int8) for rows in (3, 10))
    x_MI[:, 0] = 127  # so that a token's scale is 1
    rows_MI, scale_N1, y_MN = x_MI.float(), torch.ones(10, 1, dtype=torch.bfloat16), torch.zeros(3, 10)
    functions["int8_linear"](rows_MI.data_ptr(), 67, levels_NI.data_ptr(), scale_N1.data_ptr(), 3, 10, 67,
                             y_MN.data_ptr(), 1)
    return y_MN, (x_MI.double() @ levels_NI.double().T).float()


def _ragged_dsa(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Enough queries and keys to screen, over caches of both types."""
    q_MHK, iq_MJX, iw_MJ = (torch.randn(70, *sizes, generator=generator) for sizes in ((3, 14), (2, 18), (2,)))
    table_UZ = torch.randperm(11, generator=generator).to(torch.int32)[None]
    slots_M, lengths_M, results = torch.zeros(70, dtype=torch.int64), torch.arange(101, 171), []
    for dtype in (torch.float32, torch.bfloat16):
        latent_PSK, keys_PSX = (torch.randn(11, 16, size, generator=generator).to(dtype) for size in (14, 18))
        out_MHC = torch.zeros(70, 3, 9)
        functions["ragged_dsa"](
            dtype is torch.bfloat16, q_MHK.data_ptr(), 3, iq_MJX.data_ptr(), iw_MJ.data_ptr(), 2, latent_PSK.data_ptr(),
            11, 16, 14, 9, keys_PSX.data_ptr(), 18, table_UZ.data_ptr(), 1, 11, slots_M.data_ptr(),
            lengths_M.data_ptr(), 70, 3, 0.3, out_MHC.data_ptr(), 1)
        expected_MHC = reference.ragged_dsa(q_MHK, iq_MJX, iw_MJ, latent_PSK, keys_PSX, slots_M, lengths_M, 3, 0.3, 9,
                                            table_UZ)
        results.append(torch.stack((out_MHC, expected_MHC)))
    got, expected = torch.stack(results, 1)
    return got, expected


def _ragged_select(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries and keys of bf16: one query alone, whose heads are taken together, and many, taken head by head."""
    iq_MJX, iw_MJ = (torch.randn(20, 3, *rest, generator=generator) for rest in ((34,), ()))
    iq_MJX = iq_MJX.bfloat16().float()
    keys_PSX = torch.randn(2, 96, 34, generator=generator).bfloat16()
    slots_M, lengths_M = (torch.arange(20) > 0).long(), torch.arange(77, 97)
    table_UZ, positions_MK = torch.arange(2, dtype=torch.int32)[:, None], torch.zeros(20, 7, dtype=torch.int32)
    functions["ragged_select"](2, iq_MJX.data_ptr(), iw_MJ.data_ptr(), 3, keys_PSX.data_ptr(), 2, 96, 34,
                               table_UZ.data_ptr(), 2, 1, slots_M.data_ptr(), None, lengths_M.data_ptr(), 20, 7,
                               positions_MK.data_ptr(), 1)
    expected_MK = reference.ragged_select(iq_MJX, iw_MJ, keys_PSX, slots_M, lengths_M, 7, table_UZ)
    assert expected_MK is not None
    return positions_MK, expected_MK


def _ragged_attention(functions: NativeFunctions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries and keys of bf16. Weights may be rounded: outputs are those of equal weights, log sums of others."""
    q_MHK, latent_PSK = (torch.randn(sizes, generator=generator).bfloat16() for sizes in ((9, 3, 42), (1, 160, 42)))
    q_MHK = q_MHK.float()
    q_MHK[4:] = 0
    slots_M, lengths_M = torch.zeros(9, dtype=torch.int64), torch.arange(150, 159)
    out_MHC, log_sums_MH, table_UZ = torch.zeros(9, 3, 34), torch.zeros(9, 3), torch.zeros(1, 1, dtype=torch.int32)
    functions["ragged_attention"](2, q_MHK.data_ptr(), 3, latent_PSK.data_ptr(), 1, 160, 42, 34,
                                  table_UZ.data_ptr(), 1, 1, slots_M.data_ptr(), lengths_M.data_ptr(), 9, None, 0, 0.3,
                                  out_MHC.data_ptr(), log_sums_MH.data_ptr(), 1)
    seen_MS = torch.arange(160) < lengths_M[:, None]
    logits_MHS = 0.3 * q_MHK @ latent_PSK[0].float().T
    expected_MH = logits_MHS.masked_fill(~seen_MS[:, None], float("-inf")).logsumexp(-1)
    means_MC = seen_MS.float() @ latent_PSK[0, :, :34].float() / lengths_M[:, None]
    return (torch.cat((log_sums_MH.flatten(), out_MHC[4:].flatten())),
            torch.cat((expected_MH.flatten(), means_MC[4:, None].expand(-1, 3, -1).flatten())))


CHECKS: dict[str, Callable[[NativeFunctions, torch.Generator], tuple[Tensor, Tensor]]] = {
    "rms_norm": _rms_norm, "swiglu": _swiglu, "experts": _experts, "sample": _sample, "index_scores": _index_scores,
    "masked_attention": _masked_attention, "sparse_scores": _sparse_scores, "int8_linear": _int8_linear,
    "ragged_dsa": _ragged_dsa, "ragged_select": _ragged_select, "ragged_attention": _ragged_attention,
}
"""Per function, what it gives and what is right."""
