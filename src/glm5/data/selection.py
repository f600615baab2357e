"""Deciding about every document of a stage: dropped for one reason, or kept with a number of copies.

Documents are read once. What one document alone decides (heuristics, metadata, language, quality) is applied at once,
and the texts that pass are spooled to disk. What needs the whole corpus is decided on a small record per document:
duplicates over all corpora, then perplexity quantiles and quality buckets of each corpus.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.data.config import MEASURED_SCORES, SHARD_CHARS, BucketConfig, CorpusConfig, DedupConfig
from glm5.data.dedup import Fingerprint, find_duplicates, fingerprint
from glm5.data.filters import DocumentFilter, LoadScorer, Scorer, outside_quantiles
from glm5.data.git import GitRepository
from glm5.data.repositories import CountTokens, repository_documents
from glm5.data.shards import write_text
from glm5.data.sources import Document, path_place, read_documents
from glm5.errors import DataError

_SCORED_AT_ONCE = 32
_COPY_SALT = 2


@dataclass(slots=True)
class Candidate:
    """What is remembered of a document once its text is on disk."""

    corpus: int
    path: str
    chars: int
    reason: str | None = None
    """Why it is dropped; None while it is kept."""
    score: float | None = None
    """What the quality buckets go by; larger is better."""
    nats_per_byte: float | None = None
    fingerprint: Fingerprint | None = None
    copies: int = 1
    spooled: bool = False
    """Whether the text is on disk: it passed the filters that look at one document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """Everything that decides what the shards of a stage hold."""

    corpora: tuple[CorpusConfig, ...]
    """The components of the mixture."""
    dedup: DedupConfig = dataclasses.field(default_factory=DedupConfig)
    """Removal of duplicates over all of them."""
    length: int
    """Tokens of a row, which bounds repository-level and interleaved sequences."""
    held_out_fraction: float = 0.0
    """Share of the paths kept out of training."""
    split_seed: int = 0
    """Seed of that choice."""
    shard_chars: int = SHARD_CHARS
    """Characters of text in a shard, about."""


def select(
    preparation: Preparation, spool: Path, count_tokens: CountTokens, load_scorer: LoadScorer | None = None
) -> list[Candidate]:
    """Decide about every document, in reading order; the texts of those not dropped at first sight go to ``spool``."""
    candidates: list[Candidate] = []
    with spool.open("w", encoding="utf-8", errors="surrogatepass") as stream:
        for number, corpus in enumerate(preparation.corpora):
            reader = _CorpusReader(number, corpus, preparation.dedup, load_scorer)
            for document in read_corpus(corpus, preparation.length, count_tokens):
                candidate = reader.add(document)
                candidates.append(candidate)
                candidate.spooled = candidate.reason is None
                if candidate.spooled:
                    write_text(stream, document.text, document.path, 0)
            reader.finish()
    spooled = [candidate for candidate in candidates if candidate.spooled]
    _drop_duplicates(spooled, preparation.dedup)
    for number, corpus in enumerate(preparation.corpora):
        _choose_copies([item for item in spooled if item.corpus == number], corpus)
    return candidates


def read_corpus(corpus: CorpusConfig, length: int, count_tokens: CountTokens) -> Iterator[Document]:
    """Documents of a corpus, or its repository-level sequences."""
    if not corpus.repository.enabled:
        yield from read_documents(corpus.sources, corpus.text_field, corpus.fields)
        return
    for spec in corpus.sources:
        # One token of a row is the end of the document.
        yield from repository_documents(GitRepository.from_spec(spec), corpus.repository, length - 1, count_tokens)


def describe(candidates: Iterable[Candidate]) -> dict[str, Any]:
    """Counts of one corpus: read, kept, copies of the kept ones, dropped by reason."""
    candidates = list(candidates)
    reasons = Counter(item.reason for item in candidates if item.reason)
    kept = [item for item in candidates if not item.reason]
    return {"read": len(candidates), "kept": len(kept), "copies": sum(item.copies for item in kept),
            "dropped": dict(sorted(reasons.items()))}


