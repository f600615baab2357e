"""Anchored episodes: a given answer becomes a turn with the policy's own log-probs, by a real gateway and engine."""

import httpx
import pytest
import torch

from glm5.errors import ConfigError
from glm5.model.checkpoint import load_model
from glm5.records import trajectory_from_json
from glm5.rl.config import RLConfig
from glm5.tokenizer.bpe import load_tokenizer


def test_a_given_answer_is_recorded_with_the_log_probs_of_the_policy(gateway, checkpoint):
    with httpx.Client(base_url=gateway, timeout=60) as http:
        session = http.post("/sessions", json={
            "session_id": "anchored", "ttl_s": 60, "enable_thinking": False, "answers": ["return a + b"],
            "sampling": {"temperature": 1.0, "max_new_tokens": 16}}).json()
        messages = [{"role": "user", "content": "What is 12 + 30?"}]
        headers = {"authorization": f"Bearer {session['api_key']}"}
        chat = f"{session['base_url']}/chat/completions"
        first = http.post(chat, json={"messages": messages}, headers=headers).json()
        assert first["choices"][0]["message"]["content"] == "return a + b"
        assert first["choices"][0]["finish_reason"] == "stop"
        messages += [first["choices"][0]["message"], {"role": "user", "content": "Is that right?"}]
        second = http.post(chat, json={"messages": messages}, headers=headers)
        assert second.status_code == 200
        answer = http.post("/sessions/anchored/finish", json={"outcome": "ok", "reward": 1.0}).json()
    assert answer["kinds"].get("extend", 0) == 1 and answer["mismatches"] == 0
    trajectory = trajectory_from_json(answer["trajectories"][0])

    tokenizer = load_tokenizer(checkpoint)
    given = [*tokenizer.encode("return a + b"), tokenizer.special_id("<|user|>")]
    start = trajectory.loss_mask.index(True)
    places = range(start, start + len(given))
    assert [trajectory.ids[place] for place in places] == given
    assert all(trajectory.loss_mask[place] and trajectory.versions[place] == 0 for place in places)
    with torch.no_grad():
        logprobs = load_model(checkpoint, dtype=torch.float32)(torch.tensor([trajectory.ids])).logits[0].log_softmax(-1)
    for place in places:
        expected = logprobs[place - 1, trajectory.ids[place]].item()
        assert trajectory.logprobs[place] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("changes", "told"), [
    ({"anchors_per_group": 8}, "anchors_per_group=8"),
    ({"anchors_per_group": 1, "temperature": 0.7}, "temperature = 1"),
    ({"anchors_per_group": 1, "enable_thinking": True}, "enable_thinking"),
    ({"rewards": {"calc": {}}}, "rewards.calc: no such taskset")])
def test_settings(changes, told):
    with pytest.raises(ConfigError, match=told):
        RLConfig(name="x", tasksets={"writing": 1.0}, **changes)
