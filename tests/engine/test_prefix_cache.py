"""Blocks, prefix tree and block tables, without tensors: a model of the cache's content says what must be where."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.engine.prefix_cache import PrefixCache
from glm5.engine.prefix_tree import BlockPool, PrefixTree, common_prefix

BLOCK = 4


def make(slots: int = 4, blocks: int = 64, **options: bool) -> PrefixCache:
    return PrefixCache(slots, 64, blocks, BLOCK, **options)


class Content:
    """What is written in every block, by the rules that the runner follows."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.entries = np.full((cache.num_blocks, BLOCK), -1)

    def start(self, tokens: np.ndarray, reuse: bool = True) -> int | None:
        """Run ``tokens`` through a slot up to the last one; what is said to be cached must be there."""
        placement = self.cache.acquire(tokens, reuse)
        if placement is None:
            return None
        if placement.copy is not None:
            self.entries[placement.copy.target] = self.entries[placement.copy.source]
        assert placement.cached < len(tokens)
        assert self.read(placement.slot, placement.cached).tolist() == tokens[: placement.cached].tolist()
        if not self.cache.reserve(placement.slot, len(tokens)):
            self.cache.release(placement.slot, tokens[: placement.cached])
            return None
        self.write(placement.slot, placement.cached, tokens[placement.cached :])
        return placement.slot

    def write(self, slot: int, start: int, tokens: np.ndarray) -> None:
        for position, token in enumerate(tokens.tolist(), start):
            self.entries[self.cache.table_UZ[slot, position // BLOCK], position % BLOCK] = token
        self.cache.lengths_U[slot] = start + len(tokens)

    def read(self, slot: int, length: int) -> np.ndarray:
        positions = np.arange(length)
        return self.entries[self.cache.table_UZ[slot, positions // BLOCK], positions % BLOCK]


def cached(cache: PrefixCache, tokens: np.ndarray) -> int:
    """How much a request would find; it takes nothing."""
    placement = cache.acquire(tokens)
    assert placement is not None
    cache.release(placement.slot, tokens[:0])
    return placement.cached


def fill(cache: PrefixCache, tokens: np.ndarray) -> int:
    slot = Content(cache).start(tokens)
    assert slot is not None
    return slot


def test_a_finished_sequence_is_found_to_the_token_except_the_last() -> None:
    cache = make()
    cache.release(fill(cache, np.arange(18)), np.arange(18))
    assert cached(cache, np.arange(30)) == 18
    assert cached(cache, np.arange(18)) == 17
    assert cached(cache, np.arange(9)) == 8
    assert cached(cache, np.array([0, 1, 9, 9])) == 2
    assert cached(cache, np.array([5, 6, 7])) == 0


def test_whole_blocks_are_shared_and_the_last_one_is_copied() -> None:
    cache = make()
    first = fill(cache, np.arange(18))
    table = cache.table_UZ[first].copy()
    cache.release(first, np.arange(18))
    placement = cache.acquire(np.arange(30))
    assert cache.table_UZ[placement.slot, :4].tolist() == table[:4].tolist()
    assert placement.copy.source == table[4] and placement.copy.target == cache.table_UZ[placement.slot, 4]
    assert placement.copy.target not in table[:5]


def test_a_published_prompt_is_shared_while_its_owner_writes_on() -> None:
    cache = make()
    owner = fill(cache, np.arange(10))
    assert cached(cache, np.arange(20)) == 0
    cache.publish(owner, np.arange(10)[:7], False)
    assert cached(cache, np.arange(20)) == 4
    cache.publish(owner, np.arange(10), True)
    assert cached(cache, np.arange(20)) == 10
    assert cache.reserve(owner, 14)
    cache.release(owner, np.arange(14))
    assert cached(cache, np.arange(20)) == 14
    assert cache.num_used == 4  # the shorter copy of the tail has gone


def test_the_longest_known_prefix_is_found_among_many_siblings() -> None:
    """Against comparing with every sequence in turn: branches inside and at the ends of blocks, prefixes of others."""
    rng = np.random.default_rng(5)
    tree, known = PrefixTree(pool := BlockPool(8192), 4), []
    for _ in range(400):
        tokens = np.concatenate([np.full(rng.integers(0, 9), 7), rng.integers(0, 3, rng.integers(0, 12))])
        blocks = [pool.take() for _ in range(-(-len(tokens) // 4))]
        tree.insert(tree.root, tokens, blocks)
        pool.drop(blocks)
        known.append(tokens)
        query = np.concatenate([np.full(rng.integers(0, 9), 7), rng.integers(0, 3, rng.integers(0, 12))])
        assert tree.match(query).length == max(common_prefix(query, other) for other in known)


def test_with_recompute_last_one_token_less_is_reused() -> None:
    cache = make(recompute_last=True)
    cache.release(fill(cache, np.arange(16)), np.arange(16))
    placement = cache.acquire(np.arange(30))
    assert placement.cached == 15 and placement.copy is not None
    assert cached(make(recompute_last=True), np.arange(5)) == 0


def test_another_version_is_never_reused() -> None:
    cache = make()
    cache.release(fill(cache, np.arange(20)), np.arange(20))
    running = fill(cache, np.arange(30, 50))
    cache.publish(running, np.arange(30, 50), True)
    cache.set_version(1)
    assert cached(cache, np.arange(30)) == cached(cache, np.arange(30, 60)) == 0
    cache.publish(running, np.arange(30, 50), True)
    cache.release(running, np.arange(30, 50))
    assert cached(cache, np.arange(30, 60)) == 0 and cache.num_used == 0


def test_eviction_takes_the_ends_of_the_least_recently_used() -> None:
    cache = make(blocks=8)
    for start in (0, 100, 200):
        cache.release(fill(cache, np.arange(start, start + 8)), np.arange(start, start + 8))
    assert cached(cache, np.arange(0, 9)) == 8  # used again: now 100 is the oldest
    running = fill(cache, np.arange(300, 312))
    assert cache.num_used == 8
    assert cached(cache, np.arange(100, 109)) == 4
    assert cached(cache, np.arange(0, 9)) == cached(cache, np.arange(200, 209)) == 8
    assert not cache.reserve(running, 36) and cache.num_used == 8  # nothing was evicted in vain
    assert cache.reserve(running, 32) and cache.num_available == 0


def test_blocks_of_running_sequences_are_not_evicted() -> None:
    cache = make(blocks=6)
    shared = np.arange(8)
    content = Content(cache)
    cache.release(content.start(shared), shared)
    reader = content.start(np.concatenate([shared, [50, 51]]))
    assert cache.num_available == 3
    other = cache.acquire(np.arange(90, 93)).slot
    assert cache.reserve(other, 12) and not cache.reserve(other, 13)
    assert cache.cost(np.arange(8)) == 3 - 1  # of its blocks the reader pins one that it would use whole
    cache.release(reader, None)
    assert cache.num_available == 3


def test_keys_that_must_not_be_kept_are_forgotten() -> None:
    cache = make()
    slot = fill(cache, np.arange(20))
    cache.publish(slot, np.arange(20), True)
    cache.release(slot, None)
    assert cached(cache, np.arange(25)) == 0 and cache.num_used == 0


def test_a_disabled_cache_never_shares() -> None:
    cache = make(enabled=False)
    slot = fill(cache, np.arange(20))
    cache.publish(slot, np.arange(20), True)
    cache.release(slot, np.arange(20))
    assert cached(cache, np.arange(25)) == 0 and cache.num_used == 0


def test_no_slot_and_no_room_are_told() -> None:
    cache = make(slots=1, blocks=2)
    slot = fill(cache, np.arange(6))
    assert cache.acquire(np.arange(3)) is None
    cache.release(slot, np.arange(6))
    assert cache.acquire(np.arange(3)).cached == 2


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=22),
        st.sampled_from(["keep", "forget", "run", "run", "version"]),
        st.integers(0, 9),
    ),
    max_size=50,
)


@settings(deadline=None, max_examples=150)
@given(STEPS, st.booleans())
def test_no_sequence_ever_sees_anothers_keys_and_no_block_is_lost(
    steps: list[tuple[list[int], str, int]], recompute_last: bool
) -> None:
    cache = make(blocks=12, recompute_last=recompute_last)
    content = Content(cache)
    running: list[tuple[int, np.ndarray]] = []
    for prompt, action, pick in steps:
        tokens = np.array(prompt, np.int64)
        slot = content.start(tokens, reuse=pick != 9)
        if slot is not None:
            if pick % 2:
                cache.publish(slot, tokens, pick == 1)
            running.append((slot, tokens))
        if action == "version":
            cache.set_version(cache.version + 1)
            content.entries[content.entries >= 0] += 10  # of the old version: must never be found again
            running = [(slot, tokens + 10) for slot, tokens in running]
        for place, (slot, tokens) in enumerate(running):  # everybody writes a little further
            if len(tokens) < 30 and cache.reserve(slot, len(tokens) + 1):
                content.write(slot, len(tokens), np.array([pick % 2]))
                running[place] = (slot, np.append(tokens, pick % 2))
        for slot, tokens in running:
            assert content.read(slot, len(tokens)).tolist() == tokens.tolist()
        if running and (action in ("keep", "forget") or slot is None):
            slot, tokens = running.pop(pick % len(running))
            cache.release(slot, None if action == "forget" else tokens)
    for slot, tokens in running:
        cache.release(slot, tokens)
    assert cache.num_idle == 4 and cache.num_available == 12
    cache.set_version(cache.version + 1)
    assert cache.num_used == 0
