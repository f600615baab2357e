"""Activation-aware scaling: move the size of large input channels into the weights before both are rounded.

A channel's input is divided by ``s`` where it is produced (a norm's weight, or the rows of the matrix before) and the
columns of the matrices that read it are multiplied by ``s``: the function stays the same, the rounding does not. As
in AWQ and SmoothQuant ``s = size(x)**a / size(w)**b``; ``a`` and ``b`` are searched on calibration inputs for the
smallest error of the rounded products, and no scaling at all is one of the candidates, so on the calibration inputs a
site never becomes worse.

Sites of a decoder layer: the two layer norms, the up projection before each ``down_proj``, and, unless a rotation
takes their place, the query latent and the values before ``o_proj``.

Letters: M tokens, D hidden, I inputs of a site, O outputs, F expert hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5.model.layers import Mlp, Projection
from glm5.model.moe import Experts, SparseMlp
from glm5.model.mtp import DecoderLayer
from glm5.model.quantize.formats import fake_quantise, round_inputs
from glm5.model.quantize.plan import QuantisationPlan, WeightFormat

_EXPONENTS = tuple((a / 10, b) for a in range(1, 11) for b in (0.0, 1 - a / 10) if (a, b) != (10, 0.0))
_SEARCH_TOKENS = 512
_SEARCH_EXPERTS = 8
_LEAST_TOKENS = 8
"""An expert that fewer calibration tokens reach keeps its scale."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Inputs of one module of a layer over the calibration tokens, in the order of its arguments."""

    arguments: tuple[Tensor, ...]

    @property
    def x_MI(self) -> Tensor:
        """The first argument by tokens."""
        return self.arguments[0].reshape(-1, self.arguments[0].shape[-1])


@dataclass(frozen=True, slots=True)
class Site:
    """Channels whose scale may move."""

    x_MI: Tensor
    """Calibration inputs."""
    produced: list[Tensor]
    """What makes the channels: a norm's weight [I] or rows [I, any] ([H, V, any]); divided by the scale."""
    read: list[Tensor]
    """Matrices [..., O, I] that read them; multiplied by the scale."""
    judged: list[tuple[Tensor, WeightFormat]]
    """Those of ``read`` [O, I] that are rounded, by which the scale is judged."""


class Recorder:
    """Keeps what the projections and experts of a layer got, while it is entered."""

    def __init__(self, layer: nn.Module) -> None:
        self.inputs: dict[str, Recorded] = {}
        self._modules = {name: module for name, module in layer.named_modules()
                         if isinstance(module, (Projection, Experts))}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Recorder:
        for name, module in self._modules.items():
            def keep(_: nn.Module, arguments: tuple[Tensor, ...], name: str = name) -> None:
                self.inputs[name] = Recorded(tuple(argument.detach() for argument in arguments))

            self._handles.append(module.register_forward_pre_hook(keep))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


@torch.no_grad()
def scale_layer(layer: DecoderLayer, prefix: str, plan: QuantisationPlan, inputs: dict[str, Recorded],
                rotated: bool) -> None:
    """Search and fold the scales of every site of ``layer`` (fp32, named ``prefix``) in place.

    ``inputs`` are those of the layer's modules before any scaling. ``rotated``: the query latent and the values are
    left to the rotation that has been folded in.
    """
    for site in _sites(layer, prefix, plan, inputs, rotated):
        if not site.judged or len(site.x_MI) < _LEAST_TOKENS:
            continue
        scale_I = best_scale(site.x_MI, site.judged)
        for tensor in site.produced:
            tensor.div_(scale_I if tensor.dim() == 1 else scale_I.view(*tensor.shape[:-1], 1))
        for tensor in site.read:
            tensor.mul_(scale_I)


