"""A model spread over the processes of a layout: experts, heads and tokens divided, parameters sharded by FSDP2.

The model keeps its class, its parameter names and its interface; only the parts that cross processes are replaced. Its
forward pass must run inside ``Spread.bind``, which is where FSDP2 gathers parameters and scatters gradients.

Gradients come out as sums over all tokens of a step: every loss is divided by counts of the whole step. Where ``tp``
processes compute alike, the sum is divided by their number.

Letters: M flattened tokens, D hidden, A experts per token, E experts, N rows exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from glm5.data.packing import Batch
from glm5.device import HOST
from glm5.kernels import dispatch
from glm5.model.dense import DenseCausalLM
from glm5.model.families import CausalLM
from glm5.model.mla import MultiHeadLatentAttention
from glm5.model.moe import Experts, SparseMlp
from glm5.model.parts import HeadPart, TokenPart
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.train.config import Attention, OptimizerConfig, ParallelConfig
from glm5.train.losses import LmEvaluation, evaluate_lm
from glm5.train.optimizers import Optimizer, build_optimizer
from glm5.train.parallel.collectives import all_to_all, exchange_rows, gather_tokens, sum_gradients, sum_outputs
from glm5.train.parallel.layout import Layout, Meshes
from glm5.train.parallel.optimizer import ShardedOptimizer
from glm5.train.parallel.rows import part_of_batch
from glm5.train.parallel.shards import Shards, divide, local_part

P = ParamSpec("P")
R = TypeVar("R")


class DividedTokens(TokenPart):
    """Two stretches of every row, one from each end, so that all processes see about as many keys."""

    def __init__(self, group: ProcessGroup, index: int) -> None:
        self._group, self._index = group, index
        self._orders: dict[tuple[int, torch.device], Tensor] = {}

    def ranges(self, length: int) -> tuple[tuple[int, int], ...]:
        """Stretches ``index`` and ``2 n - 1 - index`` of ``2 n`` equal ones."""
        processes = self._group.size()
        size = length // (2 * processes)
        last = 2 * processes - 1 - self._index
        return (self._index * size, (self._index + 1) * size), (last * size, (last + 1) * size)

    def gather(self, x_Bt: Tensor) -> Tensor:
        """Whole rows; see ``TokenPart``."""
        return gather_tokens(x_Bt, self._group, self._order(x_Bt.shape[1] * self._group.size(), x_Bt.device))

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the processes of the row."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total

    def _order(self, length: int, device: torch.device) -> Tensor:
        """Place of each token of a row among the local tokens of all processes, one process after the other."""
        if (length, device) not in self._orders:
            processes = self._group.size()
            stretches = torch.arange(length).view(2 * processes, -1)
            places = torch.cat([stretches[[index, 2 * processes - 1 - index]].flatten() for index in range(processes)])
            self._orders[length, device] = places.argsort().to(device)
        return self._orders[length, device]


class DividedHeads(HeadPart):
    """An equal share of the attention heads."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def enter(self, x: Tensor) -> Tensor:
        """``x``, with its gradient summed over the heads of all processes."""
        return sum_gradients(x, self._group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum of the outputs."""
        return sum_outputs(x, self._group)

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the processes, each of which has as many heads."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total / self._group.size()


class DividedExperts(Experts):
    """The experts ``index * n ... (index + 1) * n - 1`` of a layer. Tokens travel to the experts' owners and back."""

    def __init__(self, whole: Experts, group: ProcessGroup, index: int) -> None:
        nn.Module.__init__(self)
        self._group = group
        self.gate_up_proj = _slice(whole.gate_up_proj, 0, index, group.size())
        self.down_proj = _slice(whole.down_proj, 0, index, group.size())

    def forward(self, x_MD: Tensor, ids_MA: Tensor, weights_MA: Tensor) -> Tensor:
        """Weighted sum of the chosen experts, wherever they are -> y_MD. The weights are applied at home, in fp32."""
        processes, experts = self._group.size(), self.down_proj.shape[0]
        order_N = ids_MA.flatten().argsort(stable=True)
        sent_PE = ids_MA.flatten().bincount(minlength=processes * experts).view(processes, experts)
        received_PE = all_to_all(sent_PE, [1] * processes, [1] * processes, self._group)
        sent, received = torch.stack([sent_PE.sum(1), received_PE.sum(1)]).tolist()
        rows_ND = exchange_rows(x_MD[order_N // ids_MA.shape[1]], sent, received, self._group)
        local_ids_N = torch.arange(experts, device=x_MD.device).repeat(processes)
        local_ids_N = local_ids_N.repeat_interleave(received_PE.flatten(), output_size=sum(received))
        ones_N1 = torch.ones(len(rows_ND), 1, device=x_MD.device)
        out_ND = dispatch.experts(rows_ND, local_ids_N.unsqueeze(1), ones_N1, self.gate_up_proj, self.down_proj)
        home_ND = exchange_rows(out_ND, received, sent, self._group)
        y_MAD = torch.empty_like(home_ND).index_copy(0, order_N, home_ND).view(*ids_MA.shape, x_MD.shape[1])
        return (y_MAD * weights_MA.unsqueeze(-1)).sum(1).to(x_MD.dtype)


class Spread:
    """A model as one process of a layout has it: whole when there is only one."""

    def __init__(self, model: CausalLM, layout: Layout | None = None,
                 config: ParallelConfig | None = None) -> None:
        """Change ``model`` in place: divided, sharded, on the device of ``layout``. It must be whole and equal in all
        processes, and its parameters must already be frozen or not."""
        self.layout = layout or Layout(model.lm_head.weight.device)
        self.model = model
        if not isinstance(model, DenseCausalLM):
            for layer in model.model.layers:
                layer.recomputes = bool(config and config.activation_checkpointing)
        self._shards: Shards | None = None
        self._root: _Root | None = None
        if self.layout.meshes is None:
            model.to(self.layout.device)
            return
        divisions = divide(model)
        _divide_modules(model, self.layout, self.layout.meshes)
        self._root = _shard_modules(model, self.layout, self.layout.meshes)
        self._shards = Shards(divisions, self.layout)

    def bind(self, function: Callable[Concatenate[GlmMoeDsaForCausalLM, P], R]
             ) -> Callable[Concatenate[GlmMoeDsaForCausalLM, P], R]:
        """``function``, whose first argument is the model, with the model's parameters at hand while it runs."""
        root = self._root
        if root is None:
            return function

        def bound(model: GlmMoeDsaForCausalLM, /, *args: P.args, **kwargs: P.kwargs) -> R:
            assert model is self.model
            result: R = root(function, *args, **kwargs)
            return result

        return bound

    def optimizer(self, config: OptimizerConfig) -> Optimizer:
        """Optimizer over the parameters that require a gradient now."""
        if self._shards is None:
            return build_optimizer(self.model, config)
        return ShardedOptimizer(self.model, config, self._shards, self.layout)

    def evaluate(self, batches: Sequence[Batch], attention: Attention) -> LmEvaluation:
        """``evaluate_lm`` of all ``batches``, each of which every process passes whole."""
        layout = self.layout
        mine = [part_of_batch(batch, layout.row_part, layout.row_parts, layout.device) for batch in batches]
        result = self.bind(evaluate_lm)(self.model, mine, attention)
        nats, tokens = layout.sum(torch.tensor([result.nats, result.tokens], dtype=torch.float64)).tolist()
        return LmEvaluation(nats=nats, tokens=int(tokens))

    def whole_model(self) -> GlmMoeDsaForCausalLM | None:
        """The model in one piece for the first process (in host memory if it was spread), None for the others."""
        if self._shards is None:
            return self.model
        with torch.device("meta"):
            whole = GlmMoeDsaForCausalLM(self.model.config)
        tensors = self._shards.bring_home({name: local_part(parameter)
                                           for name, parameter in self.model.named_parameters()})
        if not self.layout.is_first:
            return None
        tensors |= {name: buffer.to(HOST) for name, buffer in self.model.named_buffers()}
        whole.load_state_dict(tensors, assign=True)
        return whole.eval()


class _Root(nn.Module):
    """Runs a function of the model as a forward pass, which is what FSDP2 hooks into."""

    def __init__(self, model: GlmMoeDsaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(model, ...)``."""
        return function(self.model, *args, **kwargs)


def _divide_modules(model: GlmMoeDsaForCausalLM, layout: Layout, meshes: Meshes) -> None:
    _, ep, cp, tp = layout.coordinates(layout.rank)
    if layout.cp > 1:
        model.part = DividedTokens(meshes.cp.get_group(), cp)
    for layer in model.model.layers:
        if layout.ep > 1 and isinstance(layer.mlp, SparseMlp):
            layer.mlp.experts = DividedExperts(layer.mlp.experts, meshes.ep.get_group(), ep)
        if layout.tp > 1:
            _divide_heads(layer.self_attn, meshes.tp.get_group(), tp)


def _divide_heads(attention: MultiHeadLatentAttention, group: ProcessGroup, index: int) -> None:
    attention.part = DividedHeads(group)
    attention.heads //= group.size()
    for projection, dim in ((attention.q_b_proj, 0), (attention.kv_b_proj, 0), (attention.o_proj, 1)):
        projection.weight = _slice(projection.weight, dim, index, group.size())


def _slice(parameter: nn.Parameter, dim: int, index: int, count: int) -> nn.Parameter:
    """Part ``index`` of ``count`` equal ones, in memory of its own."""
    part = parameter.detach().chunk(count, dim)[index].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _shard_modules(model: GlmMoeDsaForCausalLM, layout: Layout, meshes: Meshes) -> _Root:
    """One unit for the experts, the heads, the attention and the feed-forward of each layer; the rest is the root's."""
    for layer in model.model.layers:
        if layout.ep > 1 and isinstance(layer.mlp, SparseMlp):
            _shard(layer.mlp.experts, meshes.experts, layout.tp)
        if layout.tp > 1:
            for projection in (layer.self_attn.q_b_proj, layer.self_attn.kv_b_proj, layer.self_attn.o_proj):
                _shard(projection, meshes.tokens, 1)
        _shard(layer.self_attn, meshes.everyone, layout.tp)
        _shard(layer.mlp, meshes.everyone, layout.tp)
    root = _Root(model)
    _shard(root, meshes.everyone, layout.tp)
    return root


def _shard(module: nn.Module, mesh: DeviceMesh, alike: int) -> None:
    """Shard the parameters of ``module`` that no unit inside it has, over ``mesh``; ``alike`` processes add the same
    gradient."""
    unit = fully_shard(module, mesh=mesh)
    unit.set_force_sum_reduction_for_comms(True)  # not every communication library has others
    unit.set_gradient_divide_factor(float(alike))
