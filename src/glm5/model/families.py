"""Either family of causal language models, our own and dense ones of Transformers: load and save by what is there.

Both have ``config.vocab_size``, ``lm_head``, ``hidden`` over packed rows, and ``new_cache`` with ``ragged`` for the
engine.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from glm5.device import HOST
from glm5.model.checkpoint import load_model, save_model, state_dict_published
from glm5.model.dense import DenseCausalLM, is_dense, load_dense, save_dense
from glm5.model.transformer import GlmMoeDsaForCausalLM

CausalLM = GlmMoeDsaForCausalLM | DenseCausalLM


def load_causal_lm(directory: str | Path, dtype: torch.dtype | None = None,
                   device: torch.device | str = HOST) -> CausalLM:
    """The model of a checkpoint directory of either family. Raises ConfigError or CheckpointError."""
    load = load_dense if is_dense(directory) else load_model
    return load(directory, dtype=dtype, device=device)


def save_causal_lm(model: CausalLM, directory: str | Path, tokenizer_source: Path | None = None) -> None:
    """Write ``model`` as a checkpoint directory of its family. Raises CheckpointError."""
    if isinstance(model, DenseCausalLM):
        save_dense(model, directory, tokenizer_source)
    else:
        save_model(model, directory, tokenizer_source=tokenizer_source)


def published_tensors(model: CausalLM) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of ``model`` under its stored name: views of the model's memory."""
    return model.published_tensors() if isinstance(model, DenseCausalLM) else state_dict_published(model)
