"""Which tokens the next step computes. Pure logic: no tensors, no clock, no threads.

One step takes every decoding sequence (one token each) and up to ``prefill_chunk`` prompt tokens, first come first
served, so that long prompts never stall running answers. Waiting sequences enter when a slot is idle, in order, with
one exception: a sequence whose prompt begins like one that is being prefilled waits until those keys exist and then
copies them, which is how the episodes of one group share their prompt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from glm5.engine.prefix_cache import PrefixCache
from glm5.engine.requests import QueueFullError, Sequence
from glm5.errors import EngineError
from glm5.records import FinishReason

_WORTH_WAITING = 16
"""Shared prompt tokens, beyond what is cached already, for which a sequence waits a step."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens ``start`` to ``stop`` of a sequence; at the prompt's end its first token is sampled."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """True when the prompt is complete after this chunk."""
        return self.stop == len(self.sequence.prompt)


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the first ``length`` positions of slot ``source`` to ``target`` before the step."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: copies in order, then all tokens in one call of the model."""

    decode: list[Sequence]
    prefill: list[PrefillChunk] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to compute."""
        return not self.decode and not self.prefill


class Scheduler:
    """Waiting, prefilling and decoding sequences of one engine."""

    def __init__(self, cache: PrefixCache, prefill_chunk: int, max_waiting: int) -> None:
        self.decoding: list[Sequence] = []
        """Replaced, never edited, when membership changes: the runner keeps arrays while it is the same list."""
        self._cache = cache
        self._prefill_chunk = prefill_chunk
        self._max_waiting = max_waiting
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._prefilling) + len(self.decoding)

    def add(self, sequence: Sequence) -> None:
        """Queue ``sequence``. Raises QueueFullError beyond ``max_waiting``; sequences that an idle slot takes in the
        next step do not count."""
        if len(self._waiting) >= self._max_waiting + self._cache.num_idle:
            raise QueueFullError(
                f"queue: {len(self._waiting)} requests wait, at most {self._max_waiting} may; "
                "retry later or add an engine"
            )
        self._waiting.append(sequence)

    def plan(self) -> StepPlan:
        """Admit what fits and choose the tokens of the next step."""
        copies = self._admit() if self._waiting and self._cache.num_idle else []
        return StepPlan(self.decoding, self._choose_chunks(), copies)

    def advance(self, plan: StepPlan) -> None:
        """The prompt tokens of ``plan`` were computed; complete prompts decode from now on."""
        for chunk in plan.prefill:
            chunk.sequence.computed = chunk.stop
        ready = [chunk.sequence for chunk in plan.prefill if chunk.is_last and not chunk.sequence.is_finished]
        if plan.prefill:
            self._prefilling = [sequence for sequence in self._prefilling if sequence.is_prefilling]
        if ready:
            self.decoding = [*self.decoding, *ready]

    def finish(self, sequences: list[Sequence], keep: bool = True) -> None:
        """Give back the slots of running ``sequences`` that have finished; ``keep`` leaves their keys for reuse."""
        for sequence in sequences:
            self._cache.release(sequence.slot, keep)
            sequence.slot = -1
        self.decoding = [sequence for sequence in self.decoding if sequence.slot >= 0]
        self._prefilling = [sequence for sequence in self._prefilling if sequence.slot >= 0]

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

    def _admit(self) -> list[SlotCopy]:
        copies: list[SlotCopy] = []
        held: list[Sequence] = []
        while self._waiting and len(held) < self._cache.num_idle:  # more could not enter next step either
            sequence = self._waiting.popleft()
            if self._should_wait(sequence):
                held.append(sequence)
                continue
            placement = self._cache.acquire(sequence.prompt, sequence.session_id, not sequence.wants_prompt_logprobs)
            assert placement is not None, "an idle slot was counted"
            sequence.slot = placement.slot
            sequence.computed = sequence.cached_tokens = placement.cached
            if placement.copy_from is not None:
                copies.append(SlotCopy(placement.copy_from, placement.slot, placement.cached))
            self._prefilling.append(sequence)
        self._waiting.extendleft(reversed(held))
        return copies

    def _should_wait(self, sequence: Sequence) -> bool:
        """True when a prefilling sequence is about to compute keys that this one would otherwise compute again."""
        if sequence.wants_prompt_logprobs or not self._cache.is_enabled:
            return False
        for other in self._prefilling:
            shared = _common_prefix(sequence.prompt, other.prompt)
            if shared - other.computed >= _WORTH_WAITING:
                return True
        return False

    def _choose_chunks(self) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        budget = self._prefill_chunk
        for sequence in self._prefilling:
            if budget == 0:
                break
            stop = min(sequence.computed + budget, len(sequence.prompt))
            chunks.append(PrefillChunk(sequence, sequence.computed, stop))
            budget -= stop - sequence.computed
        return chunks


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
