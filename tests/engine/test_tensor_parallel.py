"""An engine on two processes gives the tokens of one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch.multiprocessing as multiprocessing

from glm5.engine.config import EngineConfig
from glm5.engine.engine import Engine
from glm5.engine.tensor_parallel import divide, join
from glm5.errors import ConfigError

from .conftest import STOP, MakeEngine, make_model
from .test_engine import WAIT_S, greedy, prompts, results, sampled

ASKED = prompts(6, seed=31)
SETTINGS = {"max_slots": 4, "max_context": 128, "prefill_chunk": 16, "threads": 1, "seed": 0, "speculative": 2}


def environment(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def follow(port: int) -> None:
    os.environ.update(environment(1, port))
    assert join(make_model(0)) is None


def test_two_processes_give_the_tokens_of_one(
    make_engine: MakeEngine, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [sampled(12, seed=n) if n % 2 else greedy(12) for n in range(6)]
    expected = results([make_engine(**SETTINGS).submit(*one) for one in zip(ASKED, params, strict=True)])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in environment(0, port).items():
        monkeypatch.setenv(name, value)
    follower = multiprocessing.get_context("spawn").Process(target=follow, args=(port,))
    follower.start()
    leader = join(make_model(0))
    try:
        with Engine(leader, [STOP], EngineConfig(**SETTINGS)) as engine:
            for _ in range(2):  # the second time over copied blocks of the prefix cache
                found = results([engine.submit(*one) for one in zip(ASKED, params, strict=True)])
                assert [item.output_ids for item in found] == [item.output_ids for item in expected]
            assert engine.stats().cached_tokens > 0
            refused = engine.update_weights(checkpoints[1], 1)
            assert not refused.success and "start another server" in refused.message
    finally:
        leader.close()
        follower.join(WAIT_S)
    assert follower.exitcode == 0


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads=2 cannot be divided"):
        divide(make_model(0), 0, 3)
