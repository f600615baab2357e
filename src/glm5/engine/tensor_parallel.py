"""One engine on several processes: attention heads and routed experts are divided, everything else is repeated.

``torchrun --nproc-per-node N -m glm5 serve DIR`` starts N processes. The first one schedules, samples and serves; it
sends every call of the model to the others, which hold the same cache and make the same call on their share. Outputs of
attention and of the experts are summed over the processes, so all hold the same hidden states. Weights are not
exchanged while such an engine runs: start another one.

Letters: M tokens, D hidden, E experts, A experts per token.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from glm5.device import collective_backend
from glm5.errors import ConfigError
from glm5.model.cache import KeyCache
from glm5.model.mla import MultiHeadLatentAttention
from glm5.model.moe import Experts, SparseMlp
from glm5.model.parts import HeadPart
from glm5.model.transformer import Attention, GlmMoeDsaForCausalLM

_IDLE = datetime.timedelta(days=365)
"""How long a follower waits for work; a leader that dies closes the connection, which ends it at once."""


def world_size() -> int:
    """Processes that ``torchrun`` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(model: GlmMoeDsaForCausalLM) -> LedModel | None:
    """Take this process's share of ``model``. The first process gets the model to run; the others work until the
    first is done and then get None. Raises ConfigError when heads or experts cannot be divided."""
    dist.init_process_group(collective_backend(model.lm_head.weight.device), timeout=_IDLE)
    divide(model, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        return LedModel(model)
    try:
        _follow(model)
    finally:
        dist.destroy_process_group()
    return None


def divide(model: GlmMoeDsaForCausalLM, rank: int, size: int) -> None:
    """Keep share ``rank`` of ``size`` of the heads and experts of ``model``, in place."""
    config = model.config
    for name in ("num_attention_heads", "n_routed_experts"):
        if getattr(config, name) % size:
            raise ConfigError(f"{size} processes: {name}={getattr(config, name)} cannot be divided equally; start a "
                              "number of processes that divides it")
    for module in model.modules():
        if isinstance(module, MultiHeadLatentAttention):
            module.part = _SharedHeads()
            module.heads //= size
            for projection, dim in ((module.q_b_proj, 0), (module.kv_b_proj, 0), (module.o_proj, 1)):
                projection.weight = _share(projection.weight, dim, rank, size)
        elif isinstance(module, SparseMlp):
            module.experts = _SharedExperts(module.experts, rank, size)


class LedModel:
    """The model as the first process runs it: every call goes to the other processes as well."""

    def __init__(self, model: GlmMoeDsaForCausalLM) -> None:
        self._model = model
        self.config, self.lm_head = model.config, model.lm_head

    def eval(self) -> LedModel:
        """The model is always in evaluation mode."""
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """This process's share."""
        return self._model.state_dict()

    def new_cache(self, *arguments: Any, table_UZ: Tensor, **settings: Any) -> KeyCache:
        """As of the model, on every process."""
        _send("new_cache", (arguments, table_UZ.shape, settings))
        return _LedCache(self.config, *arguments, table_UZ=table_UZ, **settings)

    def ragged(self, ids_M: Tensor, positions_M: Tensor, slots_M: Tensor, cache: KeyCache, rows: Tensor | None = None,
               attention: Attention = "sparse") -> Tensor:
        """As of the model."""
        return self.lm_head(self.ragged_hidden(ids_M, positions_M, slots_M, cache, rows, attention)).float()

    def ragged_hidden(self, ids_M: Tensor, positions_M: Tensor, slots_M: Tensor, cache: KeyCache,
                      rows: Tensor | None = None, attention: Attention = "sparse") -> Tensor:
        """As of the model."""
        _send("ragged_hidden", (cache.table_UZ, ids_M, positions_M, slots_M, rows, attention))
        return self._model.ragged_hidden(ids_M, positions_M, slots_M, cache, rows, attention)

    def ragged_mtp(self, hidden_MD: Tensor, next_ids_M: Tensor, positions_M: Tensor, slots_M: Tensor, cache: KeyCache,
                   attention: Attention = "sparse") -> Tensor:
        """As of the model."""
        _send("ragged_mtp", (cache.table_UZ, hidden_MD, next_ids_M, positions_M, slots_M, attention))
        return self._model.ragged_mtp(hidden_MD, next_ids_M, positions_M, slots_M, cache, attention)

    def close(self) -> None:
        """Let the other processes go."""
        _send("stop", ())
        dist.destroy_process_group()


class _LedCache(KeyCache):
    """The first process's cache: what is copied or written here is so everywhere."""

    def copy_block(self, source: int, target: int) -> None:
        _send("copy_block", (source, target))
        super().copy_block(source, target)

    def write_blocks(self, blocks: Tensor, entries: list[Tensor]) -> None:
        super().write_blocks(blocks, entries)  # refuses what does not fit before the others hear of it
        _send("write_blocks", (blocks, entries))


class _SharedHeads(HeadPart):
    """Some of the heads of a layer."""

    def leave(self, x: Tensor) -> Tensor:
        """Sum over the processes."""
        dist.all_reduce(x)
        return x


class _SharedExperts(nn.Module):
    """The experts ``first`` to ``first + E`` of a layer; the others add their parts."""

    def __init__(self, experts: Experts, rank: int, size: int) -> None:
        super().__init__()
        self.gate_up_proj = _share(experts.gate_up_proj, 0, rank, size)
        self.down_proj = _share(experts.down_proj, 0, rank, size)
        self._first = rank * len(self.down_proj)
        self._forward = experts.forward.__func__

    def forward(self, x_MD: Tensor, ids_MA: Tensor, weights_MA: Tensor) -> Tensor:
        """Weighted sum of the chosen experts -> y_MD."""
        local_MA = ids_MA - self._first
        is_here_MA = (local_MA >= 0) & (local_MA < len(self.down_proj))
        y_MD = self._forward(self, x_MD, local_MA.where(is_here_MA, 0), weights_MA * is_here_MA)
        dist.all_reduce(y_MD)
        return y_MD


def _share(parameter: nn.Parameter, dim: int, rank: int, size: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().chunk(size, dim)[rank].contiguous(), requires_grad=False)


def _send(name: str, arguments: tuple[Any, ...]) -> None:
    dist.broadcast_object_list([name, arguments], src=0)


def _follow(model: GlmMoeDsaForCausalLM) -> None:
    """Make the calls of the first process until it stops."""
    cache: KeyCache | None = None
    while True:
        message: list[Any] = [None, None]
        dist.broadcast_object_list(message, src=0)
        name, arguments = message
        if name == "stop":
            return
        if name == "new_cache":
            sizes, table_shape, settings = arguments
            table_UZ = torch.zeros(table_shape, dtype=torch.int32)
            cache = KeyCache(model.config, *sizes, table_UZ=table_UZ, **settings)
            continue
        assert cache is not None, "the first message makes the cache"
        if name in ("copy_block", "write_blocks"):
            getattr(cache, name)(*arguments)
            continue
        table_UZ, *inputs, attention = arguments
        cache.table_UZ.copy_(table_UZ)
        if name == "ragged_hidden":
            *inputs, rows = inputs
            model.ragged_hidden(*inputs, cache, rows, attention)
        else:
            model.ragged_mtp(*inputs, cache, attention)
