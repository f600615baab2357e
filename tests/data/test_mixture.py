"""Shares of several sources, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from glm5.data.mixture import Mixture
from glm5.data.packing import Row, make_row
from glm5.errors import DataError


class Numbered:
    """A source whose row n holds its own tag and n."""

    def __init__(self, tag: int) -> None:
        self._tag = tag

    def row(self, number: int, length: int, seed: int) -> Row:
        return make_row(np.array([self._tag, number]), np.zeros(2, dtype=np.int64), length, 0)


def drawn(mixture: Mixture, numbers: range, seed: int = 0) -> list[tuple[int, int]]:
    rows = [mixture.row(number, 2, seed).ids.tolist() for number in numbers]
    return [(tag, index) for tag, index in rows]


def test_each_source_gives_its_share_and_skips_none_of_its_rows() -> None:
    rows = drawn(Mixture([(Numbered(1), 4.0), (Numbered(2), 1.0), (Numbered(3), 0.0)]), range(9000))
    first, second = ([index for tag, index in rows if tag == wanted] for wanted in (1, 2))
    assert first == list(range(len(first)))
    assert second == list(range(len(second)))
    assert len(first) + len(second) == 9000
    assert 0.18 < len(second) / 9000 < 0.22


def test_rows_do_not_depend_on_where_reading_starts() -> None:
    sources = [(Numbered(1), 0.5), (Numbered(2), 0.5)]
    straight = drawn(Mixture(sources), range(8300))
    assert drawn(Mixture(sources), range(8200, 8300)) == straight[8200:]
    assert drawn(Mixture(sources), range(100)) != drawn(Mixture(sources), range(100), seed=1)


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0], [float("nan")]])
def test_weights_that_are_no_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="mixture weights"):
        Mixture([(Numbered(0), weight) for weight in weights])
