"""Memory plan: bytes on each device for a parallel layout, in training and in serving.

Weights, gradients, optimizer and cache follow exactly from the shapes and the rules below; activations are an estimate.
A layout has fsdp x ep x cp x tp devices. In training all parameters are sharded over all devices; a layer at work is
gathered but for its experts, divided along ep, and its heads, divided along tp. In serving nothing is gathered: each
device holds its experts, its heads and all other weights; fsdp and ep ranks have sequences of their own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from glm5.errors import ConfigError
from glm5.model.config import ModelConfig
from glm5.model.counts import cache_bytes_per_token, matrices, norm_parameters

_HEAD_CHUNK = 1024
"""Tokens whose logits exist at once in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of the parallel axes."""

    fsdp: int = 1
    """Ranks with other rows and the same experts."""
    ep: int = 1
    """Ranks with other rows and other routed experts."""
    cp: int = 1
    """Ranks that divide the tokens of a row."""
    tp: int = 1
    """Ranks that divide the attention heads."""

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ConfigError(f"layout: {name}={size}: expected at least 1")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.fsdp * self.ep * self.cp * self.tp


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes on one device in training."""

    weights: int
    """fp32 master weights."""
    gradients: int
    """fp32."""
    optimizer: int
    """One fp32 momentum for matrices (Muon), two fp32 moments for all other parameters (AdamW)."""
    gathered: int
    """bf16 copies of the largest layer and the one fetched ahead, as they are while computed."""
    activations: int
    """Input of every layer, and one layer at work: activation checkpointing per layer, logits by chunks. Estimate."""


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Bytes on one device in serving."""

    weights_bf16: int
    """Weights as in a bf16 checkpoint."""
    weights_fp8: int
    """Weights as in an FP8 checkpoint, scales included."""
    cache: int
    """Latent and index keys of the sequences of one rank, bf16, divided along cp."""
    activations: int
    """One prefill chunk at work. Estimate."""


def parse_layout(text: str) -> Layout:
    """A layout such as ``fsdp=8,ep=8,cp=1,tp=1``; axes left out are 1. Raises ConfigError."""
    axes = {field.name for field in dataclasses.fields(Layout)}
    sizes = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in axes or not value.strip().isdigit():
            raise ConfigError(f"layout {text!r}: got {part!r}; expected axes fsdp, ep, cp, tp with sizes, such as "
                              "fsdp=8,ep=8")
        sizes[name.strip()] = int(value)
    return Layout(**sizes)


def training_memory(config: ModelConfig, layout: Layout, tokens: int) -> TrainingMemory:
    """Plan for micro-batches of ``tokens`` tokens, divided along cp; MTP layer included."""
    _check_layout(config, layout)
    depths, hidden = config.num_nextn_predict_layers, config.hidden_size
    main_norms, mtp_norms = norm_parameters(config)
    matrix_elements = sum(item.size * (item.main + depths * item.mtp) for item in matrices(config))
    matrix_elements = -(-(matrix_elements + depths * 2 * hidden**2) // layout.devices)
    others = -(-(2 * config.vocab_size * hidden + main_norms + depths * mtp_norms) // layout.devices)
    elements = matrix_elements + others
    return TrainingMemory(4 * elements, 4 * elements, 4 * matrix_elements + 8 * others,
                          2 * 2 * _largest_layer(config, layout),
                          _training_activations(config, layout, -(-tokens // layout.cp)))


def serving_memory(config: ModelConfig, layout: Layout, context: int, sequences: int, chunk: int) -> ServingMemory:
    """Plan for ``sequences`` sequences of ``context`` tokens on each fsdp and ep rank, and prefill chunks of ``chunk``
    tokens; MTP layer included."""
    _check_layout(config, layout)
    depths = config.num_nextn_predict_layers
    main_norms, mtp_norms = norm_parameters(config)
    plain = 2 * config.vocab_size * config.hidden_size + main_norms + depths * mtp_norms
    plain += depths * 2 * config.hidden_size**2
    bf16 = fp8 = 2 * plain
    for item in matrices(config):
        ranks = layout.ep if item.is_expert else layout.tp if item.is_per_head else 1
        count = item.main + depths * item.mtp
        bf16 += -(-2 * item.size * count // ranks)
        fp8 += -(-(item.size + 4 * item.blocks if item.quantised else 2 * item.size) * count // ranks)
    cache = sum(cache_bytes_per_token(config).values()) * -(-context // layout.cp) * sequences
    return ServingMemory(bf16, fp8, cache, 2 * chunk * _layer_width(config, layout))


def _check_layout(config: ModelConfig, layout: Layout) -> None:
    for axis, size, key, total in (("tp", layout.tp, "num_attention_heads", config.num_attention_heads),
                                   ("ep", layout.ep, "n_routed_experts", config.n_routed_experts)):
        if total % size:
            raise ConfigError(f"layout: {axis}={size} does not divide {key}={total}")


def _largest_layer(config: ModelConfig, layout: Layout) -> int:
    """Matrix elements of a sparse layer with an indexer (of a dense one in a model without experts) when gathered."""
    is_sparse = "sparse" in config.mlp_schedule or config.num_nextn_predict_layers > 0
    elements = 0
    for item in matrices(config):
        count = item.mtp  # an MTP layer is such a layer
        if not is_sparse:
            count = min(item.main, item.mtp or item.main // config.num_hidden_layers)
        split = layout.ep if item.is_expert else layout.tp if item.is_per_head else 1
        elements += -(-item.size * count // split)
    return elements


def _training_activations(config: ModelConfig, layout: Layout, tokens: int) -> int:
    """bf16 layer inputs, selected positions (int32) and one layer at work three times over (values, gradients,
    temporaries), and fp32 logits of a chunk with their gradient."""
    depths = config.num_nextn_predict_layers
    inputs = 2 * tokens * config.hidden_size * (config.num_hidden_layers + depths + 1)
    selection = 4 * tokens * min(config.index_topk, tokens * layout.cp)
    logits = 2 * 4 * min(tokens, _HEAD_CHUNK) * config.vocab_size
    return inputs + selection + 3 * 2 * tokens * _layer_width(config, layout) + logits


def _layer_width(config: ModelConfig, layout: Layout) -> int:
    """Activation elements of one layer for one token: norms, latents, queries, keys and values, experts."""
    heads = config.num_attention_heads // layout.tp
    attention = heads * (2 * config.qk_head_dim + 2 * config.v_head_dim) + config.q_lora_rank + config.kv_lora_rank
    attention += config.index_n_heads * config.index_head_dim
    chosen = config.num_experts_per_tok + config.n_shared_experts
    experts = chosen * (config.hidden_size + 3 * config.moe_intermediate_size)
    return 4 * config.hidden_size + attention + max(experts, 3 * config.intermediate_size)
