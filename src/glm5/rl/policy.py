"""The policy of a run: our own model, or a dense Transformers model, made ready for the trainer.

Both are trained by the same step; they differ in what is frozen. Of ours the indexers, the MTP layer and the router
bias stay as they are; of a dense model everything is trained.
"""

from __future__ import annotations

from pathlib import Path

import torch

from glm5.model.dense import DenseCausalLM
from glm5.model.families import CausalLM, load_causal_lm
from glm5.model.quantize.plan import trained_for


def load_policy(directory: Path, device: torch.device) -> CausalLM:
    """The policy in ``directory``, in fp32, with ``requires_grad`` where it is trained. Raises CheckpointError."""
    model = load_causal_lm(directory, dtype=torch.float32, device=device)
    if not isinstance(model, DenseCausalLM):
        model.config = trained_for(model.config, None)
    freeze(model)
    return model


def freeze(model: CausalLM) -> None:
    """Leave only what reinforcement learning trains."""
    if isinstance(model, DenseCausalLM):
        model.requires_grad_(True)
        return
    mtp_prefix = f"model.layers.{model.config.num_hidden_layers}."
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name and not name.startswith(mtp_prefix))
