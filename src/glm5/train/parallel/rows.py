"""Rows of data among processes: each reads its part of every batch, by random access."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from glm5.data.packing import Batch, Row, RowSource


class PartOfRows:
    """Part ``part`` of ``parts`` of every batch of ``batch_rows`` rows of a source, which ``parts`` must divide.

    All parts together are the rows of the source, in its order, however many parts there are.
    """

    def __init__(self, source: RowSource, batch_rows: int, part: int, parts: int) -> None:
        self._source, self._batch_rows = source, batch_rows
        self._rows = batch_rows // parts
        self._first = part * self._rows

    def row(self, number: int, length: int, seed: int) -> Row:
        """Row ``number`` of this part."""
        batch, place = divmod(number, self._rows)
        return self._source.row(batch * self._batch_rows + self._first + place, length, seed)


def part_of_batch(batch: Batch, part: int, parts: int, device: torch.device) -> Batch:
    """Part ``part`` of ``parts`` of the rows of ``batch`` on ``device``; rows of padding fill the last parts, so that
    all parts are equally large."""
    rows = -(-batch.ids_BT.shape[0] // parts)
    missing = rows * parts - batch.ids_BT.shape[0]

    def cut(x_BT: torch.Tensor, fill: int | bool) -> torch.Tensor:
        return pad(x_BT, (0, 0, 0, missing), value=fill)[part * rows : (part + 1) * rows].to(device)

    return Batch(ids_BT=cut(batch.ids_BT, 0), positions_BT=cut(batch.positions_BT, 0),
                 documents_BT=cut(batch.documents_BT, -1), loss_mask_BT=cut(batch.loss_mask_BT, False))
