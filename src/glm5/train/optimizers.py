"""Optimizers: Muon with per-head orthogonalisation (Muon Split) for matrices, AdamW for everything else.

Which parameter goes where:

- **Muon**: every weight matrix of attention, feed-forward networks, experts and the MTP projection. It is a stack of
  slices that are orthogonalised one by one: ``q_b_proj`` (W_UQ) and ``kv_b_proj`` (W_UK and W_UV) have one slice per
  head; each expert's gate, up and down projection is its own slice; any other matrix is one slice.
- **AdamW with decay**: embeddings, output head, router gate. Their rows are per-token or per-expert vectors, for which
  a spectral norm means little.
- **AdamW without decay**: norms and biases; and all indexer parameters, at their own rate, because the indexers learn
  from another loss (KL) with the published rates of an adaptive optimizer.

One Muon step (GLM-4.5 report; arXiv:2502.16982): ``b = mu b + (1 - mu) g``, ``u = (1 - mu) g + mu b`` (Nesterov),
``o = NewtonSchulz5(u)``, ``w = (1 - lr decay) w - lr 0.2 sqrt(max(m, n)) o`` with the slice's own ``m x n``, so that
updates have the RMS of AdamW's and both share a learning rate.

Invariants: slices of equal shape, of all parameters together and up to transposition, go through one batched chain of
products, because on small models the number of dispatched operations costs more than the arithmetic. The saved state is
named after parameters and shaped like them, so that it does not depend on the grouping. Only parameters that require
a gradient when the optimizer is built are touched.

Letters: P slices, M rows, N columns of a slice (M <= N after transposition).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glm5.errors import CheckpointError
from glm5.model.config import ModelConfig
from glm5.model.families import CausalLM
from glm5.train.config import OptimizerConfig

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of one Newton-Schulz step; they map singular values of (0, 1] to about 1 within five steps."""
_RMS = 0.2
_TABLES = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")

