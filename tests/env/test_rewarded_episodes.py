"""Whole episodes at a task service with blended rewards, self-play verification and a monitor, over real HTTP."""

import asyncio
import time

import pytest

from glm5.env.client import run_episode
from glm5.env.rewards.config import MonitorConfig, RewardConfig, VerificationConfig
from glm5.env.rewards.monitor import REFUSAL
from glm5.env.rewards.rules import RuleConfig
from glm5.env.service import build_app
from glm5.env.tasks import load_taskset
from glm5.errors import ConfigError
from glm5.records import SamplingParams
from glm5.wire import HttpClient, HttpStatusError

from .scripted_model import answer, model_app, served, tool_call
from .test_blend import reward_model

TASK = load_taskset("writing").task("train", 0)
ANCHOR = TASK.data["anchor"]
QUESTION = VerificationConfig().question


def play(policy, rewards, body, names=("writing",), seen=None, url=""):
    """``await body(http, service URL, model URL)`` against a service with ``rewards`` and a scripted model."""
    async def run(service_url, model_url):
        http = HttpClient()
        try:
            return await body(http, service_url, model_url)
        finally:
            http.close()

    with served(model_app(policy, seen)) as model_url:
        with served(build_app(names, capacity=2, rewards=rewards, reward_model_url=url)) as service_url:
            return asyncio.run(run(service_url, model_url))


def episode(policy, rewards, task_id=TASK.task_id, **options):
    """The result of an episode of at most three turns."""
    async def body(http, service_url, model_url):
        return await http.post(f"{service_url}/episodes/run", {
            "episode_id": f"e{time.monotonic_ns()}", "task_id": task_id, "base_url": f"{model_url}/v1",
            "api_key": "key", "max_turns": 3, "timeout_s": 20}, 30)

    return play(policy, rewards, body, **options)


def test_every_part_is_reported():
    rules = (RuleConfig(kind="length", options={"most": 3}),)
    with reward_model(0.5) as url:
        result = episode(lambda messages: answer(ANCHOR), {"writing": RewardConfig(model=2.0, rules=rules)}, url=url)
    assert result["reward"] == pytest.approx((1 + 1 + 2 * 0.5) / 4)
    assert result["reward_parts"] == {"task": 1.0, "rule.length": 1.0, "model": 0.5,
                                      "words": float(len(ANCHOR.split()))}


def test_a_missing_part_is_an_infrastructure_error_and_no_reward():
    with reward_model({}) as url:
        result = episode(lambda messages: answer(ANCHOR), {"writing": RewardConfig(model=1.0)}, url=url)
    assert (result["outcome"], result["reward"], result["reward_parts"]) == ("infra_error", None, {})
    assert "reward model" in result["reason"]


@pytest.mark.parametrize(("first", "second", "reward", "agrees"), [
    (ANCHOR, "yes", 1.0, 1.0), (ANCHOR, "no", 0.75, 0.0), ("nonsense", "no", 0.25, 1.0), ("nonsense", "yes", 0.0, 0.0),
    (ANCHOR, "perhaps", 0.75, 0.0)])
def test_the_second_answer_verifies_the_first(first, second, reward, agrees):
    def policy(messages):
        return answer(second if messages[-1]["content"] == QUESTION else first)

    seen = []
    result = episode(policy, {"writing": RewardConfig(verification=VerificationConfig(weight=0.25))}, seen=seen)
    assert result["reward"] == pytest.approx(reward)
    assert result["reward_parts"]["verdict"] == agrees and result["turns"] == 2
    assert [message["content"] for message in seen[1]["messages"]] == [TASK.instruction, first, QUESTION]


def test_an_episode_without_an_answer_gives_no_verdict():
    seen = []
    config = {"writing": RewardConfig(verification=VerificationConfig(weight=0.25))}
    result = episode(lambda messages: {**answer(ANCHOR), "finish": "length"}, config, seen=seen)
    assert result["outcome"] == "truncated" and len(seen) == 1
    assert result["reward"] == pytest.approx(0.75) and result["reward_parts"]["verdict"] == 0.0


def test_the_monitor_sees_tool_calls_of_an_episode():
    task = load_taskset("calculator").task("train", 0)

    def policy(messages):
        if messages[-1]["role"] == "tool":
            return answer(str(task.data["value"]))
        return tool_call("calculator", '{"expression": "git log"}')

    seen = []
    config = {"calculator": RewardConfig(monitor=MonitorConfig(zero_reward=True))}
    result = episode(policy, config, task_id=task.task_id, names=("calculator",), seen=seen)
    assert seen[1]["messages"][-1]["content"] == REFUSAL
    assert result["reward"] == 0.0 and result["reward_parts"]["task"] == 1.0
    assert {name: value for name, value in result["reward_parts"].items() if name.startswith("monitor.")} == {
        "monitor.recorded_answers": 1.0, "monitor.suspected": 1.0, "monitor.confirmed": 1.0}


def test_an_anchored_episode_opens_its_session_with_the_anchor():
    async def body(http, service_url, model_url):
        with pytest.raises(HttpStatusError, match="400"):
            await http.get(f"{service_url}/anchor?task_id=nothing/train/0", 5)
        return await run_episode(
            http, gateway_url=model_url, service_url=service_url, episode_id="e", group_id="g", taskset="writing",
            task_id=TASK.task_id, sampling=SamplingParams(), max_turns=2, timeout_s=20, anchored=True)

    seen = []
    played = play(lambda messages: answer(ANCHOR), {"writing": RewardConfig(anchors="solution")}, body, seen=seen)
    assert seen[0]["answers"] == [ANCHOR] and played.reward == 1.0
    seen.clear()
    play(lambda messages: answer(ANCHOR), {"writing": RewardConfig()}, body, seen=seen)
    assert seen[0]["answers"] == []


def test_a_service_without_the_reward_model_it_needs_does_not_start():
    with pytest.raises(ConfigError, match="needs a reward model"):
        build_app(["writing"], rewards={"writing": RewardConfig(model=1.0)})
