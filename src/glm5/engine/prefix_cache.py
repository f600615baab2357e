"""Which slot of the key cache a new sequence gets, and how much of its prompt is already there. Pure numpy.

Every slot remembers the ids whose keys it holds, the weight version that computed all of them, and the session that
used it last. A finished sequence leaves its slot idle but filled. A new one continues in place when an idle slot's
content is a prefix of its prompt (or belongs to its own session); otherwise the longest shared prefix of any slot,
busy or idle, is copied into the least valuable idle slot: empty ones first, then those without a session, then the
least recently used.

Invariants: a slot is reused only under the version that computed its keys; at least the last prompt token is always
computed, since its logits are needed; a slot whose keys mix versions is never shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_BLOCK = 128
_SMALLEST_COPY = 8
"""Shorter shared prefixes cost more to copy, in calls, than to compute."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence goes: its slot, how many leading tokens it finds, and the slot to copy these from first."""

    slot: int
    cached: int
    copy_from: int | None


class PrefixCache:
    """Bookkeeping of the slots; the tensors themselves belong to the runner.

    ``ids_SC`` [slots, context] holds the ids by position, ``lengths`` how many of them have keys: the position of the
    next token.
    """

    def __init__(self, num_slots: int, max_context: int, version: int = 0, enabled: bool = True) -> None:
        self.ids_SC = np.zeros((num_slots, max_context), np.int32)
        self.lengths = np.zeros(num_slots, np.int64)
        self.version = version
        self.is_enabled = enabled
        self._is_busy = np.zeros(num_slots, bool)
        self._is_shareable = np.zeros(num_slots, bool)
        self._sessions: list[str | None] = [None] * num_slots
        self._has_session = np.zeros(num_slots, bool)
        self._used_at = np.zeros(num_slots, np.int64)
        self._clock = 0
        self._num_idle = num_slots

    @property
    def num_idle(self) -> int:
        """Slots that no running sequence holds."""
        return self._num_idle

    def acquire(self, prompt: np.ndarray, session_id: str | None = None, reuse: bool = True) -> Placement | None:
        """A slot for ``prompt``, marked busy and holding ``cached`` leading tokens; None when every slot is busy."""
        if not self._num_idle:
            return None
        source, shared = self._longest_match(prompt, session_id) if reuse and self.is_enabled else (-1, 0)
        slot, copy_from = self._choose(source, shared, session_id)
        if copy_from is None and slot != source:
            shared = 0
        if copy_from is not None:
            self.ids_SC[slot, :shared] = self.ids_SC[copy_from, :shared]
        self._occupy(slot, shared, session_id)
        return Placement(slot, shared, copy_from)

    def append_prompt(self, slot: int, ids: np.ndarray) -> None:
        """Keys of ``ids`` were computed behind what ``slot`` held."""
        start = self.lengths[slot]
        self.ids_SC[slot, start : start + len(ids)] = ids
        self.lengths[slot] = start + len(ids)

    def append_tokens(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Keys of one id for each of ``slots`` (distinct) were computed."""
        self.ids_SC[slots, self.lengths[slots]] = ids
        self.lengths[slots] += 1

    def release(self, slot: int, keep: bool = True) -> None:
        """``slot`` is idle again; its content stays for reuse unless ``keep`` is False or its versions are mixed."""
        self._is_busy[slot] = False
        self._num_idle += 1
        self._clock += 1
        self._used_at[slot] = self._clock
        if not keep or not self._is_shareable[slot]:
            self._forget(slot)

    def set_version(self, version: int) -> None:
        """New weights: nothing computed before is shared again. Running sequences keep what they have."""
        self.version = version
        self._is_shareable[:] = False
        for slot in np.flatnonzero(~self._is_busy):
            self._forget(int(slot))

    def _longest_match(self, prompt: np.ndarray, session_id: str | None) -> tuple[int, int]:
        """(slot, length) of the longest shareable prefix, the last prompt token left out; -1 when there is none."""
        limit = len(prompt) - 1
        matched = np.zeros(len(self.lengths), np.int64)
        alive = np.flatnonzero(self._is_shareable & (self.lengths > 0))
        for start in range(0, limit, _BLOCK):
            if not alive.size:
                break
            stop = min(start + _BLOCK, limit)
            is_equal = self.ids_SC[alive, start:stop] == prompt[start:stop]
            is_equal &= np.arange(start, stop) < self.lengths[alive, None]
            run = np.where(is_equal.all(1), stop - start, is_equal.argmin(1))
            matched[alive] = start + run
            alive = alive[run == stop - start]
        best = int(matched.max())
        if best == 0:
            return -1, 0
        ties = np.flatnonzero(matched == best).tolist()
        own = [slot for slot in ties if session_id is not None and self._sessions[slot] == session_id]
        idle = [slot for slot in ties if not self._is_busy[slot]]
        # Among equals an exactly filled idle slot is best: continuing there needs no copy and loses nothing.
        ordered = own + sorted(idle, key=lambda slot: int(self.lengths[slot])) + ties
        return ordered[0], best

    def _choose(self, source: int, shared: int, session_id: str | None) -> tuple[int, int | None]:
        """(slot to take, slot to copy from or None) for the best match ``source`` of length ``shared``."""
        if source >= 0 and not self._is_busy[source]:
            is_own = session_id is not None and self._sessions[source] == session_id
            if is_own or shared == self.lengths[source]:
                return source, None
        idle = np.flatnonzero(~self._is_busy)
        order = np.lexsort((self._used_at[idle], self._has_session[idle], self.lengths[idle] > 0))
        slot = int(idle[order[0]])
        return slot, source if source >= 0 and slot != source and shared >= _SMALLEST_COPY else None

    def _occupy(self, slot: int, length: int, session_id: str | None) -> None:
        self._is_busy[slot] = True
        self._num_idle -= 1
        self._is_shareable[slot] = True
        self.lengths[slot] = length
        self._sessions[slot] = session_id
        self._has_session[slot] = session_id is not None

    def _forget(self, slot: int) -> None:
        self.lengths[slot] = 0
        self._is_shareable[slot] = False
        self._sessions[slot] = None
        self._has_session[slot] = False
