"""Interleaved packing of similar texts: long sequences whose parts are easily confused.

A document (the anchor) is cut into parts at line starts, and a similar document is placed into each gap, so that going
on with the anchor means finding its thread behind a distractor that looks alike. GLM-5 names interleaved packing of
highly similar texts as its remedy against losing the middle; the form is that of NExtLong (arXiv:2501.12766).

Similarity is the cosine of hashed byte n-gram vectors, weighted by inverse document frequency, within blocks of
documents. The grouping is greedy in reading order, hence deterministic; every document is in exactly one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from glm5.data.classifier import hashed_ngrams

_BLOCK = 4096
"""Documents that are compared with each other."""
_DIMENSIONS = 2048
_SIZES = (4, 6)
_COMPARED_BYTES = 16_384


def group_similar(texts: Sequence[str], sizes: Sequence[int], length: int, threshold: float) -> list[list[int]]:
    """Indices of ``texts`` in groups: the anchor first, then its most similar texts by falling cosine, while the
    ``sizes`` (tokens) of a group sum to at most ``length``. A text that fits nowhere is a group of its own."""
    groups: list[list[int]] = []
    for start in range(0, len(texts), _BLOCK):
        vectors_ND = _vectors(texts[start : start + _BLOCK])
        free = np.ones(len(vectors_ND), dtype=bool)
        for anchor in range(len(vectors_ND)):
            if not free[anchor]:
                continue
            free[anchor] = False
            cosines = vectors_ND @ vectors_ND[anchor]
            group, used = [anchor], sizes[start + anchor]
            for candidate in np.argsort(-cosines, kind="stable").tolist():
                if cosines[candidate] < threshold or used >= length:
                    break
                if free[candidate] and used + sizes[start + candidate] <= length:
                    free[candidate] = False
                    group.append(candidate)
                    used += sizes[start + candidate]
            groups.append([start + member for member in group])
    return groups


def interleave(anchor: str, others: Sequence[str]) -> str:
    """``anchor`` in ``len(others) + 1`` parts of about equal size, cut at line starts, with ``others`` between them.

    An anchor of fewer lines has empty parts at the end. Every piece ends its line.
    """
    lines = anchor.splitlines(keepends=True)
    ends = np.cumsum([len(line) for line in lines])
    targets = [len(anchor) * part / (len(others) + 1) for part in range(1, len(others) + 1)]
    cuts = [min(int(np.searchsorted(ends, target)) + 1, len(lines)) for target in targets]
    bounds = [0, *cuts, len(lines)]
    parts = ["".join(lines[first:last]) for first, last in pairwise(bounds)]
    pieces = [parts[0]]
    for other, part in zip(others, parts[1:], strict=True):
        pieces += [other, part]
    return "".join(piece if piece.endswith("\n") or not piece else piece + "\n" for piece in pieces)


def _vectors(texts: Sequence[str]) -> np.ndarray:
    """Unit vectors [texts, dimensions], fp32; zero for a text without n-grams."""
    counts = np.zeros((len(texts), _DIMENSIONS), dtype=np.float32)
    for row, text in enumerate(texts):
        hashes = hashed_ngrams(text.encode("utf-8", "replace")[:_COMPARED_BYTES], _SIZES)
        counts[row] = np.bincount((hashes % np.uint64(_DIMENSIONS)).astype(np.int64), minlength=_DIMENSIONS)
    weights = np.log((1 + len(texts)) / (1 + np.count_nonzero(counts, axis=0))) + 0.1
    vectors = np.sqrt(counts) * weights.astype(np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, 1e-12)
