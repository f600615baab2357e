"""A tiny random checkpoint with a trained tokenizer, and a real server process over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import openai
import pytest
import torch

from glm5.model.checkpoint import save_model
from glm5.model.config import preset
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.process import spawn, stop, wait_ready
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer, train_tokenizer

MODEL = "tiny"
CONTEXT = 900


@dataclass(frozen=True)
class Server:
    """A running server, its checkpoint and a client of it."""

    url: str
    pid: int
    directory: Path
    tokenizer: Tokenizer

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


def write_checkpoint(directory: Path, seed: int) -> None:
    """A random model whose rows fit the tokenizer that is saved with it."""
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog, über 日本語 😀 " * 20], 320)
    config = replace(
        preset("nano"),
        vocab_size=320,
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
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    save_model(GlmMoeDsaForCausalLM(config, torch.Generator().manual_seed(seed)), directory)
    tokenizer.save(directory)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / MODEL
    write_checkpoint(directory, 0)
    return directory


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("server")
    arguments = [
        "serve",
        str(checkpoint),
        "--port",
        "0",
        "--ready-file",
        str(root / "ready.json"),
        "--max-slots",
        "8",
        "--max-context",
        str(CONTEXT),
        "--threads",
        "1",
        "--weight-version",
        "3",
    ]
    process = spawn(arguments, root / "serve.log", {"OMP_NUM_THREADS": "1"})
    try:
        url = wait_ready(process, root / "ready.json", root / "serve.log", 60)
        yield Server(url, process.pid, checkpoint, load_tokenizer(checkpoint))
    finally:
        stop(process)
