"""Weights from the trainer's memory into the engine's: one broadcast over a process group of its own.

The group stands beside the default group of ``torch.distributed``: rank 0 sends, the engines receive. Tensors travel
in the announced order as the bytes of a few large buffers, with one SHA-256 over all. Everything has a deadline; after
any failure the group is gone, and the weights come from disk.

The group objects are built directly, because ``torch.distributed.new_group`` only divides an existing world, which
engines that come and go cannot be part of.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.device import HOST, open_process_group
from glm5.errors import CheckpointError, WeightSyncError
from glm5.model.checkpoint import load_published
from glm5.model.families import CausalLM, published_tensors
from glm5.model.shards import DTYPES_BY_NAME, NAMES_BY_DTYPE, TensorSpec

BUFFER_BYTES = 64 << 20
"""Size of one buffer, more for a single larger tensor."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is about to be broadcast: names, types and shapes in order, and the SHA-256 of all bytes."""

    specs: dict[str, TensorSpec]
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Body of the request that announces it."""
        return {"names": list(self.specs), "dtypes": [NAMES_BY_DTYPE[spec.dtype] for spec in self.specs.values()],
                "shapes": [list(spec.shape) for spec in self.specs.values()], "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Announcement:
        """Undo ``to_json``. Raises WeightSyncError."""
        try:
            specs = {str(name): TensorSpec(DTYPES_BY_NAME[dtype], tuple(int(size) for size in shape))
                     for name, dtype, shape in zip(data["names"], data["dtypes"], data["shapes"], strict=True)}
            return cls(specs, str(data["sha256"]))
        except (KeyError, TypeError, ValueError) as error:
            raise WeightSyncError(f"announcement of weights: {error!r}; send names, dtypes, shapes, sha256") from None


class WeightGroup:
    """One member of the group. Raises WeightSyncError when the others do not come, or go, within ``timeout_s``."""

    def __init__(self, host: str, port: int, rank: int, size: int, backend: str, timeout_s: float) -> None:
        """Meets the other ranks at ``host:port``, where rank 0 listens."""
        self._timeout = timedelta(seconds=timeout_s)
        try:
            self._store = dist.TCPStore(host, port, size, rank == 0, self._timeout, wait_for_workers=False)
            self._group: Any
            self._group, self._device = open_process_group(backend, self._store, rank, size, self._timeout)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise WeightSyncError(f"weight group of {size} at {host}:{port}: {_first_line(error)}") from None

    def close(self) -> None:
        """Leave the group; the other members' calls fail."""
        self._group = self._store = None

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast ``tensors`` as rank 0. Raises WeightSyncError."""
        for names in buffers({name: spec_of(tensor) for name, tensor in tensors.items()}):
            joined = torch.cat([_bytes_of(tensors[name]) for name in names])
            self._broadcast(joined.to(self._device))

    def receive(self, announcement: Announcement) -> dict[str, Tensor]:
        """The tensors of a broadcast. Raises WeightSyncError, also when their checksum is another."""
        received: dict[str, Tensor] = {}
        sha256 = hashlib.sha256()
        for names in buffers(announcement.specs):
            sizes = [announcement.specs[name].nbytes for name in names]
            joined = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            self._broadcast(joined)
            joined = joined.cpu()
            sha256.update(joined.numpy())
            for name, part in zip(names, joined.split(sizes), strict=True):
                spec = announcement.specs[name]
                # a copy, because a view of a smaller type may start where the larger one must not
                received[name] = part.clone().view(spec.dtype).reshape(spec.shape)
        if sha256.hexdigest() != announcement.sha256:
            raise WeightSyncError(f"broadcast of weights: SHA-256 {sha256.hexdigest()}, {announcement.sha256} was "
                                  "announced; load them from disk")
        return received

    def _broadcast(self, buffer: Tensor) -> None:
        if self._group is None:
            raise WeightSyncError("broadcast of weights: the group was closed; form it again")
        try:
            self._group.broadcast(buffer, 0).wait(self._timeout)
        except RuntimeError as error:
            self.close()
            raise WeightSyncError(f"broadcast of weights: {_first_line(error)}") from None


def announce(tensors: Mapping[str, Tensor]) -> Announcement:
    """The announcement of ``tensors``."""
    sha256 = hashlib.sha256()
    for tensor in tensors.values():
        sha256.update(_bytes_of(tensor).numpy())
    return Announcement({name: spec_of(tensor) for name, tensor in tensors.items()}, sha256.hexdigest())


def snapshot(model: CausalLM) -> dict[str, Tensor]:
    """Copies of all published tensors in main memory: the optimizer may go on while they travel."""
    return {name: tensor.detach().to(HOST, copy=True).contiguous()
            for name, tensor in published_tensors(model).items()}


def with_tensors(current: CausalLM, tensors: Mapping[str, Tensor]) -> CausalLM:
    """A copy of ``current`` with other weights. Raises CheckpointError for tensors that do not fit or have NaNs."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"broadcast: {name} has values that are not finite; publish good weights")
    model = copy.deepcopy(current)
    load_published(published_tensors(model), tensors)
    return model


def spec_of(tensor: Tensor) -> TensorSpec:
    """Type and shape."""
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def buffers(specs: Mapping[str, TensorSpec]) -> Iterator[Sequence[str]]:
    """Names of the tensors that share one buffer, in order."""
    names: list[str] = []
    size = 0
    for name, spec in specs.items():
        if names and spec.nbytes and size + spec.nbytes > BUFFER_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += spec.nbytes
    if names:
        yield names


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
