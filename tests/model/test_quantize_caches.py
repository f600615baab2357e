from __future__ import annotations

import math

import pytest
import torch

from glm5.errors import ConfigError
from glm5.kernels import reference
from glm5.model.quantize.caches import CacheFormat, QuantisedEntries, dequantise_entries, error_bound, quantise_entries
from glm5.model.quantize.hadamard import hadamard

FORMATS = [CacheFormat(kind="int8", block=32), CacheFormat(kind="fp8", block=32), CacheFormat(kind="int8", block=7)]


def entries(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    x[:, 3] *= 30  # an outlier channel
    return x


def test_int8_entries_by_hand_with_a_smaller_last_block() -> None:
    x = torch.tensor([[127.0, -1.4, 0.0, 2.0, -254.0]])
    levels, scale = quantise_entries(x, CacheFormat(kind="int8", block=3))
    assert levels.tolist() == [[127, -1, 0, 1, -127]] and scale.tolist() == [[1.0, 2.0]]
    assert dequantise_entries(levels, scale, CacheFormat(kind="int8", block=3)).tolist() == [[127, -1, 0, 2, -254]]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("width", [32, 70, 5])
def test_errors_stay_within_the_stated_bound_and_come_near_it(form: CacheFormat, width: int) -> None:
    extremes = [torch.zeros(1, width), torch.full((1, width), 3e38), torch.full((1, width), 1e-41)]
    x = torch.cat([entries(200, width), *extremes])
    error = (dequantise_entries(*quantise_entries(x, form), form) - x).abs()
    bound = error_bound(x, form)
    assert (error <= bound).all()
    assert (error[:200] / bound[:200]).max() > 0.9
    assert error[200].max() == 0


@pytest.mark.parametrize("form", FORMATS)
def test_an_entry_depends_on_its_own_token_only(form: CacheFormat) -> None:
    x = entries(6, 40)
    together = quantise_entries(x, form)
    for row in range(6):
        alone = quantise_entries(x[row : row + 1], form)
        assert torch.equal(alone[0].view(torch.int8), together[0][row : row + 1].view(torch.int8))
        assert torch.equal(alone[1], together[1][row : row + 1])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_cache_gives_back_what_was_written_and_copies_prefixes(kind: str) -> None:
    form = CacheFormat(kind=kind, block=16, exact_tail=8)
    cache = QuantisedEntries(3, 10, 40, form)
    x = entries(4, 40)
    slots, positions = torch.tensor([2, 0, 2, 2]), torch.tensor([0, 5, 1, 2])
    cache.write(slots, positions, x)
    found = cache.read(slots, positions)
    assert torch.equal(found[:, :32], dequantise_entries(*quantise_entries(x[:, :32], form), form))
    assert torch.equal(found[:, 32:], x[:, 32:].bfloat16().float())
    cache.copy_prefix(2, 1, 3)
    assert torch.equal(cache.read(torch.tensor(1), torch.arange(3)), cache.read(torch.tensor(2), torch.arange(3)))
    assert cache.bytes == 3 * 10 * (32 + 2 * 4 + 8 * 2)
    cache.write(torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), x[:0])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_attention_over_a_rounded_cache_is_that_over_its_entries_and_near_the_exact_one(kind: str) -> None:
    latent_dim, rope_dim, heads, length = 32, 8, 4, 50
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(length, latent_dim + rope_dim, generator=generator)
    q = torch.randn(3, heads, latent_dim + rope_dim, generator=generator)
    cache = QuantisedEntries(1, length, latent_dim + rope_dim, CacheFormat(kind=kind, block=32, exact_tail=rope_dim))
    cache.write(torch.zeros(length), torch.arange(length), x)
    arguments = torch.zeros(3, dtype=torch.long), torch.tensor([1, 17, 50]), None, 0.2, latent_dim
    exact = reference.ragged_attention(q, x[None], *arguments)
    read = cache.read(torch.zeros(1, 1), torch.arange(length)[None])
    got = reference.ragged_attention(q, read, *arguments)
    off = torch.cat([error_bound(x[:, :latent_dim], cache.form), x[:, latent_dim:].abs() / 256], dim=1)
    logits_off = float(0.2 * (q.abs() @ off.T).max())  # weights move by exp(2 d) - 1 in sum when logits move by d
    limit = off[:, :latent_dim].max() + (math.exp(2 * logits_off) - 1) * x.abs().max()
    assert 0 < (got - exact).abs().max() < limit


def test_rotating_index_queries_and_keys_keeps_scores_and_shrinks_the_error_of_outliers() -> None:
    generator = torch.Generator().manual_seed(5)
    keys, queries = torch.randn(64, 128, generator=generator), torch.randn(16, 128, generator=generator)
    keys[:, 7] *= 40
    form = CacheFormat(kind="int8")
    exact = queries @ keys.T
    plain = queries @ dequantise_entries(*quantise_entries(keys, form), form).T
    turned, turned_queries = hadamard(keys, 128), hadamard(queries, 128)
    torch.testing.assert_close(turned_queries @ turned.T, exact, rtol=1e-4, atol=1e-3)
    rotated = turned_queries @ dequantise_entries(*quantise_entries(turned, form), form).T
    assert (rotated - exact).square().mean() < 0.5 * (plain - exact).square().mean()


def test_wrong_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected int8 or fp8"):
        CacheFormat(kind="int4")
    with pytest.raises(ConfigError, match="leaves nothing"):
        QuantisedEntries(1, 1, 8, CacheFormat(kind="int8", exact_tail=8))
