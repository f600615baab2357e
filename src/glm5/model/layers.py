"""Small parts that every block uses: uninitialised projections, norms, rotary tables, and the mask of a packed batch.

Parameters are created without values; ``GlmMoeDsaForCausalLM.reset_parameters`` or a checkpoint fills them, so that a
model on the meta device costs nothing and a loaded model is never initialised twice.

Letters: B batch rows, T queries, S keys, D hidden, R rotary dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glm5.kernels import dispatch
from glm5.model.parts import TokenPart

QUERY_SPAN = 512
"""Queries that are attended at once."""
SHORT_ROW = 1024
"""Rows up to this length keep their masks and activations; longer ones make them again where they are needed."""


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


@dataclass(frozen=True, slots=True)
class Span:
    """A range of local query tokens and the keys that any of them may see, in all rows."""

    first_query: int
    stop: int
    """End of the queries and of the keys."""
    first_key: int
    longest: int
    """Most keys that one query of the range sees."""
    shift: int = 0
    """Place of a query in its row minus its place among the local tokens."""

    @property
    def places(self) -> slice:
        """The query tokens in their row."""
        return slice(self.first_query, self.stop)

    @property
    def queries(self) -> slice:
        """The query tokens among the local tokens."""
        return slice(self.first_query - self.shift, self.stop - self.shift)

    @property
    def keys(self) -> slice:
        """The key tokens."""
        return slice(self.first_key, self.stop)


class PackedRows:
    """What every layer of one forward shares: rotary tables, and the causal block-diagonal mask by spans of queries.

    ``documents_BT`` holds the document id of each token, -1 for padding, None for one document per row; a document is a
    run of equal ids. Spans leave out keys that no query of theirs can see, so that short documents in long rows cost
    what they cost alone. Documents and ``shape`` are those of whole rows, the rotary tables those of the local tokens.
    """

    def __init__(self, cos_BTR2: Tensor, sin_BTR2: Tensor, documents_BT: Tensor | None, shape: tuple[int, int],
                 part: TokenPart) -> None:
        self.cos_BTR2, self.sin_BTR2, self.part = cos_BTR2, sin_BTR2, part
        self.rows, self.length = shape
        self.is_short = self.length <= SHORT_ROW
        self._tokens_T = torch.arange(self.length, device=cos_BTR2.device)
        self._documents_BT = documents_BT
        self._starts_BT = self._document_starts()
        self.spans, self.longest = self._make_spans()
        self._masks: dict[int, Tensor] = {}

    def mask(self, span: Span) -> Tensor:
        """mask_BtS bool for the queries and keys of ``span``; padding rows see nothing."""
        kept = self._masks.get(span.first_query)
        if kept is not None:
            return kept
        keys_S, queries_t1 = self._tokens_T[span.keys], self._tokens_T[span.places, None]
        mask_BtS = (keys_S <= queries_t1) & (keys_S >= self._starts_BT[:, span.places, None])
        mask_BtS = mask_BtS.expand(self.rows, -1, -1)
        if self.is_short:
            self._masks[span.first_query] = mask_BtS
        return mask_BtS

    def visible_keys(self) -> tuple[Tensor, Tensor]:
        """First visible key and the end of the visible keys of every local query, [B or 1, T]; none for padding."""
        return self.part.local(self._starts_BT), self.part.local(self._tokens_T.unsqueeze(0) + 1)

    def query_rows(self, span: Span) -> int:
        """Number of queries in ``span`` that are not padding: each sees at least itself."""
        if self._documents_BT is None:
            return self.rows * (span.stop - span.first_query)
        return int((self._documents_BT[:, span.places] >= 0).sum())

    def counted_tokens(self) -> Tensor | None:
        """valid_BT bool of the local tokens, or None when no token is padding by construction."""
        return None if self._documents_BT is None else self.part.local(self._documents_BT) >= 0

    def _document_starts(self) -> Tensor:
        """Index of the first token of each token's document [B or 1, T]; for padding, an index past the row."""
        if self._documents_BT is None:
            return torch.zeros_like(self._tokens_T).unsqueeze(0)
        starts_BT = torch.zeros_like(self._documents_BT, dtype=torch.long)
        is_new_BT = self._documents_BT[:, 1:] != self._documents_BT[:, :-1]
        starts_BT[:, 1:] = torch.where(is_new_BT, self._tokens_T[1:], 0)
        return starts_BT.cummax(1).values.masked_fill(self._documents_BT < 0, self.length)

    def _make_spans(self) -> tuple[tuple[Span, ...], int]:
        """Spans of the local queries, and the most keys that any query of the rows sees, local or not."""
        bounds, local = [], 0
        for first, last in self.part.ranges(self.length):
            bounds += [(start, min(start + QUERY_SPAN, last), first - local)
                       for start in range(first, last, QUERY_SPAN)]
            local += last - first
        earliest_T = self._starts_BT.amin(0)
        visible_T = self._tokens_T - earliest_T + 1
        numbers = [visible_T.max(), *(earliest_T[start:stop].min() for start, stop, _ in bounds),
                   *(visible_T[start:stop].max() for start, stop, _ in bounds)]
        longest, *numbers = torch.stack(numbers).tolist()  # one transfer for all spans
        spans = tuple(Span(start, stop, min(first, start), most, shift) for (start, stop, shift), first, most
                      in zip(bounds, numbers[: len(bounds)], numbers[len(bounds) :], strict=True))
        return spans, longest
