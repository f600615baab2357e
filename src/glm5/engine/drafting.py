"""Drafting with the MTP layer, so that one step of the model can yield several tokens.

After each step the MTP layer takes the hidden states of the tokens that were kept and the ids that followed them, and
draws a draft of the next token; fed with its own output it draws further ones. The next step computes all drafts at
once, samples at every position as it would without drafts, and keeps a draft exactly if it is the token that was
sampled. So every token comes from the model's own distribution and from the request's own random stream: drafting
changes neither a token nor a log-prob, whatever the drafts are, and may be switched at any step.

Draft and sample use the same uniform number, which makes them agree where their distributions do (the coupling of
Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024): a draft is rejected
with at most the probability that the two inverse cumulative distributions differ at that number.

Letters: M tokens or rows, D hidden, U slots, N drafts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from glm5.engine.prefix_cache import PrefixCache
from glm5.engine.sampler import RowSettings, sample
from glm5.engine.tensor_parallel import LedModel
from glm5.model.cache import KeyCache
from glm5.model.transformer import Attention, GlmMoeDsaForCausalLM


class Drafter:
    """Drafts by slot for one engine."""

    def __init__(self, num_slots: int, drafts: int, cache: PrefixCache, keys: KeyCache, attention: Attention) -> None:
        self.most = drafts
        self.drafts_UN = np.zeros((num_slots, drafts), np.int64)
        self.count_U = np.zeros(num_slots, np.int64)
        """Drafts that the next step of a slot verifies."""
        self._cache, self._keys, self._attention = cache, keys, attention

    def extend(
        self,
        model: GlmMoeDsaForCausalLM | LedModel,
        hidden_MD: Tensor,
        next_ids_M: np.ndarray,
        positions_M: np.ndarray,
        slots_M: np.ndarray,
    ) -> Tensor:
        """Give the MTP layer the keys of tokens, from their hidden states and the ids after them -> its own states."""
        place = (self._tensor(array) for array in (next_ids_M, positions_M, slots_M))
        return model.ragged_mtp(hidden_MD, *place, self._keys, self._attention)

    def draft(
        self, model: GlmMoeDsaForCausalLM | LedModel, hidden_MD: Tensor, slots: np.ndarray, wanted: np.ndarray, settings: RowSettings
    ) -> None:
        """Draw ``wanted`` drafts, one number a row, for ``slots``.

        Row r of ``hidden_MD`` is the MTP layer's state at the last token of ``slots[r]`` that has keys; ``settings`` say
        how the token after the next one will be sampled.
        """
        self.count_U[slots] = wanted
        rows, lengths = np.flatnonzero(wanted), self._cache.lengths_U[slots]
        hidden_MD = hidden_MD[self._tensor(rows)]
        for depth in range(int(wanted.max(initial=0))):
            if depth:
                goes_on = wanted[rows] > depth
                rows, hidden_MD = rows[goes_on], hidden_MD[self._tensor(np.flatnonzero(goes_on))]
                ids = self.drafts_UN[slots[rows], depth - 1]
                hidden_MD = self.extend(model, hidden_MD, ids, lengths[rows] - 1 + depth, slots[rows])
            drawn, _ = sample(model.lm_head(hidden_MD).float(), settings.at(rows, depth))
            self.drafts_UN[slots[rows], depth] = drawn.cpu().numpy()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._keys.table_UZ.device)


class DraftControl:
    """Whether to draft: compares the time per token with and without, in turns, and stays with the faster."""

    LONG, SHORT = 256, 16
    """Steps in the faster mode between two tries, and steps of a try of the other one."""

    def __init__(self) -> None:
        self.is_drafting = True
        self.seconds_per_token: dict[bool, float] = {}
        """By ``is_drafting``, from the last completed turn."""
        self._seconds, self._tokens, self._steps, self._end = 0.0, 0, 0, self.SHORT

    @property
    def speedup(self) -> float:
        """Time per token without drafts over that with drafts; 0 before both are known."""
        return self.seconds_per_token[False] / self.seconds_per_token[True] if len(self.seconds_per_token) == 2 else 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        """One step without prefill took ``seconds`` for ``tokens`` new tokens."""
        self._seconds, self._tokens, self._steps = self._seconds + seconds, self._tokens + tokens, self._steps + 1
        if self._steps < self._end:
            return
        self.seconds_per_token[self.is_drafting] = self._seconds / max(self._tokens, 1)
        if len(self.seconds_per_token) == 2 and self._end == self.SHORT:
            self.is_drafting, self._end = self.speedup >= 1, self.LONG
        else:
            self.is_drafting, self._end = not self.is_drafting, self.SHORT
        self._seconds, self._tokens, self._steps = 0.0, 0, 0
