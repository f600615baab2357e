import dataclasses
import os
import signal
import time

import httpx
import pytest
import torch

from glm5.errors import WeightSyncError
from glm5.model.checkpoint import load_model
from glm5.rl.push import WeightPusher, check_canary, push
from glm5.rl.supervisor import poll_until
from glm5.rl.weights import publish


def publish_changed(checkpoint, run_dir, version):
    model = load_model(checkpoint)
    with torch.no_grad():
        model.lm_head.weight.mul_(1 + version)
    return publish(model, run_dir, version=version, step=version, parent=None, tokenizer_dir=checkpoint)


def held_version(url):
    try:
        return httpx.get(f"{url}/get_model_info", timeout=5).json()["weight_version"]
    except httpx.TransportError:
        return -1


def test_engine_and_trainer_agree_on_the_canary_after_a_push_and_only_then(engine, checkpoint, tmp_path):
    _, url = engine
    published = publish_changed(checkpoint, tmp_path, 1)
    with httpx.Client(timeout=30) as client:
        with pytest.raises(WeightSyncError, match="canary log-probs of weight version 1 differ"):
            check_canary(client, url, published)
        report = push(client, url, published)
    assert report.version == 1 and report.canary_error < 1e-4
    assert held_version(url) == 1


def test_a_version_that_cannot_be_loaded_leaves_the_engine_as_it_was(engine, checkpoint, tmp_path):
    _, url = engine
    before = held_version(url)
    missing = dataclasses.replace(publish_changed(checkpoint, tmp_path, 9), directory=tmp_path / "nowhere")
    with httpx.Client(timeout=30) as client, pytest.raises(WeightSyncError, match="update_weights_from_disk"):
        push(client, url, missing)
    assert held_version(url) == before


def test_the_pusher_brings_the_newest_version_also_to_an_engine_that_was_killed(engine, checkpoint, tmp_path):
    supervisor, url = engine
    events = []
    with WeightPusher([url], lambda kind, **values: events.append((kind, values))) as pusher:
        for version in (2, 3, 4):
            pusher.submit(publish_changed(checkpoint, tmp_path, version))
        poll_until(lambda: pusher.is_held(4), supervisor.tend, 30, "version 4")
        os.kill(supervisor.process_ids()["engine"], signal.SIGKILL)
        poll_until(lambda: held_version(url) == -1, lambda: None, 10, "death")
        poll_until(lambda: held_version(url) == 4, supervisor.tend, 60, "version 4 again")
    assert [values["version"] for kind, values in events if kind == "weights_pushed"][-2:] == [4, 4]


def test_an_engine_that_stays_away_is_an_error_of_the_trainer_not_a_hang(checkpoint, tmp_path):
    events = []
    with WeightPusher(["http://127.0.0.1:9"], lambda kind, **values: events.append(kind), deadline_s=0.2) as pusher:
        pusher.submit(publish_changed(checkpoint, tmp_path, 1))
        time.sleep(1.5)
        with pytest.raises(WeightSyncError, match="did not arrive within 0 s"):
            pusher.is_held(1)
    assert events == ["weights_push_failed"]
