"""Modules with quantised weights: real integers or e4m3 in memory, multiplied as they are.

``quantise_modules`` replaces the projections and experts of a float module; ``fit_modules`` gives a model on the meta
device the modules that the tensors of a directory need. Buffers have the names of the published format, so that a
checkpoint is their state dict (with the experts one by one, as in a float checkpoint).

INT8 and INT4 with rounded inputs run as integer products; without, and for FP8, the weight is expanded for the product
and dropped again: memory stays that of the quantised weight.

Letters: M tokens, D hidden, E experts, A experts per token, O outputs, I inputs, F expert hidden, 2 gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5.errors import CheckpointError
from glm5.kernels import integer
from glm5.model.counts import FP8_BLOCK
from glm5.model.layers import Projection
from glm5.model.moe import Experts
from glm5.model.quantize.formats import dequantise, quantise, round_inputs
from glm5.model.quantize.hadamard import hadamard
from glm5.model.quantize.plan import Kind, QuantisationPlan, StoredFormats, WeightFormat
from glm5.model.shards import TensorSpec

_DOWN = "down_proj"
_NEEDED_AS_FLOAT = ("kv_b_proj", "lm_head")
_STORED_TYPES: Mapping[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class QuantisedMatrix(nn.Module):
    """A matrix [O, I], where a ``Projection`` stood, or a stack of them [..., O, I]; uninitialised on creation."""

    weight_scale: Tensor

    def __init__(self, shape: tuple[int, ...], form: WeightFormat, rotation: int = 0,
                 scale_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.shape, self.form, self.rotation = shape, form, rotation
        *stack, outputs, inputs = shape
        scales = {"int4": (outputs, -(-inputs // form.group_size)), "int8": (outputs, 1),
                  "fp8": (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))}[form.kind]
        if form.kind == "int4":
            self.register_buffer("weight_packed", torch.empty(*stack, outputs, -(-inputs // 8), dtype=torch.int32))
        else:
            self.register_buffer("weight", torch.empty(shape, dtype=_STORED_TYPES[form.kind]))
        scale_dtype = scale_dtype or (torch.float32 if form.kind == "fp8" else torch.bfloat16)
        self.register_buffer("weight_scale", torch.empty(*stack, *scales, dtype=scale_dtype))

    @classmethod
    def from_float(cls, weight: Tensor, form: WeightFormat, rotation: int = 0) -> QuantisedMatrix:
        """The quantised form of ``weight`` [..., O, I]. Raises CheckpointError when it is not finite."""
        with weight.device:
            matrix = cls(tuple(weight.shape), form, rotation)
        if weight.is_meta:
            return matrix
        levels, scale = quantise(weight, form)
        matrix.stored.copy_(integer.pack_int4(levels) if form.kind == "int4" else levels)
        matrix.weight_scale.copy_(scale)
        return matrix

    @property
    def stored(self) -> Tensor:
        """What is stored besides the scales: packed words, int8 levels or e4m3 numbers."""
        buffer = self.weight_packed if self.form.kind == "int4" else self.weight
        assert isinstance(buffer, Tensor)
        return buffer

    def expand(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The float matrix or stack [..., O, I]; its columns are still rotated where inputs have to be."""
        return _expand(self.stored, self.weight_scale, self.shape[-1], self.form, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., I] times the matrix -> [..., O]; inputs are rotated and rounded first."""
        return self._multiply(x.reshape(-1, x.shape[-1]), self.stored, self.weight_scale).view(*x.shape[:-1], -1)

    def multiply(self, x_MI: Tensor, index: int) -> Tensor:
        """``x`` [M, I] times matrix ``index`` of a stack [E, ..., O, I] -> [M, outputs of all that it holds]."""
        return self._multiply(x_MI, self.stored[index], self.weight_scale[index])

    def _multiply(self, x_MI: Tensor, stored: Tensor, scale: Tensor) -> Tensor:
        if self.rotation:
            x_MI = hadamard(x_MI, self.rotation)
        if self.form.rounds_inputs and self.form.kind == "int8":
            return integer.int8_linear(x_MI, stored.flatten(0, -2), scale.flatten(0, -2))
        if self.form.rounds_inputs and self.form.kind == "int4":
            return integer.int4_linear(x_MI, stored.flatten(0, -2), scale.flatten(0, -2), self.form.group_size)
        weight = _expand(stored, scale, self.shape[-1], self.form, x_MI.dtype)
        return F.linear(round_inputs(x_MI, self.form), weight.flatten(0, -2))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts and moves of ``nn.Module`` pass here: follow the device, never change a stored type."""
        return super()._apply(lambda tensor: _keep_type(fn(tensor), tensor), recurse)


class QuantisedExperts(nn.Module):
    """The routed experts, stacked as in ``Experts``."""

    def __init__(self, gate_up_proj: QuantisedMatrix, down_proj: QuantisedMatrix) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x_MD: Tensor, ids_MA: Tensor, weights_MA: Tensor) -> Tensor:
        """Weighted sum of the chosen experts -> y_MD: contract of ``kernels.reference.experts``."""
        M, A = ids_MA.shape
        order = ids_MA.flatten().argsort(stable=True)
        counts = ids_MA.flatten().bincount(minlength=self.gate_up_proj.shape[0]).tolist()
        y_ND = x_MD.new_empty(M * A, x_MD.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = order[start : start + count]
                gate_NF, up_NF = self.gate_up_proj.multiply(x_MD[rows // A], expert).chunk(2, dim=-1)
                y_ND[rows] = self.down_proj.multiply(F.silu(gate_NF) * up_NF, expert)
                start += count
        return (y_ND.view(M, A, x_MD.shape[1]) * weights_MA.float().unsqueeze(-1)).sum(1).to(x_MD.dtype)


def quantise_modules(module: nn.Module, plan: QuantisationPlan, prefix: str = "", down_rotation: int = 0) -> None:
    """Replace the projections and experts below ``module`` that ``plan`` names, by their quantised forms.

    ``prefix`` is the published name of ``module`` with a dot. Raises CheckpointError naming one that is not finite.
    """
    for name, child in list(module.named_modules()):
        rotation = down_rotation if name.endswith(_DOWN) else 0
        try:
            if isinstance(child, Projection):
                form = plan.format_of(prefix + name)
                if form is not None:
                    module.set_submodule(name, QuantisedMatrix.from_float(child.weight.detach(), form, rotation))
            elif isinstance(child, Experts):
                form = plan.format_of(f"{prefix}{name}.0.{_DOWN}")
                if form is not None:
                    gate_up_E2FD = child.gate_up_proj.detach().unflatten(1, (2, -1))
                    module.set_submodule(name, QuantisedExperts(
                        QuantisedMatrix.from_float(gate_up_E2FD, form),
                        QuantisedMatrix.from_float(child.down_proj.detach(), form, down_rotation)))
        except CheckpointError as error:
            raise CheckpointError(f"{prefix}{name}: {error}") from None


def fit_modules(model: nn.Module, specs: Mapping[str, TensorSpec], formats: StoredFormats) -> None:
    """Give ``model`` (meta device, float modules) the modules that the tensors of a directory (published names) fill.

    Raises CheckpointError naming a matrix whose format the configuration does not state, or which must not be
    quantised.
    """
    for name, child in list(model.named_modules()):
        if not isinstance(child, (Projection, Experts)):
            continue
        first = f"{name}.0.{_DOWN}" if isinstance(child, Experts) else name
        form = _stored_form(specs, first, formats)
        if form is None:
            continue
        if f"{first}.weight_scale" not in specs:
            raise CheckpointError(f"{first}.weight_scale: missing beside quantised weights; use a complete checkpoint")
        rotation = formats.down_rotation if first.endswith(_DOWN) else 0
        scale_dtype = specs[f"{first}.weight_scale"].dtype
        with torch.device("meta"):
            if isinstance(child, Experts):
                experts, inner, hidden = child.down_proj.mT.shape
                model.set_submodule(name, QuantisedExperts(
                    QuantisedMatrix((experts, 2, inner, hidden), form, 0, scale_dtype),
                    QuantisedMatrix((experts, hidden, inner), form, rotation, scale_dtype)))
            else:
                model.set_submodule(name, QuantisedMatrix(tuple(child.weight.shape), form, rotation, scale_dtype))


def _stored_form(specs: Mapping[str, TensorSpec], module: str, formats: StoredFormats) -> WeightFormat | None:
    """The format of the tensors of ``module``, by what is there; None for a float matrix or none at all."""
    weight = specs.get(f"{module}.weight")
    kind: Kind | None = "int4" if f"{module}.weight_packed" in specs else None
    if kind is None and weight is not None:
        kind = next((kind for kind, dtype in _STORED_TYPES.items() if dtype == weight.dtype), None)
    if kind is None:
        return None
    if kind not in formats.by_kind:
        raise CheckpointError(f"{module}: holds {kind} weights, which quantization_config does not describe; correct "
                              "config.json")
    if module.endswith(_NEEDED_AS_FLOAT):
        raise CheckpointError(f"{module}: holds {kind} weights, but the attention needs this matrix itself; export it "
                              "in bf16")
    return formats.by_kind[kind]


def _expand(stored: Tensor, scale: Tensor, inputs: int, form: WeightFormat, dtype: torch.dtype) -> Tensor:
    levels = integer.unpack_int4(stored, inputs) if form.kind == "int4" else stored
    return dequantise(levels, scale, form, dtype)


def _keep_type(moved: Tensor, before: Tensor) -> Tensor:
    return moved if moved.dtype == before.dtype else before.to(moved.device)
