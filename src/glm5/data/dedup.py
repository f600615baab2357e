"""Duplicates: exact ones by a hash of the normalised text, near ones by MinHash signatures with banded look-up.

The rule is greedy in one order: documents are taken one by one, and one that matches a document kept before is dropped.
``keep = "first"`` takes them in reading order, ``"longest"`` by falling length (the first among equals first). So the
result depends on the documents alone, and every dropped one has a kept one that it duplicates.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm5.data.config import DedupConfig
from glm5.data.filters import word_runs
from glm5.errors import DataError

if TYPE_CHECKING:
    from rensa import RMinHash

_SEED = 42
_MISSED = 0.05
"""Chance that the look-up misses a pair at the threshold; the bands follow from it."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is remembered of a text to find its duplicates."""

    chars: int
    digest: bytes
    signature: RMinHash | None
    """None when near-duplicates are not asked for, or for a text without words."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Why a document is dropped."""

    reason: str
    """``exact_duplicate`` or ``near_duplicate``."""
    of: int
    """Index of the kept document that it matches."""


def fingerprint(text: str, config: DedupConfig) -> Fingerprint:
    """The fingerprint of one text. Raises DataError when near-duplicates are asked for and rensa is missing."""
    normal = normalise(text)
    digest = hashlib.sha256(normal.encode("utf-8", "replace")).digest()[:16]
    return Fingerprint(len(text), digest, _signature(normal, config) if config.near else None)


def normalise(text: str) -> str:
    """Compatibility form, lower case, one space between words: what exact duplicates agree in."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def find_duplicates(prints: Sequence[Fingerprint], config: DedupConfig) -> dict[int, Duplicate]:
    """Index → why it is dropped, for every duplicate among ``prints``, which are in reading order."""
    order = list(range(len(prints)))
    if config.keep == "longest":
        order.sort(key=lambda index: -prints[index].chars)
    dropped: dict[int, Duplicate] = {}
    kept: dict[bytes, int] = {}
    lookup = _Lookup(config) if config.near else None
    for index in order:
        item = prints[index]
        twin = kept.get(item.digest) if config.exact or config.near else None
        if twin is not None:
            dropped[index] = Duplicate("exact_duplicate", twin)
            continue
        if lookup is not None and item.signature is not None:
            similar = lookup.find(item.signature)
            if similar is not None:
                dropped[index] = Duplicate("near_duplicate", similar)
                continue
            lookup.add(index, item.signature)
        kept[item.digest] = index
    return dropped


class _Lookup:
    """Kept signatures by bands; candidates are confirmed by the estimate over the whole signature."""

    def __init__(self, config: DedupConfig) -> None:
        from rensa import RMinHashLSH

        self._threshold = config.threshold
        self._kept: dict[int, RMinHash] = {}
        self._bands = RMinHashLSH(config.threshold, config.permutations, band_count(config))

    def find(self, signature: RMinHash) -> int | None:
        """The kept document of smallest index that is similar enough."""
        similar = [key for key in self._bands.query(signature)
                   if self._kept[key].jaccard(signature) >= self._threshold]
        return min(similar, default=None)

    def add(self, index: int, signature: RMinHash) -> None:
        self._kept[index] = signature
        self._bands.insert(index, signature)


def band_count(config: DedupConfig) -> int:
    """The fewest bands b (a divisor of the signature's length) that miss a pair at the threshold s with a probability
    of at most 5%: (1 - s^r)^b with r = permutations / b rows each."""
    divisors = [count for count in range(1, config.permutations + 1) if config.permutations % count == 0]
    for bands in divisors:
        if (1 - config.threshold ** (config.permutations // bands)) ** bands <= _MISSED:
            return bands
    return config.permutations


def _signature(normal: str, config: DedupConfig) -> RMinHash | None:
    try:
        from rensa import RMinHash
    except ImportError:
        raise DataError("dedup.near needs rensa; run: pip install 'glm5[data]'") from None
    runs = word_runs(normal, config.shingle_words)
    if not runs:
        return None
    signature = RMinHash(num_perm=config.permutations, seed=_SEED)
    signature.update(runs)
    return signature
