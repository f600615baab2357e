"""An episode that goes on while the weights change: real engine, real gateway, ledger."""

import asyncio
import time

import httpx
import pytest

from glm5.records import Episode, trajectory_from_json
from glm5.wire import HttpClient

from .factories import make_episode, open_ledger


async def swap_in_the_middle(engine_url, gateway_url, checkpoint):
    """One turn of an episode during which the engine loads version 5."""
    http = HttpClient()
    try:
        session = await http.post(f"{gateway_url}/sessions", {
            "session_id": "partial", "sampling": {"temperature": 0.0, "max_new_tokens": 380}}, 30.0)
        question = {"model": "policy", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
        turn = asyncio.create_task(http.post(f"{session['base_url']}/chat/completions", question, 60.0,
                                             session["api_key"]))
        deadline = time.monotonic() + 30
        while (await http.get(f"{engine_url}/stats", 30.0))["generated_tokens"] < 5:
            assert time.monotonic() < deadline and not turn.done()
        answer = await http.post(f"{engine_url}/update_weights_from_disk",
                                 {"model_path": str(checkpoint), "weight_version": 5}, 60.0)
        assert answer["success"] and not turn.done()
        await turn
        return await http.post(f"{gateway_url}/sessions/partial/finish", {"outcome": "ok", "reward": 1.0}, 30.0)
    finally:
        http.close()


@pytest.mark.slow
def test_each_token_keeps_its_version_and_the_oldest_one_counts(engine, gateway, checkpoint, tmp_path):
    _, engine_url = engine
    try:
        summary = asyncio.run(swap_in_the_middle(engine_url, gateway, checkpoint))
    finally:
        httpx.post(f"{engine_url}/update_weights_from_disk", timeout=60,
                   json={"model_path": str(checkpoint), "weight_version": 0})
    (trajectory,) = [trajectory_from_json(item) for item in summary["trajectories"]]
    versions = [version for version, on in zip(trajectory.versions, trajectory.loss_mask, strict=True) if on]
    switch = versions.index(5)
    assert switch >= 5 and versions == [0] * switch + [5] * (len(versions) - switch)
    ledger = open_ledger(tmp_path)
    ledger.record_version(0, 0)
    ledger.record_version(5, 1)
    ledger.set_progress(2, 5)
    ledger.open_group("g", taskset="calculator", task_id="t", task_index=0, size=2)
    episode = Episode(episode_id="g-s0a0", group_id="g", task_id="t", taskset="calculator", outcome="ok", reward=1.0,
                      trajectories=[trajectory])
    assert ledger.close_group("g", [[episode], [make_episode("g", 1, 0.0, version=5)]]) == ""
    batch = ledger.lease(1, 2)
    assert [batch.staleness[sample.sample_id] for sample in batch.samples] == [2, 1]
    assert batch.samples[0].trajectory.versions == trajectory.versions  # to the trainer, token by token
    ledger.close()
