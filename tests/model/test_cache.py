from __future__ import annotations

import random

import pytest
import torch

from glm5.model.cache import KeyCache
from glm5.model.transformer import GlmMoeDsaForCausalLM
from model.tiny import random_ids, tiny_model

SCHEDULES = [("full",) * 4, ("full", "shared", "full", "shared")]


def feed_in_random_chunks(model: GlmMoeDsaForCausalLM, cache: KeyCache, rows: list[torch.Tensor], slots: list[int],
                          attention: str, seed: int) -> list[torch.Tensor]:
    """Logits of every token of ``rows``, each in its slot, in calls that mix chunks of several rows."""
    chooser = random.Random(seed)
    done, logits = [0] * len(rows), [[] for _ in rows]
    while any(done[row] < len(ids) for row, ids in enumerate(rows)):
        pieces = []
        for row in chooser.sample(range(len(rows)), len(rows)):
            count = min(chooser.choice([0, 1, 1, 2, 9, 25]), len(rows[row]) - done[row])
            pieces.append((row, done[row], done[row] + count))
            done[row] += count
        ids = torch.cat([rows[row][start:stop] for row, start, stop in pieces])
        if not len(ids):
            continue
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in pieces])
        slot_ids = torch.cat([torch.full((stop - start,), slots[row]) for row, start, stop in pieces])
        result = model.ragged(ids, positions, slot_ids, cache, None, attention)
        for (row, _, _), part in zip(pieces, result.split([stop - start for _, start, stop in pieces]), strict=True):
            logits[row].append(part)
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("attention", ["sparse", "dense"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@torch.no_grad()
def test_ragged_chunks_give_the_logits_of_forward(schedule: tuple[str, ...], attention: str) -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=schedule)
    rows = [random_ids(1, length, seed=length)[0] for length in (1, 13, 16, 47, 80)]
    cache = KeyCache(model.config, 7, 96)
    for tensor in (*cache.latent_LPSK, *cache.index_keys_LPSX):
        tensor.fill_(torch.nan)  # what is not written must never be read
    found = feed_in_random_chunks(model, cache, rows, [6, 0, 3, 2, 5], attention, seed=4)
    for ids, logits in zip(rows, found, strict=True):
        expected = model(ids[None], attention=attention).logits[0]
        assert expected.std() > 0.3
        assert (logits - expected).abs().max() <= 1e-4


@torch.no_grad()
def test_a_cache_no_longer_than_index_topk_needs_no_index_keys() -> None:
    model = tiny_model()
    ids = random_ids(1, 16)[0]
    cache = KeyCache(model.config, 2, 16)
    assert all(keys.numel() == 0 for keys in cache.index_keys_LPSX)
    found = feed_in_random_chunks(model, cache, [ids], [1], "sparse", seed=0)[0]
    torch.testing.assert_close(found, model(ids[None]).logits[0], rtol=0, atol=1e-4)


@torch.no_grad()
def test_rows_select_the_wanted_logits_in_fp32() -> None:
    model = tiny_model().to(torch.bfloat16)
    ids = random_ids(1, 30)[0]
    arguments = (ids, torch.arange(30), torch.zeros(30, dtype=torch.long))
    caches = [KeyCache(model.config, 1, 64, torch.bfloat16) for _ in range(2)]
    everything = model.ragged(*arguments, caches[0])
    some = model.ragged(*arguments, caches[1], torch.tensor([29, 3]))
    assert everything.dtype == some.dtype == torch.float32
    assert some.shape == (2, 64)
    torch.testing.assert_close(some, everything[[29, 3]], rtol=0, atol=0.2)


@torch.no_grad()
def test_a_copied_prefix_continues_like_its_source() -> None:
    model = tiny_model()
    ids = random_ids(1, 50)[0]
    cache = KeyCache(model.config, 3, 64)
    model.ragged(ids[:40], torch.arange(40), torch.zeros(40, dtype=torch.long), cache)
    cache.copy_block(0, 2)
    found = model.ragged(ids[30:], torch.arange(30, 50), torch.full((20,), 2), cache)
    torch.testing.assert_close(found, model(ids[None]).logits[0, 30:], rtol=0, atol=1e-4)


def test_bytes_count_latents_of_all_layers_and_index_keys_of_full_ones() -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=SCHEDULES[1])
    cache = KeyCache(model.config, 2, 32, dtype=torch.bfloat16)
    assert cache.bytes == 2 * 32 * (4 * (16 + 8) + 2 * 16) * 2
