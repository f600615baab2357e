"""Several row sources in one stream, each with its share of the rows.

Which source gives row n is drawn from (seed, n); a source's own rows are taken in order, so none of them is skipped
and nothing is lost. Random access by row number, as every row source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from glm5.data.packing import Batch, Row, RowSource, batches
from glm5.errors import DataError

_BLOCK = 4096


class Mixture:
    """Rows of ``sources`` in proportion to their weights."""

    def __init__(self, sources: Sequence[tuple[RowSource, float]]) -> None:
        """Pairs of source and weight; weights are relative. Raises DataError for weights that are no shares."""
        weights = np.array([weight for _, weight in sources], dtype=np.float64)
        if not len(weights) or not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() <= 0:
            raise DataError(f"mixture weights {weights.tolist()}: expected numbers >= 0, one of them above 0")
        self._sources = [source for source, _ in sources]
        self._shares = weights / weights.sum()
        self._counts: dict[int, list[np.ndarray]] = {}
        self._block_key: tuple[int, int] | None = None
        self._block = np.empty(0, dtype=np.int64)

    def row(self, number: int, length: int, seed: int) -> Row:
        """Row ``number`` of the mixture."""
        block, offset = divmod(number, _BLOCK)
        choices = self._choices(seed, block)
        chosen = int(choices[offset])
        earlier = int(self._rows_before(seed, block)[chosen] + np.count_nonzero(choices[:offset] == chosen))
        return self._sources[chosen].row(earlier, length, seed)

    def batches(self, batch_rows: int, length: int, seed: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """Endless training batches from ``start_step`` on."""
        return batches(self, batch_rows, length, seed, start_step)

    def _choices(self, seed: int, block: int) -> np.ndarray:
        """Source of each row of a block of rows."""
        if self._block_key != (seed, block):
            generator = np.random.default_rng([seed, block])
            self._block = generator.choice(len(self._sources), size=_BLOCK, p=self._shares)
            self._block_key = (seed, block)
        return self._block

    def _rows_before(self, seed: int, block: int) -> np.ndarray:
        """Rows that each source gave before a block."""
        counts = self._counts.setdefault(seed, [np.zeros(len(self._sources), dtype=np.int64)])
        while len(counts) <= block:
            generator = np.random.default_rng([seed, len(counts) - 1])
            drawn = generator.choice(len(self._sources), size=_BLOCK, p=self._shares)
            counts.append(counts[-1] + np.bincount(drawn, minlength=len(self._sources)))
        return counts[block]
