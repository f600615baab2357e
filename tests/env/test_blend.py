"""Blended rewards: the formula by hand, what is asked when, and that a missing part is never a number."""

import asyncio
import json
from collections import Counter

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from glm5.env.check import write_demonstrations, write_pairs
from glm5.env.rewards import judge as judge_module
from glm5.env.rewards.anchors import Anchors
from glm5.env.rewards.blend import Rewards
from glm5.env.rewards.config import (
    JudgeConfig,
    MonitorConfig,
    RewardConfig,
    VerificationConfig,
    read_rewards,
)
from glm5.env.rewards.rules import RuleConfig
from glm5.env.rewards.verification import demonstrate, verdict
from glm5.env.tasks import load_taskset
from glm5.errors import ConfigError, TaskError
from glm5.wire import HttpClient
from tests.env.scripted_judge import judge_server
from tests.env.scripted_model import served

WRITING = load_taskset("writing")
TASK = WRITING.task("train", 0)
SHORT = RuleConfig(kind="length", weight=2.0, options={"most": 2})


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(judge_module, "_RETRY_S", 0.0)


def reward_model(answer, seen=None):
    """A served reward model that gives ``answer`` to everything."""
    async def score(request):
        if seen is not None:
            seen.append(await request.json())
        return JSONResponse(answer if isinstance(answer, dict) else {"rewards": [answer]},
                            500 if answer == {} else 200)

    return served(Starlette(routes=[Route("/score", score, methods=["POST"])]))


def blend(config, text, own, url="", counts=None):
    async def run():
        http = HttpClient()
        rewards = Rewards(config, WRITING, http, url)
        messages = [{"role": "user", "content": TASK.instruction}, {"role": "assistant", "content": text}]
        try:
            return await rewards.blend(TASK, messages, {"reward": own, "words": 2.0}, counts or Counter())
        finally:
            rewards.close()
            http.close()

    return asyncio.run(run())


def test_rules_and_the_own_verifier_by_weight():
    parts = blend(RewardConfig(rules=(SHORT,)), "two words", 0.0)
    assert parts == {"reward": 2 / 3, "task": 0.0, "rule.length": 1.0, "words": 2.0}
    assert blend(RewardConfig(rules=(SHORT,)), "now three words", 1.0)["reward"] == 1 / 3


def test_two_rules_of_a_kind_have_names_of_their_own():
    rules = (SHORT, RuleConfig(kind="length", options={"least": 5}))
    parts = blend(RewardConfig(rules=rules), "two words", 1.0)
    assert (parts["rule.length"], parts["rule.length.1"]) == (1.0, 0.0)


@pytest.mark.parametrize(("own", "gate", "expected"), [
    (1.0, True, (1 + 3 * 0.8) / 4), (0.5, True, (0.5 + 3 * 0.5 * 0.8) / 4), (0.0, True, 0.0),
    (0.0, False, 3 * 0.8 / 4)])
def test_quality_counts_as_far_as_the_answer_is_correct(own, gate, expected):
    seen = []
    with reward_model(0.8, seen) as url:
        parts = blend(RewardConfig(model=3.0, gate=gate), "an answer", own, url)
    assert parts["reward"] == pytest.approx(expected)
    assert bool(seen) == ("model" in parts) == bool(own or not gate)
    if seen:
        assert seen[0] == {"conversations": [[{"role": "user", "content": TASK.instruction},
                                              {"role": "assistant", "content": "an answer"}]]}


def test_the_judge_is_a_part():
    with judge_server(lambda system, material: {"grade": 4}) as url:
        config = RewardConfig(task=1.0, judge=JudgeConfig(url=url, model="critic", weight=1.0))
        parts = blend(config, "an answer", 1.0)
    assert parts["judge"] == 0.75 and parts["reward"] == (1 + 0.75) / 2


@pytest.mark.parametrize("answer", [{}, {"rewards": []}, {"rewards": [0.5, 0.5]}, {"rewards": ["0.5"]},
                                    {"rewards": [1.5]}, {"rewards": [True]}, {"scores": [0.5]}])
def test_a_reward_model_that_gives_no_number_fails_closed(answer):
    with reward_model(answer) as url, pytest.raises(TaskError, match="reward model"):
        blend(RewardConfig(model=1.0), "an answer", 1.0, url)


def test_a_judge_that_fails_gives_no_reward():
    with judge_server(lambda system, material: "five stars") as url:
        config = RewardConfig(judge=JudgeConfig(url=url, model="critic", attempts=1))
        with pytest.raises(TaskError, match="no verdict"):
            blend(config, "an answer", 1.0)


