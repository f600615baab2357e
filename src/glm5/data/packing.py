"""Rows of tokens for training: documents side by side, kept apart by position and document number.

Letters: B rows of a batch, T tokens of a row.

A row source gives row number n as a pure function of (n, length, seed), so training resumes at any row without
replaying, on any number of ranks. Within a row, positions start at 0 for each document and documents count from 0;
padding has document -1. ``loss_mask`` stands at the position that predicts: True at t means that predicting
``ids[t + 1]`` counts. It is False at the last position of a row and wherever t + 1 belongs to another document.

``TokenDataset`` holds tokenised documents, each ended by ``<|endoftext|>``, and makes rows of them by cutting the
concatenated stream, or by packing whole documents. Each epoch shuffles the rows; every token is in exactly one row of
an epoch. Torch is loaded when the first batch is made, so that processes that only make rows stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from glm5.data.sources import Document
from glm5.errors import DataError
from glm5.runlog import progress_bar
from glm5.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

Packing = Literal["stream", "whole"]
_DOCUMENTS_PER_CALL = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One row; all arrays have shape [T], int64, the mask bool."""

    ids: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows as tensors: int64, the mask bool."""

    ids_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor
    """-1 is padding."""
    loss_mask_BT: torch.Tensor
    """True at t when predicting ``ids[t + 1]`` counts."""


class RowSource(Protocol):
    """Anything that gives rows by number."""

    def row(self, number: int, length: int, seed: int) -> Row:
        """Row ``number`` (from 0, without end) of ``length`` tokens; a pure function of its arguments."""


def row_ranges(batch_rows: int | Callable[[int], int], start_step: int = 0, rank: int = 0,
               world_size: int = 1) -> Iterator[range]:
    """Numbers of the rows that ``rank`` takes at each step, from ``start_step`` on, without end.

    ``batch_rows`` is the rows of every step, or gives those of a step. Rows are numbered through, whatever the number
    of ranks is; the ranks take equal contiguous parts of a step, so that their union is the batch and a run may go on
    with another number of ranks. Raises DataError when the rows of a step are no multiple of ``world_size``.
    """
    rows_of = batch_rows if callable(batch_rows) else lambda _step: batch_rows
    first = sum(rows_of(step) for step in range(start_step)) if callable(batch_rows) else start_step * batch_rows
    for step in count(start_step):
        rows = rows_of(step)
        if rows % world_size or not 0 <= rank < world_size:
            raise DataError(f"batch_rows={rows} cannot be shared by {world_size} ranks (rank {rank}); "
                            "make batch_rows a multiple of the number of ranks")
        share = rows // world_size
        yield range(first + rank * share, first + (rank + 1) * share)
        first += rows


def batches(source: RowSource, batch_rows: int, length: int, seed: int = 0, start_step: int = 0) -> Iterator[Batch]:
    """Endless batches of one rank, made when they are asked for; ``glm5.data.loader`` makes them ahead."""
    for numbers in row_ranges(batch_rows, start_step):
        yield collate([source.row(number, length, seed) for number in numbers])


def collate(rows: Sequence[Row]) -> Batch:
    """Stack rows of one length."""
    import torch

    return Batch(
        ids_BT=torch.from_numpy(np.stack([row.ids for row in rows])),
        positions_BT=torch.from_numpy(np.stack([row.positions for row in rows])),
        documents_BT=torch.from_numpy(np.stack([row.documents for row in rows])),
        loss_mask_BT=torch.from_numpy(np.stack([row.loss_mask for row in rows])),
    )


def make_row(
    ids: np.ndarray, documents: np.ndarray, length: int, pad_id: int, trained: np.ndarray | None = None
) -> Row:
    """A row from tokens and their document numbers (ascending from 0), padded to ``length``.

    ``trained`` tells of each token whether predicting it counts; None counts all.
    """
    used = len(ids)
    row = Row(
        ids=np.full(length, pad_id, dtype=np.int64),
        positions=np.zeros(length, dtype=np.int64),
        documents=np.full(length, -1, dtype=np.int64),
        loss_mask=np.zeros(length, dtype=bool),
    )
    row.ids[:used] = ids
    row.documents[:used] = documents
    same = row.documents[1:used] == row.documents[: used - 1]
    starts = np.concatenate([[0], np.flatnonzero(~same) + 1, [used]])
    row.positions[:used] = np.arange(used) - np.repeat(starts[:-1], starts[1:] - starts[:-1])
    row.loss_mask[: used - 1] = same if trained is None else same & trained[1:]
    return row


class ShuffledOrder:
    """A fresh permutation of ``size`` items per epoch, by random access; remembers the last one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._key: tuple[int, int] | None = None
        self._order = np.empty(0, dtype=np.int64)

    def item(self, number: int, seed: int) -> int:
        """Item ``number`` of the endless sequence of shuffled epochs."""
        epoch, index = divmod(number, self._size)
        if self._key != (seed, epoch):
            self._order = np.random.default_rng([seed, epoch]).permutation(self._size)
            self._key = (seed, epoch)
        return int(self._order[index])


