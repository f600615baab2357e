"""Small parts that every block uses: uninitialised projections, norms, rotary tables, and the mask of a packed batch.

Parameters are created without values; ``GlmMoeDsaForCausalLM.reset_parameters`` or a checkpoint fills them, so that a
model on the meta device costs nothing and a loaded model is never initialised twice.

Letters: B batch rows, T queries, S keys, D hidden, R rotary dims.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5.kernels import dispatch


class Projection(nn.Module):
    """A matrix without bias, stored [out, in] as published."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in] -> [..., out]."""
        return nn.functional.linear(x, self.weight)


class Embedding(nn.Module):
    """The token embedding [W, D]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of any shape -> [..., D]."""
        return nn.functional.embedding(ids, self.weight)


class RmsNorm(nn.Module):
    """Root-mean-square norm: normalised in fp32, cast, then multiplied by the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., size] -> the same shape."""
        return dispatch.rms_norm(x, self.weight, self.eps)


class Mlp(nn.Module):
    """SwiGLU feed-forward: the dense layers and the shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Projection(hidden_size, intermediate_size)
        self.up_proj = Projection(hidden_size, intermediate_size)
        self.down_proj = Projection(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., D] -> [..., D]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_tables(positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., R/2] of every position, computed in fp32 and cast to ``dtype``."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angles = positions.unsqueeze(-1).float() * (1.0 / theta**exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class PackedRows:
    """What every layer of one forward shares: rotary tables and the causal, block-diagonal mask.

    ``documents_BT`` holds the document id of each token, -1 for padding, None for one document per row. Masks are made
    for a range of query rows against the keys up to its end; the mask of a single range is kept and reused.
    """

    def __init__(self, cos_BTR2: Tensor, sin_BTR2: Tensor, documents_BT: Tensor | None, shape: tuple[int, int]) -> None:
        self.cos_BTR2, self.sin_BTR2 = cos_BTR2, sin_BTR2
        self.rows, self.length = shape
        self._documents_BT = documents_BT
        self._kept: tuple[int, int, Tensor] | None = None

    def mask(self, start: int, stop: int) -> Tensor:
        """mask_BtS bool for queries ``start:stop`` and keys ``:stop``."""
        if self._kept is None or self._kept[:2] != (start, stop):
            self._kept = (start, stop, self._make_mask(start, stop))
        return self._kept[2]

    def query_rows(self, start: int, stop: int) -> int:
        """Number of queries in ``start:stop`` that are not padding: each sees at least itself."""
        if self._documents_BT is None:
            return self.rows * (stop - start)
        return int((self._documents_BT[:, start:stop] >= 0).sum())

    def counted_tokens(self) -> Tensor | None:
        """valid_BT bool, or None when no token is padding by construction."""
        return None if self._documents_BT is None else self._documents_BT >= 0

    def _make_mask(self, start: int, stop: int) -> Tensor:
        keys_S = torch.arange(stop, device=self.cos_BTR2.device)
        causal_BtS = (keys_S <= keys_S[start:stop, None]).unsqueeze(0)
        if self._documents_BT is None:
            return causal_BtS.expand(self.rows, -1, -1)
        queries_Bt1 = self._documents_BT[:, start:stop, None]
        return (queries_Bt1 == self._documents_BT[:, None, :stop]) & causal_BtS & (queries_Bt1 >= 0)
