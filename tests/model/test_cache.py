from __future__ import annotations

import random

import pytest
import torch

from glm5.model.cache import Entries, ExactEntries, KeyCache
from glm5.model.quantize.caches import CacheFormat, dequantise_entries, quantise_entries
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
    for entries in (*cache.latents, *cache.index_keys):
        entries.values_PSD.fill_(torch.nan)  # what is not written must never be read
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
    assert all(keys.values_PSD.numel() == 0 for keys in cache.index_keys)
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


class RoundedBefore(ExactEntries):
    """Exact entries that are given rounded numbers: what a rounded cache must be equal to."""

    def __init__(self, like: Entries, form: CacheFormat) -> None:
        self.values_PSD, self._form = like.values_PSD, form

    def write(self, rows_M: torch.Tensor, x_MD: torch.Tensor) -> None:
        head = x_MD.shape[-1] - self._form.exact_tail
        rounded = dequantise_entries(*quantise_entries(x_MD[:, :head], self._form), self._form)
        super().write(rows_M, torch.cat([rounded, x_MD[:, head:].bfloat16().float()], 1))


@pytest.mark.parametrize("attention", ["sparse", "dense"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@torch.no_grad()
def test_a_rounded_cache_is_an_exact_one_of_rounded_numbers_in_far_less_memory(kind: str, attention: str) -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=SCHEDULES[1], index_topk=24)
    rows = [random_ids(1, length, seed=length)[0] for length in (1, 13, 47, 80)]
    table = torch.randperm(7 * 12, generator=torch.Generator().manual_seed(3)).view(7, 12).int()
    exact, rounded = (KeyCache(model.config, 7 * 12, 8, table_UZ=table, kind=name) for name in ("auto", kind))
    exact.latents = [RoundedBefore(entries, CacheFormat(kind=kind, exact_tail=8)) for entries in exact.latents]
    exact.index_keys = [RoundedBefore(entries, CacheFormat(kind=kind)) for entries in exact.index_keys]
    wanted = feed_in_random_chunks(model, exact, rows, [6, 0, 3, 2], attention, seed=4)
    found = feed_in_random_chunks(model, rounded, rows, [6, 0, 3, 2], attention, seed=4)
    for ids, one, other in zip(rows, found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-4
        assert not torch.allclose(one, model(ids[None], attention=attention).logits[0], atol=1e-3)
    # 16 levels, one scale and 8 bf16 numbers a latent; 16 levels and one scale an index key.
    assert rounded.bytes == 7 * 12 * 8 * (4 * (16 + 4 + 16) + 2 * (16 + 4))
    assert rounded.bytes < 0.45 * exact.bytes


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@torch.no_grad()
def test_blocks_of_a_rounded_cache_travel_and_are_copied_bit_by_bit(kind: str) -> None:
    model = tiny_model()
    ids = random_ids(1, 50)[0]
    caches = [KeyCache(model.config, 3, 64, kind=kind) for _ in range(2)]
    model.ragged(ids[:40], torch.arange(40), torch.zeros(40, dtype=torch.long), caches[0])
    caches[1].write_blocks(torch.tensor([1]), caches[0].read_blocks(torch.tensor([0])))
    caches[1].copy_block(1, 2)
    found = [model.ragged(ids[40:], torch.arange(40, 50), torch.full((10,), slot), cache)
             for slot, cache in ((0, caches[0]), (1, caches[1]), (2, caches[1]))]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    exact = KeyCache(model.config, 3, 64)
    with pytest.raises(ValueError, match="use equal engines"):
        exact.write_blocks(torch.tensor([1]), caches[0].read_blocks(torch.tensor([0])))
