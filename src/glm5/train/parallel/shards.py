"""Where each element of each parameter lies, and the two movements that follow: whole tensors to an owner, and back.

A parameter is first divided along the axis that its module is divided by (heads along ``tp``, routed experts along
``ep``), then FSDP2 cuts what is left along dim 0 into equal chunks, the last ones shorter or empty, over all processes
that hold the same. So every element has exactly one place, and a shard is a box of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from glm5.device import HOST
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.train.parallel.collectives import all_to_all
from glm5.train.parallel.layout import Layout

_AT_ONCE = 1 << 26
"""Elements that are brought to the first process in one exchange: 256 MiB in fp32."""

Box = tuple[slice, ...]
"""One slice for each dimension of a whole tensor."""


@dataclass(frozen=True, slots=True)
class Division:
    """How a parameter is divided before FSDP2 shards it."""

    shape: torch.Size
    """Shape of the whole parameter."""
    axis: Literal["ep", "tp"] | None = None
    """Axis of the layout along which processes hold other parts; None when all hold the same."""
    dim: int = 0
    """Dimension of the parameter that ``axis`` divides."""


def divide(model: GlmMoeDsaForCausalLM) -> dict[str, Division]:
    """Division of every parameter of a whole model."""
    return {name: _divide(name, parameter) for name, parameter in model.named_parameters()}


def local_part(parameter: Tensor) -> Tensor:
    """The shard of a parameter or gradient that this process holds, sharing its memory."""
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


class Shards:
    """The shards of a model's parameters. All methods but ``cut`` must be called by every process alike."""

    def __init__(self, divisions: Mapping[str, Division], layout: Layout) -> None:
        self.divisions, self._layout = dict(divisions), layout
        assert layout.meshes is not None
        self._group = layout.meshes.everyone.get_group()

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """The shard of this process, as a view of ``whole``."""
        return whole[self.box(name, self._layout.rank)]

    def box(self, name: str, rank: int) -> Box:
        """Place of the shard of process ``rank`` in the whole parameter ``name``."""
        layout, division = self._layout, self.divisions[name]
        fsdp, ep, cp, tp = layout.coordinates(rank)
        box = [slice(0, size) for size in division.shape]
        index, count = rank, layout.size
        if division.axis == "tp":
            index, count = (fsdp * layout.ep + ep) * layout.cp + cp, layout.size // layout.tp
            box[division.dim] = _chunk(box[division.dim], tp, layout.tp)
        elif division.axis == "ep":
            index, count = (fsdp * layout.cp + cp) * layout.tp + tp, layout.size // layout.ep
            box[division.dim] = _chunk(box[division.dim], ep, layout.ep)
        box[0] = _chunk(box[0], index, count)
        return tuple(box)

    def collect(self, shards: Mapping[str, Tensor], owners: Mapping[str, int]) -> dict[str, Tensor]:
        """Bring each tensor to its owner: from this process's shard of every name to the whole ones that it owns.

        ``shards`` has the same names everywhere, all of one type.
        """
        names = self._by_owner(shards, owners)
        mine = names[self._layout.rank]
        sent = [sum(shards[name].numel() for name in group) for group in names]
        received = [sum(self._size(name, rank) for name in mine) for rank in range(self._layout.size)]
        flat = torch.cat([shards[name].reshape(-1) for group in names for name in group])
        arrived = all_to_all(flat, sent, received, self._group)
        wholes = {name: flat.new_empty(self.divisions[name].shape) for name in mine}
        pieces = iter(arrived.split([self._size(name, rank) for rank in range(self._layout.size) for name in mine]))
        for rank in range(self._layout.size):
            for name in mine:
                target = wholes[name][self.box(name, rank)]
                target.copy_(next(pieces).view(target.shape))
        return wholes

    def bring_home(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors in host memory on the first process, nothing on the others; at most about ``_AT_ONCE``
        elements are whole on the device at a time."""
        whole: dict[str, Tensor] = {}
        waiting: dict[str, Tensor] = {}
        size = 0
        for number, (name, shard) in enumerate(shards.items(), start=1):
            waiting[name] = shard
            size += self.divisions[name].shape.numel()
            if size >= _AT_ONCE or number == len(shards):
                arrived = self.collect(waiting, dict.fromkeys(waiting, 0))
                whole |= {name: tensor.to(HOST) for name, tensor in arrived.items()}
                waiting, size = {}, 0
        return whole

    def scatter(self, wholes: Mapping[str, Tensor], like: Mapping[str, Tensor],
                owners: Mapping[str, int]) -> dict[str, Tensor]:
        """Inverse of ``collect``: from the whole tensors that this process owns to its shard of every name.

        ``like`` are tensors of the shapes and type of the shards.
        """
        names = self._by_owner(like, owners)
        mine = names[self._layout.rank]
        sent = [sum(self._size(name, rank) for name in mine) for rank in range(self._layout.size)]
        received = [sum(like[name].numel() for name in group) for group in names]
        parts = [wholes[name][self.box(name, rank)].reshape(-1) for rank in range(self._layout.size) for name in mine]
        flat = torch.cat(parts) if parts else next(iter(like.values())).new_empty(0)
        arrived = all_to_all(flat, sent, received, self._group)
        order = [name for group in names for name in group]
        pieces = arrived.split([like[name].numel() for name in order])
        return {name: piece.view(like[name].shape) for name, piece in zip(order, pieces, strict=True)}

    def _by_owner(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> list[list[str]]:
        return [[name for name in tensors if owners[name] == rank] for rank in range(self._layout.size)]

    def _size(self, name: str, rank: int) -> int:
        return math.prod(part.stop - part.start for part in self.box(name, rank))


def balanced_owners(sizes: Mapping[str, int], processes: int) -> dict[str, int]:
    """An owner for each name, so that what the processes own is about equally large: the largest names go first."""
    loads = [0] * processes
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners


def _divide(name: str, parameter: Tensor) -> Division:
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return Division(parameter.shape, "ep")
    if name.endswith(("q_b_proj.weight", "kv_b_proj.weight")):
        return Division(parameter.shape, "tp")
    if name.endswith("self_attn.o_proj.weight"):
        return Division(parameter.shape, "tp", 1)
    return Division(parameter.shape)


def _chunk(range_: slice, index: int, count: int) -> slice:
    """Chunk ``index`` of a range as ``torch.chunk`` cuts it, empty past the end."""
    size = -(-(range_.stop - range_.start) // count)
    start = min(range_.start + index * size, range_.stop)
    return slice(start, min(start + size, range_.stop))
