"""Which tokens the next step computes. Pure logic: no tensors, no clock, no threads.

One step takes every decoding sequence (one token each, and room for its drafts) and up to ``prefill_chunk`` tokens of
sequences that are being filled, so that long prompts never stall running answers. Order is by seniority: higher
priority first, then first come first served. A waiting sequence enters when a slot is idle and the cache has room for
all it is to compute, with one exception: one that begins like another that is being filled waits until those keys
exist and then shares them, which is how the episodes of one group share their prompt.

When blocks run out, the most junior sequence is preempted: it gives up its slot, waits again in its place, and computes
prompt and answer so far anew, what is left of them in the prefix cache excepted. Its answer goes on as if nothing had
happened, since a token depends on the ids before it and the request's own random stream. Nobody preempts a senior, and
any one sequence fits into the cache alone, so the most senior always goes on and nothing deadlocks.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from glm5.engine.prefix_cache import BlockCopy, PrefixCache
from glm5.engine.prefix_tree import common_prefix
from glm5.engine.requests import QueueFullError, Sequence
from glm5.errors import EngineError
from glm5.records import FinishReason

_WORTH_WAITING = 16
"""Shared tokens, beyond what is cached already, for which a sequence waits a step."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens ``start`` to ``stop`` of what a sequence is filled with; at the end its next token is sampled."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """True when the sequence is filled after this chunk."""
        return self.stop == len(self.sequence.filling)

    @property
    def is_sampled(self) -> bool:
        """True when the sequence's next token is sampled from the end of this chunk."""
        return self.is_last and self.sequence.max_new_tokens > 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: copies in order, then all tokens in one call of the model."""

    decode: list[Sequence]
    prefill: list[PrefillChunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to compute."""
        return not self.decode and not self.prefill