def best_scale(x_MI: Tensor, judged: list[tuple[Tensor, WeightFormat]]) -> Tensor:
    """The scale [I] with the smallest squared error of ``x @ w.T`` over all ``judged``; ones when none is better."""
    x_MI = x_MI[:: -(-len(x_MI) // _SEARCH_TOKENS)].float()
    exact = [x_MI @ weight_OI.T for weight_OI, _ in judged]
    size_x_I = x_MI.abs().mean(0).clamp_min(1e-5)
    size_w_I = torch.cat([weight_OI for weight_OI, _ in judged]).abs().amax(0).clamp_min(1e-5)
    best_I = torch.ones_like(size_x_I)
    least = _error(x_MI, judged, exact, best_I)
    for a, b in _EXPONENTS:
        scale_I = size_x_I**a / size_w_I**b
        scale_I = (scale_I / (scale_I.max() * scale_I.min()).sqrt()).clamp(1e-4, 1e4)
        error = _error(x_MI, judged, exact, scale_I)
        if error < least:
            best_I, least = scale_I, error
    return best_I


def _error(x_MI: Tensor, judged: list[tuple[Tensor, WeightFormat]], exact: list[Tensor], scale_I: Tensor) -> float:
    total = 0.0
    for (weight_OI, form), exact_MO in zip(judged, exact, strict=True):
        rounded_MO = round_inputs(x_MI / scale_I, form) @ fake_quantise(weight_OI * scale_I, form).T
        total += float((rounded_MO - exact_MO).square().sum())
    return total


def _sites(layer: DecoderLayer, prefix: str, plan: QuantisationPlan, inputs: dict[str, Recorded],
           rotated: bool) -> Iterator[Site]:
    """Sites in an order in which no recorded input is changed by the folding of an earlier site."""
    if not rotated:
        attention = layer.self_attn
        readers = ["self_attn.q_b_proj", *(["self_attn.indexer.wq_b"] if attention.indexer is not None else [])]
        yield _site(layer, prefix, plan, inputs, [attention.q_a_layernorm.weight], readers)
        values_HVC = attention.kv_b_proj.weight.unflatten(0, (attention.heads, -1))[:, attention.nope_dim :]
        yield _site(layer, prefix, plan, inputs, [values_HVC], ["self_attn.o_proj"])
    readers = ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]
    if layer.self_attn.indexer is not None:
        readers += ["self_attn.indexer.wk", "self_attn.indexer.weights_proj"]
    yield _site(layer, prefix, plan, inputs, [layer.input_layernorm.weight], readers)

    mlp = layer.mlp
    name, dense = ("mlp.shared_experts", mlp.shared_experts) if isinstance(mlp, SparseMlp) else ("mlp", mlp)
    assert isinstance(dense, Mlp)
    yield _site(layer, prefix, plan, inputs, [dense.up_proj.weight], [f"{name}.down_proj"])
    if isinstance(mlp, SparseMlp):
        form = plan.format_of(f"{prefix}mlp.experts.0.down_proj")
        yield from _expert_sites(mlp.experts, inputs["mlp.experts"], form)
    norm_site = _site(layer, prefix, plan, inputs, [layer.post_attention_layernorm.weight],
                      [f"{name}.gate_proj", f"{name}.up_proj"])
    if isinstance(mlp, SparseMlp):
        norm_site.read.extend([mlp.gate.weight, mlp.experts.gate_up_proj])
        if form is not None:
            busiest = inputs["mlp.experts"].arguments[1].flatten().bincount().argsort(descending=True)
            norm_site.judged.extend((mlp.experts.gate_up_proj[expert], form) for expert in busiest[:_SEARCH_EXPERTS])
    yield norm_site


def _site(layer: DecoderLayer, prefix: str, plan: QuantisationPlan, inputs: dict[str, Recorded],
          produced: list[Tensor], readers: list[str]) -> Site:
    """The site whose channels the projections ``readers`` of the layer read."""
    read = [layer.get_submodule(name).weight for name in readers]
    forms = [plan.format_of(prefix + name) for name in readers]
    judged = [(weight, form) for weight, form in zip(read, forms, strict=True) if form is not None]
    return Site(inputs[readers[0]].x_MI, produced, read, judged)


def _expert_sites(experts: Experts, recorded: Recorded, form: WeightFormat | None) -> Iterator[Site]:
    """One site for each expert, between its up and its down projection."""
    x_MD, ids_MA, _ = recorded.arguments
    for expert in range(len(experts.down_proj) if form is not None else 0):
        rows_ND = x_MD[(ids_MA == expert).any(1)]
        gate_NF, up_NF = F.linear(rows_ND, experts.gate_up_proj[expert]).chunk(2, dim=-1)
        up_FD = experts.gate_up_proj[expert].chunk(2)[1]
        down_DF = experts.down_proj[expert]
        yield Site(F.silu(gate_NF) * up_NF, [up_FD], [down_DF], [(down_DF, form)])
