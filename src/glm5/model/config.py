"""Model configuration: the fields of a published ``config.json``, presets and schedules.

Torch-free. A ``ModelConfig`` is frozen; field names are the published ones. Keys that this package does not act on are
kept in ``extra`` and written back unchanged, so that reading and writing a published file loses nothing. Keys that
only ever have one value in this architecture (``_FIXED``) are checked and written, never stored.
``head_dim`` is such an inert key on purpose: published files carry 64 or 192 there, and the rotary width is always
``qk_rope_head_dim``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError

_FIXED: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "hidden_act": "silu",
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": False,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True,
}
"""Published keys with the one value that this architecture implements."""

_UNPUBLISHED: dict[str, Any] = {"latent_norm_eps": 1e-6, "mtp_zero_first_embedding": False}
"""Keys of ours that no published file has, and their defaults: written only when they say something else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of one GLM-5-family model; the defaults are those of GLM-5."""

    vocab_size: int = 154880
    """Rows of the embedding and of the output head."""
    hidden_size: int = 6144
    """Width of the residual stream."""
    intermediate_size: int = 12288
    """Inner width of the dense feed-forward layers."""
    moe_intermediate_size: int = 2048
    """Inner width of one expert."""
    num_hidden_layers: int = 78
    """Decoder layers, the MTP layer not counted."""
    num_nextn_predict_layers: int = 1
    """MTP layers: 0 or 1."""
    num_attention_heads: int = 64
    """Heads of the latent attention."""
    num_key_value_heads: int = 64
    """Equal to ``num_attention_heads``: keys are expanded per head from the latent."""
    q_lora_rank: int = 2048
    """Width of the query latent."""
    kv_lora_rank: int = 512
    """Width of the key-value latent, which is what the cache stores."""
    qk_nope_head_dim: int = 192
    """Part of a query/key head without rotary position."""
    qk_rope_head_dim: int = 64
    """Rotary part of a query/key head, and of an index head."""
    v_head_dim: int = 256
    """Width of a value head."""
    n_routed_experts: int = 256
    """Routed experts of a sparse layer."""
    n_shared_experts: int = 1
    """Experts that every token passes, fused into one of that many times the width."""
    num_experts_per_tok: int = 8
    """Routed experts per token."""
    n_group: int = 1
    """Groups that the routed experts are split into, in order; a group scores the sum of its two best experts."""
    topk_group: int = 1
    """Groups that a token may choose its experts from."""
    norm_topk_prob: bool = True
    """Whether the chosen router scores are normalised to sum 1 before scaling."""
    routed_scaling_factor: float = 2.5
    """Factor on the routed experts' weights."""
    first_k_dense_replace: int = 3
    """Leading layers with a dense feed-forward; ``mlp_layer_types`` overrides it."""
    mlp_layer_types: tuple[str, ...] | None = None
    """``dense`` or ``sparse`` for each layer."""
    index_n_heads: int = 32
    """Heads of the lightning indexer."""
    index_head_dim: int = 128
    """Width of an index head: the rotary part first."""
    index_topk: int = 2048
    """Keys that sparse attention keeps for each query."""
    indexer_types: tuple[str, ...] | None = None
    """``full`` (own indexer) or ``shared`` (selection of the previous full layer) for each layer."""
    index_topk_pattern: str | tuple[str, ...] | None = None
    """The same as letters ``F``/``S`` or as words; used when ``indexer_types`` is absent."""
    index_topk_freq: int | None = None
    """Every so-manyth layer is full; used when neither list is present."""
    index_skip_topk_offset: int | None = None
    """Leading full layers of the frequency schedule; absent means 2."""
    index_share_for_mtp_iteration: bool = False
    """Chained MTP steps use the selection of the first step instead of making their own."""
    indexer_rope_interleave: bool = True
    """Rotary pairs of an index head are neighbours (GLM); False pairs the two halves (DeepSeek-V3.2)."""
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: _rope(1_000_000))
    """Base frequency ``rope_theta``, and ``rope_type``, always ``default``."""
    max_position_embeddings: int = 202752
    """Longest context the model is meant for."""
    rms_norm_eps: float = 1e-5
    """Epsilon of the layer norms and of the final norm."""
    latent_norm_eps: float = 1e-6
    """Epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``: 1e-6 as in Transformers; some engines use 1e-5."""
    mtp_zero_first_embedding: bool = False
    """Replace the MTP layer's embedding at position 0 by zeros, as vLLM does; Transformers and Megatron do not."""
    initializer_range: float = 0.02
    """Standard deviation of freshly initialised weights."""
    eos_token_id: tuple[int, ...] = (154820, 154827, 154829)
    """Ids that end an answer."""
    pad_token_id: int | None = 154820
    """Padding id."""
    dtype: str = "bfloat16"
    """Data type of the stored weights."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a published file that nothing here reads, written back as they were."""

    def __post_init__(self) -> None:
        self._check_types()
        if self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(f"num_key_value_heads={self.num_key_value_heads}: must equal num_attention_heads="
                              f"{self.num_attention_heads}; keys are expanded per head")
        if self.num_nextn_predict_layers not in (0, 1):
            raise ConfigError(f"num_nextn_predict_layers={self.num_nextn_predict_layers}: expected 0 or 1")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise ConfigError(f"qk_rope_head_dim={self.qk_rope_head_dim}: must be even and at most index_head_dim="
                              f"{self.index_head_dim}")
        self._check_groups()
        _check_rope(self.rope_parameters)
        if "full" not in self.indexer_schedule[:1]:
            raise ConfigError(f"indexer_types[0]={self.indexer_schedule[0]!r}: the first layer has no selection to "
                              "share; make it 'full'")
        _check_words("mlp_layer_types", self.mlp_schedule, ("dense", "sparse"), self.num_hidden_layers)
        _check_words("indexer_types", self.indexer_schedule, ("full", "shared"), self.num_hidden_layers)

    def _check_types(self) -> None:
        may_be_zero = {"num_nextn_predict_layers", "first_k_dense_replace", "pad_token_id", "index_skip_topk_offset"}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is None and item.type == "int | None":
                continue
            if item.type in ("int", "int | None"):
                least = 0 if item.name in may_be_zero else 1
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise ConfigError(f"{item.name}={value!r}: expected an integer of at least {least}")
            elif item.type == "float" and not _is_positive(value):
                raise ConfigError(f"{item.name}={value!r}: expected a positive number")
            elif item.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{item.name}={value!r}: expected true or false")

    def _check_groups(self) -> None:
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(f"num_experts_per_tok={self.num_experts_per_tok} exceeds n_routed_experts="
                              f"{self.n_routed_experts}; lower it")
        size, rest = divmod(self.n_routed_experts, self.n_group)
        if self.n_group > 1 and (rest or size < 2):
            raise ConfigError(f"n_group={self.n_group}: must divide n_routed_experts={self.n_routed_experts} into "
                              "groups of at least 2")
        if self.topk_group > self.n_group:
            raise ConfigError(f"topk_group={self.topk_group} exceeds n_group={self.n_group}; lower it")
        if self.num_experts_per_tok > self.topk_group * size:
            raise ConfigError(f"num_experts_per_tok={self.num_experts_per_tok} exceeds the {self.topk_group * size} "
                              f"experts of topk_group={self.topk_group} groups; raise topk_group")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query/key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return float(self.rope_parameters["rope_theta"])

    @property
    def mlp_schedule(self) -> tuple[str, ...]:
        """``dense`` or ``sparse`` for each decoder layer."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        return ("dense",) * dense + ("sparse",) * (self.num_hidden_layers - dense)

    @property
    def indexer_schedule(self) -> tuple[str, ...]:
        """``full`` or ``shared`` for each decoder layer: explicit list, else pattern, else frequency and offset."""
        if self.indexer_types is not None:
            return self.indexer_types
        if self.index_topk_pattern is not None:
            words = {"F": "full", "S": "shared"}
            return tuple(words.get(item, item) for item in self.index_topk_pattern)
        every = max(self.index_topk_freq or 1, 1)
        offset = 2 if self.index_skip_topk_offset is None else self.index_skip_topk_offset
        distances = (max(layer - offset + 1, 0) for layer in range(self.num_hidden_layers))
        return tuple("shared" if distance % every else "full" for distance in distances)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed and checked again. Raises ConfigError for an unknown field."""
        known = {item.name for item in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise ConfigError(f"{name}: not a field of the model configuration")
        return dataclasses.replace(self, **{name: _frozen(value) for name, value in changes.items()})

    def to_json(self) -> dict[str, Any]:
        """The object of ``config.json``, ready for ``json.dumps``; optional keys appear when they are set."""
        optional = {"mlp_layer_types", "indexer_types", "index_topk_pattern", "index_topk_freq",
                    "index_skip_topk_offset"}
        data: dict[str, Any] = {**_FIXED, "qk_head_dim": self.qk_head_dim}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name == "extra" or (item.name in optional and value is None):
                continue
            if item.name in _UNPUBLISHED and value == _UNPUBLISHED[item.name]:
                continue
            data[item.name] = list(value) if isinstance(value, tuple) else value
        data["rope_parameters"] = dict(self.rope_parameters)
        data["eos_token_id"] = list(self.eos_token_id) or None
        return {**data, **self.extra}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read the object of a ``config.json``; ``source`` names the file in messages. Raises ConfigError."""
        values = dict(data)
        for key, expected in _FIXED.items():
            if key in values and values.pop(key) not in (expected, None):
                raise ConfigError(f"{source}: {key}={data[key]!r}: this architecture implements only {expected!r}")
        if "model_type" not in data:
            raise ConfigError(f"{source}: model_type is missing; expected 'glm_moe_dsa'")
        values.pop("qk_head_dim", None)
        if values.get("rope_parameters") is None:
            if values.get("rope_theta") is None:
                raise ConfigError(f"{source}: rope_parameters is missing; add rope_theta and rope_type 'default' there")
            values["rope_parameters"] = _rope(values.pop("rope_theta"))
        if "torch_dtype" in values:
            values.setdefault("dtype", values.pop("torch_dtype"))
        names = {item.name for item in dataclasses.fields(cls)} - {"extra"}
        known = {key: _frozen(value) for key, value in values.items() if key in names and value is not None}
        stops = known.get("eos_token_id")
        known["eos_token_id"] = (stops,) if isinstance(stops, int) else stops or ()
        known.setdefault("pad_token_id", None)
        extra = {key: value for key, value in values.items() if key not in names}
        _check_required(known, source)
        try:
            return cls(**known, extra=extra)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_json_file(cls, path: str | Path) -> ModelConfig:
        """Read a ``config.json`` file. Raises ConfigError naming the file and the key."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a checkpoint directory") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a JSON object, got {type(data).__name__}")
        return cls.from_json(data, str(path))


