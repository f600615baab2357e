"""Samples → micro-batches of packed rows.

Samples are sorted by length and packed first-fit into rows as long as the longest sample of the micro-batch: rows stay
short, so that attention does not pay for pairs of tokens of different samples, and little is padding. Positions restart
with every sample, documents keep attention within it, and a sampled token at position t is predicted at t - 1 of the
same sample.

Letters: B rows, T tokens of a row, M sampled tokens of the micro-batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.records import Sample
from glm5.rl.ledger import LeasedBatch
from glm5.rl.losses import token_coefficients


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows and, flat, what the loss needs of every sampled token."""

    ids_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor
    """-1 where padded."""
    predictors: Tensor
    """Int64 [M]: flat index in [B * T] of the position that predicts each sampled token."""
    labels: Tensor
    """Int64 [M]: the sampled tokens."""
    behaviour: Tensor
    """Fp32 [M]: log-probs recorded by the engine."""
    advantages: Tensor
    """Fp32 [M]; under a critic rewards, from which it makes advantages."""
    teacher: Tensor
    """Fp32 [M]: log-probs of the teacher, NaN where there is none."""
    coefficients: Tensor
    """Fp32 [M]: weight of each token in the loss of the whole batch."""
    samples: Tensor
    """Int64 [M]: index of each token's sample in the batch."""
    staleness: Tensor
    """Int64 [M]: trainer steps."""
    tokens: int
    """Tokens that are not padding."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on ``device``."""
        moved = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return MicroBatch(**{name: value.to(device) if isinstance(value, Tensor) else value
                             for name, value in moved.items()})


def micro_batches(batch: LeasedBatch, max_tokens: int) -> list[MicroBatch]:
    """All samples of ``batch``; ``max_tokens`` bounds B * T of each part (one row at least)."""
    coefficients = token_coefficients(batch.samples, batch.episodes)
    order = sorted(range(len(batch.samples)), key=lambda index: -len(batch.samples[index].trajectory.ids))
    parts: list[MicroBatch] = []
    while order:
        length = len(batch.samples[order[0]].trajectory.ids)
        rows, order = _fill_rows(batch.samples, order, length, max(max_tokens // length, 1))
        parts.append(_pack(batch, coefficients, rows, length))
    return parts


def _fill_rows(samples: Sequence[Sample], order: Sequence[int], length: int,
               max_rows: int) -> tuple[list[list[int]], list[int]]:
    """First fit in the given order: sample indices of each row, and those that are left."""
    rows: list[list[int]] = []
    space: list[int] = []
    left: list[int] = []
    for index in order:
        size = len(samples[index].trajectory.ids)
        row = next((row for row, free in enumerate(space) if free >= size), None)
        if row is not None:
            rows[row].append(index)
            space[row] -= size
        elif len(rows) < max_rows:
            rows.append([index])
            space.append(length - size)
        else:
            left.append(index)
    return rows, left


def _pack(batch: LeasedBatch, coefficients: Sequence[float], rows: Sequence[Sequence[int]], length: int) -> MicroBatch:
    ids_BT = torch.zeros(len(rows), length, dtype=torch.int64)
    positions_BT = torch.zeros_like(ids_BT)
    documents_BT = torch.full_like(ids_BT, -1)
    predictors: list[int] = []
    labels: list[int] = []
    floats: list[tuple[float, float, float, float]] = []
    staleness: list[int] = []
    owners: list[int] = []
    for row, members in enumerate(rows):
        start = 0
        for document, index in enumerate(members):
            sample, trajectory = batch.samples[index], batch.samples[index].trajectory
            end = start + len(trajectory.ids)
            ids_BT[row, start:end] = torch.tensor(trajectory.ids)
            positions_BT[row, start:end] = torch.arange(end - start)
            documents_BT[row, start:end] = document
            sampled = [t for t, on in enumerate(trajectory.loss_mask) if on]
            predictors += [row * length + start + t - 1 for t in sampled]
            labels += [trajectory.ids[t] for t in sampled]
            advantages = sample.token_credits or [sample.advantage] * len(trajectory.ids)
            teacher = sample.teacher_logprobs or [math.nan] * len(trajectory.ids)
            floats += [(trajectory.logprobs[t], advantages[t], teacher[t], coefficients[index]) for t in sampled]
            staleness += [batch.staleness[sample.sample_id]] * len(sampled)
            owners += [index] * len(sampled)
            start = end
    behaviour, advantage, teacher_logprobs, weight = (
        column.contiguous() for column in torch.tensor(floats, dtype=torch.float32).unbind(1))
    return MicroBatch(ids_BT, positions_BT, documents_BT, torch.tensor(predictors), torch.tensor(labels),
                      behaviour, advantage, teacher_logprobs, weight, torch.tensor(owners),
                      torch.tensor(staleness), int((documents_BT >= 0).sum()))