class Scheduler:
    """Waiting, filling and decoding sequences of one engine."""

    def __init__(self, cache: PrefixCache, prefill_chunk: int, max_waiting: int, lookahead: int = 1) -> None:
        self.decoding: list[Sequence] = []
        """Replaced, never edited, when membership changes: the runner keeps arrays while it is the same list."""
        self.preemptions = 0
        """How many times a sequence had to give up its slot."""
        self.reused_tokens = 0
        """Tokens that were found in the cache rather than computed."""
        self._cache = cache
        self._prefill_chunk = prefill_chunk
        self._max_waiting = max_waiting
        self._lookahead = lookahead
        self._roomy: list[Sequence] = []
        """The decoding sequences, the same list, when ``_steps_left`` was computed."""
        self._steps_left = 0
        """Steps for which all of them have blocks in any case."""
        self._waiting: list[Sequence] = []
        self._filling: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._filling) + len(self.decoding)

    def add(self, sequence: Sequence) -> None:
        """Queue ``sequence``. Raises QueueFullError beyond ``max_waiting``; sequences that an idle slot takes in the
        next step do not count."""
        if len(self._waiting) >= self._max_waiting + self._cache.num_idle:
            raise QueueFullError(
                f"queue: {len(self._waiting)} requests wait, at most {self._max_waiting} may; "
                "retry later or add an engine"
            )
        insort(self._waiting, sequence, key=_seniority)

    def plan(self) -> StepPlan:
        """Admit what fits and choose the tokens of the next step."""
        self._make_decode_room()
        copies = self._admit() if self._waiting else []
        chunks = self._choose_chunks() if self._filling else []
        if self._filling and not chunks and not self.decoding:
            # It pins a copy of what it computed itself; when it starts again it shares that copy.
            self._preempt(self._filling[-1])
            return self.plan()
        return StepPlan(self.decoding, chunks, copies)

    def advance(self, plan: StepPlan) -> None:
        """The chunks of ``plan`` were computed; sequences that are filled decode from now on."""
        if not plan.prefill:
            return
        for chunk in plan.prefill:
            sequence = chunk.sequence
            if sequence.slot >= 0:
                sequence.computed = chunk.stop
                self._cache.publish(sequence.slot, sequence.filling[: chunk.stop], chunk.is_last)
        ready = [chunk.sequence for chunk in plan.prefill if chunk.is_last and not chunk.sequence.is_finished]
        self._filling = [sequence for sequence in self._filling if sequence.is_filling]
        if ready:
            self.decoding = [*self.decoding, *ready]

    def finish(self, sequences: list[Sequence], keep: bool = True) -> None:
        """Give back the slots of running ``sequences`` that have finished; ``keep`` leaves their keys for reuse."""
        for sequence in sequences:
            self._release(sequence, keep)
        self.decoding = [sequence for sequence in self.decoding if sequence.slot >= 0]
        self._filling = [sequence for sequence in self._filling if sequence.slot >= 0]

    def stop(self, sequence: Sequence, reason: FinishReason | None, error: EngineError | None = None) -> bool:
        """End ``sequence`` now, wherever it is, with ``reason`` or ``error``; False when it had finished."""
        if sequence.is_finished:
            return False
        sequence.finish_reason, sequence.error = reason, error
        if sequence.slot >= 0:
            self.finish([sequence], keep=error is None)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        return True

    def _release(self, sequence: Sequence, keep: bool) -> None:
        length = min(int(self._cache.lengths_U[sequence.slot]), len(sequence.prompt) + len(sequence.output_ids))
        self._cache.release(sequence.slot, sequence.known_ids()[:length] if keep else None)
        sequence.slot = -1

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence, keep=True)
        sequence.computed, sequence.filling = 0, sequence.known_ids()
        if len(sequence.prompt_logprobs) < len(sequence.prompt):
            sequence.prompt_logprobs.clear()
        self.decoding = [other for other in self.decoding if other is not sequence]
        self._filling = [other for other in self._filling if other is not sequence]
        insort(self._waiting, sequence, key=_seniority)
        self.preemptions += 1

    def _preempt_junior(self, sequence: Sequence) -> bool:
        """Preempt the most junior running sequence that is junior to ``sequence``; False when there is none."""
        victim = max((*self._filling, *self.decoding), key=_seniority, default=sequence)
        if _seniority(victim) <= _seniority(sequence):
            return False
        self._preempt(victim)
        return True

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Blocks for ``length`` positions of ``sequence``, taken from juniors if need be."""
        while not self._cache.reserve(sequence.slot, length):
            if not self._preempt_junior(sequence):
                return False
        return True

    def _make_decode_room(self) -> None:
        """Every decoding sequence gets blocks for its next tokens, or waits again."""
        if self.decoding is self._roomy and self._steps_left > 0:
            self._steps_left -= 1
            return
        cache = self._cache
        slots = np.fromiter((sequence.slot for sequence in self.decoding), np.int64, len(self.decoding))
        wanted = np.minimum(cache.lengths_U[slots] + self._lookahead, cache.capacity)
        spare = cache.num_blocks_U[slots] * cache.block_size - wanted
        short = np.flatnonzero(spare < 0)
        if not short.size:
            least = int(spare.min()) if len(spare) else 0
            self._roomy, self._steps_left = self.decoding, least // self._lookahead
            return
        needy = sorted(((self.decoding[row], int(wanted[row])) for row in short), key=lambda item: _seniority(item[0]))
        for sequence, length in needy:
            if sequence.slot >= 0 and not self._reserve(sequence, length):
                self._preempt(sequence)

    def _admit(self) -> list[BlockCopy]:
        copies: list[BlockCopy] = []
        held: list[Sequence] = []
        promised = sum(self._missing(sequence) for sequence in self._filling)
        while self._waiting and (len(held) < self._cache.num_idle or self._has_lower(self._waiting[0])):
            sequence = self._waiting.pop(0)
            if self._should_wait(sequence):
                held.append(sequence)
                continue
            while not (fits := self._has_room(sequence, promised)) and self._has_lower(sequence):
                self._preempt_junior(sequence)
                promised = sum(self._missing(other) for other in self._filling)
            placement = self._cache.acquire(sequence.filling, not sequence.wants_prompt_scores) if fits else None
            if placement is None:
                held.append(sequence)
                break
            sequence.slot, sequence.computed = placement.slot, placement.cached
            if not sequence.output_ids:
                sequence.cached_tokens = placement.cached
            self.reused_tokens += placement.cached
            if placement.copy is not None:
                copies.append(placement.copy)
            insort(self._filling, sequence, key=_seniority)
            promised += self._missing(sequence)
        for sequence in held:
            insort(self._waiting, sequence, key=_seniority)
        return copies

    def _has_room(self, sequence: Sequence, promised: int) -> bool:
        """Whether a slot is idle and ``sequence`` can be filled beside what the others are about to take."""
        if not self._cache.num_idle:
            return False
        room = self._cache.num_available - promised - self._cache.num_growing  # each of these may soon take a block
        return self._cache.cost(sequence.filling, not sequence.wants_prompt_scores) <= room

    def _has_lower(self, sequence: Sequence) -> bool:
        """Whether anything of lower priority runs."""
        return any(other.priority < sequence.priority for other in (*self._filling, *self.decoding))

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that a filling sequence still has to get."""
        return self._cache.blocks_of(len(sequence.filling)) - int(self._cache.num_blocks_U[sequence.slot])

    def _should_wait(self, sequence: Sequence) -> bool:
        """True when a filling sequence is about to compute keys that this one would otherwise compute again."""
        if sequence.wants_prompt_scores or not self._cache.is_enabled:
            return False
        for other in self._filling:
            shared = common_prefix(sequence.filling, other.filling)
            if shared - other.computed >= _WORTH_WAITING:
                return True
        return False

    def _choose_chunks(self) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        budget = self._prefill_chunk
        for sequence in list(self._filling):
            if budget == 0:
                break
            if sequence.slot < 0:
                continue  # preempted by one before it
            stop = min(sequence.computed + budget, len(sequence.filling))
            if not self._reserve(sequence, stop):
                continue
            chunks.append(PrefillChunk(sequence, sequence.computed, stop))
            budget -= stop - sequence.computed
        return chunks


def _seniority(sequence: Sequence) -> tuple[int, int]:
    """Ascending from the most senior."""
    return -sequence.priority, sequence.request_id