def presets() -> dict[str, ModelConfig]:
    """Every preset by name."""
    return {
        "nano": ModelConfig(
            vocab_size=1024, hidden_size=128, intermediate_size=384, moe_intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=16,
            qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1,
            index_n_heads=8, index_head_dim=32, index_topk=128, max_position_embeddings=2048,
            rope_parameters=_rope(10_000), initializer_range=0.05, eos_token_id=(), pad_token_id=None,
            dtype="float32"),
        "micro": ModelConfig(
            vocab_size=4096, hidden_size=384, intermediate_size=1024, moe_intermediate_size=160, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=8, q_lora_rank=192, kv_lora_rank=128, qk_nope_head_dim=32,
            qk_rope_head_dim=32, v_head_dim=64, n_routed_experts=16, num_experts_per_tok=4, first_k_dense_replace=1,
            index_n_heads=16, index_head_dim=64, index_topk=256, max_position_embeddings=16384,
            rope_parameters=_rope(10_000), eos_token_id=(), pad_token_id=None,
            dtype="float32"),
        "mini": ModelConfig(
            vocab_size=32768, hidden_size=1024, intermediate_size=3072, moe_intermediate_size=448, num_hidden_layers=16,
            num_attention_heads=16, num_key_value_heads=16, q_lora_rank=512, kv_lora_rank=256, qk_nope_head_dim=64,
            qk_rope_head_dim=32, v_head_dim=96, n_routed_experts=40, num_experts_per_tok=4, first_k_dense_replace=1,
            index_n_heads=16, index_head_dim=64, index_topk=512, max_position_embeddings=32768,
            rope_parameters=_rope(10_000), eos_token_id=(), pad_token_id=None),
        "glm-5": ModelConfig(),
        "glm-5.2": ModelConfig(
            rope_parameters=_rope(8_000_000), max_position_embeddings=1048576,
            index_topk_freq=4, index_skip_topk_offset=3,
            index_share_for_mtp_iteration=True, extra={"moe_router_dtype": "float32"}),
    }


