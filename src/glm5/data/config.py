"""What the ``[data]`` tables of a stage may say about documents. No torch here.

A corpus is one component of the training mixture: sources, what is kept of them, how often each document is seen, and
how documents become rows. Every field has a default that leaves the text as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from glm5.errors import ConfigError

RecallKind = Literal["lookups", "repetitions", "entries", "needles", "turns"]
"""Synthetic long-range recall texts; see ``glm5.data.long_context``."""
DEFAULT_RECALL: tuple[RecallKind, ...] = ("lookups", "lookups", "repetitions", "entries")
"""A kind that is named twice is drawn twice as often."""
SHARD_CHARS = 1 << 28
"""Characters of text that are tokenised at a time."""
MEASURED_SCORES = frozenset({"quality", "perplexity"})
"""Bucket scores that we compute; any other name is a field of the record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """What a document must satisfy to be kept. Defaults keep everything."""

    min_chars: int = 0
    """Fewest characters."""
    max_chars: int = 0
    """Most characters; 0 sets no limit."""
    max_line_chars: int = 0
    """Longest line, in characters; 0 sets no limit. Minified code and data have long ones."""
    min_alphanumeric: float = 0.0
    """Smallest share of letters and digits among the characters that are no white space."""
    max_repeated_lines: float = 1.0
    """Largest share of non-empty lines that repeat an earlier line."""
    max_repeated_words: float = 1.0
    """Largest share of runs of five words that repeat an earlier run."""
    metadata: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Fields of the record and the values that each may have, for example ``license = ["mit", "bsd"]``."""
    languages: tuple[str, ...] = ()
    """Languages to keep, as labels of ``language_model``; empty keeps all."""
    language_model: str = ""
    """File of ``glm5 data train-filter`` whose labels are languages; empty takes py3langid (ISO 639-1 labels)."""
    quality_model: str = ""
    """File of ``glm5 data train-filter``; the probability of its first label is the quality. Empty: none."""
    min_quality: float = 0.0
    """Smallest quality."""
    perplexity_model: str = ""
    """Checkpoint directory that scores documents in nats per byte; empty scores none."""
    perplexity_quantiles: tuple[float, float] = (0.0, 1.0)
    """Quantiles of the corpus between which nats per byte must lie; (0.05, 0.9) drops the emptiest and the oddest."""

    def __post_init__(self) -> None:
        _require_shares(min_alphanumeric=self.min_alphanumeric, max_repeated_lines=self.max_repeated_lines,
                        max_repeated_words=self.max_repeated_words, min_quality=self.min_quality)
        low, high = self.perplexity_quantiles
        if not 0 <= low < high <= 1:
            raise ConfigError(f"perplexity_quantiles=({low}, {high}): expected 0 <= low < high <= 1")
        if (low, high) != (0.0, 1.0) and not self.perplexity_model:
            raise ConfigError("perplexity_quantiles needs perplexity_model: give a checkpoint directory")
        if self.min_quality and not self.quality_model:
            raise ConfigError(f"min_quality={self.min_quality} needs quality_model: see glm5 data train-filter")
        if self.language_model and not self.languages:
            raise ConfigError("language_model needs languages: name the labels to keep")


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupConfig:
    """Removal of duplicates over all corpora of a stage, in their order."""

    exact: bool = False
    """Drop texts that are equal after Unicode, case and white-space normalisation."""
    near: bool = False
    """Drop texts whose sets of word runs are similar, by MinHash."""
    threshold: float = 0.8
    """Jaccard similarity, as estimated from the signatures, from which two texts are near-duplicates."""
    shingle_words: int = 5
    """Words per run."""
    permutations: int = 128
    """Length of the signatures; the estimate's standard error is at most 0.5 / sqrt(permutations)."""
    keep: Literal["first", "longest"] = "first"
    """Which one stays: the first in reading order, or the longest (the first among equals)."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold} must lie in (0, 1]")
        if self.shingle_words < 1 or self.permutations < 16:
            raise ConfigError(f"shingle_words={self.shingle_words} must be at least 1, permutations="
                              f"{self.permutations} at least 16")


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketConfig:
    """Quality buckets: documents in order of a score, cut into equal parts, each part seen a number of times."""

    score: str = "quality"
    """``quality`` (larger is better), ``perplexity`` (smaller is better), or a numeric field (larger is better)."""
    copies: tuple[float, ...] = ()
    """Copies per epoch of each bucket, worst first; 0 drops it, 3.2 gives three and to every fifth a fourth."""

    def __post_init__(self) -> None:
        if any(not 0 <= count <= 100 for count in self.copies) or (self.copies and not any(self.copies)):
            raise ConfigError(f"copies={list(self.copies)}: expected numbers in [0, 100], one of them above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class InfillingConfig:
    """Fill-in-the-middle for code (arXiv:2207.14255)."""

    rate: float = 0.0
    """Share of the documents that are rearranged."""
    suffix_first: float = 0.5
    """Share of those in suffix-prefix-middle order; the rest is prefix-suffix-middle."""

    def __post_init__(self) -> None:
        _require_shares(rate=self.rate, suffix_first=self.suffix_first)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryConfig:
    """Repository-level sequences: related files, changes and issues side by side, up to one row."""

    enabled: bool = False
    """True makes sequences of whole repositories; every source must then be ``git:PATH``."""
    commits: int = 0
    """Newest commits that each give one sequence: issue, files before the change, message, diff."""
    issues: str = ""
    """``.jsonl`` file of issues and pull requests: ``number``, ``title``, ``body``. Commits name them as ``#12``."""

    def __post_init__(self) -> None:
        if self.commits < 0:
            raise ConfigError(f"commits={self.commits} is below 0; give a number of commits")
        if self.issues and not self.commits:
            raise ConfigError("issues needs commits above 0: an issue is placed before the commit that names it")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusConfig:
    """One component of the mixture."""

    name: str = "text"
    """Name in reports."""
    sources: tuple[str, ...]
    """``stdlib``, folders, files of text, ``.jsonl`` or ``.parquet`` files, ``git:PATH`` or ``git:PATH@REVISION``."""
    weight: float = 1.0
    """Share of the rows, relative to the other corpora."""
    text_field: str = "text"
    """Field of ``.jsonl`` and ``.parquet`` records that holds the text."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    """What is kept."""
    buckets: BucketConfig = field(default_factory=BucketConfig)
    """How often documents of each quality are seen."""
    long_chars: int = 0
    """Characters from which a document counts as long."""
    long_copies: float = 1.0
    """Factor on the copies of long documents."""
    infilling: InfillingConfig = field(default_factory=InfillingConfig)
    """Fill-in-the-middle."""
    repository: RepositoryConfig = field(default_factory=RepositoryConfig)
    """Repository-level sequences."""
    packing: Literal["stream", "whole", "similar"] = "stream"
    """``stream`` cuts the concatenated documents into rows; ``whole`` cuts only documents longer than a row and packs
    them first-fit; ``similar`` also interleaves similar documents within one sequence (``glm5.data.similar``)."""
    similarity: float = 0.4
    """Cosine from which ``packing = "similar"`` puts two documents into one sequence."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError(f"corpus {self.name!r}: sources is empty; name at least one")
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"corpus name {self.name!r}: expected letters, digits, - and _")
        if not math.isfinite(self.weight) or self.weight <= 0:
            raise ConfigError(f"corpus {self.name!r}: weight={self.weight} must be a number above 0")
        if self.long_copies < 0 or self.long_copies > 100:
            raise ConfigError(f"corpus {self.name!r}: long_copies={self.long_copies} must lie in [0, 100]")
        if self.long_copies != 1 and not self.long_chars:
            raise ConfigError(f"corpus {self.name!r}: long_copies needs long_chars above 0")
        needed = {"quality": self.filters.quality_model, "perplexity": self.filters.perplexity_model}
        if self.buckets.copies and needed.get(self.buckets.score) == "":
            raise ConfigError(f"corpus {self.name!r}: buckets.score={self.buckets.score!r} needs "
                              f"filters.{self.buckets.score}_model")
        if self.repository.enabled and not all(source.startswith("git:") for source in self.sources):
            raise ConfigError(f"corpus {self.name!r}: repository sequences need sources of the form git:PATH")
        _require_shares(similarity=self.similarity)

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that must be read beside the text."""
        scored = self.buckets.copies and self.buckets.score not in MEASURED_SCORES
        return tuple(dict.fromkeys([*self.filters.metadata, *([self.buckets.score] if scored else [])]))


def _require_shares(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{name}={value} must lie in [0, 1]")
