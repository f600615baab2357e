"""Published checkpoints: read, write, and exchange of weights in memory, always under the published names.

A checkpoint is a directory that Transformers, vLLM and SGLang load as it is: ``config.json``, one or more safetensors
files (with an index when more), ``generation_config.json`` and the tokenizer's files. The routed experts, stacked in
memory, are stored one by one; the MTP layer is layer ``num_hidden_layers``; the router bias is fp32 on disk whatever
the weights are. Every tensor keeps its stored type unless a caller asks for another: reading and writing changes no
byte.

Strict in both directions: a missing, extra or misshapen tensor is a ``CheckpointError``, never a fresh value. The one
exception is a checkpoint without any tensor of the MTP layer that its ``config.json`` still promises, which is what
Transformers writes: it loads with ``num_nextn_predict_layers`` 0 and says so on stderr.

Writing goes to a temporary directory beside the target, is flushed to the disk and then renamed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from glm5.device import HOST
from glm5.errors import CheckpointError
from glm5.model.config import ModelConfig
from glm5.model.moe import Experts
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.runlog import flush_to_disk, replace_directory, temporary_path

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_MTP_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Tensors that other exports repeat inside the MTP layer; accepted when they equal the main ones, never written."""


def load_model(directory: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = HOST,
               config_overrides: Mapping[str, Any] | None = None) -> GlmMoeDsaForCausalLM:
    """The model of a checkpoint directory, in evaluation mode.

    ``dtype`` None keeps the stored type of each tensor; the router bias is fp32 in any case. ``config_overrides``
    replaces fields of ``config.json``, for example ``{"num_nextn_predict_layers": 0}`` to leave the MTP layer out.
    Raises ConfigError or CheckpointError naming the file and the key or tensor.
    """
    directory = Path(directory)
    config = ModelConfig.from_json_file(directory / "config.json")
    if config.extra.get("quantization_config"):
        raise CheckpointError(f"{directory / 'config.json'}: quantization_config: quantised weights cannot be loaded; "
                              "give the bf16 checkpoint")
    tensors, files = _read_files(directory)
    prefix = f"model.layers.{config.num_hidden_layers}."
    if config_overrides and "num_nextn_predict_layers" in config_overrides:
        if config_overrides["num_nextn_predict_layers"] == 0:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    elif config.num_nextn_predict_layers and not any(name.startswith(prefix) for name in tensors):
        print(f"{directory}: config.json promises num_nextn_predict_layers=1 but holds no tensor {prefix}*; "
              "loading without the MTP layer (num_nextn_predict_layers=0)", file=sys.stderr)
        config = config.replace(num_nextn_predict_layers=0)
    config = config.replace(**(config_overrides or {}))
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(config)
    tensors = _without_copies(tensors, files, prefix)
    _check(state_dict_published(model), tensors, files, directory)
    _allocate(model, tensors, dtype, torch.device(device))
    load_published(model, tensors)
    return model.eval()


