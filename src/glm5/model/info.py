"""``glm5 model info``: everything that follows from a configuration, as result rows (names in ``docs/model.md``)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError
from glm5.model.config import ModelConfig, preset
from glm5.model.counts import (
    cache_bytes_per_token,
    decode_flops,
    parameter_counts,
    prefill_flops,
    stored_bytes,
    tensor_counts,
    train_flops,
)
from glm5.model.memory import Layout, serving_memory, training_memory


def find_config(target: str) -> ModelConfig:
    """The configuration of a checkpoint directory or of a preset. Raises ConfigError."""
    if Path(target).is_dir():
        return ModelConfig.from_json_file(Path(target) / "config.json")
    return preset(target)


def describe(config: ModelConfig, *, context: int, layout: Layout, sequences: int) -> list[dict[str, Any]]:
    """Rows of counts, cache, operations and memory at ``context`` tokens. Raises ConfigError for what does not fit."""
    if not 1 <= context <= config.max_position_embeddings:
        raise ConfigError(f"context={context}: expected 1 to max_position_embeddings={config.max_position_embeddings}")
    if sequences < 1:
        raise ConfigError(f"sequences={sequences}: expected at least 1")
    cache = cache_bytes_per_token(config)
    flops = {"decode": decode_flops(config, context), "prefill": prefill_flops(config, context),
             "train": train_flops(config, context)}
    train = training_memory(config, layout, tokens=context)
    serve = serving_memory(config, layout, context, sequences, chunk=min(context, 8192))
    rows = _rows("parameters", parameter_counts(config), "parameters")
    rows += _rows("tensors", tensor_counts(config), "tensors")
    rows += _rows("checkpoint_bytes", stored_bytes(config), "bytes")
    rows += _rows("cache_bytes_per_token", {**cache, "total": sum(cache.values())}, "bytes/token")
    for phase, parts in flops.items():
        values = {**dataclasses.asdict(parts), "total": parts.total}
        rows += _rows(f"flops_per_token.{phase}", {name: round(value) for name, value in values.items()}, "FLOP/token")
    rows += [{"name": "layout.devices", "value": layout.devices, "unit": "devices"}]
    training = dataclasses.asdict(train)
    rows += _rows("memory.train", {**training, "total": sum(training.values())}, "bytes/device")
    serving = dataclasses.asdict(serve)
    besides = serving["cache"] + serving["activations"]
    rows += _rows("memory.serve", {**serving, "total_bf16": serving["weights_bf16"] + besides,
                                   "total_fp8": serving["weights_fp8"] + besides}, "bytes/device")
    return rows


def _rows(prefix: str, values: dict[str, int], unit: str) -> list[dict[str, Any]]:
    return [{"name": f"{prefix}.{name}", "value": value, "unit": unit} for name, value in values.items()]
