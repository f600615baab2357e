import dataclasses
import json
import os
import signal
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch

from glm5.errors import WeightSyncError
from glm5.model.checkpoint import load_model
from glm5.rl import push as pushing
from glm5.rl.operation import WeightsConfig
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
    with WeightPusher(["http://127.0.0.1:9"], lambda kind, **values: events.append(kind),
                      WeightsConfig(deadline_s=0.2)) as pusher:
        pusher.submit(publish_changed(checkpoint, tmp_path, 1))
        time.sleep(1.5)
        with pytest.raises(WeightSyncError, match="did not arrive within 0 s"):
            pusher.is_held(1)
    assert events == ["weights_push_failed"]


def test_a_version_that_fails_its_canary_is_rolled_back_and_reported(engine, checkpoint, tmp_path):
    _, url = engine
    events, suspects = [], []
    good = publish_changed(checkpoint, tmp_path, 20)
    bad = dataclasses.replace(publish_changed(checkpoint, tmp_path, 21), canary_logprobs=[-99.0] * 63)
    with WeightPusher([url], lambda kind, **values: events.append((kind, values)), WeightsConfig(recheck_s=0.1),
                      lambda url, why: suspects.append((url, why))) as pusher:
        pusher.submit(good)
        poll_until(lambda: pusher.is_held(20), lambda: None, 30, "version 20")
        pusher.submit(bad)
        poll_until(lambda: suspects, lambda: None, 30, "suspicion")
        assert not pusher.is_held(21) and pusher.is_held(20)
    rolled = [values for kind, values in events if kind == "weights_rolled_back"]
    assert rolled and rolled[0]["version"] == 21 and rolled[0]["to"] == 20 and rolled[0]["canary_error"] < 1e-4
    assert held_version(url) == 20  # after every attempt
    assert suspects[0][0] == url and "canary log-probs of weight version 21 differ" in suspects[0][1]


def test_a_difference_is_loaded_like_a_whole_version(engine, checkpoint, tmp_path):
    _, url = engine
    model = load_model(checkpoint)
    with httpx.Client(timeout=30) as client:
        for version in (30, 31, 32):
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)
            published = publish(model, tmp_path, version=version, step=version, parent=version - 1 if version > 30 else
                                None, tokenizer_dir=checkpoint, full_every=8)
            assert published.links == version - 30
            assert push(client, url, published).canary_error < 1e-4


class Liar(BaseHTTPRequestHandler):
    """An engine that claims version 1; ``mode`` says how it treats the canary."""

    mode = "wrong"

    def do_GET(self):
        self._answer({"weight_version": 1})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if self.mode == "silent":
            time.sleep(1.0)
        self._answer({"prompt_logprobs": [None, *[-1.0] * 63]})

    def _answer(self, body):
        data = json.dumps(body).encode()
        with suppress(OSError):
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(("mode", "said"), [("wrong", "CanaryError"), ("silent", "ReadTimeout")])
def test_an_engine_that_looks_well_and_lies_is_reported_after_the_second_look(checkpoint, tmp_path, monkeypatch, mode,
                                                                              said):
    monkeypatch.setattr(pushing, "CANARY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(Liar, "mode", mode)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    suspects = []
    published = publish_changed(checkpoint, tmp_path, 1)
    try:
        with WeightPusher([f"http://127.0.0.1:{server.server_address[1]}"], lambda kind, **values: None,
                          on_suspect=lambda url, why: suspects.append(why)) as pusher:
            pusher.submit(published)
            poll_until(lambda: suspects, lambda: None, 30, "suspicion")
            assert not pusher.is_held(1)
    finally:
        server.shutdown()
        server.server_close()
    assert suspects[0].startswith(f"looks well but fails its canary: {said}")
