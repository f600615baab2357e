"""Cases that every Triton form must pass, on any device; run as a program they use Triton's interpreter on the CPU.

``TRITON_INTERPRET=1 python -m tests.kernels.triton_cases`` prints what fails. Sizes are tiny, because the interpreter
runs one element of a grid after the other.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm5.kernels import dispatch, reference

Case = Callable[[torch.device], None]


def gradients(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> list[Tensor]:
    """The output and the gradient of every argument that wants one, for a fixed random cotangent."""
    leaves = [argument for argument in arguments if isinstance(argument, Tensor) and argument.requires_grad]
    out = function(*arguments)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * cotangent).sum(), leaves)]


def compare(name: str, arguments: tuple[Any, ...], device: torch.device, tolerance: float = 1e-4) -> None:
    """Values and gradients of the Triton form equal the reference, and a second run gives the same bits."""
    moved = tuple(
        argument.detach().to(device).requires_grad_(argument.requires_grad)
        if isinstance(argument, Tensor)
        else argument
        for argument in arguments
    )
    with dispatch.prefer("triton"):
        got, again = (gradients(getattr(dispatch, name), moved) for _ in range(2))
    for value, repeated, want in zip(got, again, gradients(getattr(reference, name), arguments), strict=True):
        torch.testing.assert_close(value.cpu(), want, rtol=tolerance, atol=tolerance)
        assert torch.equal(value, repeated), f"{name}: two runs differ"


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def lists(batch: int, queries: int, keys: int, width: int) -> Tensor:
    """Ascending positions below the query's own, padded with -1; the first query lists none."""
    positions_BTK = torch.full((batch, queries, width), -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(1, queries):
            chosen = torch.randperm(min(keys, 2 * t))[:width].sort().values
            positions_BTK[b, t, : chosen.numel()] = chosen.to(torch.int32)
    return positions_BTK


def rms_norm(device: torch.device) -> None:
    compare("rms_norm", (leaf(5, 24), leaf(24), 1e-5), device)


def apply_rope(device: torch.device) -> None:
    for interleaved in (True, False):
        compare("apply_rope", (leaf(2, 3, 2, 8), torch.randn(2, 3, 4), torch.randn(2, 3, 4), interleaved), device)


def swiglu(device: torch.device) -> None:
    compare("swiglu", (leaf(3, 20),), device)


def sparse_attention(device: torch.device) -> None:
    compare("sparse_attention", (leaf(2, 6, 3, 20), leaf(2, 11, 20), lists(2, 6, 11, 7), 0.3, 12), device)


def sparse_targets(device: torch.device) -> None:
    arguments = (torch.randn(1, 5, 3, 20), torch.randn(1, 9, 20), lists(1, 5, 9, 6), 0.3)
    with dispatch.prefer("triton"):
        target_BTK = dispatch.sparse_targets(*(x.to(device) if isinstance(x, Tensor) else x for x in arguments))
    torch.testing.assert_close(target_BTK.cpu(), reference.sparse_targets(*arguments), rtol=1e-4, atol=1e-5)


def sparse_scores(device: torch.device) -> None:
    compare("sparse_scores", (leaf(2, 5, 3, 10), leaf(2, 9, 10), leaf(2, 5, 3), 0.4, lists(2, 5, 9, 6)), device)


def indexer_kl(device: torch.device) -> None:
    mask_BTS = torch.ones(4, 7, dtype=torch.bool).tril(2).repeat(2, 1, 1)
    mask_BTS[1, 2] = False
    target_BTS = torch.rand(2, 4, 7).masked_fill(~mask_BTS, 0.0)
    target_BTS /= target_BTS.sum(-1, keepdim=True).clamp_min(1e-9)
    compare("indexer_kl", (leaf(2, 4, 7), target_BTS, mask_BTS), device)


def index_scores(device: torch.device) -> None:
    arguments = (torch.randn(2, 3, 5, 12), torch.randn(2, 9, 12), torch.randn(2, 3, 5), 0.3, torch.rand(2, 3, 9) < 0.7)
    with dispatch.prefer("triton"):
        scores_BTS = dispatch.index_scores(*(x.to(device) if isinstance(x, Tensor) else x for x in arguments))
    torch.testing.assert_close(scores_BTS.cpu(), reference.index_scores(*arguments), rtol=1e-4, atol=1e-4)


def selection(device: torch.device) -> None:
    """Ties towards the lower position, NaN last, pages, ranges, rows shorter than the selection."""
    keys_PSX = torch.randint(-1, 2, (2, 40, 4)).float()
    keys_PSX[0, 7], keys_PSX[0, 9] = float("nan"), float("inf")
    iq_MJX, iw_MJ = torch.randn(5, 2, 4).sign(), torch.randn(5, 2).sign()
    slots_M, lengths_M = torch.tensor([0, 1, 0, 1, 0]), torch.tensor([40, 33, 3, 0, 20])
    paged = keys_PSX.view(8, 10, 4), torch.tensor([[0, 1, 2, 3], [5, 4, 7, 6]], dtype=torch.int32)
    for cache_PSX, table_UZ in ((keys_PSX, None), paged):
        arguments = (iq_MJX, iw_MJ, cache_PSX, slots_M, lengths_M, 6, table_UZ)
        with dispatch.prefer("triton"):
            got_MK = dispatch.ragged_select(*(x.to(device) if isinstance(x, Tensor) else x for x in arguments))
        want_MK = reference.ragged_select(*arguments)
        assert got_MK is not None and want_MK is not None and torch.equal(got_MK.cpu(), want_MK)
    first_BT = torch.tensor([[0, 20, 1, 0, 11]]).expand(2, -1)
    last_BT = torch.tensor([[40, 33, 3, 0, 20]]).expand(2, -1)
    selection = (iq_MJX.expand(2, -1, -1, -1), keys_PSX, iw_MJ.expand(2, -1, -1), 0.5, first_BT, last_BT, 6)
    with dispatch.prefer("triton"):
        got_BTK = dispatch.select_positions(*(x.to(device) if isinstance(x, Tensor) else x for x in selection))
    assert torch.equal(got_BTK.cpu(), reference.select_positions(*selection))


def ragged_attention(device: torch.device) -> None:
    q_MHK, latent_PSK = torch.randn(4, 3, 20), torch.randn(2, 12, 20)
    slots_M, lengths_M = torch.tensor([1, 0, 1, 0]), torch.tensor([12, 5, 0, 1])
    paged = latent_PSK.view(6, 4, 20), torch.tensor([[5, 0, 3], [2, 4, 1]], dtype=torch.int32)
    for positions_MK in (None, torch.tensor([[0, 3, 11], [1, 4, -1], [-1, -1, -1], [0, -1, -1]])):
        for cache_PSK, table_UZ in ((latent_PSK, None), paged):
            arguments = (q_MHK, cache_PSK, slots_M, lengths_M, positions_MK, 0.3, 12, table_UZ)
            with dispatch.prefer("triton"):
                got_MHC = dispatch.ragged_attention(*(x.to(device) if isinstance(x, Tensor) else x for x in arguments))
            torch.testing.assert_close(got_MHC.cpu(), reference.ragged_attention(*arguments), rtol=1e-4, atol=1e-4)


def experts(device: torch.device) -> None:
    ids_MA = torch.tensor([[0, 2], [2, 2], [0, 3], [3, 0], [2, 0]])  # expert 1 gets no token
    compare("experts", (leaf(5, 12), ids_MA, leaf(5, 2), leaf(4, 16, 12), leaf(4, 12, 8)), device)


def sample(device: torch.device) -> None:
    logits_BW = torch.randn(6, 50) * 2
    logits_BW[1, 10:14] = logits_BW[1].max()  # equal logits at every cut
    settings = (
        torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 1.0]),
        torch.tensor([-1, 2, 5, -1, 8, -1]),
        torch.tensor([1.0, 1.0, 0.8, 0.5, 0.9, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.3]),
        torch.rand(6),
    )
    with dispatch.prefer("triton"):
        ids_B, logprobs_B = dispatch.sample(logits_BW.to(device), *(setting.to(device) for setting in settings))
    want_B, want_logprobs_B = reference.sample(logits_BW, *settings)
    assert torch.equal(ids_B.cpu(), want_B)
    torch.testing.assert_close(logprobs_B.cpu(), want_logprobs_B, rtol=1e-5, atol=1e-5)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        rms_norm,
        apply_rope,
        swiglu,
        sparse_attention,
        sparse_targets,
        sparse_scores,
        indexer_kl,
        index_scores,
        selection,
        ragged_attention,
        experts,
        sample,
    )
}


def main() -> int:
    failed = 0
    for name, case in CASES.items():
        torch.manual_seed(0)
        try:
            case(torch.device("cpu"))
        except Exception:
            failed += 1
            print(f"{name}: {traceback.format_exc(limit=-3)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
