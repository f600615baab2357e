"""From a float checkpoint to a quantised one, a decoder layer at a time.

Each layer is read in fp32, its inputs on calibration tokens are recorded, rotations and scales are folded in, its
matrices are rounded, and it is written; memory is that of two copies of one layer and the embedding. Held-out tokens
pass the original and the quantised layers side by side, so that the quality of what was written is known at the end
without loading it. Variants that are only measured pass along in the same way.

The target appears by one rename. Letters: B rows, T tokens, D hidden, W vocabulary, R rotary dims.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from glm5.device import HOST
from glm5.errors import CheckpointError, ConfigError
from glm5.model.checkpoint import (
    MAX_SHARD_BYTES,
    copy_tokenizer,
    open_checkpoint,
    replacing,
    state_dict_published,
    write_config,
)
from glm5.model.config import ModelConfig
from glm5.model.fp8 import FP8, PublishedTensors
from glm5.model.layers import PackedRows, rotary_tables
from glm5.model.mla import AttentionMode
from glm5.model.mtp import DecoderLayer, MtpLayer
from glm5.model.parts import TokenPart
from glm5.model.quantize.hadamard import down_block, rotate_down, rotate_layer
from glm5.model.quantize.plan import TRAINED_FOR, QuantisationPlan
from glm5.model.quantize.projections import QuantisedMatrix, quantise_modules
from glm5.model.quantize.scaling import Recorder, scale_layer
from glm5.model.shards import ShardWriter, TensorSpec
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.runlog import progress_bar

Rotation = Literal["none", "folded", "online"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transforms:
    """What is done to the weights before they are rounded."""

    rotation: Rotation = "folded"
    """Hadamard rotations: none, those that cost nothing at run time, or also of the inputs of every ``down_proj``."""
    scaling: bool = True
    """Search activation-aware scales."""

    def __post_init__(self) -> None:
        if self.rotation not in ("none", "folded", "online"):
            raise ConfigError(f"rotation={self.rotation!r}: expected none, folded or online")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to quantise."""

    plan: QuantisationPlan
    transforms: Transforms


@dataclass(frozen=True, slots=True)
class Quality:
    """What rounding costs on the held-out tokens."""

    loss: float
    """Cross-entropy of the next token in nats."""
    kl: float
    """Mean KL of the quantised next-token distribution from the original one, in nats; 0 for the original."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written and how good it is."""

    original: Quality
    variants: Mapping[str, Quality]
    """By the names that were given; the first is what was written."""
    tokens: int
    """Held-out predictions behind each figure."""
    bytes_before: int
    bytes_after: int


