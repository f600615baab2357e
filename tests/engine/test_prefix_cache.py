"""Slot choice and prefix reuse, without tensors."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.engine.prefix_cache import PrefixCache


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def fill(cache: PrefixCache, prompt: np.ndarray, session: str | None = None) -> int:
    """Run ``prompt`` through a slot; the slot."""
    placement = cache.acquire(prompt, session)
    assert placement is not None
    cache.append_prompt(placement.slot, prompt[placement.cached :])
    return placement.slot


def test_a_finished_sequence_is_continued_in_its_slot() -> None:
    cache = PrefixCache(4, 64)
    slot = fill(cache, np.arange(20))
    cache.release(slot)
    placement = cache.acquire(np.arange(30))
    assert (placement.slot, placement.cached, placement.copy_from) == (slot, 20, None)


def test_the_last_prompt_token_is_always_computed() -> None:
    cache = PrefixCache(4, 64)
    cache.release(fill(cache, np.arange(20)))
    assert cache.acquire(np.arange(20)).cached == 19


def test_a_prefix_of_a_busy_slot_is_copied() -> None:
    cache = PrefixCache(4, 64)
    busy = fill(cache, np.arange(20))
    placement = cache.acquire(np.concatenate([np.arange(15), ids(60, 61)]))
    assert (placement.cached, placement.copy_from) == (15, busy) and placement.slot != busy
    assert cache.ids_SC[placement.slot, :15].tolist() == list(range(15))


def test_branching_leaves_the_longer_sequence_for_others() -> None:
    cache = PrefixCache(4, 64)
    first = fill(cache, np.arange(20))
    cache.release(first)
    branch = cache.acquire(np.concatenate([np.arange(12), ids(60, 61)]))
    assert branch.slot != first and branch.copy_from == first
    assert cache.acquire(np.arange(25)).slot == first


def test_a_session_that_rewrites_its_history_keeps_its_slot() -> None:
    cache = PrefixCache(4, 64)
    first = fill(cache, np.arange(20), "a")
    cache.release(first)
    placement = cache.acquire(np.concatenate([np.arange(12), ids(60, 61)]), "a")
    assert (placement.slot, placement.cached, placement.copy_from) == (first, 12, None)


def test_another_version_is_never_reused() -> None:
    cache = PrefixCache(4, 64)
    cache.release(fill(cache, np.arange(20)))
    running = fill(cache, np.arange(30, 50))
    cache.set_version(1)
    assert cache.acquire(np.arange(30)).cached == 0
    assert cache.acquire(np.arange(30, 60)).cached == 0
    cache.release(running)
    assert cache.acquire(np.arange(30, 60)).cached == 0


def test_eviction_takes_empty_slots_then_the_oldest_and_sessions_last() -> None:
    cache = PrefixCache(4, 64)
    slots = [fill(cache, np.arange(10) + 10 * n, "kept" if n == 0 else None) for n in range(3)]
    for slot in slots:
        cache.release(slot)
    taken = [cache.acquire(ids(90 + n)).slot for n in range(4)]
    assert taken == [3, slots[1], slots[2], slots[0]]
    assert cache.acquire(ids(1)) is None


def test_a_released_slot_that_must_not_be_kept_is_forgotten() -> None:
    cache = PrefixCache(2, 64)
    cache.release(fill(cache, np.arange(20)), keep=False)
    assert cache.acquire(np.arange(25)).cached == 0


def test_a_disabled_cache_never_shares() -> None:
    cache = PrefixCache(2, 64, enabled=False)
    cache.release(fill(cache, np.arange(20)))
    assert cache.acquire(np.arange(25)).cached == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.booleans(), st.integers(0, 3)), max_size=40
    )
)
def test_what_a_slot_is_said_to_hold_is_what_was_put_there(steps: list[tuple[list[int], bool, int]]) -> None:
    cache = PrefixCache(4, 64)
    truth: dict[int, list[int]] = {slot: [] for slot in range(4)}
    busy: list[int] = []
    for prompt, release, pick in steps:
        placement = cache.acquire(np.array(prompt, np.int64), None)
        if placement is None:
            assert len(busy) == 4
            cache.release(busy.pop(pick))
            continue
        assert placement.slot not in busy and placement.cached < len(prompt)
        if placement.copy_from is not None:
            truth[placement.slot] = truth[placement.copy_from][: placement.cached]
        truth[placement.slot] = truth[placement.slot][: placement.cached]
        assert truth[placement.slot] == prompt[: placement.cached]
        cache.append_prompt(placement.slot, np.array(prompt[placement.cached :], np.int64))
        truth[placement.slot] = list(prompt)
        busy.append(placement.slot)
        if release:
            cache.release(busy.pop(pick % len(busy)))
        assert cache.num_idle == 4 - len(busy)
