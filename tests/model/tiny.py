"""Models of a few thousand parameters whose every weight matters: norms differ from 1, biases from 0."""

from __future__ import annotations

from typing import Any

import torch

from glm5.model.config import ModelConfig
from glm5.model.moe import Router
from glm5.model.transformer import GlmMoeDsaForCausalLM


def tiny_config(**changes: Any) -> ModelConfig:
    """Three layers (one dense), 16 index heads, index_topk 16."""
    values = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 16,
        "max_position_embeddings": 256, "rope_parameters": {"rope_theta": 10_000, "rope_type": "default"},
        "initializer_range": 0.4, "eos_token_id": (1, 2, 3), "pad_token_id": 0, "dtype": "float32"}
    return ModelConfig(**{**values, **changes})


def tiny_model(seed: int = 0, **changes: Any) -> GlmMoeDsaForCausalLM:
    """A model with random weights everywhere, router biases near the published 6.9."""
    generator = torch.Generator().manual_seed(seed)
    model = GlmMoeDsaForCausalLM(tiny_config(**changes), generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif "o_proj" in name or "down_proj" in name:
                parameter.mul_(3.0)
            elif name == "lm_head.weight":
                parameter.mul_(0.4)
        for module in model.modules():
            if isinstance(module, Router):
                module.e_score_correction_bias.copy_(6.9 + 0.25 * torch.rand(module.num_experts, generator=generator))
    return model.eval()


def random_ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids [rows, length] of the tiny vocabulary."""
    return torch.randint(4, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
