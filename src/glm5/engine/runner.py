"""The torch side of a step: flat tensors in, sampled ids out.

One call of ``model.ragged`` computes all tokens of a step, whichever sequences they belong to. What the next step of
a decoding sequence needs (its last id, its drafts, its sampling parameters, how many tokens it has) stays in arrays by
slot, so that a decode step costs a handful of array operations however many sequences run.

Rows of logits come in three parts: the decoding sequences, each with one row for its last id and one for each draft;
the ends of filled sequences; every token of the prompts whose log-probs are wanted.

Letters: M tokens of the step, B rows, W vocabulary, D hidden, U slots, N drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glm5.device import HOST
from glm5.engine.config import EngineConfig
from glm5.engine.drafting import Drafter
from glm5.engine.edits import LogitEdits, needs_edits
from glm5.engine.prefix_cache import PrefixCache
from glm5.engine.requests import Sequence
from glm5.engine.sampler import RowSettings, log_probs, mix_seed, sample, top_log_probs
from glm5.engine.scheduler import PrefillChunk, StepPlan
from glm5.engine.tensor_parallel import LedModel
from glm5.model.families import CausalLM
from glm5.records import TopLogprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced: ids with their log-probs, those of one sequence in order, and log-probs of prompts."""

    sequences: list[Sequence]
    """Of each id."""
    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    """Of each id, empty for those that did not ask; empty when nobody did."""
    prompt_logprobs: list[tuple[Sequence, list[float]]]
    drafted: int = 0
    """Drafts that were verified."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The flat tokens of one step: those of the decoding sequences first, then the chunks."""

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    owners: np.ndarray
    """Which of the decoding sequences each of their tokens belongs to."""
    offsets: np.ndarray
    """How many tokens behind the sequence's last id each of these is: from 1 on they are drafts."""
    ends: np.ndarray
    """Last tokens of the chunks that end what a sequence is filled with, if it is to sample."""
    scored: np.ndarray
    """Tokens of prompts whose log-probs are wanted."""

    @property
    def rows(self) -> np.ndarray | None:
        """Tokens whose logits are wanted; None means all."""
        if len(self.owners) == len(self.ids):
            return None
        return np.concatenate([np.arange(len(self.owners)), self.ends, self.scored])


