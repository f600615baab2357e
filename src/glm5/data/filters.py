"""Which documents are kept: heuristics, metadata, language, quality. One reason per document that is dropped.

The heuristics are those of C4 and Gopher (arXiv:2112.11446 appendix A1.1) and of code corpora (line length). Language
and quality come from n-gram classifiers. Perplexity needs a model, which this layer does not import: whoever may passes
a ``Scorer``.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from glm5.data.classifier import NgramClassifier
from glm5.data.config import FilterConfig
from glm5.data.sources import Document
from glm5.errors import DataError

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

Scorer = Callable[[Sequence[str]], list[float]]
"""Texts → nats per UTF-8 byte of each."""
LoadScorer = Callable[[str], Scorer]
"""Checkpoint directory → its scorer."""
_RUN_WORDS = 5
_LANGUAGE_CHARS = 20_000


class DocumentFilter:
    """The filters of one corpus that look at one document at a time."""

    def __init__(self, config: FilterConfig) -> None:
        """Loads the classifiers. Raises DataError when one is missing or lacks a label."""
        self._config = config
        self._quality = NgramClassifier.load(config.quality_model) if config.quality_model else None
        self._language = _language_identifier(config) if config.languages else None

    def reason(self, document: Document) -> str | None:
        """Why ``document`` is dropped, None when it is kept. The cheap tests come first; the first failure counts."""
        config, text = self._config, document.text
        if len(text) < config.min_chars:
            return "too_short"
        if config.max_chars and len(text) > config.max_chars:
            return "too_long"
        for name, allowed in config.metadata.items():
            if str(document.metadata.get(name)) not in allowed:
                return f"metadata_{name}"
        if config.max_line_chars and max(map(len, text.splitlines()), default=0) > config.max_line_chars:
            return "long_line"
        if config.min_alphanumeric and alphanumeric_share(text) < config.min_alphanumeric:
            return "few_letters"
        if config.max_repeated_lines < 1 and repeated_share(_lines(text)) > config.max_repeated_lines:
            return "repeated_lines"
        if config.max_repeated_words < 1 and repeated_share(word_runs(text, _RUN_WORDS)) > config.max_repeated_words:
            return "repeated_words"
        if self._language and self._language(text) not in config.languages:
            return "language"
        return None

    def quality(self, text: str) -> float | None:
        """Probability of the quality model's first label; None without a model."""
        return float(self._quality.probabilities(text)[0]) if self._quality else None


def alphanumeric_share(text: str) -> float:
    """Letters and digits among the characters that are no white space; 0 when there are none."""
    visible = [character for character in text if not character.isspace()]
    return sum(map(str.isalnum, visible)) / len(visible) if visible else 0.0


def repeated_share(items: Sequence[str]) -> float:
    """Share of ``items`` that are equal to an earlier one; 0 when there are none."""
    return 1 - len(set(items)) / len(items) if items else 0.0


def word_runs(text: str, size: int) -> list[str]:
    """Every run of ``size`` consecutive words; one run of all words when there are fewer, none without words."""
    words = text.split()
    return [" ".join(words[start : start + size]) for start in range(max(len(words) - size + 1, min(len(words), 1)))]


def outside_quantiles(values: Sequence[float], low: float, high: float) -> list[bool]:
    """Which of ``values`` lie outside their own ``low`` and ``high`` quantiles (by rank; ties keep their order).

    Of n values ``floor(low * n)`` are too small and ``n - ceil(high * n)`` too large. NaN counts as largest.
    """
    order = sorted(range(len(values)), key=lambda index: (values[index] != values[index], values[index]))
    first, last = math.floor(low * len(values)), math.ceil(high * len(values))
    outside = [False] * len(values)
    for index in (*order[:first], *order[last:]):
        outside[index] = True
    return outside


def count_reasons(reasons: Sequence[str | None]) -> dict[str, int]:
    """Documents by reason, the most frequent first; None counts as ``kept``."""
    return dict(Counter("kept" if reason is None else reason for reason in reasons).most_common())


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _language_identifier(config: FilterConfig) -> Callable[[str], str]:
    if config.language_model:
        classifier = NgramClassifier.load(config.language_model)
        classifier.require_labels(config.languages)
        return classifier.label
    identifier = _library_identifier()
    unknown = sorted(set(config.languages) - set(identifier.nb_classes))
    if unknown:
        raise DataError(f"filters.languages: py3langid knows no {unknown[0]!r}; give ISO 639-1 labels such as 'en'")
    return lambda text: str(identifier.classify(text[:_LANGUAGE_CHARS])[0])


@functools.cache
def _library_identifier() -> LanguageIdentifier:
    """The model of py3langid, which takes a second to load."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise DataError("filters.languages without language_model needs py3langid: pip install 'glm5[data]'") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE)
