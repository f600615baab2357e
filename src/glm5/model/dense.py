"""Dense causal language models of the Transformers library (Llama and Qwen class) behind the interface of our model.

The network is the library's own; only its attention is ours, registered under one name and given what a call attends
to: packed rows for training and scoring, or a paged key cache for inference. So whatever runs our model (the trainer,
the engine with its prefix cache and weight updates) runs these too, and both sides compute one and the same function.

A checkpoint is a Transformers directory. As for our own models, a missing, unexpected or misshapen tensor is an error.

Letters: B rows, T query tokens, S keys, H heads, J key heads, K head dim, M flattened tokens, D hidden, W vocabulary,
U slots.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glm5.device import HOST
from glm5.errors import CheckpointError, ConfigError
from glm5.model.cache import CacheKind, ExactEntries, KeyCache
from glm5.model.checkpoint import copy_tokenizer, replacing
from glm5.model.delta import open_tensors
from glm5.model.parts import TokenPart
from glm5.model.shards import ShardWriter, TensorSpec

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The library's class by ``model_type``, of the architectures that are known to work: full causal attention, nothing
but weights and biases."""
_ATTENTION = "glm5"
_MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class DenseOutput:
    """Result of ``forward`` and ``hidden``."""

    logits: Tensor | None
    """[B, T, W]; None from ``hidden``."""
    hidden_BTD: Tensor
    """After the final norm."""
    expert_load_LE: Tensor
    """No row: there are no experts. It and the next stand for what losses of either family add up."""
    balance_loss: Tensor
    """Zero."""


