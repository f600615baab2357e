"""What a configuration costs, in exact numbers: parameters, stored bytes, cache bytes and floating-point operations.

Torch-free: everything follows from the shapes. The published numbers of GLM-5 and GLM-5.2 are tests, and so is the
agreement with a model built on the meta device. One multiplication with an addition counts as two operations.

Letters: D hidden, H heads, N/R nope/rope dims, V value dim, C kv latent, J index heads, X index head dim, E experts,
k ``index_topk``, T context.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm5.model.config import ModelConfig

FP8_BLOCK = 128
"""Rows and columns of a block of FP8 weights that shares one scale; the last block of a matrix may be partial."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Equal matrices of the model, [out, in] each."""

    out: int
    inner: int
    main: int
    """Number in the main model."""
    mtp: int
    """Number in an MTP layer."""
    active: int
    """Number in the main model that one token passes."""
    quantised: bool
    """Stored in FP8 by an FP8 checkpoint."""
    is_expert: bool = False
    """Belongs to the routed experts."""
    is_per_head: bool = False
    """One side is split by attention heads, so that tensor parallelism can shard it."""

    @property
    def size(self) -> int:
        """Elements of one matrix."""
        return self.out * self.inner

    @property
    def blocks(self) -> int:
        """Scales of one matrix in an FP8 checkpoint."""
        return -(-self.out // FP8_BLOCK) * -(-self.inner // FP8_BLOCK)


def matrices(config: ModelConfig) -> list[Matrices]:
    """All matrices of the layers; embedding, head and ``eh_proj`` are not among them."""
    hidden, heads, inner = config.hidden_size, config.num_attention_heads, config.moe_intermediate_size
    layers, full = config.num_hidden_layers, config.indexer_schedule.count("full")
    dense, sparse = (config.mlp_schedule.count(kind) for kind in ("dense", "sparse"))
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    shared_inner = inner * config.n_shared_experts
    values = config.qk_nope_head_dim + config.v_head_dim

    def everywhere(out: int, inside: int, per_head: bool = False) -> Matrices:
        return Matrices(out, inside, layers, 1, layers, True, is_per_head=per_head)

    return [
        everywhere(config.q_lora_rank, hidden),
        everywhere(heads * config.qk_head_dim, config.q_lora_rank, per_head=True),
        everywhere(config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        everywhere(heads * values, config.kv_lora_rank, per_head=True),
        everywhere(hidden, heads * config.v_head_dim, per_head=True),
        Matrices(config.index_n_heads * config.index_head_dim, config.q_lora_rank, full, 1, full, True),
        Matrices(config.index_head_dim, hidden, full, 1, full, True),
        Matrices(config.index_n_heads, hidden, full, 1, full, False),
        Matrices(config.intermediate_size, hidden, 2 * dense, 0, 2 * dense, True),
        Matrices(hidden, config.intermediate_size, dense, 0, dense, True),
        Matrices(experts, hidden, sparse, 1, sparse, False),
        Matrices(inner, hidden, 2 * sparse * experts, 2 * experts, 2 * sparse * chosen, True, is_expert=True),
        Matrices(hidden, inner, sparse * experts, experts, sparse * chosen, True, is_expert=True),
        Matrices(shared_inner, hidden, 2 * sparse, 2, 2 * sparse, True),
        Matrices(hidden, shared_inner, sparse, 1, sparse, True),
    ]


def norm_parameters(config: ModelConfig) -> tuple[int, int]:
    """Elements of all vectors (norm weights and the bias of ``k_norm``) of the main model and of an MTP layer."""
    layer = 2 * config.hidden_size + config.q_lora_rank + config.kv_lora_rank
    indexer = 2 * config.index_head_dim
    main = config.num_hidden_layers * layer + config.indexer_schedule.count("full") * indexer + config.hidden_size
    return main, layer + indexer + 3 * config.hidden_size


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Exact numbers of parameters; the router bias, a buffer, counts apart.

    ``total`` is the main model and ``with_mtp`` adds the MTP layer. ``active`` are the parameters of the main model
    that one token passes, embedding and head included; the other published senses of the word stand beside it.
    """
    table = matrices(config)
    main_norms, mtp_norms = norm_parameters(config)
    embedding = config.vocab_size * config.hidden_size
    chosen, experts = config.num_experts_per_tok, config.n_routed_experts
    mtp_rest = mtp_norms + 2 * config.hidden_size**2
    mtp_layer = sum(item.size * item.mtp for item in table) + mtp_rest
    mtp_active = mtp_rest + sum(item.size * item.mtp * chosen // experts if item.is_expert else item.size * item.mtp
                                for item in table)
    total = 2 * embedding + main_norms + sum(item.size * item.main for item in table)
    active = 2 * embedding + main_norms + sum(item.size * item.active for item in table)
    depths, sparse = config.num_nextn_predict_layers, config.mlp_schedule.count("sparse")
    return {
        "total": total, "with_mtp": total + depths * mtp_layer,
        "active": active, "active_without_embedding": active - embedding,
        "active_without_embedding_and_head": active - 2 * embedding, "active_with_mtp": active + depths * mtp_active,
        "routed_experts": sum(item.size * item.main for item in table if item.is_expert),
        "router_bias": sparse * experts, "router_bias_with_mtp": (sparse + depths) * experts,
    }


def tensor_counts(config: ModelConfig) -> dict[str, int]:
    """Numbers of tensors in a published checkpoint, MTP layer included: in bf16, and in FP8 with its scales."""
    depths, full = config.num_nextn_predict_layers, config.indexer_schedule.count("full")
    table = matrices(config)
    stored = sum(item.main + depths * item.mtp for item in table)
    vectors = 4 * (config.num_hidden_layers + depths) + 2 * (full + depths) + 1 + 3 * depths
    biases = config.mlp_schedule.count("sparse") + depths
    bf16 = stored + vectors + biases + 2 + depths
    return {"bf16": bf16, "fp8": bf16 + sum(item.main + depths * item.mtp for item in table if item.quantised)}


def stored_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of the tensors of a published checkpoint, MTP layer included, in bf16 and in FP8."""
    counts, depths = parameter_counts(config), config.num_nextn_predict_layers
    bf16 = 2 * counts["with_mtp"] + 4 * counts["router_bias_with_mtp"]
    fp8 = bf16 + sum((item.main + depths * item.mtp) * (4 * item.blocks - item.size)
                     for item in matrices(config) if item.quantised)
    return {"bf16": bf16, "fp8": fp8}


def cache_bytes_per_token(config: ModelConfig, itemsize: int = 2) -> dict[str, int]:
    """Cache of one token in the main model: latent (C + R) in every layer, index key (X) where a layer has an indexer.

    ``mtp`` is what an MTP layer adds when it drafts.
    """
    latent = (config.kv_lora_rank + config.qk_rope_head_dim) * itemsize
    index = config.index_head_dim * itemsize
    return {"latent": config.num_hidden_layers * latent, "index": config.indexer_schedule.count("full") * index,
            "mtp": config.num_nextn_predict_layers * (latent + index)}


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of the main model per token."""

    projections: float
    """Two for each active matrix element, the head where it runs."""
    attention: float
    """Query-key products and weighted values over the selected keys, all layers."""
    indexer: float
    """Scores of all visible keys in the layers with an indexer; none while no more than k keys are visible."""

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.projections + self.attention + self.indexer


def decode_flops(config: ModelConfig, context: int) -> Flops:
    """The token that sees ``context`` keys, itself included: attention in the latent space, 2 H (2 C + R) a key."""
    keys = min(context, config.index_topk)
    scored = context if context > config.index_topk else 0
    return Flops(2.0 * (_active_matrix_elements(config) + _head_elements(config)),
                 _absorbed_pair(config) * keys * config.num_hidden_layers, _indexer_pair(config) * scored)


def prefill_flops(config: ModelConfig, context: int) -> Flops:
    """Mean over a prompt of ``context`` tokens: attention in the latent space, the head for the last token only."""
    keys, scored = _mean_keys(config, context)
    head = 2.0 * _head_elements(config) / context
    return Flops(2.0 * _active_matrix_elements(config) + head,
                 _absorbed_pair(config) * keys * config.num_hidden_layers, _indexer_pair(config) * scored)


def train_flops(config: ModelConfig, context: int) -> Flops:
    """Mean over a training row of ``context`` tokens: forward and backward (three times forward), keys expanded, so
    2 H (N + R + V) a key, the head for every token; recomputation and MTP steps are not counted."""
    keys, scored = _mean_keys(config, context)
    pair = 2.0 * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    return Flops(6.0 * (_active_matrix_elements(config) + _head_elements(config)),
                 3 * pair * keys * config.num_hidden_layers, 3 * _indexer_pair(config) * scored)


def _active_matrix_elements(config: ModelConfig) -> int:
    return sum(item.size * item.active for item in matrices(config))


def _head_elements(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def _absorbed_pair(config: ModelConfig) -> float:
    return 2.0 * config.num_attention_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)


def _indexer_pair(config: ModelConfig) -> float:
    """Score of one key in all layers with an indexer: J dot products of width X, then the weighted sum over J."""
    return 2.0 * config.index_n_heads * (config.index_head_dim + 1) * config.indexer_schedule.count("full")


def _mean_keys(config: ModelConfig, context: int) -> tuple[float, float]:
    """Mean over positions 1 … T of the attended keys min(t, k), and of the scored keys (t where t > k)."""
    short = min(context, config.index_topk)
    within = short * (short + 1) // 2
    beyond = context * (context + 1) // 2 - within
    return (within + (context - short) * config.index_topk) / context, beyond / context
