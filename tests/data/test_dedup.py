"""Duplicates against the exact Jaccard similarity, and the rule of which one stays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from glm5.data.config import DedupConfig
from glm5.data.dedup import Duplicate, band_count, find_duplicates, fingerprint, normalise
from glm5.data.filters import word_runs


def duplicates(texts: list[str], **config: object) -> dict[int, Duplicate]:
    settings = DedupConfig(**config)  # type: ignore[arg-type]
    return find_duplicates([fingerprint(text, settings) for text in texts], settings)


def variants(rng: np.random.Generator, count: int, changed: int) -> list[str]:
    """Texts of 200 words; each differs from the first in ``changed`` words."""
    words = [f"w{number}" for number in rng.integers(10**9, size=200)]
    texts = [" ".join(words)]
    for number in range(1, count):
        other = list(words)
        for place in rng.choice(200, size=changed, replace=False):
            other[place] = f"x{number}_{place}"
        texts.append(" ".join(other))
    return texts


def jaccard(first: set[str], second: set[str]) -> float:
    return len(first & second) / len(first | second)


def test_exact_duplicates_agree_in_normal_form_and_the_first_stays() -> None:
    texts = ["Hello  World", "other", "hello world\n", "ﬁne", "FINE", "other", ""]
    assert duplicates(texts, exact=True) == {
        2: Duplicate("exact_duplicate", 0), 4: Duplicate("exact_duplicate", 3), 5: Duplicate("exact_duplicate", 1)
    }
    assert duplicates(texts) == {}


def test_near_duplicates_are_those_of_high_jaccard_similarity() -> None:
    rng = np.random.default_rng(0)
    families = [variants(rng, 4, changed) for changed in (1, 1, 2, 60, 90) for _ in range(4)]
    texts = list(itertools.chain.from_iterable(families))
    sets = [set(word_runs(normalise(text), 5)) for text in texts]
    dropped = duplicates(texts, near=True, threshold=0.7)
    for index in range(len(texts)):
        kept = [position for position in range(index) if position not in dropped]
        best = max((jaccard(sets[index], sets[position]) for position in kept), default=0.0)
        if best > 0.85:  # three standard errors above the threshold
            assert dropped[index].reason == "near_duplicate"
            assert jaccard(sets[index], sets[dropped[index].of]) > 0.55
        elif best < 0.55:
            assert index not in dropped
    assert 20 < len(dropped) < 40


def test_the_longest_stays_and_among_equals_the_first() -> None:
    text = " ".join(f"word{number}" for number in range(100))
    longer = text + " and one more"
    assert duplicates([text, longer, text.upper(), "else"], near=True, keep="longest") == {
        0: Duplicate("near_duplicate", 1), 2: Duplicate("near_duplicate", 1)
    }
    assert duplicates([text, longer, text.upper()], near=True) == {
        1: Duplicate("near_duplicate", 0), 2: Duplicate("exact_duplicate", 0)
    }


def test_texts_without_words_are_no_near_duplicates_of_anything() -> None:
    assert duplicates(["", "  \n", "a b"], near=True) == {1: Duplicate("exact_duplicate", 0)}


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.95, 1.0])
def test_bands_miss_a_pair_at_the_threshold_with_at_most_five_percent(threshold: float) -> None:
    config = DedupConfig(near=True, threshold=threshold)
    bands = band_count(config)
    rows = config.permutations // bands
    assert bands * rows == config.permutations
    assert (1 - threshold**rows) ** bands <= 0.05 or bands == config.permutations
    assert bands == 1 or (1 - threshold ** (2 * rows)) ** (bands // 2) > 0.05


def test_the_result_does_not_change_between_runs() -> None:
    texts = variants(np.random.default_rng(3), 30, 8)
    assert duplicates(texts, near=True) == duplicates(texts, near=True)
