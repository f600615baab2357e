"""Published checkpoints: read, write, and exchange of weights in memory, always under the published names.

A checkpoint is a directory that Transformers, vLLM and SGLang load as it is: ``config.json``, one or more safetensors
files (with an index when more), ``generation_config.json`` and the tokenizer's files. The routed experts, stacked in
memory, are stored one by one; the MTP layer is layer ``num_hidden_layers``; the router bias is fp32 on disk whatever
the weights are. Every tensor keeps its stored type unless a caller asks for another: reading and writing changes no
byte. FP8 weights are dequantised while they are read (``fp8``).

Strict in both directions: a missing, extra or misshapen tensor is a ``CheckpointError``, never a fresh value. The one
exception is a checkpoint without any tensor of the MTP layer that its ``config.json`` still promises, which is what
Transformers writes: it loads with ``num_nextn_predict_layers`` 0 and says so on stderr.

Writing goes to a temporary directory beside the target, is flushed to the disk and then renamed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from glm5.device import HOST
from glm5.errors import CheckpointError, ConfigError
from glm5.model.config import ModelConfig
from glm5.model.delta import open_tensors
from glm5.model.fp8 import PublishedTensors, check_quantization_config
from glm5.model.moe import Experts
from glm5.model.quantize.plan import StoredFormats
from glm5.model.quantize.projections import fit_modules
from glm5.model.shards import ShardWriter, TensorSpec
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.runlog import flush_to_disk, replace_directory, temporary_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
MAX_SHARD_BYTES = 5 * 10**9
"""Largest file that is written when nothing else is asked for, the published size."""

_MTP_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Tensors that other exports repeat inside the MTP layer; accepted when they equal the main ones, never written."""


def load_model(directory: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = HOST,
               config_overrides: Mapping[str, Any] | None = None) -> GlmMoeDsaForCausalLM:
    """The model of a checkpoint directory, in evaluation mode.

    ``dtype`` None keeps the stored type of each tensor, and gives FP8 weights in the type that ``config.json`` names;
    the router bias is fp32 in any case. ``config_overrides`` replaces fields of ``config.json``, for example
    ``{"num_nextn_predict_layers": 0}`` to leave the MTP layer out. Raises ConfigError or CheckpointError naming the
    file and the key or tensor.
    """
    model, tensors = open_checkpoint(directory, dtype, config_overrides)
    _allocate(model, tensors.specs, dtype, torch.device(device))
    _copy(state_dict_published(model), tensors)
    return model.eval()


def open_checkpoint(directory: str | Path, dtype: torch.dtype | None = None,
                    config_overrides: Mapping[str, Any] | None = None) -> tuple[GlmMoeDsaForCausalLM, PublishedTensors]:
    """The model of a checkpoint on the meta device, and its tensors, checked against it and not yet read.

    Arguments and errors as for ``load_model``; FP8 weights come in ``dtype``, or in the type of ``config.json``.
    """
    directory = Path(directory)
    config = ModelConfig.from_json_file(directory / "config.json")
    quantization = config.extra.get("quantization_config") or {}
    formats = None
    if quantization.get("quant_method") == "compressed-tensors":
        formats = StoredFormats.from_json(quantization, str(directory / "config.json"))
    else:
        check_quantization_config(quantization, directory / "config.json")
        config = config.replace(extra={key: value for key, value in config.extra.items()
                                       if key != "quantization_config"})
    tensors = PublishedTensors(open_tensors(directory), dtype or _torch_dtype(config, directory))
    prefix = f"model.layers.{config.num_hidden_layers}."
    if config_overrides and "num_nextn_predict_layers" in config_overrides:
        if config_overrides["num_nextn_predict_layers"] == 0:
            tensors.discard([name for name in tensors if name.startswith(prefix)])
    elif config.num_nextn_predict_layers and not any(name.startswith(prefix) for name in tensors):
        print(f"{directory}: config.json promises num_nextn_predict_layers=1 but holds no tensor {prefix}*; "
              "loading without the MTP layer (num_nextn_predict_layers=0)", file=sys.stderr)
        config = config.replace(num_nextn_predict_layers=0)
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(config.replace(**(config_overrides or {})))
    if formats is not None:
        fit_modules(model, tensors.specs, formats)
        tensors.discard([name for name in tensors if name.endswith(".weight_shape")])
    _discard_copies(tensors, prefix)
    _check(state_dict_published(model), tensors.specs, tensors.stored.files, directory)
    return model, tensors


