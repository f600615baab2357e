"""The sampler against plain statistics and against one-row-at-a-time computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from glm5.engine.sampler import RowSettings, log_probs, mix_seed, sample, uniforms


def settings(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, seed: int = 0) -> RowSettings:
    return RowSettings(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_p, np.float32),
        np.full(rows, top_k, np.int64),
        np.zeros(rows, np.float32),
        np.full(rows, mix_seed(seed), np.uint64),
        np.arange(rows, dtype=np.uint64),
    )


def chi_squared(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Statistic over the categories with positive expectation, as a z-score."""
    used = expected > 0
    statistic = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_samples_follow_the_softmax(temperature: float) -> None:
    rows, width = 40_000, 24
    logits = torch.randn(width, generator=torch.Generator().manual_seed(3)) * 1.5
    ids, _ = sample(logits.expand(rows, width), settings(rows, temperature))
    counts = torch.bincount(ids, minlength=width).double()
    expected = torch.softmax(logits.double() / temperature, 0) * rows
    assert abs(chi_squared(counts, expected)) < 5


def test_samples_follow_the_truncated_distribution() -> None:
    rows, width = 40_000, 24
    logits = torch.randn(width, generator=torch.Generator().manual_seed(4))
    ids, _ = sample(logits.expand(rows, width), settings(rows, top_k=10, top_p=0.7))
    order = logits.argsort(descending=True)[:10]
    weights = torch.softmax(logits[order].double(), 0)
    kept = (weights.cumsum(0) - weights) < 0.7
    expected = torch.zeros(width, dtype=torch.float64)
    expected[order[kept]] = weights[kept] / weights[kept].sum() * rows
    counts = torch.bincount(ids, minlength=width).double()
    assert counts[expected == 0].sum() == 0
    assert abs(chi_squared(counts, expected)) < 5


def test_an_impossible_token_is_never_sampled() -> None:
    logits = torch.full((5000, 6), -math.inf)
    logits[:, 2] = 0.0
    logits[:, 4] = -3.0
    ids, _ = sample(logits, settings(5000))
    assert set(ids.tolist()) == {2, 4}


def test_log_prob_is_that_of_the_scaled_distribution_before_truncation() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(5)) * 3
    ids, found = sample(logits, settings(64, temperature=0.7, top_k=5, top_p=0.9))
    expected = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, ids[:, None])[:, 0]
    assert (found.double() - expected).abs().max() < 1e-5


def test_greedy_rows_are_the_argmax_beside_sampled_ones() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(6))
    mixed = settings(6)
    mixed.temperature[[1, 4]] = 0
    ids, logprobs = sample(logits, mixed)
    assert ids[[1, 4]].tolist() == logits[[1, 4]].argmax(-1).tolist()
    assert torch.allclose(logprobs, log_probs(logits, ids), atol=1e-5)
    plain, _ = sample(logits, settings(6))
    assert ids[[0, 2, 3, 5]].tolist() == plain[[0, 2, 3, 5]].tolist()


def test_top_k_one_is_greedy_and_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]]).expand(50, 4)
    ids, _ = sample(logits, settings(50, top_k=1))
    assert set(ids.tolist()) == {1}


def test_uniforms_depend_on_seed_and_counter_only_and_are_uniform() -> None:
    seeds = np.array([mix_seed(s) for s in range(200)], np.uint64)
    counters = np.arange(500, dtype=np.uint64)
    grid = uniforms(np.repeat(seeds, 500), np.tile(counters, 200))
    assert grid.min() >= 0 and grid.max() < 1
    histogram = np.histogram(grid, 50, (0, 1))[0]
    assert abs(chi_squared(torch.tensor(histogram, dtype=torch.float64), torch.full((50,), 2000.0))) < 5
    table = grid.reshape(200, 500).astype(np.float64)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02
    assert uniforms(seeds[7:8], counters[9:10])[0] == table[7, 9].astype(np.float32)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_reports_itself_and_leaves_others_alone(bad: float) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(7))
    clean_ids, clean = sample(logits, settings(3))
    logits[1, 3] = bad
    ids, logprobs = sample(logits, settings(3))
    assert not math.isfinite(float(logprobs[1]))
    assert ids[[0, 2]].tolist() == clean_ids[[0, 2]].tolist() and logprobs[[0, 2]].tolist() == clean[[0, 2]].tolist()
