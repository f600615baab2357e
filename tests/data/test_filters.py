"""Each filter on texts whose measure is known, and the reasons that are reported."""

from __future__ import annotations

import builtins
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.data.config import FilterConfig
from glm5.data.filters import (
    DocumentFilter,
    _library_identifier,
    alphanumeric_share,
    count_reasons,
    outside_quantiles,
    repeated_share,
    word_runs,
)
from glm5.data.sources import Document
from glm5.errors import ConfigError, DataError


def reason(text: str, **config: Any) -> str | None:
    return DocumentFilter(FilterConfig(**config)).reason(Document(text, "x", {"license": "mit", "stars": 3}))


@pytest.mark.parametrize(
    ("text", "config", "expected"),
    [
        ("abc", {"min_chars": 3}, None),
        ("ab", {"min_chars": 3}, "too_short"),
        ("abcd", {"max_chars": 3}, "too_long"),
        ("ab\nabcd", {"max_line_chars": 4}, None),
        ("ab\nabcde", {"max_line_chars": 4}, "long_line"),
        ("ab ()", {"min_alphanumeric": 0.5}, None),
        ("ab ();", {"min_alphanumeric": 0.5}, "few_letters"),
        ("", {"min_alphanumeric": 0.5}, "few_letters"),
        ("a\nb\n\n a\nc", {"max_repeated_lines": 0.25}, None),
        ("a\nb\n\n a\na", {"max_repeated_lines": 0.25}, "repeated_lines"),
        ("1 2 3 4 5 1 2 3 4 5", {"max_repeated_words": 0.1}, "repeated_words"),
        ("1 2 3 4 5 1 2 3 4 6", {"max_repeated_words": 0.1}, None),
        ("a", {"metadata": {"license": ("mit", "bsd"), "stars": ("3",)}}, None),
        ("a", {"metadata": {"license": ("bsd",)}}, "metadata_license"),
        ("", {}, None),
    ],
)
def test_a_document_is_dropped_for_the_first_test_that_it_fails(
    text: str, config: dict[str, Any], expected: str | None
) -> None:
    assert reason(text, **config) == expected


def test_measures_of_empty_and_short_texts() -> None:
    assert alphanumeric_share(" \n") == 0 and alphanumeric_share("aé1_") == 0.75
    assert repeated_share([]) == 0 and repeated_share(["a", "a", "b", "a"]) == 0.5
    assert word_runs("", 5) == [] and word_runs("a b", 5) == ["a b"] and word_runs("a b c", 2) == ["a b", "b c"]


@given(st.lists(st.integers(0, 5), max_size=30), st.floats(0, 0.5), st.floats(0.5, 1))
def test_quantiles_keep_the_middle_of_the_sorted_values(values: list[int], low: float, high: float) -> None:
    outside = outside_quantiles(values, low, high)
    kept = [value for value, drop in zip(values, outside, strict=True) if not drop]
    assert sorted(kept) == sorted(values)[math.floor(low * len(values)) : math.ceil(high * len(values))]


def test_quantiles_by_hand_with_ties_and_nan() -> None:
    assert outside_quantiles([3, 1, 2, 4, 0], 0.2, 0.8) == [False, False, False, True, True]
    assert outside_quantiles([1, 1, 1, 1], 0.25, 0.75) == [True, False, False, True]
    assert outside_quantiles([float("nan"), 1, 2], 0.0, 0.6) == [True, False, False]
    assert outside_quantiles([], 0.1, 0.9) == []


def test_languages_by_the_library() -> None:
    german = "Das ist ein ganz gewöhnlicher deutscher Satz über das Wetter und die Leute in der Stadt."
    english = "This is a perfectly ordinary English sentence about the weather and the people in town."
    assert reason(english, languages=("en", "zh")) is None
    assert reason(german, languages=("en", "zh")) == "language"
    assert reason("这是一个普通的中文句子，关于天气和城里的人。", languages=("en", "zh")) is None
    with pytest.raises(DataError, match="py3langid knows no 'klingon'"):
        reason("x", languages=("klingon",))


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("py3langid"):
            raise ImportError(name)
        return real(name, *rest)

    _library_identifier.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DataError, match=r"pip install 'glm5\[data\]'"):
        DocumentFilter(FilterConfig(languages=("en",)))


def test_reasons_are_counted() -> None:
    assert count_reasons([None, "a", None, "b", "a", None]) == {"kept": 3, "a": 2, "b": 1}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"min_alphanumeric": 1.5}, "must lie in"),
        ({"perplexity_quantiles": (0.9, 0.1), "perplexity_model": "x"}, "low < high"),
        ({"perplexity_quantiles": (0.0, 0.9)}, "needs perplexity_model"),
        ({"min_quality": 0.5}, "needs quality_model"),
        ({"language_model": "x"}, "needs languages"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FilterConfig(**config)
