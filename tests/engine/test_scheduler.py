"""Scheduling decisions, without tensors or threads."""

from __future__ import annotations

import numpy as np
import pytest

from glm5.engine.prefix_cache import PrefixCache
from glm5.engine.requests import QueueFullError, Sequence
from glm5.engine.scheduler import Scheduler, StepPlan
from glm5.records import SamplingParams


def sequence(number: int, prompt: list[int]) -> Sequence:
    return Sequence(
        request_id=number,
        prompt=np.array(prompt, np.int64),
        params=SamplingParams(),
        stop_ids=frozenset(),
        seed=0,
        max_new_tokens=4,
    )


def scheduler(slots: int = 2, chunk: int = 8, waiting: int = 100) -> Scheduler:
    return Scheduler(PrefixCache(slots, 64), chunk, waiting)


def chunks(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.stop) for chunk in plan.prefill]


def run(of: Scheduler) -> StepPlan:
    """Plan and pretend to compute."""
    plan = of.plan()
    for chunk in plan.prefill:
        of._cache.append_prompt(chunk.sequence.slot, chunk.sequence.prompt[chunk.start : chunk.stop])
    of.advance(plan)
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
    for _ in range(3):
        plan = run(of)
        order.append(plan.prefill[0].sequence.request_id)
        assert len(plan.prefill) == 1
        of.finish([plan.prefill[0].sequence])
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
    assert (decoding.slot >= 0, prefilling.is_prefilling, waiting.slot) == (True, True, -1)
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
    assert [(copy.source, copy.length) for copy in second.copies] == [(first.prefill[0].sequence.slot, 39)] * 3


def test_held_requests_do_not_block_different_ones() -> None:
    of = scheduler(slots=4, chunk=64)
    for number, start in enumerate((0, 0, 100)):
        of.add(sequence(number, list(range(start, start + 30))))
    assert [item[0] for item in chunks(run(of))] == [0, 2]
    assert chunks(run(of)) == [(1, 29, 30)]
