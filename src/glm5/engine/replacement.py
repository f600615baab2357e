"""Loading weights for an engine: the first ones, and those that replace them while it runs.

A replacement is trusted only after four checks: the files, and those of the versions that it is a difference to, match
the checksums of ``manifest.json`` when the publisher wrote one, the checkpoint itself is complete (``load_causal_lm``),
every tensor has the shape of the one it replaces, and every value is finite.
"""

from __future__ import annotations

from pathlib import Path

import torch

from glm5.device import find_device
from glm5.engine.checksums import verify_checksums
from glm5.engine.config import EngineConfig
from glm5.engine.tensor_parallel import LedModel
from glm5.errors import CheckpointError
from glm5.model.delta import chain
from glm5.model.families import CausalLM, load_causal_lm

_FP32_ELEMENTS = 2**29
"""Weights up to this number are widened to fp32 on a CPU: 2 GiB."""
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def load_weights(directory: str | Path, config: EngineConfig) -> CausalLM:
    """The model in ``directory`` in the engine's type and on its device. Raises CheckpointError or ConfigError."""
    model = load_causal_lm(directory, dtype=_DTYPES[config.dtype], device=find_device(config.device))
    return model.float() if config.dtype == "auto" and _runs_faster_in_fp32(model) else model


def _runs_faster_in_fp32(model: CausalLM) -> bool:
    """True on a CPU, whose native kernels compute in fp32, for plain half-precision weights that stay small."""
    tensors = model.state_dict().values()
    is_plain = all(tensor.dtype in (torch.bfloat16, torch.float16, torch.float32) for tensor in tensors)
    return is_plain and all(tensor.is_cpu for tensor in tensors) and sum(map(torch.numel, tensors)) <= _FP32_ELEMENTS


def load_replacement(
    directory: str | Path, config: EngineConfig, current: CausalLM | LedModel
) -> CausalLM:
    """A verified model that may take the place of ``current``. Raises CheckpointError or ConfigError."""
    for part in chain(Path(directory)):
        verify_checksums(part)
    model = load_weights(directory, config)
    tensors = model.state_dict()
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in current.state_dict().items()}
    if {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} != expected:
        raise CheckpointError(
            f"{directory}: its tensors differ in name, shape or type from those being served; start another server"
        )
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor).all():
            raise CheckpointError(f"{directory}: {name} has values that are not finite; publish good weights")
    return model
