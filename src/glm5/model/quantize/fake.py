"""Quantisation-aware training: the model computes with the weights that an export would hold (GLM-5 report, section on
INT4 in SFT).

While ``rounded`` is entered the memory of the planned weights holds their rounded values, made by the rounding code of
the export; on leaving it the exact master weights are back, bit for bit. Gradients that are computed in between are
those at the rounded weights and are applied to the master weights: the straight-through estimator, whose derivative of
rounding is 1. That costs one rounding per optimizer step, whatever the number of forward passes in it, and one copy of
the planned weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from glm5.model.layers import Projection
from glm5.model.moe import Experts
from glm5.model.quantize.formats import fake_quantise
from glm5.model.quantize.plan import QuantisationPlan, WeightFormat


@contextmanager
def rounded(model: nn.Module, plan: QuantisationPlan | None) -> Iterator[None]:
    """``model`` computes with weights rounded by ``plan`` inside the block; None changes nothing."""
    planned = list(_planned_weights(model, plan)) if plan is not None else []
    masters = [weight.clone() for weight, _ in planned]
    try:
        for weight, form in planned:
            weight.copy_(fake_quantise(weight, form))
        yield
    finally:
        for (weight, _), master in zip(planned, masters, strict=True):
            weight.copy_(master)


def _planned_weights(model: nn.Module, plan: QuantisationPlan) -> Iterator[tuple[Tensor, WeightFormat]]:
    """The parameters that an export by ``plan`` rounds; matrices one by one, stacks of experts as [E, any, O, I]."""
    for name, module in model.named_modules():
        if isinstance(module, Projection):
            form = plan.format_of(name)
            if form is not None:
                yield module.weight.detach(), form
        elif isinstance(module, Experts):
            form = plan.format_of(f"{name}.0.down_proj")
            if form is not None:
                yield module.gate_up_proj.detach().unflatten(1, (2, -1)), form  # two matrices in a checkpoint
                yield module.down_proj.detach(), form
