"""Published FP8 weights: e4m3 values in blocks of 128 x 128 with one fp32 scale each (DeepSeek-V3 section 3.3).

``X.weight`` holds the values and ``X.weight_scale_inv`` the scales, [ceil(out / 128), ceil(in / 128)]; despite its name
a scale multiplies: ``W = values * scale``. The last block of a row or column may be partial (the 576 rows of
``kv_a_proj_with_mqa``). What is quantised is a matter of the tensors in the file, never of ``modules_to_not_convert``,
whose published list says ``self_attn.indexers_proj`` for what is stored as ``self_attn.indexer.weights_proj``.

Letters: O output rows, I input columns, o and i blocks of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.errors import CheckpointError
from glm5.model.config import ModelConfig
from glm5.model.counts import FP8_BLOCK
from glm5.model.shards import ShardReader, TensorSpec

SCALE_SUFFIX = "_scale_inv"
FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_QUANTISED = re.compile(r"\.(self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|indexer\.(wq_b|wk))"
                        r"|mlp\.((experts\.\d+|shared_experts)\.)?(gate|up|down)_proj)\.weight$")


def is_quantised_name(name: str) -> bool:
    """Whether a published FP8 checkpoint stores this weight in FP8."""
    return _QUANTISED.search(name) is not None


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of a matrix."""
    return -(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK)


def quantise(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 values and scales of a matrix: in each block the largest magnitude becomes the largest FP8 number.

    A block of zeros has scale 1. Raises ValueError for values that are not finite.
    """
    rows, columns = weight_OI.shape
    o, i = scale_shape((rows, columns))
    values_OI = torch.empty(rows, columns, dtype=FP8)
    scale_oi = torch.empty(o, i)
    for number, band_BI in enumerate(weight_OI.split(FP8_BLOCK)):  # band by band: no second matrix in fp32
        padded = torch.nn.functional.pad(band_BI.float(), (0, i * FP8_BLOCK - columns))
        blocks_BiB = padded.view(-1, i, FP8_BLOCK)
        largest_i = blocks_BiB.abs().amax((0, 2))
        if not torch.isfinite(largest_i).all():
            raise ValueError("values that are not finite cannot be quantised")
        scale_oi[number] = torch.where(largest_i > 0, largest_i / _LARGEST, 1.0)
        scaled_BiB = (blocks_BiB / scale_oi[number, :, None]).clamp_(-_LARGEST, _LARGEST)
        start = number * FP8_BLOCK
        values_OI[start : start + FP8_BLOCK] = scaled_BiB.flatten(1)[:, :columns].to(FP8)
    return values_OI, scale_oi


def dequantise(values_OI: Tensor, scale_oi: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix in ``dtype``: multiplied in fp32, then rounded once."""
    weight_OI = torch.empty(values_OI.shape, dtype=dtype)
    bands = zip(weight_OI.split(FP8_BLOCK), values_OI.split(FP8_BLOCK), scale_oi, strict=True)
    for target_BI, band_BI, scale_i in bands:
        target_BI.copy_(band_BI.float() * scale_i.repeat_interleave(FP8_BLOCK)[: band_BI.shape[1]])
    return weight_OI


class PublishedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by published name, FP8 weights given in ``dtype``, all others as stored.

    ``specs`` describes what is given, ``quantised`` are the names that are stored in FP8, ``stored`` is the reader
    below. Raises CheckpointError for scales that do not fit their weight.
    """

    def __init__(self, stored: ShardReader, dtype: torch.dtype) -> None:
        self.stored, self._dtype = stored, dtype
        scales = [name for name in stored if name.endswith(SCALE_SUFFIX)]
        self.quantised = {name.removesuffix(SCALE_SUFFIX) for name in scales}
        for name in scales:
            _check_scale(stored, name)
        self.specs = {name: TensorSpec(dtype, spec.shape) if name in self.quantised else spec
                      for name, spec in stored.specs.items() if not name.endswith(SCALE_SUFFIX)}

    def __getitem__(self, name: str) -> Tensor:
        if name in self.quantised:
            return dequantise(self.stored[name], self.stored[name + SCALE_SUFFIX], self._dtype)
        if name not in self:
            raise KeyError(name)
        return self.stored[name]

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def file(self, name: str) -> Path:
        """Where a tensor lies."""
        return self.stored.files[name]

    def discard(self, names: list[str]) -> None:
        """Hide tensors."""
        for name in names:
            del self.specs[name]
            self.quantised.discard(name)


def quantization_config(config: ModelConfig) -> dict[str, Any]:
    """The object of a published FP8 ``config.json``, its list of unquantised modules included, misnomer and all."""
    depths, layers = config.num_nextn_predict_layers, config.num_hidden_layers
    keep = ["lm_head", "model.embed_tokens", "model.norm"]
    indexers = (*config.indexer_schedule, *("full",) * depths)
    mlps = (*config.mlp_schedule, *("sparse",) * depths)
    for layer, (indexer, mlp) in enumerate(zip(indexers, mlps, strict=True)):
        names = ["input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"]
        if mlp == "sparse":
            names += ["mlp.gate", "mlp.gate.e_score_correction_bias"]
        if indexer == "full":
            names += ["self_attn.indexers_proj", "self_attn.indexer.k_norm", "self_attn.indexer.k_norm.bias"]
        if layer >= layers:
            names += ["eh_proj", "enorm", "hnorm", "shared_head.norm"]
        keep += [f"model.layers.{layer}.{name}" for name in names]
    return {"activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": keep, "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}


def check_quantization_config(value: Any, source: Path) -> None:
    """Raises CheckpointError unless ``value`` is absent or describes FP8 in blocks of 128 x 128."""
    if not value:
        return
    method, block = value.get("quant_method"), value.get("weight_block_size")
    if method != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]:
        raise CheckpointError(f"{source}: quantization_config: quant_method={method!r} with weight_block_size="
                              f"{block!r}; expected 'fp8' with [{FP8_BLOCK}, {FP8_BLOCK}]; give such a one, or bf16")


def _check_scale(stored: ShardReader, name: str) -> None:
    weight = name.removesuffix(SCALE_SUFFIX)
    spec, scale = stored.specs.get(weight), stored.specs[name]
    if spec is None or spec.dtype != FP8 or len(spec.shape) != 2:
        found = f"is {spec.dtype} {list(spec.shape)}" if spec else "is missing"
        raise CheckpointError(f"{stored.files[name]}: tensor {name} is a scale but {weight} {found}; expected "
                              f"a matrix of {FP8}")
    if scale.dtype != torch.float32 or scale.shape != scale_shape(spec.shape):
        raise CheckpointError(f"{stored.files[name]}: tensor {name} is {scale.dtype} {list(scale.shape)}; {weight} of "
                              f"shape {list(spec.shape)} needs torch.float32 {list(scale_shape(spec.shape))}")
