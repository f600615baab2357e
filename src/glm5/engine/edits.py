"""What a request changes in its logits before a token is sampled: penalties, bias, grammar.

Order: repetition penalty, presence and frequency penalties, bias, grammar; the grammar has the last word. Log-probs are
reported from the logits as the model gave them.

Letter: W vocabulary.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from glm5.engine.grammar import Constraint
from glm5.records import SamplingParams


def needs_edits(params: SamplingParams) -> bool:
    """True when a request with ``params`` samples from other logits than the model's."""
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.grammar is not None
    )


class LogitEdits:
    """The edits of one request, which follow what it has sampled."""

    def __init__(
        self, params: SamplingParams, prompt: np.ndarray, sampled: list[int], constraint: Constraint | None
    ) -> None:
        """``sampled`` is the answer so far, which ``constraint`` has followed already."""
        self._params, self._constraint = params, constraint
        self._counts: dict[int, int] = dict(Counter(sampled))
        self._seen = {*prompt.tolist(), *sampled} if params.repetition_penalty != 1 else set()
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in params.logit_bias])

    def apply(self, logits_W: Tensor) -> None:
        """Edit ``logits_W`` (fp32) in place. Logits become NaN when the grammar's state is broken."""
        device, params = logits_W.device, self._params
        if self._seen and params.repetition_penalty != 1:
            ids = torch.tensor(sorted(self._seen), device=device)
            values = logits_W[ids]
            logits_W[ids] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            ids = torch.tensor(list(self._counts), device=device)
            counts = torch.tensor(list(self._counts.values()), dtype=logits_W.dtype, device=device)
            logits_W[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if len(self._bias):
            logits_W.index_add_(0, self._bias_ids.to(device), self._bias.to(device, logits_W.dtype))
        if self._constraint is not None:
            allowed = self._constraint.allowed()
            if allowed is None:
                logits_W.fill_(float("nan"))
                return
            # Rows beyond the tokenizer's ids exist for alignment only.
            logits_W[len(allowed) :] = float("-inf")
            logits_W[: len(allowed)].masked_fill_(~torch.from_numpy(allowed).to(device), float("-inf"))

    def advance(self, token: int) -> None:
        """``token`` was sampled."""
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._params.repetition_penalty != 1:
            self._seen.add(token)
        if self._constraint is not None:
            self._constraint.advance(token)
