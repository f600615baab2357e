"""The optimizer of sharded parameters: the one of a single process, fed with what this process is to update.

AdamW works element by element, and the experts' stacks are cut between matrices, so each process updates its own shards
of those. Muon needs the other matrices whole: each has one owner, which collects its gradient, keeps its momentum and
a whole copy of its weight, and scatters the updated weight. So no process repeats the work of another, and a matrix
travels twice per step.

The saved state is the whole one, as a single process writes it: it does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from glm5.device import HOST
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.train.config import OptimizerConfig
from glm5.train.optimizers import GradientNorms, Optimizer, parameter_role, require_same_state
from glm5.train.parallel.layout import Layout
from glm5.train.parallel.shards import Shards, balanced_owners, local_part

_MOMENTUM = "muon.momentum"
_MOMENTS = ("adamw.exp_avg", "adamw.exp_avg_sq")
_STATES = (_MOMENTUM, *_MOMENTS)
_STEP = "adamw.step"


class ShardedOptimizer(Optimizer):
    """See the module's docstring. Every method must be called by all processes alike."""

    def __init__(self, model: GlmMoeDsaForCausalLM, config: OptimizerConfig, shards: Shards, layout: Layout) -> None:
        self._shards, self._layout = shards, layout
        self._sharded = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._roles = {name: parameter_role(name, parameter, config) for name, parameter in self._sharded.items()}
        sizes = {name: shards.divisions[name].shape.numel() for name, parameter in self._sharded.items()
                 if self._roles[name] == "matrix" and parameter.ndim == 2}
        self._owners = balanced_owners(sizes, layout.size)
        owned = self._collect({name: local_part(self._sharded[name]) for name in self._owners})
        self._owned = {name: nn.Parameter(weight) for name, weight in owned.items()}
        self._local = {name: nn.Parameter(local_part(parameter)) for name, parameter in self._sharded.items()
                       if name not in self._owners}
        mine = {name: (self._owned | self._local)[name] for name in self._sharded
                if name in self._owned or name in self._local}
        super().__init__(mine, model.config, config)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        super().zero_grad()
        for parameter in self._sharded.values():
            parameter.grad = None

    def clip_gradients(self) -> GradientNorms:
        """Norms over all processes; each gradient is scaled where it lies."""
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                gradients[self._roles[name] == "indexer"].append(local_part(parameter.grad))
        squares = torch.zeros(2, device=self._layout.device)
        for place, group in enumerate((gradients[False], gradients[True])):
            if group:
                squares[place] = torch.stack(torch._foreach_norm(group)).float().square().sum()
        dist.all_reduce(squares)
        main, indexer = squares.sqrt().tolist()
        for norm, group in ((main, gradients[False]), (indexer, gradients[True])):
            if group and self._clip_norm and norm > self._clip_norm and torch.isfinite(torch.tensor(norm)):
                torch._foreach_mul_(group, self._clip_norm / (norm + 1e-6))
        return GradientNorms(main=main, indexer=indexer)

    def step(self, lr_scale: float = 1.0) -> None:
        """One update; afterwards every shard has its new weights."""
        for name, parameter in self._local.items():
            gradient = self._sharded[name].grad
            parameter.grad = None if gradient is None else local_part(gradient)
        for name, gradient in self._collect({name: self._gradient(name) for name in self._owners}).items():
            self._owned[name].grad = gradient
        super().step(lr_scale)
        updated = {name: weight.detach() for name, weight in self._owned.items()}
        shards = {name: local_part(self._sharded[name]) for name in self._owners}
        for name, weight in self._scatter(updated, shards).items():
            shards[name].copy_(weight)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole state in host memory on the first process, nothing on the others."""
        own, whole = self._state(), {}
        for kind in _STATES:
            shards = {name: own[f"{kind}.{name}"] for name in self._local if kind in self._kinds(name)}
            if kind == _MOMENTUM:
                owned = {name: own[f"{kind}.{name}"] for name in self._owned}
                shards |= self._scatter(owned, {name: local_part(self._sharded[name]) for name in self._owners})
            whole |= {f"{kind}.{name}": tensor for name, tensor in self._shards.bring_home(shards).items()}
        steps = {key: tensor.to(HOST) for key, tensor in own.items() if key.startswith(_STEP)}
        return whole | steps if self._layout.is_first else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's part of a whole state. Raises CheckpointError when it is not this optimizer's."""
        expected = {}
        for name in self._sharded:
            shape = self._shards.divisions[name].shape
            expected |= {f"{kind}.{name}": shape for kind in self._kinds(name)}
            if self._roles[name] != "matrix":
                expected[f"{_STEP}.{name}"] = torch.Size()
        require_same_state(expected, {key: tensor.shape for key, tensor in state.items()})
        own = {}
        for name in (*self._owned, *self._local):
            for key in (f"{kind}.{name}" for kind in self._kinds(name)):
                own[key] = state[key] if name in self._owned else self._shards.cut(name, state[key])
        own |= {key: tensor for key, tensor in state.items() if key.startswith(_STEP)}
        super().load_state_dict(own)

    def _kinds(self, name: str) -> tuple[str, ...]:
        """Kinds of the saved tensors that are shaped like parameter ``name``."""
        return (_MOMENTUM,) if self._roles[name] == "matrix" else _MOMENTS

    def _gradient(self, name: str) -> Tensor:
        parameter = self._sharded[name]
        return torch.zeros_like(local_part(parameter)) if parameter.grad is None else local_part(parameter.grad)

    def _collect(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._shards.collect(shards, self._owners) if self._owners else {}

    def _scatter(self, wholes: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._shards.scatter(wholes, like, self._owners) if like else {}