def quantise_checkpoint(source: str | Path, target: str | Path, variants: Mapping[str, Variant], calibration_BT: Tensor,
                        held_out_BT: Tensor, max_shard_bytes: int = MAX_SHARD_BYTES) -> Exported:
    """Write ``source`` to ``target`` by the first of ``variants`` and measure all of them.

    Token ids [rows, length]: ``calibration`` for the scales, ``held_out`` for the figures. Raises ConfigError or
    CheckpointError; then nothing is left at ``target``, and what was there is unchanged.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise CheckpointError(f"{target}: source and target are the same directory; give another target")
    model, tensors = open_checkpoint(source)
    if any(isinstance(module, QuantisedMatrix) for module in model.modules()):
        raise CheckpointError(f"{source}: is quantised already; give the checkpoint that it was made from")
    if calibration_BT.numel() == 0 or held_out_BT.shape[-1] < 2 or held_out_BT.numel() == 0:
        raise ConfigError("calibration: no rows of two tokens or more for calibration and for held-out text; give more "
                          "text")
    written = next(iter(variants.values()))
    specs = _announce(model, tensors, written)
    with replacing(target) as temporary:
        writer = ShardWriter(temporary, specs, max_shard_bytes)
        passes = _Passes(model, tensors, variants, calibration_BT, held_out_BT)
        layers = len(model.model.layers)
        with progress_bar("quantize", layers, unit="layers") as bar:
            for number in range(layers):
                for name, tensor in passes.advance(number).items():
                    writer.write(name, tensor.to(specs[name].dtype))
                bar.advance(number + 1, number + 1)
        for name in tensors:
            if not name.startswith("model.layers."):
                writer.write(name, tensors[name])
        writer.close()
        extra = {key: value for key, value in model.config.extra.items() if key != TRAINED_FOR}
        block = down_block(model.config) if written.transforms.rotation == "online" else 0
        config = model.config.replace(extra={**extra, "quantization_config": written.plan.to_json(block)})
        write_config(config, temporary)
        copy_tokenizer(source, temporary)
    qualities = {name: passes.quality(name) for name in ("", *variants)}
    return Exported(qualities.pop(""), qualities, held_out_BT[:, 1:].numel(),
                    sum(spec.nbytes for spec in tensors.specs.values()), sum(spec.nbytes for spec in specs.values()))


def _announce(model: GlmMoeDsaForCausalLM, tensors: PublishedTensors, variant: Variant) -> dict[str, TensorSpec]:
    """Types and shapes of everything that will be written: floats as in the source, quantised ones as they will be."""
    quantised = copy.deepcopy(model)
    quantise_modules(quantised, variant.plan)
    specs = {}
    for name, tensor in _published(quantised, "", tensors).items():
        before = tensors.specs.get(name)
        is_same = before is not None and tensor.dtype.is_floating_point and tensor.dtype != FP8
        specs[name] = before if is_same else TensorSpec(tensor.dtype, tuple(tensor.shape))
    return specs


def _published(module: nn.Module, prefix: str, tensors: PublishedTensors) -> dict[str, Tensor]:
    """The tensors of a quantised module under their published names, the shapes of packed matrices included."""
    published = state_dict_published(module, prefix)
    for name in [name for name in published if name.endswith(".weight_packed")]:
        owner = name.removesuffix("_packed")
        published[f"{owner}_shape"] = torch.tensor(tensors.specs[owner].shape)
    return published


class _Passes:
    """The hidden states of the calibration and held-out tokens through the original and all variants."""

    def __init__(self, model: GlmMoeDsaForCausalLM, tensors: PublishedTensors, variants: Mapping[str, Variant],
                 calibration_BT: Tensor, held_out_BT: Tensor) -> None:
        self._model, self._tensors, self._variants = model, tensors, variants
        self._ids = {"calibration": calibration_BT, "held_out": held_out_BT}
        self._embedding_WD = tensors["model.embed_tokens.weight"].float()
        self._packed = {part: _packed_rows(model, ids_BT) for part, ids_BT in self._ids.items()}
        original = {part: self._embedding_WD[ids_BT] for part, ids_BT in self._ids.items()}
        self._hidden = {"calibration": original["calibration"], **dict.fromkeys(("", *variants), original["held_out"])}
        self._selection: dict[str, tuple[Tensor, ...] | None] = dict.fromkeys(self._hidden)

    @torch.no_grad()
    def advance(self, number: int) -> dict[str, Tensor]:
        """Pass layer ``number``; its tensors as the first variant writes them, by published name."""
        prefix = f"model.layers.{number}."
        layer = self._read(number, prefix)
        with Recorder(layer) as recorder:
            self._pass("calibration", layer)
        self._pass("", layer)
        written: dict[str, Tensor] = {}
        for name, variant in self._variants.items():
            changed = self._read(number, prefix)
            _prepare(changed, prefix, variant, recorder, self._model.config)
            if not written:
                written = _published(changed, prefix, self._tensors)
            self._pass(name, changed)
        return written

    def quality(self, name: str) -> Quality:
        """Loss of a variant ("" is the original) and its KL from the original."""
        norm_D, head_WD = self._tensors["model.norm.weight"].float(), self._tensors["lm_head.weight"].float()
        eps, ids_BT = self._model.config.rms_norm_eps, self._ids["held_out"]
        loss = kl = 0.0
        for row_T, exact_TD, hidden_TD in zip(ids_BT, self._hidden[""], self._hidden[name], strict=True):
            exact_TW, log_p_TW = (
                torch.log_softmax(torch.nn.functional.rms_norm(x[:-1], norm_D.shape, norm_D, eps) @ head_WD.T, -1)
                for x in (exact_TD, hidden_TD))
            loss -= float(log_p_TW.gather(1, row_T[1:, None]).sum())
            kl += float((exact_TW.exp() * (exact_TW - log_p_TW)).sum())
        return Quality(loss / ids_BT[:, 1:].numel(), kl / ids_BT[:, 1:].numel())

    def _pass(self, name: str, layer: DecoderLayer) -> None:
        """Send the tokens of one pass through ``layer``. The MTP layer, which feeds nothing, only records."""
        part = "calibration" if name == "calibration" else "held_out"
        hidden_BTD, mode = self._hidden[name], AttentionMode(sparse=True, indexer_loss=False)
        if isinstance(layer, MtpLayer):
            if name == "calibration":
                self._pass_mtp(layer, hidden_BTD)
            return
        shared = self._selection[name] if layer.self_attn.indexer is None else None
        result = layer(hidden_BTD, self._packed[part], mode, shared)
        self._hidden[name], self._selection[name] = result.hidden_BTD, result.selection

    def _pass_mtp(self, layer: MtpLayer, hidden_BTD: Tensor) -> None:
        norm_D = self._tensors["model.norm.weight"].float()
        normed_BTD = torch.nn.functional.rms_norm(hidden_BTD, norm_D.shape, norm_D, self._model.config.rms_norm_eps)
        next_BT = self._ids["calibration"].roll(-1, dims=1)
        layer(layer.merge(self._embedding_WD[next_BT], normed_BTD), self._packed["calibration"],
              AttentionMode(sparse=True, indexer_loss=False))

    def _read(self, number: int, prefix: str) -> DecoderLayer:
        layer = copy.deepcopy(self._model.model.layers[number]).to_empty(device=HOST).float()
        for name, target in state_dict_published(layer, prefix).items():
            target.copy_(self._tensors[name])
        assert isinstance(layer, DecoderLayer)
        return layer


def _prepare(layer: DecoderLayer, prefix: str, variant: Variant, recorder: Recorder, config: ModelConfig) -> None:
    """Transform and quantise ``layer`` (fp32) in place."""
    rotation = variant.transforms.rotation
    if rotation != "none":
        rotate_layer(layer)
    if variant.transforms.scaling:
        scale_layer(layer, prefix, variant.plan, recorder.inputs, rotated=rotation != "none")
    block = down_block(config) if rotation == "online" else 0
    if block:
        rotate_down(layer, block)
    quantise_modules(layer, variant.plan, prefix, block)


def _packed_rows(model: GlmMoeDsaForCausalLM, ids_BT: Tensor) -> PackedRows:
    positions_BT = torch.arange(ids_BT.shape[1]).expand(ids_BT.shape)
    config = model.config
    cos_BTR2, sin_BTR2 = rotary_tables(positions_BT, config.qk_rope_head_dim, config.rope_theta, torch.float32)
    return PackedRows(cos_BTR2, sin_BTR2, None, (ids_BT.shape[0], ids_BT.shape[1]), TokenPart())