Cut = Callable[[Tensor], Tensor]
"""View of a parameter-shaped tensor as a stack of slices [P, m, n]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientNorms:
    """Norms before clipping."""

    main: float
    """Norm over everything but the indexers."""
    indexer: float
    """Norm over the indexers."""

    @property
    def finite(self) -> bool:
        """Whether every gradient is finite."""
        return math.isfinite(self.main) and math.isfinite(self.indexer)


def orthogonalize(update_PMN: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iteration: each slice [M, N] with M <= N becomes nearly orthogonal (singular values near 1)."""
    a, b, c = _QUINTIC
    x_PMN = update_PMN / (update_PMN.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram_PMM = torch.bmm(x_PMN, x_PMN.mT)
        poly_PMM = torch.baddbmm(gram_PMM, gram_PMM, gram_PMM, beta=b, alpha=c)
        x_PMN = torch.baddbmm(x_PMN, poly_PMM, x_PMN, beta=a)
    return x_PMN


def matrix_cuts(name: str, parameter: Tensor, config: ModelConfig, split_heads: bool) -> list[Cut]:
    """How Muon slices the matrix or stack of matrices ``name``; together the cuts cover it exactly once."""
    heads = config.num_attention_heads
    if split_heads and name.endswith("q_b_proj.weight"):
        return [lambda x: x.unflatten(0, (heads, -1))]
    if split_heads and name.endswith("kv_b_proj.weight"):
        nope = config.qk_nope_head_dim
        return [lambda x: x.unflatten(0, (heads, -1))[:, :nope], lambda x: x.unflatten(0, (heads, -1))[:, nope:]]
    if name.endswith("experts.gate_up_proj"):
        return [lambda x: x.unflatten(1, (2, -1))[:, 0], lambda x: x.unflatten(1, (2, -1))[:, 1]]
    if parameter.ndim == 3:
        return [lambda x: x]
    return [lambda x: x.unsqueeze(0)]


class _Muon:
    """Muon over matrices; see the module's docstring for the rule."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], model_config: ModelConfig,
                 config: OptimizerConfig) -> None:
        self._parameters = dict(parameters)
        self._momentum, self._steps = config.momentum, config.newton_schulz_steps
        self._lr, self._decay = config.muon_lr or config.lr, config.weight_decay
        groups: dict[tuple[int, int], list[tuple[str, Cut]]] = defaultdict(list)
        for name, parameter in self._parameters.items():
            for cut in matrix_cuts(name, parameter, model_config, config.muon_split):
                rows, columns = cut(parameter.detach()).shape[1:]
                groups[min(rows, columns), max(rows, columns)].append((name, cut if rows <= columns else _tall(cut)))
        self._groups = list(groups.values())
        self._buffers = [torch.zeros_like(self._stack(group, self._parameters)) for group in self._groups]

    @torch.no_grad()
    def step(self, lr_scale: float) -> None:
        if not self._parameters:
            return
        lr = self._lr * lr_scale
        gradients = {name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                     for name, parameter in self._parameters.items()}
        torch._foreach_mul_(list(self._parameters.values()), 1 - lr * self._decay)
        for group, buffer_PMN in zip(self._groups, self._buffers, strict=True):
            gradient_PMN = self._stack(group, gradients)
            buffer_PMN.lerp_(gradient_PMN, 1 - self._momentum)
            update_PMN = orthogonalize(gradient_PMN.lerp_(buffer_PMN, self._momentum), self._steps)
            targets = [cut(self._parameters[name]) for name, cut in group]
            updates = update_PMN.split([target.shape[0] for target in targets])
            torch._foreach_add_(targets, updates, alpha=-lr * _RMS * math.sqrt(buffer_PMN.shape[2]))

    def state_dict(self) -> dict[str, Tensor]:
        momentum = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}
        self._exchange(momentum, save=True)
        return {f"muon.momentum.{name}": tensor.detach() for name, tensor in momentum.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._exchange({name: state[f"muon.momentum.{name}"] for name in self._parameters}, save=False)

    def _exchange(self, momentum: dict[str, Tensor], save: bool) -> None:
        """Copy the stacked buffers into parameter-shaped tensors, or back."""
        with torch.no_grad():
            for group, buffer_PMN in zip(self._groups, self._buffers, strict=True):
                pieces = [cut(momentum[name]) for name, cut in group]
                for piece, part in zip(pieces, buffer_PMN.split([piece.shape[0] for piece in pieces]), strict=True):
                    (piece if save else part).copy_(part if save else piece)

    @staticmethod
    def _stack(group: list[tuple[str, Cut]], tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([cut(tensors[name].detach()) for name, cut in group])


class Optimizer:
    """Muon and AdamW over named parameters, behind one step. Matrices are whole, or stacks of whole ones."""

    def __init__(self, trained: Mapping[str, nn.Parameter], model_config: ModelConfig, config: OptimizerConfig) -> None:
        roles = {name: parameter_role(name, parameter, config) for name, parameter in trained.items()}
        by_role = {role: {name: trained[name] for name in trained if roles[name] == role}
                   for role in ("matrix", "table", "vector", "indexer")}
        self._clip_norm = config.clip_norm
        self._indexers = list(by_role["indexer"].values())
        self._main = [parameter for name, parameter in trained.items() if roles[name] != "indexer"]
        self._muon = _Muon(by_role["matrix"], model_config, config)
        self._adamw_names = [name for name in trained if roles[name] != "matrix"]
        self._adamw_parameters = [trained[name] for name in self._adamw_names]
        groups = [_adamw_group(by_role["table"], config.lr, config.weight_decay),
                  _adamw_group(by_role["vector"], config.lr, 0.0),
                  _adamw_group(by_role["indexer"], config.indexer_lr or config.lr, 0.0)]
        groups = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True) if groups else None
        self._rates = [group["lr"] for group in groups]
        if self._adamw is not None:
            for parameter in self._adamw_parameters:  # filled now, so that a state saved before the first step is whole
                self._adamw.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                                                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                                                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False)}

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in (*self._main, *self._indexers):
            parameter.grad = None

    def clip_gradients(self) -> GradientNorms:
        """Clip the gradients of the main parameters and of the indexers, each to ``clip_norm``; give the norms before.

        Two norms, because a large gradient of one loss must not shrink the step of the other.
        """
        main, indexer = _clip(self._main, self._clip_norm), _clip(self._indexers, self._clip_norm)
        return GradientNorms(main=float(main), indexer=float(indexer))

    def step(self, lr_scale: float = 1.0) -> None:
        """One update at ``lr_scale`` times the configured rates."""
        self._muon.step(lr_scale)
        if self._adamw is not None:
            for group, rate in zip(self._adamw.param_groups, self._rates, strict=True):
                group["lr"] = rate * lr_scale
            self._adamw.step()

    def reset(self) -> None:
        """Forget all moments and step counts, as if no step had been taken."""
        self.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in self._state().items()})

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that continue the run exactly, named after the parameters; ready for safetensors."""
        return self._state()

    def _state(self) -> dict[str, Tensor]:
        state = self._muon.state_dict()
        for name, values in self._adamw_states():
            state |= {f"adamw.{key}.{name}": tensor.detach().clone() for key, tensor in values.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state_dict``. Raises CheckpointError when names or shapes differ from this optimizer's."""
        expected = {name: tensor.shape for name, tensor in self._state().items()}
        found = {name: tensor.shape for name, tensor in state.items()}
        require_same_state(expected, found)
        self._muon.load_state_dict(state)
        with torch.no_grad():
            for name, values in self._adamw_states():
                for key, tensor in values.items():
                    tensor.copy_(state[f"adamw.{key}.{name}"])

    def _adamw_states(self) -> Iterable[tuple[str, dict[str, Tensor]]]:
        if self._adamw is None:
            return
        for name, parameter in zip(self._adamw_names, self._adamw_parameters, strict=True):
            yield name, self._adamw.state[parameter]


def build_optimizer(model: CausalLM, config: OptimizerConfig) -> Optimizer:
    """Optimizer over the parameters of ``model`` that require a gradient now."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Optimizer(trained, model.config, config)


def require_same_state(expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size]) -> None:
    """Raise CheckpointError unless the shapes of a saved state are the expected ones."""
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise CheckpointError(f"optimizer state does not fit: {len(wrong)} tensors missing, extra or misshapen, "
                              f"first {wrong[0]!r}; resume with the model and optimizer that wrote it")


def parameter_role(name: str, parameter: Tensor, config: OptimizerConfig) -> str:
    """``matrix`` (Muon), ``table``, ``vector`` or ``indexer`` (groups of AdamW)."""
    if ".indexer." in name:
        return "indexer"
    if parameter.ndim < 2:
        return "vector"
    return "table" if config.kind == "adamw" or name.endswith(_TABLES) else "matrix"


def _tall(cut: Cut) -> Cut:
    return lambda x: cut(x).mT


def _adamw_group(parameters: Mapping[str, nn.Parameter], lr: float, decay: float) -> dict[str, Any]:
    return {"params": list(parameters.values()), "lr": lr, "weight_decay": decay}


def _clip(parameters: list[nn.Parameter], clip_norm: float) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = nn.utils.get_total_norm(gradients)
    if clip_norm and torch.isfinite(norm):
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm
