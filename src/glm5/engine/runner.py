"""The torch side of a step: flat tensors in, sampled ids out.

One call of ``model.ragged`` computes all tokens of a step, whichever sequences they belong to. What the next step of
a decoding sequence needs (its last id, its sampling parameters, how many tokens it has) stays in arrays by slot, so
that a decode step costs a handful of array operations however many sequences run.

Letters: M tokens of the step, B sampled rows, W vocabulary, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from glm5.engine.config import EngineConfig
from glm5.engine.edits import LogitEdits, needs_edits
from glm5.engine.prefix_cache import PrefixCache
from glm5.engine.requests import Sequence, TopLogprobs
from glm5.engine.sampler import RowSettings, log_probs, mix_seed, sample, top_log_probs
from glm5.engine.scheduler import PrefillChunk, StepPlan
from glm5.model.cache import SlotCache
from glm5.model.transformer import GlmMoeDsaForCausalLM


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced: an id and its log-prob for each of ``sequences``, and log-probs of prompt tokens."""

    sequences: list[Sequence]
    ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[tuple[Sequence, list[float]]]
    top_logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    """By request id, for the requests that asked for them."""


class Runner:
    """Owns the key cache and the per-slot sampling state; ``model`` may be replaced between steps."""

    def __init__(self, model: GlmMoeDsaForCausalLM, cache: PrefixCache, config: EngineConfig) -> None:
        self.model = model
        self._cache = cache
        self._attention = config.attention
        self._device = torch.device(config.device)
        num_slots, max_context = cache.ids_SC.shape
        weight = model.lm_head.weight
        self._keys = SlotCache(model.config, num_slots, max_context, weight.dtype, self._device)
        self._temperature = np.ones(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.full(num_slots, -1, np.int64)
        self._min_p = np.zeros(num_slots, np.float32)
        self._top_logprobs = np.zeros(num_slots, np.int64)
        self._edits: dict[int, LogitEdits] = {}
        self._seed = np.zeros(num_slots, np.uint64)
        self._counter = np.zeros(num_slots, np.uint64)
        self._last_id = np.zeros(num_slots, np.int64)
        self._decoding: list[Sequence] = []
        self._decode_slots = np.zeros(0, np.int64)

    @property
    def cache_bytes(self) -> int:
        """Memory of the key cache."""
        return self._keys.bytes

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Compute ``plan``: append keys, sample one id for every sequence that is at the end of what it knows."""
        for copy in plan.copies:
            self._keys.copy_prefix(copy.source, copy.target, copy.length)
        decode_slots = self._slots_of(plan.decode)
        decode_ids = self._last_id[decode_slots]
        ids, positions, slots = decode_ids, self._cache.lengths[decode_slots], decode_slots
        if plan.prefill:
            chunks = plan.prefill
            ids = np.concatenate([ids, *(chunk.sequence.prompt[chunk.start : chunk.stop] for chunk in chunks)])
            positions = np.concatenate([positions, *(np.arange(chunk.start, chunk.stop) for chunk in chunks)])
            slots = np.concatenate(
                [slots, *(np.full(chunk.stop - chunk.start, chunk.sequence.slot) for chunk in chunks)]
            )
        sampled = [chunk for chunk in plan.prefill if chunk.is_last and chunk.sequence.max_new_tokens > 0]
        scored = [chunk for chunk in plan.prefill if chunk.sequence.wants_prompt_logprobs]
        rows = self._rows(plan, sampled, scored) if plan.prefill else None
        logits_BW = self.model.ragged(
            self._tensor(ids),
            self._tensor(positions),
            self._tensor(slots),
            self._keys,
            None if rows is None else self._tensor(rows),
            attention=self._attention,
        )
        self._cache.append_tokens(decode_slots, decode_ids)
        for chunk in plan.prefill:
            self._cache.append_prompt(chunk.sequence.slot, chunk.sequence.prompt[chunk.start : chunk.stop])
        sequences = plan.decode + [chunk.sequence for chunk in sampled] if sampled else plan.decode
        sampled_BW = logits_BW[: len(sequences)]
        new_ids, new_logprobs = self._sample(sampled_BW, decode_slots, sampled)
        return StepResult(
            sequences,
            new_ids,
            new_logprobs,
            self._score(logits_BW[len(sequences) :], scored),
            self._top(sampled_BW, sequences),
        )

    def _slots_of(self, decode: list[Sequence]) -> np.ndarray:
        if decode is not self._decoding:
            self._decoding = decode
            self._decode_slots = np.fromiter((sequence.slot for sequence in decode), np.int64, len(decode))
        return self._decode_slots

    def _rows(self, plan: StepPlan, sampled: list[PrefillChunk], scored: list[PrefillChunk]) -> np.ndarray:
        """Tokens whose logits are needed: the decoding ones, ends of prompts, then every token of the scored chunks."""
        starts: dict[int, int] = {}
        offset = len(plan.decode)
        for chunk in plan.prefill:
            starts[chunk.sequence.request_id] = offset
            offset += chunk.stop - chunk.start
        ends = [starts[chunk.sequence.request_id] + chunk.stop - chunk.start - 1 for chunk in sampled]
        spans = [np.arange(chunk.stop - chunk.start) + starts[chunk.sequence.request_id] for chunk in scored]
        return np.concatenate([np.arange(len(plan.decode)), np.array(ends, np.int64), *spans])

    def _sample(
        self, logits_BW: Tensor, decode_slots: np.ndarray, sampled: list[PrefillChunk]
    ) -> tuple[list[int], list[float]]:
        if not len(logits_BW):
            return [], []
        slots = decode_slots
        if sampled:
            for chunk in sampled:
                self._register(chunk.sequence)
            slots = np.concatenate([slots, np.array([chunk.sequence.slot for chunk in sampled], np.int64)])
        settings = RowSettings(
            self._temperature[slots],
            self._top_p[slots],
            self._top_k[slots],
            self._seed[slots],
            self._counter[slots],
            self._min_p[slots],
        )
        edited = [row for row, slot in enumerate(slots.tolist()) if slot in self._edits] if self._edits else []
        ids, logprobs = sample(self._edit(logits_BW, slots, edited), settings)
        for row in edited:
            token = int(ids[row])
            self._edits[int(slots[row])].advance(token)
            # The model's own log-prob, as of every other token.
            logprobs[row] = log_probs(logits_BW[row : row + 1] / (settings.temperature[row] or 1.0), ids[row : row + 1])
        new_ids = ids.cpu().numpy()
        self._last_id[slots] = new_ids
        self._counter[slots] += np.uint64(1)
        return new_ids.tolist(), logprobs.tolist()

    def _edit(self, logits_BW: Tensor, slots: np.ndarray, edited: list[int]) -> Tensor:
        """``logits_BW`` with the edits of the requests in rows ``edited``; the given tensor stays as it is."""
        if not edited:
            return logits_BW
        edited_BW = logits_BW.clone()
        for row in edited:
            self._edits[int(slots[row])].apply(edited_BW[row])
        return edited_BW

    def _top(self, logits_BW: Tensor, sequences: list[Sequence]) -> dict[int, TopLogprobs]:
        if not self._top_logprobs.any():
            return {}
        return {
            sequence.request_id: top_log_probs(logits_W / (sequence.params.temperature or 1.0), count)
            for sequence, logits_W in zip(sequences, logits_BW, strict=True)
            if (count := sequence.params.top_logprobs)
        }

    def _register(self, sequence: Sequence) -> None:
        slot, params = sequence.slot, sequence.params
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._min_p[slot] = params.min_p
        self._top_logprobs[slot] = params.top_logprobs
        self._edits.pop(slot, None)
        if needs_edits(params):
            self._edits[slot] = LogitEdits(params, sequence.prompt, sequence.constraint)
        self._seed[slot] = mix_seed(sequence.seed)
        self._counter[slot] = 0

    def _score(self, logits_MW: Tensor, scored: list[PrefillChunk]) -> list[tuple[Sequence, list[float]]]:
        """Log-probs of the prompt tokens that follow the positions of ``scored`` chunks."""
        results: list[tuple[Sequence, list[float]]] = []
        offset = 0
        for chunk in scored:
            targets = chunk.sequence.prompt[chunk.start + 1 : chunk.stop + 1]
            temperature = chunk.sequence.params.temperature or 1.0
            scaled_MW = logits_MW[offset : offset + len(targets)] / temperature
            results.append((chunk.sequence, log_probs(scaled_MW, self._tensor(targets)).tolist()))
            offset += chunk.stop - chunk.start
        return results

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
