"""A tiny checkpoint with a tokenizer, and a real engine process over it."""

import dataclasses
from pathlib import Path

import pytest
import torch

from glm5.model.checkpoint import save_model
from glm5.model.config import preset
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.rl.supervisor import ServiceSpec, Supervisor
from glm5.tokenizer.bpe import train_tokenizer

TEXTS = ["What is 12 + 30? The calculator says 42.", "def add(a, b):\n    return a + b\n", "cat /tmp/notes.txt"] * 8


def build_model(vocab_size: int, seed: int = 0) -> GlmMoeDsaForCausalLM:
    config = dataclasses.replace(
        preset("nano"), vocab_size=vocab_size, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        index_n_heads=4, index_head_dim=16, index_topk=8, max_position_embeddings=512, initializer_range=0.2)
    return GlmMoeDsaForCausalLM(config, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loadable directory: tiny model, tokenizer of a few hundred ids."""
    root = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer(TEXTS, 320)
    tokenizer.save(root / "tokenizer")
    save_model(build_model(tokenizer.vocab_size), root / "checkpoint", tokenizer_source=root / "tokenizer")
    return root / "checkpoint"


@pytest.fixture
def events():
    """Collects ``on_event`` calls."""
    return []


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    """(supervisor, url) of a running engine that starts with version 0."""
    with Supervisor(tmp_path_factory.mktemp("engine"), lambda kind, **values: None) as supervisor:
        url = supervisor.add(ServiceSpec("engine", "/health_generate", lambda: [
            "serve", str(checkpoint), "--max-slots", "4", "--threads", "1"]))
        supervisor.wait_until_ready()
        yield supervisor, url


@pytest.fixture(scope="module")
def gateway(engine, checkpoint, tmp_path_factory):
    """URL of a gateway before the engine."""
    supervisor, engine_url = engine
    store = tmp_path_factory.mktemp("gateway") / "turns.sqlite"
    url = supervisor.add(ServiceSpec("gateway", "/health", lambda: [
        "gateway", "--engine", engine_url, "--tokenizer", str(checkpoint), "--store", str(store)]))
    supervisor.wait_until_ready()
    return url