def save_model(model: GlmMoeDsaForCausalLM, directory: str | Path, tokenizer_source: Path | None = None,
               max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write ``model`` as a checkpoint directory; an existing checkpoint there is replaced.

    ``tokenizer_source`` is a directory whose tokenizer files are copied. Raises CheckpointError when the disk refuses
    (nothing is left half-written) or the target is a directory of something else.
    """
    tensors = state_dict_published(model)
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    stored = str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    with replacing(Path(directory)) as temporary:
        writer = ShardWriter(temporary, specs, max_shard_bytes)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.close()
        write_config(model.config.replace(dtype=stored), temporary)
        if tokenizer_source is not None:
            if not (Path(tokenizer_source) / TOKENIZER_FILES[0]).exists():
                raise CheckpointError(f"{Path(tokenizer_source) / TOKENIZER_FILES[0]}: missing; give a directory with "
                                      "a saved tokenizer")
            copy_tokenizer(Path(tokenizer_source), temporary)


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """A temporary directory beside ``directory`` that takes its place when the block ends without an error.

    Raises CheckpointError when the disk refuses (nothing is left half-written) or when ``directory`` is one of
    something else than a checkpoint.
    """
    temporary = temporary_path(directory)
    try:
        if directory.exists() and any(directory.iterdir()) and not (directory / "config.json").exists():
            raise CheckpointError(f"{directory}: exists and has no config.json, so it is not a checkpoint to replace; "
                                  "choose another directory")
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            flush_to_disk(path)
        replace_directory(temporary, directory)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{directory}: cannot be written ({reason}); free space or choose another "
                              "directory") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_config(config: ModelConfig, directory: Path) -> None:
    """``config.json`` and the ``generation_config.json`` that follows from it."""
    data = config.to_json()
    _write_json(directory / "config.json", data)
    generation = {key: data[key] for key in ("eos_token_id", "pad_token_id") if data[key] is not None}
    _write_json(directory / "generation_config.json", {"_from_model_config": True, **generation})


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy those tokenizer files that ``source`` has."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def state_dict_published(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Every weight and router bias under its published name: views of the model's memory, experts one by one.

    ``model`` may be a part of a model whose published name, with a dot, is ``prefix``.
    """
    published = {}
    for name, tensor in model.state_dict(prefix=prefix).items():
        owner, separator, stack = name.partition("mlp.experts.")
        if not separator:
            published[name] = tensor
            continue
        projection, _, kind = stack.partition(".")
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        for number, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.view(len(parts), -1, matrix.shape[-1]), strict=True):
                published[f"{owner}{separator}{number}.{part}.{kind or 'weight'}"] = rows
    return published


def read_published(directory: str | Path) -> dict[str, Tensor]:
    """The stored tensors of a checkpoint directory by name, mapped from the files rather than copied.

    Raises CheckpointError for a missing or truncated file, or an index that does not fit the files.
    """
    return dict(open_tensors(Path(directory)))


@torch.no_grad()
def load_published(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into ``targets``, the published tensors of a model, in place, converting types.

    Everything is checked before the first copy: on CheckpointError the model is unchanged.
    """
    _check(targets, {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, {}, None)
    _copy(targets, tensors)


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(tensors[name])


def _check(expected: Mapping[str, Tensor], found: Mapping[str, TensorSpec], files: Mapping[str, Path],
           directory: Path | None) -> None:
    place = str(directory) if directory else "weights"
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"{place}: tensor {missing[0]} is missing{_and_more(missing)} though the configuration "
                              "asks for it; use a complete checkpoint or correct config.json")
    extra = [name for name in found if name not in expected]
    if extra:
        raise CheckpointError(f"{files.get(extra[0], place)}: unexpected tensor {extra[0]}{_and_more(extra)}, the "
                              "configuration has no place for it; correct config.json or remove it")
    for name, target in expected.items():
        if tuple(target.shape) != found[name].shape:
            raise CheckpointError(f"{files.get(name, place)}: tensor {name} has shape {list(found[name].shape)}, the "
                                  f"configuration gives {list(target.shape)}; correct config.json or the checkpoint")
        if found[name].dtype != target.dtype and not (_is_wide(found[name]) and _is_wide(target)):
            wanted = str(target.dtype)
            if _is_wide(target):
                wanted = "bfloat16, float16 or float32, or float8_e4m3fn with a weight_scale_inv"
            raise CheckpointError(f"{files.get(name, place)}: tensor {name} has type {found[name].dtype}; expected "
                                  f"{wanted}")


def _is_wide(tensor: Tensor | TensorSpec) -> bool:
    """Whether the type is one that weights can be converted from and to."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize >= 2


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _discard_copies(tensors: PublishedTensors, prefix: str) -> None:
    """Hide the MTP layer's copies of embedding and head after making sure that they are copies."""
    for suffix, original in _MTP_COPIES.items():
        if prefix + suffix not in tensors:
            continue
        if original not in tensors or not torch.equal(tensors[prefix + suffix], tensors[original]):
            raise CheckpointError(f"{tensors.file(prefix + suffix)}: tensor {prefix}{suffix} differs from {original}; "
                                  "this architecture shares it, so the checkpoint is of another one")
        tensors.discard([prefix + suffix])


def _torch_dtype(config: ModelConfig, directory: Path) -> torch.dtype:
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if config.dtype not in dtypes:
        raise ConfigError(f"{directory / 'config.json'}: dtype={config.dtype!r}: expected one of {', '.join(dtypes)}")
    return dtypes[config.dtype]


def _allocate(model: GlmMoeDsaForCausalLM, specs: Mapping[str, TensorSpec], dtype: torch.dtype | None,
              device: torch.device) -> None:
    """Give the parameters of a model on the meta device memory, in ``dtype`` or in the type of their stored tensors."""
    first_by_owner = {}
    for name, spec in specs.items():
        head, separator, _ = name.partition(".mlp.experts.")
        first_by_owner.setdefault(head + separator if separator else name, spec.dtype)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owner = f"{module_name}." if isinstance(module, Experts) else f"{module_name}.{name}"
            memory = torch.empty(parameter.shape, dtype=dtype or first_by_owner[owner], device=device)
            module.register_parameter(name, nn.Parameter(memory))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device=device))


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