def pack_first_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Indices of ``sizes`` grouped into rows of at most ``length``: largest first, each into the first row with room.

    Deterministic; equal sizes keep their order. Every size must be at most ``length``. O(n log n): a tree holds the
    largest room below each of its nodes, the leaves being the rows.
    """
    width = 1 << max(len(sizes) - 1, 0).bit_length()
    room = [length] * (2 * width)
    rows: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        node = 1
        while node < width:
            node = 2 * node if room[2 * node] >= sizes[index] else 2 * node + 1
        if node - width == len(rows):
            rows.append([])
        rows[node - width].append(index)
        room[node] -= sizes[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


class TokenDataset:
    """Tokenised documents and the rows that they make."""

    def __init__(self, ids: np.ndarray, documents: np.ndarray, pad_id: int, packing: Packing = "stream") -> None:
        """``ids`` [tokens]; ``documents`` [n, 2]: end offset in ``ids`` and UTF-8 bytes of each document.

        ``packing`` "whole" cuts only documents that are longer than a row, into pieces that are documents of their own.
        """
        self._ids = ids
        self._ends = documents[:, 0]
        self._pad_id = pad_id
        self._packing = packing
        self._orders: dict[int, ShuffledOrder] = {}
        self._packed: dict[int, list[np.ndarray]] = {}
        self.num_tokens = len(ids)
        self.num_documents = len(documents)
        self.num_bytes = int(documents[:, 1].sum())
        """UTF-8 bytes of the texts, for bits per byte."""

    @classmethod
    def from_documents(cls, documents: Iterable[Document], tokenizer: Tokenizer) -> TokenDataset:
        """Tokenise in memory. Raises DataError when there is no text."""
        return cls(*tokenise(((("", document.text),) for document in documents), tokenizer), tokenizer.pad_id)

    def num_rows(self, length: int) -> int:
        """Rows of one epoch."""
        return len(self._pieces(length)) if self._packing == "whole" else -(-self.num_tokens // length)

    def row(self, number: int, length: int, seed: int) -> Row:
        """Row ``number`` of the endless sequence of shuffled epochs."""
        order = self._orders.setdefault(length, ShuffledOrder(self.num_rows(length)))
        item = order.item(number, seed)
        return self._packed_row(item, length) if self._packing == "whole" else self._window(item * length, length)

    def batches(self, batch_rows: int, length: int, seed: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """Endless training batches from ``start_step`` on."""
        return batches(self, batch_rows, length, seed, start_step)

    def ordered_batches(self, batch_rows: int, length: int) -> Iterator[Batch]:
        """One pass in order for evaluation; neighbouring rows share one token, so that every prediction within a
        document counts exactly once. The last batch may have fewer rows."""
        starts = iter(range(0, max(self.num_tokens - 1, 1), length - 1))
        while group := list(islice(starts, batch_rows)):
            yield collate([self._window(start, length) for start in group])

    def _window(self, start: int, length: int) -> Row:
        end = min(start + length, self.num_tokens)
        owner = np.searchsorted(self._ends, np.arange(start, end), side="right")
        return make_row(np.asarray(self._ids[start:end]), owner - owner[0], length, self._pad_id)

    def _packed_row(self, item: int, length: int) -> Row:
        pieces = self._pieces(length)[item]
        ids = np.concatenate([self._ids[start:end] for start, end in pieces])
        documents = np.repeat(np.arange(len(pieces)), pieces[:, 1] - pieces[:, 0])
        return make_row(ids, documents, length, self._pad_id)

    def _pieces(self, length: int) -> list[np.ndarray]:
        """Of every row the (start, end) offsets of its pieces, [pieces, 2], in order of the stream."""
        if length not in self._packed:
            bounds = [(first, min(first + length, end))
                      for start, end in zip([0, *self._ends[:-1].tolist()], self._ends.tolist(), strict=True)
                      for first in range(start, end, length)]
            table = np.array(bounds, dtype=np.int64)
            rows = pack_first_fit((table[:, 1] - table[:, 0]).tolist(), length)
            self._packed[length] = [table[sorted(row)] for row in rows]
        return self._packed[length]


def tokenise(documents: Iterable[Sequence[tuple[str, str]]], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all documents, each ended by ``<|endoftext|>``, and the table of (end offset, bytes).

    A document is a sequence of sections (special token or empty, text). Raises DataError when there is none.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    pieces: list[np.ndarray] = []
    table: list[tuple[int, int]] = []
    end = 0
    documents = list(documents)
    # Data workers stay silent: theirs is not the terminal.
    with nullcontext() if parent_process() else progress_bar("tokenise", len(documents)) as bar:
        for start in range(0, len(documents), _DOCUMENTS_PER_CALL):
            group = documents[start : start + _DOCUMENTS_PER_CALL]
            encoded = iter(tokenizer.encode_batch([text for sections in group for _, text in sections]))
            for sections in group:
                ids: list[int] = []
                for token, _ in sections:
                    ids += [tokenizer.special_id(token)] if token else []
                    ids += next(encoded)
                pieces.append(np.array([*ids, tokenizer.pad_id], dtype=dtype))
                end += len(ids) + 1
                table.append((end, sum(len(text.encode("utf-8", "replace")) for _, text in sections)))
            if bar:
                bar.advance(len(table), end)
    if not pieces:
        raise DataError("corpus: no text; name a source that has some")
    return np.concatenate(pieces), np.array(table, dtype=np.int64)