def preset(name: str) -> ModelConfig:
    """The preset called ``name``. Raises ConfigError listing the names."""
    known = presets()
    if name not in known:
        raise ConfigError(f"preset {name!r} does not exist; choose one of {', '.join(known)}")
    return known[name]


def _check_rope(parameters: Any) -> None:
    """A guessed base would be wrong without any error, so it must be there; scaled kinds are not implemented."""
    if not isinstance(parameters, Mapping) or not _is_positive(parameters.get("rope_theta")):
        raise ConfigError(f"rope_parameters={parameters!r}: expected rope_theta, a positive number, and rope_type "
                          "'default'")
    if parameters.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_parameters: rope_type={parameters['rope_type']!r}: this architecture has only "
                          "'default'")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default"}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_required(known: Mapping[str, Any], source: str) -> None:
    """Shape keys must be in the file: a default of another model is never a good guess."""
    required = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
                "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                "v_head_dim", "n_routed_experts", "num_experts_per_tok", "index_n_heads", "index_head_dim",
                "index_topk")
    for key in required:
        if key not in known:
            raise ConfigError(f"{source}: {key} is missing; add it")


def _check_words(key: str, found: tuple[str, ...], allowed: tuple[str, ...], length: int) -> None:
    if len(found) != length:
        raise ConfigError(f"{key} has {len(found)} entries for num_hidden_layers={length}; give one for each layer")
    for index, word in enumerate(found):
        if word not in allowed:
            raise ConfigError(f"{key}[{index}]={word!r}: expected one of {', '.join(allowed)}")
