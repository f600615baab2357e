"""A tiny random model with every kind of layer, and engines over it that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm5.engine.config import EngineConfig
from glm5.engine.engine import Engine
from glm5.model.checkpoint import save_model
from glm5.model.config import ModelConfig, preset
from glm5.model.transformer import GlmMoeDsaForCausalLM

VOCABULARY = 96
STOP = 95

MakeEngine = Callable[..., Engine]


def tiny_config() -> ModelConfig:
    """Two layers, one dense and one sparse, and sequences longer than ``index_topk`` in most tests."""
    return replace(
        preset("nano"),
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=8,
        max_position_embeddings=256,
        initializer_range=0.3,
    )


def make_model(seed: int) -> GlmMoeDsaForCausalLM:
    """A random model; equal seeds give equal weights."""
    return GlmMoeDsaForCausalLM(tiny_config(), torch.Generator().manual_seed(seed)).eval()


@pytest.fixture(scope="session")
def model() -> GlmMoeDsaForCausalLM:
    return make_model(0)


@pytest.fixture
def make_engine(model: GlmMoeDsaForCausalLM) -> Iterator[MakeEngine]:
    """Builds engines with small sizes; keyword arguments override the configuration."""
    engines: list[Engine] = []

    def make(of: GlmMoeDsaForCausalLM = model, **settings: object) -> Engine:
        sizes = {"max_slots": 8, "max_context": 128, "prefill_chunk": 16, "threads": 1, "seed": 0, **settings}
        engines.append(Engine(of, [STOP], EngineConfig(**sizes)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of two different models of the same shape; the first equals ``model``."""
    root = tmp_path_factory.mktemp("checkpoints")
    for seed in (0, 1):
        save_model(make_model(seed), root / str(seed))
    return root / "0", root / "1"