class DenseCausalLM(nn.Module):
    """A Transformers model as the trainer and the engine see it."""

    def __init__(self, network: Any) -> None:
        """``network`` is a ``...ForCausalLM`` whose attention is set to ours (see ``load_dense``)."""
        super().__init__()
        self.network = network
        self.config = network.config
        self.part = TokenPart()

    @property
    def lm_head(self) -> nn.Linear:
        """The output head; its weight may be the embedding's."""
        head: nn.Linear = self.network.lm_head
        return head

    def forward(self, input_ids_BT: Tensor, positions_BT: Tensor | None = None,
                documents_BT: Tensor | None = None) -> DenseOutput:
        """Logits of packed rows; arguments as for ``hidden``."""
        output = self.hidden(input_ids_BT, positions_BT, documents_BT)
        return dataclasses.replace(output, logits=self.lm_head(output.hidden_BTD))

    def hidden(self, input_ids_BT: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None, *,
               attention: str = "dense", indexer_loss: bool = False) -> DenseOutput:
        """Hidden states of packed rows; ``documents_BT`` is a document id per token, -1 for padding, and attention is
        causal within a document. ``attention`` is for callers that run either family: it is dense in any case.
        Raises ConfigError for a loss of indexers, which there are none."""
        del attention
        if indexer_loss:
            raise ConfigError(f"a model of type {self.config.model_type} has no indexers to train; set "
                              "train_indexer = false")
        if positions_BT is None:
            positions_BT = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device).expand(input_ids_BT.shape)
        hidden_BTD = self._run(input_ids_BT, positions_BT, _PackedRows(documents_BT))
        return DenseOutput(None, hidden_BTD, hidden_BTD.new_zeros(0, 1), hidden_BTD.new_zeros(()))

    def published_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint stores, by name: views of the weights, without a head that is the embedding."""
        tensors: dict[str, Tensor] = self.network.state_dict()
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        return tensors

    def new_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, *,
                  table_UZ: Tensor, with_mtp: bool = False, kind: CacheKind = "auto") -> DenseKeyCache:
        """A cache for ``ragged``. Raises ConfigError for what only our own architecture has."""
        if with_mtp or kind != "auto":
            raise ConfigError(f"cache_dtype={kind!r}: a model of type {self.config.model_type} has an unrounded cache "
                              "and no MTP layer; leave cache_dtype at auto")
        return DenseKeyCache(self.config, num_blocks, block_size, dtype, device, table_UZ)

    @torch.inference_mode()
    def ragged(self, ids_M: Tensor, positions_M: Tensor, slots_M: Tensor, cache: KeyCache, rows: Tensor | None = None,
               attention: str = "dense") -> Tensor:
        """Prefill and decode tokens in one call -> logits fp32 [rows or M, W].

        Token m is written at position ``positions[m]`` of slot ``slots[m]`` and attends to that slot up to itself. The
        tokens of one slot stand together, in order. ``rows`` are the indices into M whose logits are wanted.
        """
        del attention
        hidden_MD = self._run(ids_M[None], positions_M[None], _RaggedStep.of(positions_M, slots_M, cache))[0]
        return self.lm_head(hidden_MD if rows is None else hidden_MD[rows]).float()

    def _run(self, ids_BT: Tensor, positions_BT: Tensor, context: _PackedRows | _RaggedStep) -> Tensor:
        output = self.network.base_model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False, context=context)
        hidden_BTD: Tensor = output.last_hidden_state
        return hidden_BTD


class DenseKeyCache(KeyCache):
    """Keys and values of every layer in pages, as ``latents`` and ``index_keys`` of a cache that is never rounded."""

    def __init__(self, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str,
                 table_UZ: Tensor) -> None:
        self.table_UZ, self.block_size = table_UZ, block_size
        self._num_blocks, self._kind = num_blocks, "auto"
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_key_value_heads * head_dim
        self.latents, self.index_keys = (
            [ExactEntries(num_blocks, block_size, width, dtype, device) for _ in range(config.num_hidden_layers)]
            for _ in ("keys", "values"))


class _PackedRows:
    """Attention of rows that hold several documents."""

    def __init__(self, documents_BT: Tensor | None) -> None:
        self._documents_BT = documents_BT
        self._mask_B1TS: Tensor | None = None

    def attend(self, layer: int, q_BHTK: Tensor, k_BJSK: Tensor, v_BJSK: Tensor, scaling: float) -> Tensor:
        """[B, H, T, K]; the same mask in every ``layer``."""
        del layer
        if self._documents_BT is None:
            return nn.functional.scaled_dot_product_attention(q_BHTK, k_BJSK, v_BJSK, is_causal=True, scale=scaling,
                                                              enable_gqa=True)
        if self._mask_B1TS is None:
            same_BTS = self._documents_BT[:, :, None] == self._documents_BT[:, None, :]
            self._mask_B1TS = same_BTS.tril()[:, None]  # padding is a document as well: no row of the mask is empty
        return nn.functional.scaled_dot_product_attention(q_BHTK, k_BJSK, v_BJSK, self._mask_B1TS, scale=scaling,
                                                          enable_gqa=True)


@dataclass(frozen=True, slots=True)
class _Group:
    """Queries that attend in one call: a decoding token of every sequence, or a chunk of one."""

    tokens_UT: Tensor
    """Indices of the queries in the step."""
    entries_US: Tensor
    """Rows of the cache that hold the keys of each slot, in order; what is past the length is masked."""
    mask_U1TS: Tensor


@dataclass(frozen=True, slots=True)
class _RaggedStep:
    """Attention of the tokens of one engine step over a paged cache."""

    cache: KeyCache
    rows_M: Tensor
    """Row of the cache where each token is written."""
    groups: list[_Group]

    @classmethod
    def of(cls, positions_M: Tensor, slots_M: Tensor, cache: KeyCache) -> _RaggedStep:
        """Groups of the tokens: all runs of one token together, each longer run alone."""
        slots = slots_M.tolist()
        starts = [m for m in range(len(slots)) if m == 0 or slots[m] != slots[m - 1]]
        runs = list(zip(starts, [*starts[1:], len(slots)], strict=True))
        single = [start for start, stop in runs if stop - start == 1]
        chunks = [torch.tensor([single]).mT] if single else []
        chunks += [torch.arange(start, stop)[None] for start, stop in runs if stop - start > 1]
        groups = [cls._group(tokens_UT.to(slots_M.device), positions_M, slots_M, cache) for tokens_UT in chunks]
        return cls(cache, cache.rows(slots_M, positions_M), groups)

    @staticmethod
    def _group(tokens_UT: Tensor, positions_M: Tensor, slots_M: Tensor, cache: KeyCache) -> _Group:
        positions_UT = positions_M[tokens_UT]
        keys_S = torch.arange(int(positions_UT.max()) + 1, device=positions_M.device)
        slots_US = slots_M[tokens_UT[:, :1]].expand(-1, len(keys_S))
        mask_U1TS = (keys_S <= positions_UT[..., None])[:, None]
        seen_US = keys_S.expand_as(slots_US).minimum(positions_UT[:, -1:])  # past the length: a row that exists
        return _Group(tokens_UT, cache.rows(slots_US, seen_US), mask_U1TS)

    def attend(self, layer: int, q_1HMK: Tensor, k_1JMK: Tensor, v_1JMK: Tensor, scaling: float) -> Tensor:
        """[1, H, M, K]; keys and values of ``layer`` are appended first."""
        stored = self.cache.layer(layer)
        for entries, x_1JMK in zip(stored, (k_1JMK, v_1JMK), strict=True):
            entries.write(self.rows_M, x_1JMK[0].transpose(0, 1).flatten(1))
        out_HMK = torch.empty_like(q_1HMK[0])
        for group in self.groups:
            k_UJSK, v_UJSK = (
                entries.read(None).flatten(0, 1)[group.entries_US].unflatten(-1, (k_1JMK.shape[1], -1)).transpose(1, 2)
                for entries in stored)
            q_UHTK = q_1HMK[0][:, group.tokens_UT].transpose(0, 1)
            out_UHTK = nn.functional.scaled_dot_product_attention(
                q_UHTK, k_UJSK.to(q_UHTK.dtype), v_UJSK.to(q_UHTK.dtype), group.mask_U1TS, scale=scaling,
                enable_gqa=True)
            out_HMK[:, group.tokens_UT] = out_UHTK.transpose(0, 1)
        return out_HMK[None]


def _attend(module: nn.Module, q_BHTK: Tensor, k_BJSK: Tensor, v_BJSK: Tensor, mask: None, *, scaling: float,
            context: _PackedRows | _RaggedStep, **_: Any) -> tuple[Tensor, None]:
    """Transformers' attention interface: the output is [B, T, H, K]."""
    out_BHTK = context.attend(module.layer_idx, q_BHTK, k_BJSK, v_BJSK, scaling)
    return out_BHTK.transpose(1, 2), None