class Runner:
    """Owns the key cache and the per-slot sampling state; ``model`` may be replaced between steps."""

    def __init__(self, model: CausalLM | LedModel, cache: PrefixCache, config: EngineConfig) -> None:
        self.model = model
        self._cache = cache
        self._attention = config.attention
        self._device = model.lm_head.weight.device
        num_slots = len(cache.lengths_U)
        weight = model.lm_head.weight
        self._keys = model.new_cache(
            cache.num_blocks,
            cache.block_size,
            weight.dtype,
            self._device,
            table_UZ=torch.from_numpy(cache.table_UZ).to(self._device),  # the same memory on a CPU
            with_mtp=config.speculative > 0,
            kind=config.cache_dtype,
        )
        self.drafter = (
            Drafter(num_slots, config.speculative, cache, self._keys, config.attention) if config.speculative else None
        )
        self._temperature = np.ones(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.full(num_slots, -1, np.int64)
        self._min_p = np.zeros(num_slots, np.float32)
        self._top_logprobs = np.zeros(num_slots, np.int64)
        self._edits: dict[int, LogitEdits] = {}
        self._seed = np.zeros(num_slots, np.uint64)
        self._counter = np.zeros(num_slots, np.uint64)
        self._remaining = np.zeros(num_slots, np.int64)
        self._last_id = np.zeros(num_slots, np.int64)
        self._decoding: list[Sequence] = []
        self._decode_slots = np.zeros(0, np.int64)

    @property
    def cache_bytes(self) -> int:
        """Memory of the key cache."""
        return self._keys.bytes

    def read_blocks(self, blocks: list[int]) -> list[Tensor]:
        """Copies of the entries of ``blocks``, on the host."""
        return [tensor.cpu() for tensor in self._keys.read_blocks(torch.tensor(blocks, device=self._device))]

    def write_blocks(self, blocks: list[int], entries: list[Tensor]) -> None:
        """Store what ``read_blocks`` gave. Raises ValueError for entries of another kind of cache."""
        self._keys.write_blocks(torch.tensor(blocks, device=self._device), entries)

    @torch.inference_mode()
    def step(self, plan: StepPlan, is_drafting: bool = False) -> StepResult:
        """Compute ``plan``: append keys, sample for every sequence that is at the end of what it knows.

        ``is_drafting`` draws drafts for the next step; those that exist are verified in any case.
        """
        for copy in plan.copies:
            self._keys.copy_block(copy.source, copy.target)
        if self._keys.table_UZ.device.type != HOST:
            self._keys.table_UZ.copy_(torch.from_numpy(self._cache.table_UZ))
        slots = self._slots_of(plan.decode)
        if self.drafter is None and not plan.prefill:
            return self._decode(plan.decode, slots)
        sampled = [chunk.sequence for chunk in plan.prefill if chunk.is_sampled]
        scored = [chunk for chunk in plan.prefill if chunk.sequence.wants_prompt_scores]
        for sequence in sampled:
            self._register(sequence)
        batch = self._gather(plan, slots, scored)
        place = (self._tensor(batch.ids), self._tensor(batch.positions), self._tensor(batch.slots), self._keys)
        rows = None if batch.rows is None else self._tensor(batch.rows)
        if self.drafter is None:
            logits_BW = self.model.ragged(*place, rows, attention=self._attention)
        else:
            hidden_MD = self.model.ragged_hidden(*place, attention=self._attention)
            logits_BW = self.model.lm_head(hidden_MD if rows is None else hidden_MD[rows]).float()
        verified = len(batch.owners)
        new_slots = _slots(sampled)
        ids, logprobs = self._sample(
            logits_BW[: verified + len(sampled)],
            np.concatenate([slots[batch.owners], new_slots]),
            np.concatenate([batch.offsets, np.zeros(len(sampled), np.int64)]),
        )
        kept = self._verify(batch, slots, ids)
        lasts = np.flatnonzero(batch.offsets == kept[batch.owners] - 1)
        self._cache.lengths_U[slots] += kept
        for chunk in plan.prefill:
            self._cache.lengths_U[chunk.sequence.slot] = chunk.stop
        all_slots = np.concatenate([slots, new_slots])
        gained = np.concatenate([kept, np.ones(len(sampled), np.int64)])
        self._last_id[all_slots] = np.concatenate([ids[lasts], ids[verified:]])
        self._counter[all_slots] += gained.astype(np.uint64)
        self._remaining[all_slots] -= gained
        if self.drafter is not None:
            ends = np.concatenate([lasts, batch.ends]) if is_drafting else np.zeros(0, np.int64)
            self._draft(plan, batch, kept if is_drafting else kept * 0, ends, all_slots, ids, hidden_MD)
        return self._result(plan, batch, kept, sampled, scored, ids, logprobs, logits_BW)

    def _decode(self, sequences: list[Sequence], slots: np.ndarray) -> StepResult:
        """One token for every sequence: the common step, without what chunks and drafts need."""
        ids, lengths = self._last_id[slots], self._cache.lengths_U[slots]
        place = (self._tensor(ids), self._tensor(lengths), self._tensor(slots), self._keys)
        logits_BW = self.model.ragged(*place, attention=self._attention)
        ids, logprobs = self._sample(logits_BW, slots)
        self._last_id[slots] = ids
        self._cache.lengths_U[slots] = lengths + 1
        self._counter[slots] += np.uint64(1)
        return StepResult(sequences, ids.tolist(), logprobs.tolist(), self._top(logits_BW, sequences), [])

    def _slots_of(self, decode: list[Sequence]) -> np.ndarray:
        if decode is not self._decoding:
            self._decoding, self._decode_slots = decode, _slots(decode)
        return self._decode_slots

    def _gather(self, plan: StepPlan, slots: np.ndarray, scored: list[PrefillChunk]) -> _Batch:
        ids, lengths = self._last_id[slots], self._cache.lengths_U[slots]
        owners, offsets = np.arange(len(slots)), np.zeros(len(slots), np.int64)
        if self.drafter is not None and self.drafter.count_U[slots].any():
            owners, offsets = np.nonzero(np.arange(self.drafter.most + 1) <= self.drafter.count_U[slots, None])
            ids = np.concatenate([ids[:, None], self.drafter.drafts_UN[slots]], 1)[owners, offsets]
        nothing = np.zeros(0, np.int64)
        decode = (ids, lengths[owners] + offsets, slots[owners])
        if not plan.prefill:
            return _Batch(*decode, owners, offsets, nothing, nothing)
        chunks = plan.prefill
        stops = len(ids) + np.cumsum([chunk.stop - chunk.start for chunk in chunks])
        is_sampled = [chunk.is_sampled for chunk in chunks]
        spans = [np.arange(stop - chunk.stop + chunk.start, stop) for chunk, stop in zip(chunks, stops, strict=True)
                 if chunk in scored]
        return _Batch(
            np.concatenate([decode[0], *(chunk.sequence.filling[chunk.start : chunk.stop] for chunk in chunks)]),
            np.concatenate([decode[1], *(np.arange(chunk.start, chunk.stop) for chunk in chunks)]),
            np.concatenate([decode[2], *(np.full(chunk.stop - chunk.start, chunk.sequence.slot) for chunk in chunks)]),
            owners,
            offsets,
            stops[is_sampled] - 1,
            np.concatenate([nothing, *spans]),
        )

    def _sample(
        self, logits_BW: Tensor, slots: np.ndarray, offsets: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs of rows that are ``offsets`` tokens, or none, behind the last id of their slots."""
        if not len(logits_BW):
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        settings = self._settings().at(slots, offsets)
        edited = [row for row, slot in enumerate(slots.tolist()) if slot in self._edits] if self._edits else []
        ids, logprobs = sample(self._edit(logits_BW, slots, edited), settings)
        for row in edited:
            token = int(ids[row])
            self._edits[int(slots[row])].advance(token)
            # The model's own log-prob, as of every other token.
            logprobs[row] = log_probs(logits_BW[row : row + 1] / (settings.temperature[row] or 1.0), ids[row : row + 1])
        return ids.cpu().numpy(), logprobs.cpu().numpy()

    def _settings(self) -> RowSettings:
        return RowSettings(self._temperature, self._top_p, self._top_k, self._min_p, self._seed, self._counter)

    def _edit(self, logits_BW: Tensor, slots: np.ndarray, edited: list[int]) -> Tensor:
        """``logits_BW`` with the edits of the requests in rows ``edited``; the given tensor stays as it is."""
        if not edited:
            return logits_BW
        edited_BW = logits_BW.clone()
        for row in edited:
            self._edits[int(slots[row])].apply(edited_BW[row])
        return edited_BW

    def _verify(self, batch: _Batch, slots: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """How many tokens each decoding sequence gets: its drafts up to the first wrong one, and one more."""
        if self.drafter is None or len(batch.owners) == len(slots):
            return np.ones(len(slots), np.int64)
        right = np.zeros((len(slots), self.drafter.most + 1), bool)
        drafts = self.drafter.drafts_UN[slots[batch.owners], np.minimum(batch.offsets, self.drafter.most - 1)]
        has_draft = batch.offsets < self.drafter.count_U[slots[batch.owners]]
        right[batch.owners, batch.offsets] = has_draft & (ids[: len(batch.owners)] == drafts)
        return right.argmin(1) + 1

    def _draft(
        self,
        plan: StepPlan,
        batch: _Batch,
        kept: np.ndarray,
        ends: np.ndarray,
        slots: np.ndarray,
        ids: np.ndarray,
        hidden_MD: Tensor,
    ) -> None:
        """Feed the MTP layer the chunks and ``kept`` tokens of each decoding sequence; draft behind tokens ``ends``.

        ``slots`` are those of all sequences that sampled; without ``ends`` they get no drafts.
        """
        drafter, verified = self.drafter, len(batch.owners)
        assert drafter is not None
        following = [_following(chunk) for chunk in plan.prefill]
        next_ids = np.concatenate([ids[:verified], *following])
        next_ids[batch.ends] = ids[verified:]
        is_fed = np.ones(len(next_ids), bool)
        is_fed[:verified] = batch.offsets < kept[batch.owners]
        fed = np.flatnonzero(is_fed)
        drafter.count_U[slots] = 0
        if not len(fed):
            return
        mtp_MD = drafter.extend(
            self.model, hidden_MD[self._tensor(fed)], next_ids[fed], batch.positions[fed], batch.slots[fed]
        )
        if len(ends):
            last_MD = mtp_MD[self._tensor(np.searchsorted(fed, ends))]
            drafter.draft(self.model, last_MD, slots, self._wanted(slots), self._settings().at(slots, 0))

    def _wanted(self, slots: np.ndarray) -> np.ndarray:
        """How many drafts each of ``slots`` can use: none where logits are edited, none past the last token."""
        assert self.drafter is not None
        room = self._cache.num_blocks_U[slots] * self._cache.block_size - self._cache.lengths_U[slots]
        wanted = np.minimum(np.minimum(self._remaining[slots] - 1, room), self.drafter.most)
        wanted[[slot in self._edits for slot in slots.tolist()]] = 0
        return np.maximum(wanted, 0)

    def _register(self, sequence: Sequence) -> None:
        slot, params = sequence.slot, sequence.params
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._min_p[slot] = params.min_p
        self._top_logprobs[slot] = params.top_logprobs
        self._edits.pop(slot, None)
        if needs_edits(params):
            self._edits[slot] = LogitEdits(params, sequence.prompt, sequence.output_ids, sequence.constraint)
        self._seed[slot] = mix_seed(sequence.seed)
        self._counter[slot] = len(sequence.output_ids)
        self._remaining[slot] = sequence.max_new_tokens - len(sequence.output_ids)

    def _result(
        self,
        plan: StepPlan,
        batch: _Batch,
        kept: np.ndarray,
        sampled: list[Sequence],
        scored: list[PrefillChunk],
        ids: np.ndarray,
        logprobs: np.ndarray,
        logits_BW: Tensor,
    ) -> StepResult:
        """The step's result without the rows of rejected drafts."""
        verified, sequences = len(batch.owners), plan.decode
        scores = self._score(logits_BW[len(ids) :], scored)
        if verified > len(sequences):
            is_kept = np.concatenate([batch.offsets < kept[batch.owners], np.ones(len(sampled), bool)])
            rows = np.flatnonzero(is_kept)
            ids, logprobs = ids[rows], logprobs[rows]
            if self._top_logprobs.any():
                logits_BW = logits_BW[self._tensor(rows)]
            sequences = [sequences[owner] for owner in batch.owners[rows[: len(rows) - len(sampled)]]]
        if sampled:
            sequences = sequences + sampled
        drafted = verified - len(plan.decode)
        return StepResult(sequences, ids.tolist(), logprobs.tolist(), self._top(logits_BW, sequences), scores, drafted)

    def _top(self, logits_BW: Tensor, sequences: list[Sequence]) -> list[TopLogprobs]:
        if not self._top_logprobs.any():
            return []
        return [
            top_log_probs(logits_W / (sequence.params.temperature or 1.0), sequence.params.top_logprobs)
            for sequence, logits_W in zip(sequences, logits_BW[: len(sequences)], strict=True)
        ]

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


def _slots(sequences: list[Sequence]) -> np.ndarray:
    return np.fromiter((sequence.slot for sequence in sequences), np.int64, len(sequences))


def _following(chunk: PrefillChunk) -> np.ndarray:
    """The id after each token of ``chunk``; 0 where it is not known yet."""
    ids = np.zeros(chunk.stop - chunk.start, np.int64)
    known = chunk.sequence.filling[chunk.start + 1 : chunk.stop + 1]
    ids[: len(known)] = known
    return ids
