"""Scheduling decisions, without tensors or threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.engine.prefix_cache import PrefixCache
from glm5.engine.requests import QueueFullError, Sequence
from glm5.engine.scheduler import Scheduler, StepPlan
from glm5.records import SamplingParams


def sequence(number: int, prompt: list[int], priority: int = 0, new: int = 4) -> Sequence:
    return Sequence(
        request_id=number,
        prompt=np.array(prompt, np.int64),
        params=SamplingParams(),
        stop_ids=frozenset(),
        seed=0,
        max_new_tokens=new,
        priority=priority,
    )


def scheduler(slots: int = 2, chunk: int = 8, waiting: int = 100, blocks: int = 0) -> Scheduler:
    return Scheduler(PrefixCache(slots, 64, blocks or slots * 16, 4), chunk, waiting)


def chunks(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.stop) for chunk in plan.prefill]


def run(of: Scheduler) -> StepPlan:
    """Plan, pretend to compute, and sample the id 99 for everybody; those that are complete finish."""
    plan = of.plan()
    cache = of._cache
    for item in plan.decode:
        assert cache.lengths_U[item.slot] < cache.num_blocks_U[item.slot] * cache.block_size, "no room for its token"
        cache.lengths_U[item.slot] += 1
    for chunk in plan.prefill:
        assert chunk.stop <= cache.num_blocks_U[chunk.sequence.slot] * cache.block_size, "no room for its chunk"
        cache.lengths_U[chunk.sequence.slot] = chunk.stop
    sampled = [*plan.decode, *(chunk.sequence for chunk in plan.prefill if chunk.is_last)]
    of.advance(plan)
    for item in sampled:
        item.output_ids.append(99)
        if len(item.output_ids) == item.max_new_tokens:
            item.finish_reason = "length"
    of.finish([item for item in sampled if item.is_finished])
    return plan


def test_long_prompts_are_computed_in_chunks_beside_decoding() -> None:
    of = scheduler()
    of.add(sequence(1, [1, 2, 3]))
    of.add(sequence(2, list(range(40, 60))))
    assert chunks(run(of)) == [(1, 0, 3), (2, 0, 5)]
    second = run(of)
    assert [item.request_id for item in second.decode] == [1] and chunks(second) == [(2, 5, 13)]
    assert chunks(run(of)) == [(2, 13, 20)]
    assert [item.request_id for item in run(of).decode] == [1, 2]


def test_requests_beyond_the_slots_wait_their_turn_in_order() -> None:
    of = scheduler(slots=1, chunk=64)
    sequences = [sequence(number, [number]) for number in (1, 2, 3)]
    for item in sequences:
        of.add(item)
    order = []
    for item in sequences:
        item.max_new_tokens = 1
        plan = run(of)
        order.append(plan.prefill[0].sequence.request_id)
        assert len(plan.prefill) == 1
    assert order == [1, 2, 3] and of.plan().is_empty and of.num_running == of.num_waiting == 0


def test_a_full_queue_refuses_but_counts_only_those_that_find_no_idle_slot() -> None:
    of = scheduler(slots=2, waiting=1)
    for number in (1, 2, 3):  # two go to the idle slots in the next step, one waits
        of.add(sequence(number, [number]))
    with pytest.raises(QueueFullError, match="retry later"):
        of.add(sequence(4, [4]))
    run(of)
    with pytest.raises(QueueFullError, match="retry later"):
        of.add(sequence(5, [5]))


def test_stopping_works_while_waiting_prefilling_and_decoding() -> None:
    of = scheduler(slots=2, chunk=4)
    decoding, prefilling, waiting = sequence(1, [1]), sequence(2, list(range(50, 70))), sequence(3, [3])
    for item in (decoding, prefilling, waiting):
        of.add(item)
    run(of)
    assert (decoding.slot >= 0, prefilling.is_filling, waiting.slot) == (True, True, -1)
    for item in (decoding, prefilling, waiting):
        assert of.stop(item, "abort") and not of.stop(item, "abort")
    assert of.plan().is_empty and of._cache.num_idle == 2


def test_episodes_of_one_group_compute_their_prompt_once() -> None:
    of = scheduler(slots=4, chunk=64)
    prompt = list(range(40))
    for number in range(4):
        of.add(sequence(number, prompt))
    first = run(of)
    assert chunks(first) == [(0, 0, 40)]
    second = run(of)
    assert chunks(second) == [(number, 39, 40) for number in (1, 2, 3)]
    table = of._cache.table_UZ
    first_slot, *others = (chunk.sequence.slot for chunk in (*first.prefill, *second.prefill))
    assert [copy.source for copy in second.copies] == [table[first_slot, 9]] * 3
    assert all((table[slot, :9] == table[first_slot, :9]).all() for slot in others)


def test_held_requests_do_not_block_different_ones() -> None:
    of = scheduler(slots=4, chunk=64)
    for number, start in enumerate((0, 0, 100)):
        of.add(sequence(number, list(range(start, start + 30))))
    assert [item[0] for item in chunks(run(of))] == [0, 2]
    assert chunks(run(of)) == [(1, 29, 30)]


def test_priority_goes_before_arrival() -> None:
    of = scheduler(slots=1, chunk=64)
    for number, priority in ((1, 0), (2, 0), (3, 5), (4, 5)):
        of.add(sequence(number, [number], priority, new=1))
    assert [run(of).prefill[0].sequence.request_id for _ in range(4)] == [3, 4, 1, 2]


def test_a_higher_priority_takes_the_slot_of_a_lower_one_which_then_goes_on() -> None:
    of = scheduler(slots=1, chunk=64)
    low, high = sequence(1, [1, 2, 3], new=6), sequence(2, [7, 8], priority=1, new=2)
    of.add(low)
    run(of), run(of)
    of.add(high)
    assert chunks(run(of)) == [(2, 0, 2)] and low.slot < 0 and of.preemptions == 1
    run(of)
    assert high.is_finished and low.output_ids == [99, 99]
    assert chunks(run(of)) == [(1, 4, 5)]  # all but its last id was still cached
    while not low.is_finished:
        run(of)
    assert low.output_ids == [99] * 6 and low.cached_tokens == 0


def test_when_blocks_run_out_the_most_junior_waits_again() -> None:
    of = scheduler(slots=3, chunk=64, blocks=6)
    items = [sequence(number, list(range(10 * number, 10 * number + 6)), new=10) for number in (1, 2, 3)]
    for item in items:
        of.add(item)
    run(of)
    assert [item.slot >= 0 for item in items] == [True, True, False]  # the third would leave no room to grow
    finished: list[int] = []
    for _ in range(60):
        run(of)
        finished += [item.request_id for item in items if item.is_finished and item.request_id not in finished]
    assert finished == [1, 2, 3] and of.preemptions > 0
    assert all(item.output_ids == [99] * 10 for item in items)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 2), st.integers(0, 3), st.booleans()),
    min_size=1, max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(REQUESTS, st.integers(8, 14), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_random_arrivals_and_aborts_in_a_small_cache_all_end(
    requests: list[tuple[int, int, int, int, bool]], blocks: int, slots: int, chunk: int, drafting: bool
) -> None:
    cache = PrefixCache(slots, 64, blocks, 4, recompute_last=drafting)
    of = Scheduler(cache, chunk, 100, lookahead=5 if drafting else 1)
    items, aborted = [], []
    for number, (length, new, priority, pause, abort) in enumerate(requests):
        new = min(new, cache.capacity - length)
        items.append(sequence(number, [n % 3 for n in range(length)], priority, new))
        of.add(items[-1])
        for _ in range(pause):
            run(of)
        if abort and of.stop(items[number // 2], "abort"):
            aborted.append(number // 2)
    for _ in range(2000):
        if not of.num_running and not of.num_waiting:
            break
        assert not run(of).is_empty, "sequences wait and nothing is computed"
    for number, item in enumerate(items):
        assert item.is_finished and item.slot < 0
        assert number in aborted or item.output_ids == [99] * item.max_new_tokens
    assert cache.num_idle == slots and cache.num_available == blocks