class _CorpusReader:
    """Filters, scores and fingerprints the documents of one corpus."""

    def __init__(self, number: int, corpus: CorpusConfig, dedup: DedupConfig, load_scorer: LoadScorer | None) -> None:
        self._number, self._corpus, self._dedup = number, corpus, dedup
        self._filter = DocumentFilter(corpus.filters)
        self._scorer = _scorer(corpus, load_scorer)
        self._waiting: list[tuple[Candidate, str]] = []

    def add(self, document: Document) -> Candidate:
        filters = self._corpus.filters
        candidate = Candidate(self._number, document.path, len(document.text), self._filter.reason(document))
        if not document.text:  # only repository sequences may be empty
            candidate.reason = "change_too_long"
        if candidate.reason:
            return candidate
        quality = self._filter.quality(document.text)
        if quality is not None and quality < filters.min_quality:
            candidate.reason = "low_quality"
            return candidate
        candidate.score = quality if self._corpus.buckets.score == "quality" else _field_score(self._corpus, document)
        if self._dedup.exact or self._dedup.near:
            candidate.fingerprint = fingerprint(document.text, self._dedup)
        if self._scorer:
            self._waiting.append((candidate, document.text))
            if len(self._waiting) >= _SCORED_AT_ONCE:
                self.finish()
        return candidate

    def finish(self) -> None:
        """Score the documents that still wait for it."""
        if self._scorer and self._waiting:
            scores = self._scorer([text for _, text in self._waiting])
            for (candidate, _), nats in zip(self._waiting, scores, strict=True):
                candidate.nats_per_byte = nats
            self._waiting.clear()


def _scorer(corpus: CorpusConfig, load_scorer: LoadScorer | None) -> Scorer | None:
    if not corpus.filters.perplexity_model:
        return None
    if load_scorer is None:
        raise DataError(f"corpus {corpus.name!r}: filters.perplexity_model cannot be used here; no model is loaded")
    return load_scorer(corpus.filters.perplexity_model)


def _field_score(corpus: CorpusConfig, document: Document) -> float | None:
    if not corpus.buckets.copies or corpus.buckets.score in MEASURED_SCORES:
        return None
    value = document.metadata[corpus.buckets.score]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise DataError(f"{document.path}: field {corpus.buckets.score!r} is {value!r}; quality buckets need a number")
    return float(value)


def _drop_duplicates(candidates: Sequence[Candidate], dedup: DedupConfig) -> None:
    kept = [item for item in candidates if item.fingerprint is not None]
    prints = [item.fingerprint for item in kept if item.fingerprint is not None]
    for index, duplicate in find_duplicates(prints, dedup).items():
        kept[index].reason = duplicate.reason
    for item in candidates:
        item.fingerprint = None


def _choose_copies(candidates: Sequence[Candidate], corpus: CorpusConfig) -> None:
    """Drop what lies outside the perplexity quantiles and set the copies of the rest."""
    candidates = [item for item in candidates if item.reason is None]
    scored = [item for item in candidates if item.nats_per_byte is not None]
    low, high = corpus.filters.perplexity_quantiles
    outside = outside_quantiles([item.nats_per_byte for item in scored if item.nats_per_byte is not None], low, high)
    for item, drop in zip(scored, outside, strict=True):
        item.reason = "perplexity" if drop else None
        if corpus.buckets.score == "perplexity" and item.nats_per_byte is not None:
            item.score = -item.nats_per_byte
    kept = [item for item in candidates if item.reason is None]
    factors = bucket_copies([item.score or 0.0 for item in kept], corpus.buckets)
    for item, factor in zip(kept, factors, strict=True):
        is_long = corpus.long_chars and item.chars >= corpus.long_chars
        wanted = factor * (corpus.long_copies if is_long else 1)
        item.copies = int(wanted) + (path_place(item.path, _COPY_SALT) < wanted % 1)
        if not item.copies:
            item.reason = "lowest_bucket" if not factor else "not_sampled"


def bucket_copies(scores: Sequence[float], config: BucketConfig) -> list[float]:
    """Copies of each document: equal parts by rank, worst first; ties keep their order."""
    if not config.copies:
        return [1.0] * len(scores)
    copies = [0.0] * len(scores)
    for rank, index in enumerate(sorted(range(len(scores)), key=lambda item: scores[item])):
        copies[index] = config.copies[rank * len(config.copies) // len(scores)]
    return copies