def test_a_confirmed_hack_gets_nothing_where_that_is_asked():
    counts = Counter({"monitor.confirmed": 1})
    config = RewardConfig(monitor=MonitorConfig(zero_reward=True))
    assert blend(config, "an answer", 1.0, counts=counts)["reward"] == 0.0
    parts = blend(RewardConfig(monitor=MonitorConfig()), "an answer", 1.0, counts=counts)
    assert parts["reward"] == 1.0 and parts["monitor.confirmed"] == 1.0


@pytest.mark.parametrize(("text", "expected"), [
    ("yes", True), ("No, it is not.", False), ("YES!", True), ("", None), ("maybe yes", None), ("yesterday", None)])
def test_verdicts(text, expected):
    assert verdict(VerificationConfig(), text) is expected


def test_demonstrations_of_a_verdict_never_train_the_wrong_answer():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "right"}]
    config = VerificationConfig(question="Right?")
    assert demonstrate(config, messages, None)[1:] == [
        {"role": "assistant", "content": "right"}, {"role": "user", "content": "Right?"},
        {"role": "assistant", "content": "yes"}]
    assert demonstrate(config, messages, "wrong")[1:] == [
        {"role": "assistant", "content": "wrong", "erroneous": True}, {"role": "user", "content": "Right?"},
        {"role": "assistant", "content": "no"}]
    assert messages[1]["content"] == "right"


def test_demonstrations_and_pairs_of_a_taskset(tmp_path):
    assert write_demonstrations("writing", 2, tmp_path / "d", verification=VerificationConfig()) == 2
    first, second = (json.loads(line)["messages"] for line in (tmp_path / "d").read_text().splitlines())
    task = WRITING.task("demo", 1)
    assert first[1]["content"] == WRITING.solution(WRITING.task("demo", 0)).answer and first[3]["content"] == "yes"
    assert second[1] == {"role": "assistant", "content": task.data["wrong"], "erroneous": True}
    assert second[3]["content"] == "no"
    assert write_pairs("writing", 9, tmp_path / "p") == 9
    pairs = [json.loads(line) for line in (tmp_path / "p").read_text().splitlines()]
    for index, pair in enumerate(pairs):
        data = WRITING.task("demo", index).data
        assert pair["chosen"] == data["anchor"]
        assert pair["rejected"] == data["wrong"] if not data["padded"] else data["anchor"] in pair["rejected"]
    with pytest.raises(ConfigError, match="no preference"):
        write_pairs("calculator", 1, tmp_path / "p")


def test_padded_answers_are_right_and_wrong_ones_are_not():
    for index in range(40):
        for split in ("demo", "train", "heldout"):
            task = WRITING.task(split, index)

            def reward(text, task=task):
                messages = [{"role": "assistant", "content": text}]
                return asyncio.run(WRITING.verify(task, None, messages))["reward"]

            better, worse = WRITING.preference(task)
            assert reward(better) == reward(WRITING.solution(task).answer) == 1.0
            assert reward(worse) == float(task.data["padded"]) and reward(task.data["wrong"]) == 0.0


def test_anchors(tmp_path):
    assert Anchors("", WRITING).answer(TASK) is None
    assert Anchors("solution", WRITING).answer(TASK) == TASK.data["anchor"]
    calculator = load_taskset("calculator")
    assert Anchors("solution", calculator).answer(calculator.task("train", 0)) is None  # solved by a tool
    path = tmp_path / "anchors.jsonl"
    path.write_text('{"instruction": "%s", "answer": "mine"}\n' % TASK.instruction)  # noqa: UP031
    assert Anchors(str(path), WRITING).answer(TASK) == "mine"
    assert Anchors(str(path), WRITING).answer(WRITING.task("train", 1)) is None
    path.write_text('{"instruction": "a"}\n')
    with pytest.raises(ConfigError, match=r"anchors\.jsonl:1"):
        Anchors(str(path), WRITING)


def test_configurations(tmp_path):
    with pytest.raises(ConfigError, match="every weight is 0"):
        RewardConfig(task=0.0)
    with pytest.raises(ConfigError, match="needs anchors"):
        RewardConfig(judge=JudgeConfig(url="http://x/v1", model="m", mode="against_anchor"))
    with pytest.raises(ConfigError, match="needs a reward model"):
        blend(RewardConfig(model=1.0), "x", 1.0)
    with pytest.raises(ConfigError, match=r"weight=1.0"):
        VerificationConfig(weight=1.0)
    path = tmp_path / "rewards.json"
    path.write_text('{"writing": {"task": 1, "rules": [{"kind": "lenght"}]}}')
    with pytest.raises(ConfigError, match="unknown; known rules"):
        read_rewards(path)
    path.write_text('{"writing": {"rules": [{"kind": "length", "options": {"most": 2}}]}}')
    assert read_rewards(path)["writing"].rules[0].options == {"most": 2}
