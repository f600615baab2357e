"""Rows of tokens for training: documents side by side, kept apart by position and document number.

Letters: B rows of a batch, T tokens of a row.

A row source gives row number n as a pure function of (n, length, seed), so training resumes at any step without
replaying. Within a row, positions start at 0 for each document and documents count from 0; padding has document -1.
``loss_mask`` stands at the position that predicts: True at t means that predicting ``ids[t + 1]`` counts. It is False
at the last position of a row and wherever t + 1 belongs to another document.

``TokenDataset`` concatenates its documents, each ended by ``<|endoftext|>``, and cuts the stream into chunks of one
row. Each epoch shuffles the chunks; every token is in exactly one row of an epoch, the last chunk is padded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from glm5.data.sources import Document, corpus_fingerprint, read_documents, split_by_file
from glm5.errors import DataError
from glm5.runlog import progress_bar, remove_leftovers, temporary_path
from glm5.tokenizer import Tokenizer

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


def batches(source: RowSource, batch_rows: int, length: int, seed: int = 0, start_step: int = 0) -> Iterator[Batch]:
    """Endless batches; the batch of step s holds rows s * batch_rows onwards, whatever ``start_step`` is."""
    first = start_step * batch_rows
    while True:
        yield collate([source.row(first + offset, length, seed) for offset in range(batch_rows)])
        first += batch_rows


def collate(rows: Sequence[Row]) -> Batch:
    """Stack rows of one length."""
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


class TokenDataset:
    """A tokenised stream of documents."""

    def __init__(self, ids: np.ndarray, documents: np.ndarray, pad_id: int) -> None:
        """``ids`` [tokens]; ``documents`` [n, 2]: end offset in ``ids`` and UTF-8 bytes of each document."""
        self._ids = ids
        self._ends = documents[:, 0]
        self._pad_id = pad_id
        self._orders: dict[int, ShuffledOrder] = {}
        self.num_tokens = len(ids)
        self.num_documents = len(documents)
        self.num_bytes = int(documents[:, 1].sum())
        """UTF-8 bytes of the texts, for bits per byte."""

    @classmethod
    def from_documents(cls, documents: Iterable[Document], tokenizer: Tokenizer) -> TokenDataset:
        """Tokenise in memory. Raises DataError when there is no text."""
        ids, table = _tokenise(documents, tokenizer)
        return cls(ids, table, tokenizer.pad_id)

    @classmethod
    def from_sources(
        cls,
        specs: Sequence[str],
        tokenizer: Tokenizer,
        *,
        part: Literal["all", "train", "held_out"] = "all",
        held_out_fraction: float = 0.0,
        split_seed: int = 0,
        cache_dir: str | Path | None = None,
    ) -> TokenDataset:
        """One part of the named sources (see ``glm5.data.sources``), from ``cache_dir`` when it is there already.

        The cache is keyed by tokenizer, names, sizes and times of the files, and split; it is memory-mapped.
        """

        def documents() -> Iterable[Document]:
            everything = read_documents(specs)
            if part == "all":
                return everything
            train, held_out = split_by_file(everything, held_out_fraction, split_seed)
            return train if part == "train" else held_out

        if cache_dir is None:
            return cls.from_documents(documents(), tokenizer)
        description = f"{tokenizer.to_json()}\n{corpus_fingerprint(specs)}\n{part} {held_out_fraction} {split_seed}"
        stem = Path(cache_dir) / hashlib.sha256(description.encode()).hexdigest()[:24]
        cached = _load_cache(stem)
        if cached is None:
            _save_cache(stem, *_tokenise(documents(), tokenizer))
            cached = _load_cache(stem)
        if cached is None:
            raise DataError(f"{stem}.tokens.npy: cannot be read back after writing; remove it and run again")
        return cls(*cached, tokenizer.pad_id)

    def num_rows(self, length: int) -> int:
        """Rows of one epoch."""
        return -(-self.num_tokens // length)

    def row(self, number: int, length: int, seed: int) -> Row:
        """Row ``number`` of the endless sequence of shuffled epochs."""
        order = self._orders.setdefault(length, ShuffledOrder(self.num_rows(length)))
        return self._window(order.item(number, seed) * length, length)

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


def _tokenise(documents: Iterable[Document], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all documents and the table of (end offset, bytes)."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    pieces: list[np.ndarray] = []
    table: list[tuple[int, int]] = []
    end = 0
    texts = [document.text for document in documents]
    with progress_bar("tokenise", len(texts)) as bar:
        for start in range(0, len(texts), _DOCUMENTS_PER_CALL):
            group = texts[start : start + _DOCUMENTS_PER_CALL]
            for text, ids in zip(group, tokenizer.encode_batch(group), strict=True):
                pieces.append(np.array([*ids, tokenizer.pad_id], dtype=dtype))
                end += len(ids) + 1
                table.append((end, len(text.encode("utf-8", "replace"))))
            bar.advance(len(table), end)
    if not pieces:
        raise DataError("corpus: no text; name a source that has some")
    return np.concatenate(pieces), np.array(table, dtype=np.int64)


def _load_cache(stem: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids and document table; None when absent or damaged."""
    try:
        table = np.load(f"{stem}.documents.npy")
        ids = np.load(f"{stem}.tokens.npy", mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return (ids, table) if len(ids) == table[-1, 0] else None


def _save_cache(stem: Path, ids: np.ndarray, table: np.ndarray) -> None:
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(stem.parent)
        for name, array in (("documents", table), ("tokens", ids)):
            target = stem.with_name(f"{stem.name}.{name}.npy")
            unfinished = temporary_path(target)
            try:
                with open(unfinished, "wb") as stream:
                    np.save(stream, array)
                os.replace(unfinished, target)
            finally:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{stem.parent}: cannot write the token cache ({error.strerror}); free space there") from None
