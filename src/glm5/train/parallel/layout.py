"""Which process does what: the four axes of a layout, the process groups that follow from them, and their deadline.

Processes are numbered row-major over the axes ``fsdp x ep x cp x tp``:

- ``fsdp`` and ``ep``: each process has rows of its own. Along ``ep`` the routed experts are divided.
- ``cp``: processes share rows and divide their tokens.
- ``tp``: processes share rows and tokens and divide the attention heads.

Invariants: whatever a process computes for tokens of its own adds up over ``fsdp``, ``ep`` and ``cp``; along ``tp``
everything but the heads is computed alike. Every collective has the deadline ``timeout_s``; one that passes it, or
whose peer dies, ends the process with a ``ServiceError``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from glm5.device import collective_backend, find_device, is_lost_peer, local_device
from glm5.errors import ConfigError, ServiceError
from glm5.model.config import ModelConfig
from glm5.train.config import ParallelConfig, StageConfig
from glm5.train.schedules import rows_of_step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Meshes:
    """Process groups of a layout of more than one process, as one-dimensional meshes of this process's peers."""

    everyone: DeviceMesh
    """All processes: they share what nothing else divides."""
    tokens: DeviceMesh
    """Processes with the same heads: their tokens differ."""
    tp: DeviceMesh
    """Processes with the same tokens."""
    cp: DeviceMesh
    """Processes with the same rows and heads."""
    ep: DeviceMesh
    """Processes that exchange tokens because each has other experts."""
    experts: DeviceMesh
    """Processes with the same experts."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of this process among ``fsdp x ep x cp x tp``; one process alone by default."""

    device: torch.device
    fsdp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    rank: int = 0
    meshes: Meshes | None = None
    """None for one process."""

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.fsdp * self.ep * self.cp * self.tp

    @property
    def is_first(self) -> bool:
        """Whether this process writes what one process must write."""
        return self.rank == 0

    @property
    def row_parts(self) -> int:
        """Number of parts that the rows of a batch are divided into."""
        return self.fsdp * self.ep

    @property
    def row_part(self) -> int:
        """The part of the rows that this process has."""
        return self.rank // (self.cp * self.tp)

    @property
    def suffix(self) -> str:
        """What tells files of this process from those of the others."""
        return "" if self.meshes is None else f".process{self.rank}"

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Places of process ``rank`` along fsdp, ep, cp and tp."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        fsdp, ep = divmod(rest, self.ep)
        return fsdp, ep, cp, tp

    def sum(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over the processes with different tokens, in the precision and on the device of ``x``."""
        if self.meshes is None:
            return x
        total = x.detach().clone()
        dist.all_reduce(total, group=self.meshes.tokens.get_group())
        return total

    def sum_rows(self, x: Tensor) -> Tensor:
        """Sum over the processes with different rows of an integer ``x``, which those of one row have alike."""
        return self.sum(x) // self.cp

    def agree(self, value: T) -> T:
        """The ``value`` that the first process has: for decisions that must be the same everywhere."""
        if self.meshes is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process runs the body before the others do."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.meshes is not None:
            dist.barrier()

    def check(self, config: StageConfig, model: ModelConfig) -> None:
        """Raise ConfigError when stage or model cannot be divided like this."""
        if config.quantization is not None and self.size > 1:
            raise ConfigError(f"quantization: weights are rounded whole, in one process, but {self.size} run; train "
                              "without torchrun, or without quantization")
        for step in range(config.batch_ramp.steps):
            if rows_of_step(config, step) % self.row_parts:
                raise ConfigError(f"batch_ramp: the {rows_of_step(config, step)} rows of step {step + 1} are not a "
                                  f"multiple of {self.row_parts} (fsdp x ep of [parallel]); let micro_rows be one")
        for what, value, divisor, axis in (
                ("batch_rows", config.batch_rows, self.row_parts, "fsdp x ep"),
                ("n_routed_experts", model.n_routed_experts, self.ep, "ep"),
                ("length", config.length, 2 * self.cp if self.cp > 1 else 1, "2 x cp"),
                ("num_attention_heads", model.num_attention_heads, self.tp, "tp")):
            if value % divisor:
                raise ConfigError(f"{what}={value} is not a multiple of {divisor} ({axis} of [parallel]); change one "
                                  "of them")


@contextmanager
def connect(config: ParallelConfig, device_name: str) -> Iterator[Layout]:
    """The layout of this process, connected to the others for as long as the body runs.

    How many processes there are is what ``torchrun`` says in the environment; without it, one. Raises ConfigError when
    that does not fit ``config``, ServiceError when another process dies or passes the deadline.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    fsdp = _remaining(config, processes)
    if processes == 1:
        yield Layout(find_device(device_name))
        return
    rank = int(os.environ["RANK"])
    device = local_device(device_name, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    try:
        dist.init_process_group(collective_backend(device), timeout=timedelta(seconds=config.timeout_s), rank=rank,
                                world_size=processes)
        try:
            axes = (fsdp, config.ep, config.cp, config.tp)
            yield Layout(device, *axes, rank=rank, meshes=_meshes(device.type, axes))
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise ServiceError(f"process {rank} of {processes} lost the others ({_first_line(error)}): one of them failed "
                           f"or did not answer within parallel.timeout_s={config.timeout_s:g}; read the other "
                           "messages, then start again: the run continues from its last checkpoint") from error


def _remaining(config: ParallelConfig, processes: int) -> int:
    """Size of the ``fsdp`` axis. Raises ConfigError when the axes do not multiply to ``processes``."""
    others = config.ep * config.cp * config.tp
    fsdp = config.fsdp or max(processes // others, 1)
    if fsdp * others != processes:
        raise ConfigError(f"[parallel] fsdp={fsdp} x ep={config.ep} x cp={config.cp} x tp={config.tp} are "
                          f"{fsdp * others} processes, but {processes} run; start with torchrun --nproc-per-node "
                          f"{fsdp * others} -m glm5 train ..., or change [parallel]")
    return fsdp


def _meshes(device_type: str, axes: tuple[int, int, int, int]) -> Meshes:
    ranks = torch.arange(math.prod(axes)).view(axes)

    def by(axis: int) -> DeviceMesh:
        """``part``: processes that differ in ``axis`` alone; ``rest``: those that agree in it."""
        return DeviceMesh(device_type, ranks.movedim(axis, -1).reshape(-1, axes[axis]), mesh_dim_names=("rest", "part"))

    heads, experts, rows = by(3), by(1), by(2)
    return Meshes(everyone=DeviceMesh(device_type, ranks.flatten()), tokens=heads["rest"], tp=heads["part"],
                  cp=rows["part"], ep=experts["part"], experts=experts["rest"])


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
