"""One model in both implementations, and how far their logits are apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5.model.checkpoint import save_model
from glm5.model.transformer import GlmMoeDsaForCausalLM

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")

TOLERANCE = 1e-4
SHARED = ("full", "shared", "full", "shared")


def in_transformers(model: GlmMoeDsaForCausalLM, directory: Path) -> torch.nn.Module:
    """``model`` saved to ``directory`` and loaded by Transformers."""
    save_model(model, directory)
    return load_in_transformers(directory)


def load_in_transformers(directory: Path) -> torch.nn.Module:
    """A checkpoint directory as Transformers loads it."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference of logits that are not flat."""
    assert theirs.std() > 0.3, "logits too flat to compare"
    return (ours - theirs).abs().max().item()


def as_mask(positions_BTK: torch.Tensor, keys: int) -> torch.Tensor:
    """Lists of selected keys, padded with -1, as a mask over ``keys`` keys."""
    marked = torch.zeros(*positions_BTK.shape[:2], keys + 1, dtype=torch.bool)
    return marked.scatter_(-1, positions_BTK.long() % (keys + 1), True)[..., :keys]