def save_model(model: GlmMoeDsaForCausalLM, directory: str | Path, tokenizer_source: Path | None = None,
               max_shard_bytes: int = 5 * 10**9) -> None:
    """Write ``model`` as a checkpoint directory; an existing checkpoint there is replaced.

    ``tokenizer_source`` is a directory whose tokenizer files are copied. Raises CheckpointError when the disk refuses
    (nothing is left half-written) or the target is a directory of something else.
    """
    directory = Path(directory)
    temporary = temporary_path(directory)
    try:
        if directory.exists() and any(directory.iterdir()) and not (directory / "config.json").exists():
            raise CheckpointError(f"{directory}: exists and has no config.json, so it is not a checkpoint to replace; "
                                  "choose another directory")
        temporary.mkdir(parents=True)
        _write_files(model, temporary, max_shard_bytes)
        if tokenizer_source is not None:
            _copy_tokenizer(Path(tokenizer_source), temporary)
        for path in (*temporary.iterdir(), temporary):
            flush_to_disk(path)
        replace_directory(temporary, directory)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{directory}: cannot be written ({reason}); free space or choose another "
                              "directory") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def state_dict_published(model: GlmMoeDsaForCausalLM) -> dict[str, Tensor]:
    """Every weight and router bias under its published name: views of the model's memory, experts one by one."""
    published = {}
    experts = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    for name, tensor in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if owner not in experts:
            published[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for number, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                published[f"{owner}.{number}.{part}.weight"] = rows
    return published


def read_published(directory: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint directory by published name, mapped from the files rather than copied.

    Raises CheckpointError for a missing or truncated file, or an index that does not fit the files.
    """
    return _read_files(Path(directory))[0]


@torch.no_grad()
def load_published(model: GlmMoeDsaForCausalLM, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` (published names) into ``model`` in place, converting types.

    Everything is checked before the first copy: on CheckpointError the model is unchanged.
    """
    targets = state_dict_published(model)
    _check(targets, tensors, {}, None)
    for name, target in targets.items():
        target.copy_(tensors[name])


def _check(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], files: Mapping[str, Path],
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
        if target.shape != found[name].shape:
            raise CheckpointError(f"{files.get(name, place)}: tensor {name} has shape {list(found[name].shape)}, the "
                                  f"configuration gives {list(target.shape)}; correct config.json or the checkpoint")
        if not found[name].dtype.is_floating_point or found[name].dtype.itemsize < 2:
            raise CheckpointError(f"{files.get(name, place)}: tensor {name} has type {found[name].dtype}; expected "
                                  "bfloat16, float16 or float32 weights")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _read_files(directory: Path) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """All tensors of a directory and the file of each."""
    tensors: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    weight_map = _read_index(directory)
    for path in sorted({directory / file for file in weight_map.values()}) or [directory / SINGLE_FILE]:
        if not path.exists():
            raise CheckpointError(f"{path}: missing; a checkpoint has {SINGLE_FILE} or {INDEX_FILE} with its files")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                    if name in files:
                        raise CheckpointError(f"{path}: tensor {name} is also in {files[name].name}; keep one of them")
                    tensors[name], files[name] = file.get_tensor(name), path
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or truncated safetensors file ({error}); copy or download it "
                                  "again") from None
    for name, file_name in weight_map.items():
        if name not in files:
            raise CheckpointError(f"{directory / file_name}: tensor {name} is missing though {INDEX_FILE} lists it; "
                                  "copy or download the file again")
    return tensors, files


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / INDEX_FILE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: not a safetensors index (no weight_map); copy or download it again") from None


def _without_copies(tensors: dict[str, Tensor], files: Mapping[str, Path], prefix: str) -> dict[str, Tensor]:
    """Drop the MTP layer's copies of embedding and head after making sure that they are copies."""
    for suffix, original in _MTP_COPIES.items():
        copy = tensors.get(prefix + suffix)
        if copy is None:
            continue
        if original not in tensors or not torch.equal(copy, tensors[original]):
            raise CheckpointError(f"{files[prefix + suffix]}: tensor {prefix}{suffix} differs from {original}; this "
                                  "architecture shares it, so the checkpoint is of another one")
        tensors = {name: tensor for name, tensor in tensors.items() if name != prefix + suffix}
    return tensors


def _allocate(model: GlmMoeDsaForCausalLM, tensors: Mapping[str, Tensor], dtype: torch.dtype | None,
              device: torch.device) -> None:
    """Give the parameters of a model on the meta device memory, in ``dtype`` or in the type of their stored tensors."""
    first_by_owner = {}
    for name, tensor in tensors.items():
        head, separator, _ = name.partition(".mlp.experts.")
        first_by_owner.setdefault(head + separator if separator else name, tensor.dtype)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owner = f"{module_name}." if isinstance(module, Experts) else f"{module_name}.{name}"
            memory = torch.empty(parameter.shape, dtype=dtype or first_by_owner[owner], device=device)
            module.register_parameter(name, nn.Parameter(memory))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device=device))


def _write_files(model: GlmMoeDsaForCausalLM, directory: Path, max_shard_bytes: int) -> None:
    tensors = {name: tensor.detach().contiguous() for name, tensor in state_dict_published(model).items()}
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    stored = str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    config = model.config.replace(dtype=stored).to_json()
    _write_json(directory / "config.json", config)
    generation = {key: config[key] for key in ("eos_token_id", "pad_token_id") if config[key] is not None}
    _write_json(directory / "generation_config.json", {"_from_model_config": True, **generation})


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, target: Path) -> None:
    if not (source / TOKENIZER_FILES[0]).exists():
        raise CheckpointError(f"{source / TOKENIZER_FILES[0]}: missing; give a directory with a saved tokenizer")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
