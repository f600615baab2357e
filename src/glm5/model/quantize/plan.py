"""Which matrices are quantised and how, and the ``quantization_config`` that says so in a published directory.

The directory format is that of compressed-tensors, which vLLM, SGLang and Transformers read: INT4 as ``pack-quantized``
(``weight_packed`` int32 [out, ceil(in/8)], ``weight_scale`` [out, groups], ``weight_shape``), INT8 as ``int-quantized``
(``weight`` int8, ``weight_scale`` [out, 1]), FP8 as ``float-quantized`` with 128 x 128 blocks (``weight`` e4m3,
``weight_scale`` [ceil(out/128), ceil(in/128)]). Several formats in one directory are ``mixed-precision``.

Never quantised: embeddings, head, norms, the router, ``eh_proj``, the indexer's head weights, and ``kv_b_proj``, which
the absorbed form of the attention multiplies from both sides. No torch here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glm5.errors import ConfigError
from glm5.model.config import ModelConfig
from glm5.model.counts import FP8_BLOCK

Kind = Literal["int4", "int8", "fp8"]
Choice = Literal["none", "int4", "int8", "fp8"]

TRAINED_FOR = "trained_for_quantization"
"""Key of the ``config.json`` of a checkpoint whose training has seen its weights rounded: the plan, as an object."""

FAMILIES: Mapping[str, str] = {
    "experts": r".*mlp\.experts\.\d+\.(gate|up|down)_proj$",
    "attention": r".*self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)$",
    "mlp": r".*mlp\.(shared_experts\.)?(gate|up|down)_proj$",
    "indexer": r".*indexer\.(wq_b|wk)$",
}
"""Families of matrices by the published names of their modules."""

_UNTOUCHED = ("lm_head", r"re:.*kv_b_proj$", r"re:.*mlp\.gate$", r"re:.*weights_proj$", r"re:.*eh_proj$")
_ROTATED = r"re:.*down_proj$"
_FORMATS: Mapping[Kind, str] = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one matrix is stored, and whether its inputs are rounded too."""

    kind: Kind
    group_size: int = 128
    """Consecutive inputs that share one INT4 scale; the last group of a row may be smaller."""
    rounds_inputs: bool = True
    """Round the inputs of each token to 8 bits before multiplying: W8A8, W4A8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantisationPlan:
    """The format of each family of matrices; the defaults are W4A8 experts and W8A8 elsewhere."""

    experts: Choice = "int4"
    """Routed experts."""
    attention: Choice = "int8"
    """Projections of the latent attention, ``kv_b_proj`` excepted."""
    mlp: Choice = "int8"
    """Dense feed-forward layers and shared experts."""
    indexer: Choice = "none"
    """``wq_b`` and ``wk`` of the indexer; rounding them changes which keys are selected."""
    group_size: int = 128
    """Consecutive inputs that share one INT4 scale."""
    rounds_inputs: bool = True
    """Round the inputs of each token to 8 bits before multiplying."""

    def __post_init__(self) -> None:
        if self.group_size < 8 or self.group_size % 8:
            raise ConfigError(f"group_size={self.group_size}: expected a positive multiple of 8, for example 128")
        for family in FAMILIES:
            if getattr(self, family) not in ("none", *_FORMATS):
                raise ConfigError(f"{family}={getattr(self, family)!r}: expected none, int4, int8 or fp8")

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> QuantisationPlan:
        """The plan of ``TRAINED_FOR``. Raises ConfigError naming ``source``."""
        try:
            return cls(**data)
        except (TypeError, ConfigError) as error:
            raise ConfigError(f"{source}: {TRAINED_FOR}: {error}; remove the key or correct it") from None

    def format_of(self, module: str) -> WeightFormat | None:
        """The format of the matrix of ``module`` (published name), None when it stays as it is."""
        for family, pattern in FAMILIES.items():
            if re.fullmatch(pattern, module):
                kind = getattr(self, family)
                return None if kind == "none" else WeightFormat(kind, self.group_size, self.rounds_inputs)
        return None

    def to_json(self, down_rotation: int = 0) -> dict[str, Any]:
        """The ``quantization_config`` of a directory. ``down_rotation`` above 0: the inputs of ``down_proj`` are to be
        rotated in blocks of that many by a Hadamard matrix before they are multiplied, as its weights have been."""
        groups: dict[str, Any] = {}
        ignored = list(_UNTOUCHED)
        for family, pattern in FAMILIES.items():
            kind = getattr(self, family)
            if kind == "none":
                ignored.append(f"re:{pattern}")
                continue
            groups[f"group_{len(groups)}"] = {
                "targets": [f"re:{pattern}"], "weights": _weights(kind, self.group_size),
                "input_activations": _inputs(kind) if self.rounds_inputs else None, "output_activations": None,
                "format": _FORMATS[kind]}
        formats = {group["format"] for group in groups.values()}
        config = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None,
                  "format": formats.pop() if len(formats) == 1 else "mixed-precision", "config_groups": groups,
                  "ignore": ignored}
        if down_rotation:
            config["transform_config"] = {"config_groups": {"R4": {
                "type": "hadamard", "head_dim": down_rotation, "apply": [
                    {"targets": [_ROTATED], "location": "input"},
                    {"targets": [_ROTATED], "location": "weight_input", "inverse": True}]}}}
        return config


def trained_for(config: ModelConfig, plan: QuantisationPlan | None) -> ModelConfig:
    """``config`` for checkpoints of a training that sees its weights rounded by ``plan``, or exact ones (None).

    Raises ConfigError when the weights are integers already, which cannot be trained.
    """
    if "quantization_config" in config.extra:
        raise ConfigError("quantization_config: quantised weights cannot be trained; start from the checkpoint that "
                          "they were made from")
    extra = {key: value for key, value in config.extra.items() if key != TRAINED_FOR}
    return config.replace(extra=extra if plan is None else {**extra, TRAINED_FOR: dataclasses.asdict(plan)})


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """What the ``quantization_config`` of a directory says about each kind of weight that may be in it."""

    by_kind: Mapping[Kind, WeightFormat]
    down_rotation: int
    """Block size of the Hadamard rotation of the inputs of ``down_proj``; 0: none."""

    @classmethod
    def from_json(cls, config: Mapping[str, Any], source: str) -> StoredFormats:
        """Read the ``quantization_config`` of compressed-tensors.

        Which matrices are quantised is not read from it (published lists name tensors that do not exist) but from the
        tensors themselves. Raises ConfigError for anything that cannot be computed here.
        """
        formats: dict[Kind, WeightFormat] = {}
        for group in config.get("config_groups", {}).values():
            found = _read_group(group, source)
            if formats.setdefault(found.kind, found) != found:
                raise ConfigError(f"{source}: quantization_config has two kinds of {found.kind} weights; expected one "
                                  "group size and one rounding of inputs for each kind")
        transforms = config.get("transform_config") or {}
        block = int((transforms.get("config_groups") or {}).get("R4", {}).get("head_dim") or 0)
        if transforms and transforms != QuantisationPlan().to_json(block).get("transform_config"):
            raise ConfigError(f"{source}: quantization_config.transform_config: only a Hadamard rotation (R4, with "
                              "head_dim) of the inputs of down_proj is implemented; export without it")
        return cls(formats, block)


def _weights(kind: Kind, group_size: int) -> dict[str, Any]:
    common = {"symmetric": True, "dynamic": False}
    if kind == "int4":
        return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, **common}
    if kind == "int8":
        return {"num_bits": 8, "type": "int", "strategy": "channel", **common}
    return {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK], **common}


def _inputs(kind: Kind) -> dict[str, Any]:
    if kind == "fp8":
        return {"num_bits": 8, "type": "float", "strategy": "group", "group_size": FP8_BLOCK, "symmetric": True,
                "dynamic": True}
    return {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}


def _read_group(group: Mapping[str, Any], source: str) -> WeightFormat:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    kinds: dict[tuple[Any, ...], Kind] = {(4, "int", "group"): "int4", (8, "int", "channel"): "int8",
                                          (8, "float", "block"): "fp8"}
    kind = kinds.get((weights.get("num_bits"), weights.get("type"), weights.get("strategy")))
    if kind is None or not weights.get("symmetric", True):
        raise ConfigError(f"{source}: quantization_config weights {dict(weights)}: expected symmetric int4 in groups, "
                          "int8 by channel or fp8 in 128 x 128 blocks")
    expected = _inputs(kind)
    if inputs is not None and any(inputs.get(key) != expected[key] for key in ("num_bits", "type", "dynamic")):
        raise ConfigError(f"{source}: quantization_config input_activations {dict(inputs)}: expected null or "
                          f"{expected}")
    return WeightFormat(kind, int(weights.get("group_size") or 128), inputs is not None)
