"""Weights over a process group: real engine processes, one of which is stopped or killed."""

import dataclasses
import os
import signal

import httpx
import pytest
import torch

from glm5.engine.broadcast import Announcement, announce, buffers, snapshot
from glm5.errors import WeightSyncError
from glm5.model.checkpoint import load_model
from glm5.model.shards import TensorSpec
from glm5.rl.broadcast import Snapshot, WeightBroadcaster
from glm5.rl.operation import WeightsConfig
from glm5.rl.push import WeightPusher, check_canary
from glm5.rl.supervisor import poll_until
from glm5.rl.weights import publish

from .test_push import held_version


def publish_with_snapshot(checkpoint, run_dir, version):
    model = load_model(checkpoint)
    with torch.no_grad():
        model.lm_head.weight.mul_(1 + version)
    published = publish(model, run_dir, version=version, step=version, parent=None, tokenizer_dir=checkpoint)
    return published, snapshot(model)


def test_weights_arrive_by_broadcast_and_again_by_the_same_group(engine, checkpoint, tmp_path):
    _, url = engine
    broadcaster = WeightBroadcaster([url], "gloo", 30.0)
    try:
        with httpx.Client(timeout=30) as client:
            for version in (50, 51):
                published, tensors = publish_with_snapshot(checkpoint, tmp_path, version)
                assert broadcaster.send(client, Snapshot(published, tensors))[url] > 0
                assert held_version(url) == version
                assert check_canary(client, url, published) < 1e-4
            with pytest.raises(WeightSyncError, match="versions only grow"):
                broadcaster.send(client, Snapshot(dataclasses.replace(published, version=40), tensors))
        assert not broadcaster.is_ready() and held_version(url) == 51
    finally:
        broadcaster.close()


def test_an_engine_that_was_killed_gets_the_version_from_disk(engine, checkpoint, tmp_path):
    supervisor, url = engine
    events = []
    config = WeightsConfig(transport="collective", deadline_s=60.0)
    with WeightPusher([url], lambda kind, **values: events.append((kind, values)), config) as pusher:
        pusher.submit(*publish_with_snapshot(checkpoint, tmp_path, 60))
        poll_until(lambda: pusher.is_held(60), supervisor.tend, 60, "version 60")
        os.kill(supervisor.process_ids()["engine"], signal.SIGKILL)
        pusher.submit(*publish_with_snapshot(checkpoint, tmp_path, 61))
        poll_until(lambda: pusher.is_held(61), supervisor.tend, 90, "version 61")
    assert held_version(url) == 61
    kinds = [kind for kind, _ in events]
    assert kinds.index("weights_broadcast") < kinds.index("weights_broadcast_failed") < kinds.index("weights_pushed")


def test_a_stopped_engine_costs_no_more_than_the_deadline(engine, checkpoint, tmp_path):
    supervisor, url = engine
    process = supervisor.process_ids()["engine"]
    broadcaster = WeightBroadcaster([url], "gloo", 1.0)
    published, tensors = publish_with_snapshot(checkpoint, tmp_path, 70)
    os.kill(process, signal.SIGSTOP)
    try:
        with httpx.Client(timeout=30) as client, pytest.raises(WeightSyncError):
            broadcaster.send(client, Snapshot(published, tensors))
    finally:
        os.kill(process, signal.SIGCONT)
        broadcaster.close()
    assert not broadcaster.is_ready()


def test_buffers_hold_whole_tensors_in_order(monkeypatch):
    monkeypatch.setattr("glm5.engine.broadcast.BUFFER_BYTES", 40)
    sizes = {"a": 5, "b": 5, "c": 1, "d": 20, "e": 0}
    specs = {name: TensorSpec(torch.float32, (size,)) for name, size in sizes.items()}
    assert list(buffers(specs)) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(buffers({})) == []


def test_an_announcement_survives_its_way_and_a_wrong_one_is_refused():
    tensors = {"x": torch.arange(4.0), "y": torch.ones(2, 3, dtype=torch.bfloat16)}
    sent = announce(tensors)
    assert Announcement.from_json(sent.to_json()) == sent
    assert announce({**tensors, "x": torch.arange(4.0) + 1}).sha256 != sent.sha256
    with pytest.raises(WeightSyncError, match="send names, dtypes, shapes, sha256"):
        Announcement.from_json({**sent.to_json(), "dtypes": ["F32", "F7"]})
    with pytest.raises(WeightSyncError):
        Announcement.from_json({**sent.to_json(), "shapes": [[4]]})
