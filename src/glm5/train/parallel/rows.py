"""Rows of a batch among processes."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from glm5.data.packing import Batch


def part_of_batch(batch: Batch, part: int, parts: int, device: torch.device) -> Batch:
    """Part ``part`` of ``parts`` of the rows of ``batch`` on ``device``; rows of padding fill the last parts, so that
    all parts are equally large."""
    rows = -(-batch.ids_BT.shape[0] // parts)
    missing = rows * parts - batch.ids_BT.shape[0]

    def cut(x_BT: torch.Tensor, fill: int | bool) -> torch.Tensor:
        return pad(x_BT, (0, 0, 0, missing), value=fill)[part * rows : (part + 1) * rows].to(device)

    return Batch(ids_BT=cut(batch.ids_BT, 0), positions_BT=cut(batch.positions_BT, 0),
                 documents_BT=cut(batch.documents_BT, -1), loss_mask_BT=cut(batch.loss_mask_BT, False))
