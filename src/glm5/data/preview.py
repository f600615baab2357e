"""What a batch looks like, for people: documents, decoded text, and which tokens are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from glm5.data.packing import Row
from glm5.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens of one document that are all trained or all not."""

    trained: bool
    """Whether the model is trained to predict these tokens."""
    tokens: int
    text: str
    """Decoded; a character that is cut by the span shows as U+FFFD."""


@dataclass(frozen=True, slots=True)
class DocumentView:
    """One document of a row."""

    document: int
    start: int
    """First token in the row."""
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """Length."""
        return sum(span.tokens for span in self.spans)

    @property
    def trained(self) -> int:
        """Tokens that are trained."""
        return sum(span.tokens for span in self.spans if span.trained)


def view_row(row: Row, tokenizer: Tokenizer) -> list[DocumentView]:
    """The documents of a row in order; padding is left out."""
    trained = np.concatenate([[False], row.loss_mask[:-1]])  # the mask stands at the position that predicts
    views = []
    used = np.flatnonzero(row.documents >= 0).tolist()
    for document, group in groupby(used, key=lambda position: int(row.documents[position])):
        positions = list(group)
        spans = []
        for flag, run in groupby(positions, key=lambda position: bool(trained[position])):
            ids = [int(row.ids[position]) for position in run]
            spans.append(Span(flag, len(ids), tokenizer.decode(ids)))
        views.append(DocumentView(document, positions[0], tuple(spans)))
    return views


def summary_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Result rows: how full the rows are, how many documents they hold, how much of them is trained."""
    tokens = sum(len(row.ids) for row in rows)
    used = sum(int((row.documents >= 0).sum()) for row in rows)
    documents = sum(int(row.documents.max()) + 1 for row in rows)
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    return [
        {"name": "data.rows", "value": len(rows), "unit": "rows"},
        {"name": "data.documents_per_row", "value": documents / len(rows), "unit": "documents"},
        {"name": "data.padding", "value": 1 - used / tokens, "unit": "share"},
        {"name": "data.trained", "value": trained / tokens, "unit": "share"},
    ]


def show_row(row: Row, views: Sequence[DocumentView], title: str) -> Iterator[str]:
    """Lines for people; text that is not trained stands in ``⟦ ⟧``."""
    padding = int((row.documents < 0).sum())
    trained = int(row.loss_mask.sum())
    yield f"── {title}: {len(row.ids)} tokens, {len(views)} documents, {padding} padding, {trained} trained"
    for view in views:
        yield f"[document {view.document} at {view.start}: {view.tokens} tokens, {view.trained} trained]"
        yield "".join(span.text if span.trained else f"⟦{span.text}⟧" for span in view.spans)