def is_dense(directory: str | Path) -> bool:
    """Whether the checkpoint in ``directory`` is of one of ``CLASSES``."""
    try:
        config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
        return config.get("model_type") in CLASSES
    except (OSError, ValueError, AttributeError):
        return False


def load_dense(directory: str | Path, dtype: torch.dtype | None = None,
               device: torch.device | str = HOST) -> DenseCausalLM:
    """The model of a Transformers directory, in evaluation mode; ``dtype`` None keeps the stored type.

    Raises CheckpointError naming what is missing, unexpected or misshapen, ConfigError without the library.
    """
    transformers = _transformers()
    transformers.AttentionInterface.register(_ATTENTION, _attend)
    directory = Path(directory)
    tensors = {name: tensor.to(dtype or tensor.dtype, copy=True)  # the reader's are mapped from files
               for name, tensor in open_tensors(directory).items()}
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        network, report = getattr(transformers, CLASSES[config.model_type]).from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype or "auto", attn_implementation=_ATTENTION,
            output_loading_info=True)
        if (directory / "generation_config.json").exists():
            network.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{directory}: cannot be loaded ({str(error).splitlines()[0]}); use a complete "
                              "Transformers checkpoint") from None
    wrong = {kind: sorted(report[f"{kind}_keys"]) for kind in ("missing", "unexpected", "mismatched")}
    for kind, names in wrong.items():
        if names:
            raise CheckpointError(f"{directory}: {kind} tensor {names[0]} (and {len(names) - 1} more); use a complete "
                                  "checkpoint or correct config.json")
    kinds = set(getattr(network.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(f"{directory / 'config.json'}: layer_types {sorted(kinds)}; only full attention is supported")
    return DenseCausalLM(network.to(device)).eval()


def save_dense(model: DenseCausalLM, directory: str | Path, tokenizer_source: Path | None = None) -> None:
    """Write ``model`` as a Transformers directory; an existing checkpoint there is replaced. Raises CheckpointError."""
    tensors = model.published_tensors()
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with replacing(Path(directory)) as temporary:
        writer = ShardWriter(temporary, specs, _MAX_SHARD_BYTES)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.close()
        model.config.dtype = model.lm_head.weight.dtype
        model.config.architectures = [type(model.network).__name__]
        model.config.save_pretrained(temporary)
        model.network.generation_config.save_pretrained(temporary)
        if tokenizer_source is not None:
            copy_tokenizer(Path(tokenizer_source), temporary)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError("a Llama or Qwen checkpoint needs transformers; pip install 'glm5[policy]'") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers
