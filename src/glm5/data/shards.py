"""Tokenised shards on disk: text that was chosen → memory-mapped tokens → rows.

``glm5.data.prepare`` writes each part of a corpus as shards of text, every shard a random sample of the part. A shard
is tokenised when its rows are first needed, or ahead of that by a worker; then its text file is removed. So training
starts when one shard is ready.

Invariants: the tokens of a shard are a function of its text, the tokenizer and the recipe alone, whoever makes them;
one process makes a shard at a time and others wait for it; a file with its final name is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glm5.data.config import InfillingConfig
from glm5.data.infilling import Section, arrange
from glm5.data.packing import Batch, Packing, Row, TokenDataset, batches, tokenise
from glm5.data.similar import group_similar, interleave
from glm5.errors import DataError
from glm5.runlog import temporary_path
from glm5.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecipe:
    """How the texts of a shard become tokens and rows."""

    packing: Packing = "stream"
    """How documents share rows."""
    infilling: InfillingConfig = field(default_factory=InfillingConfig)
    """Fill-in-the-middle."""
    similarity: float | None = None
    """Cosine from which documents are interleaved; None leaves them apart."""
    sequence_length: int = 0
    """Tokens of an interleaved sequence at most."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: ``<stem>.jsonl`` before, ``<stem>.tokens.npy`` and ``<stem>.documents.npy`` after tokenising."""

    stem: Path
    tokenizer: Tokenizer
    recipe: ShardRecipe

    @property
    def is_tokenised(self) -> bool:
        """Whether the tokens are on disk."""
        return self._file("documents.npy").is_file()

    def build(self) -> None:
        """Tokenise unless it is done; wait while another process does it. Raises DataError when the cache is full or
        its text is gone."""
        with locked(self._file("lock")):
            if self.is_tokenised:
                return
            for leftover in self.stem.parent.glob(f".{self.stem.name}.*.tmp"):  # of a process that was killed
                leftover.unlink(missing_ok=True)
            ids, table = tokenise(iter(self._sections()), self.tokenizer)
            save_array(self._file("tokens.npy"), ids)
            save_array(self._file("documents.npy"), table)  # last: its presence means that the tokens are there
            self._file("jsonl").unlink(missing_ok=True)

    def load(self) -> TokenDataset:
        """The rows of this shard, memory-mapped."""
        self.build()
        try:
            ids = np.load(self._file("tokens.npy"), mmap_mode="r")
            table = np.load(self._file("documents.npy"))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{self.stem}: cannot be read back ({error}); remove {self.stem.parent.parent} and run "
                            "again") from None
        return TokenDataset(ids, table, self.tokenizer.pad_id, self.recipe.packing)

    def _sections(self) -> list[list[Section]]:
        records = list(read_texts(self._file("jsonl")))
        if self.recipe.similarity is None:
            return [arrange(text, path, copy, self.recipe.infilling) for text, path, copy in records]
        texts = [text for text, _, _ in records]
        sizes = [len(ids) + 1 for ids in self.tokenizer.encode_batch(texts)]
        groups = group_similar(texts, sizes, self.recipe.sequence_length, self.recipe.similarity)
        return [[("", interleave(texts[anchor], [texts[other] for other in others]))] for anchor, *others in groups]

    def _file(self, ending: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{ending}")


class ShardedDataset:
    """Rows of one part of a corpus: the shards in order, each with its rows shuffled anew every epoch."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self._loaded: dict[int, TokenDataset] = {}
        self._starts: dict[int, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: the files, not the memory maps."""
        return {"shards": self.shards, "_loaded": {}, "_starts": {}}

    def shard(self, index: int) -> TokenDataset:
        """Shard ``index``, tokenised now if it is not yet."""
        if index not in self._loaded:
            self._loaded[index] = self.shards[index].load()
        return self._loaded[index]

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch; needs all shards."""
        return sum(self.shard(index).num_tokens for index in range(len(self.shards)))

    def num_rows(self, length: int) -> int:
        """Rows of one epoch; needs all shards."""
        return self._start(len(self.shards), length)

    def row(self, number: int, length: int, seed: int) -> Row:
        """Row ``number`` of the endless sequence of epochs. Needs the shards up to the one that holds the row."""
        index = next((item for item in range(len(self.shards)) if number < self._start(item + 1, length)), None)
        epoch = 0
        if index is None:
            epoch, number = divmod(number, self.num_rows(length))
            index = next(item for item in range(len(self.shards)) if number < self._start(item + 1, length))
        shard = self.shard(index)
        return shard.row(epoch * shard.num_rows(length) + number - self._start(index, length), length, seed)

    def batches(self, batch_rows: int, length: int, seed: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """Endless training batches from ``start_step`` on."""
        return batches(self, batch_rows, length, seed, start_step)

    def _start(self, index: int, length: int) -> int:
        """Rows of an epoch before shard ``index``."""
        starts = self._starts.setdefault(length, [0])
        while len(starts) <= index:
            starts.append(starts[-1] + self.shard(len(starts) - 1).num_rows(length))
        return starts[index]


def write_text(stream: Any, text: str, path: str, copy: int) -> None:
    """Append one document to a shard of text."""
    stream.write(json.dumps([text, path, copy], ensure_ascii=False) + "\n")


def read_texts(file: Path) -> Iterator[tuple[str, str, int]]:
    """(text, path, copy) of every document of a shard of text."""
    try:
        with file.open(encoding="utf-8", errors="surrogatepass") as stream:
            for line in stream:
                text, path, copy = json.loads(line)
                yield text, path, copy
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error}); remove {file.parent.parent} and run again") from None


def save_array(file: Path, array: np.ndarray) -> None:
    """Write ``array`` under its final name once it is whole. Raises DataError when there is no room."""
    unfinished = temporary_path(file)
    try:
        with open(unfinished, "wb") as stream:
            np.save(stream, array)
        os.replace(unfinished, file)
    except OSError as error:
        raise DataError(f"{file.parent}: cannot write the token cache ({error.strerror}); free space there") from None
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold ``file`` for the body; wait while another process or thread does. The kernel frees it when a holder dies."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(f"{file.parent}: cannot write the token cache ({error.strerror}); free space there") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
