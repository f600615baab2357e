"""``glm5 convert``: another type, other file sizes or fewer layers of a checkpoint, one tensor in memory at a time.

The source is checked against its configuration before anything is written; the target appears by one rename. What is
not asked for stays as stored: FP8 weights and their scales are copied byte for byte unless ``dtype`` dequantises them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from glm5.errors import CheckpointError, ConfigError
from glm5.model.checkpoint import MAX_SHARD_BYTES, copy_tokenizer, open_checkpoint, replacing, write_config
from glm5.model.config import ModelConfig
from glm5.model.fp8 import (
    FP8,
    SCALE_SUFFIX,
    PublishedTensors,
    is_quantised_name,
    quantise,
    quantization_config,
    scale_shape,
)
from glm5.model.shards import ShardWriter, TensorSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B", re.IGNORECASE)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What to change; the defaults change nothing but the division into files."""

    dtype: torch.dtype | None = None
    """Type of all weights but the router bias, which stays fp32; None keeps each as stored."""
    fp8: bool = False
    """Store the matrices that a published FP8 checkpoint quantises in FP8, and the other weights in bf16."""
    layers: int | None = None
    """Keep this many leading layers; the MTP layer is kept too and renumbered."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """Largest file, except for a single larger tensor."""

    def __post_init__(self) -> None:
        if self.fp8 and self.dtype is not None:
            raise ConfigError(f"fp8 and dtype={self.dtype}: an FP8 checkpoint keeps its other weights in bf16; leave "
                              "one out")
        if self.max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes={self.max_shard_bytes}: expected at least 1")


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written."""

    tensors: int
    nbytes: int
    files: int


def convert_checkpoint(source: str | Path, target: str | Path, conversion: Conversion) -> Converted:
    """Write ``source`` to ``target`` as ``conversion`` says, with a progress bar on stderr.

    Raises ConfigError or CheckpointError; then nothing is left at ``target``, and what was there is unchanged.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise CheckpointError(f"{target}: source and target are the same directory; give another target")
    model, tensors = open_checkpoint(source, conversion.dtype)
    config = _shorten(model.config, conversion.layers)
    names = _kept_names(tensors, model.config, config)
    plan = {name: _stored_form(tensors, origin, conversion) for name, origin in names.items()}
    specs = {name + suffix: spec for name, parts in plan.items() for suffix, spec in parts.items()}
    nbytes = sum(spec.nbytes for spec in specs.values())
    with replacing(target) as temporary, _progress(target, nbytes) as (bar, task):
        writer = ShardWriter(temporary, specs, conversion.max_shard_bytes)
        for name, origin in names.items():
            for suffix, tensor in _encode(tensors, origin, plan[name]).items():
                writer.write(name + suffix, tensor)
                bar.advance(task, tensor.nbytes)
        writer.close()
        stored = specs["model.embed_tokens.weight"].dtype
        config = config.replace(dtype=str(stored).removeprefix("torch."))
        if any(SCALE_SUFFIX in parts for parts in plan.values()):
            config = config.replace(extra={**config.extra, "quantization_config": quantization_config(config)})
        write_config(config, temporary)
        copy_tokenizer(source, temporary)
        files = len(list(temporary.glob("*.safetensors")))
    return Converted(len(specs), nbytes, files)


def parse_size(text: str) -> int:
    """Bytes of a size such as ``5GB`` or ``500MB``, powers of 1000. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"size {text!r}: expected a number and a unit, such as 5GB or 500MB")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


def parse_dtype(text: str) -> torch.dtype:
    """The type called ``text``. Raises ConfigError listing the names."""
    if text not in DTYPES:
        raise ConfigError(f"dtype {text!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[text]


def _shorten(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The configuration of the first ``layers`` layers."""
    if layers is None:
        return config
    if not 1 <= layers <= config.num_hidden_layers:
        raise ConfigError(f"layers={layers}: expected 1 to num_hidden_layers={config.num_hidden_layers}")
    lists = {name: value[:layers] for name in ("mlp_layer_types", "indexer_types", "index_topk_pattern")
             if (value := getattr(config, name)) is not None}
    return config.replace(num_hidden_layers=layers, **lists)


def _kept_names(tensors: PublishedTensors, old: ModelConfig, new: ModelConfig) -> dict[str, str]:
    """Source name by target name: dropped layers left out, the MTP layer renumbered."""
    names = {}
    for name in tensors:
        match = _LAYER.match(name)
        layer = int(match[1]) if match else 0
        if layer >= old.num_hidden_layers:
            names[f"model.layers.{layer - old.num_hidden_layers + new.num_hidden_layers}.{name[match.end():]}"] = name
        elif layer < new.num_hidden_layers:
            names[name] = name
    return names


def _stored_form(tensors: PublishedTensors, name: str, conversion: Conversion) -> dict[str, TensorSpec]:
    """What is written for one published tensor, by suffix: itself (""), and its scale when it becomes or stays FP8."""
    shape = tensors.specs[name].shape
    stays = name in tensors.quantised and conversion.dtype is None
    if stays or (conversion.fp8 and is_quantised_name(name)):
        return {"": TensorSpec(FP8, shape), SCALE_SUFFIX: TensorSpec(torch.float32, scale_shape(shape))}
    if name.endswith("e_score_correction_bias"):
        return {"": TensorSpec(torch.float32, shape)}
    dtype = torch.bfloat16 if conversion.fp8 else conversion.dtype or tensors.specs[name].dtype
    return {"": TensorSpec(dtype, shape)}


def _encode(tensors: PublishedTensors, name: str, form: dict[str, TensorSpec]) -> dict[str, Tensor]:
    if SCALE_SUFFIX not in form:
        return {"": tensors[name].to(form[""].dtype)}
    if name in tensors.quantised:
        return {suffix: tensors.stored[name + suffix] for suffix in form}
    try:
        values, scale = quantise(tensors[name])
    except ValueError as error:
        raise CheckpointError(f"{tensors.file(name)}: tensor {name}: {error}") from None
    return {"": values, SCALE_SUFFIX: scale}


@contextmanager
def _progress(target: Path, nbytes: int) -> Iterator[tuple[Progress, TaskID]]:
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar, bar.add_task(target.name, total=nbytes)
