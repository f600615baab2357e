"""Rewards of a run: where the reward model lies, what the task services are told, anchored slots, counts, pairs."""

import asyncio
import dataclasses
import json

import pytest

from glm5.env.rewards.config import MonitorConfig, RewardConfig, read_rewards
from glm5.env.rewards.rules import RuleConfig
from glm5.env.tasks import load_taskset
from glm5.errors import ConfigError, DataError
from glm5.records import Episode, Trajectory
from glm5.rl.config import RLConfig
from glm5.rl.episodes import monitor_counts
from glm5.rl.general import train_reward_model
from glm5.rl.launch.rewards import reward_arguments, reward_model_directory
from glm5.rl.pairs import write_ledger_pairs
from glm5.tokenizer.bpe import load_tokenizer
from glm5.train.preference_config import PreferenceConfig

from .factories import open_ledger
from .test_orchestrator import Scripted, make_config, running, start_ledger, until

REWARDS = {"writing": RewardConfig(rules=(RuleConfig(kind="length", options={"most": 9}),), monitor=MonitorConfig())}


def test_the_reward_model_of_a_stage_is_found_from_a_stage_and_from_an_evaluation(tmp_path):
    checkpoint = tmp_path / "reward-model" / "checkpoints" / "000060"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match="no finished run 'reward-model'"):
        reward_model_directory("stage:reward-model", tmp_path / "general")
    (tmp_path / "reward-model" / "final.json").write_text('{"checkpoint": "000060"}')
    with pytest.raises(ConfigError, match="no reward_head"):
        reward_model_directory("stage:reward-model", tmp_path / "general")
    (checkpoint / "reward_head.safetensors").write_text("")
    for run_dir in (tmp_path / "general", tmp_path / "evaluation" / "general"):
        assert reward_model_directory("stage:reward-model", run_dir) == checkpoint
    assert reward_model_directory(str(checkpoint), tmp_path) == checkpoint


def test_task_services_read_what_the_run_writes(tmp_path):
    assert reward_arguments(RLConfig(name="x", tasksets={"writing": 1.0}), tmp_path, "") == []
    config = RLConfig(name="x", tasksets={"writing": 1.0}, rewards=REWARDS)
    flag, path, *rest = reward_arguments(config, tmp_path, "http://r")
    assert (flag, rest) == ("--rewards", ["--reward-model", "http://r"])
    assert read_rewards(tmp_path / "rewards.json") == REWARDS and path == str(tmp_path / "rewards.json")


def test_a_weight_without_a_reward_model_is_refused():
    with pytest.raises(ConfigError, match="reward_model is empty"):
        RLConfig(name="x", tasksets={"writing": 1.0}, rewards={"writing": RewardConfig(model=1.0)})


def episode(**parts):
    return Episode(episode_id="e", group_id="g", task_id="t", taskset="t", outcome="ok", reward=1.0, reward_parts=parts)


def test_counts_of_the_monitor():
    assert monitor_counts([episode(task=1.0), episode(**{"monitor.suspected": 2.0, "monitor.confirmed": 1.0}),
                           episode(**{"monitor.suspected": 1.0})]) == {"suspected": 3, "confirmed": 1}
    assert monitor_counts([episode(task=1.0)]) == {}


def test_the_last_slots_of_a_group_are_anchored_and_hacking_is_an_event(tmp_path):
    class Watching(Scripted):
        """Remembers the answers that sessions are opened with; every episode was suspected once."""

        def __init__(self):
            super().__init__()
            self.answers = {}
            from starlette.responses import JSONResponse
            from starlette.routing import Route

            async def anchor(request):
                return JSONResponse({"answer": "anchor"})

            self.server.config.app.router.routes.append(Route("/anchor", anchor))

        async def open(self, request):
            body = await request.json()
            self.answers[body["session_id"].partition("-s")[2][0]] = body.get("answers")
            return await super().open(request)

        async def run(self, request):
            answer = await super().run(request)
            body = json.loads(answer.body) | {"reward_parts": {"monitor.suspected": 1.0}}
            from starlette.responses import JSONResponse
            return JSONResponse(body)

    config = make_config(tasksets={"calculator": 1.0}, group_size=3, anchors_per_group=1)
    ledger = start_ledger(tmp_path, config)

    async def run():
        async with running(config, tmp_path, service):
            await until(lambda: ledger.counts().groups.get("ready", 0) >= 1)

    service = Watching()
    try:
        asyncio.run(run())
    finally:
        service.close()
        ledger.close()
    assert service.answers == {"0": None, "1": None, "2": ["anchor"]}
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {"kind": "reward_hacking", "suspected": 3} in [
        {key: event[key] for key in ("kind", "suspected")} for event in events if event["kind"] == "reward_hacking"]


def answered(tokenizer, text, reward, number, closed=True):
    """An episode of one turn with this answer to the first writing task."""
    prompt = [1, 2]
    output = [*tokenizer.encode(text), *([tokenizer.special_id("<|user|>")] if closed else [])]
    trajectory = Trajectory(ids=prompt + output, loss_mask=[False, False] + [True] * len(output),
                            logprobs=[0.0, 0.0] + [-1.0] * len(output), versions=[-1, -1] + [0] * len(output))
    return Episode(episode_id=f"e{number}", group_id="g", task_id="writing/train/0", taskset="writing", outcome="ok",
                   reward=reward, trajectories=[trajectory])


@pytest.mark.parametrize(("anchors", "chosen"), [("", "return a"), ("solution", None)])
def test_pairs_from_a_ledger(tmp_path, checkpoint, anchors, chosen):
    tokenizer = load_tokenizer(checkpoint)
    ledger = open_ledger(tmp_path)
    ledger.record_version(0, 0)
    ledger.open_group("g", taskset="writing", task_id="writing/train/0", task_index=0, size=3)
    ledger.close_group("g", [[answered(tokenizer, "return a", 1.0, 0)], [answered(tokenizer, "cat", 0.0, 1)],
                             [answered(tokenizer, "never closed", -1.0, 2, closed=False)]])
    ledger.close()
    assert write_ledger_pairs(tmp_path, checkpoint, tmp_path / "pairs.jsonl", 5, anchors) == 1
    task = load_taskset("writing").task("train", 0)
    assert json.loads((tmp_path / "pairs.jsonl").read_text()) == {
        "messages": [{"role": "user", "content": task.instruction}], "chosen": chosen or task.data["anchor"],
        "rejected": "cat"}


def test_no_pair_is_said(tmp_path, checkpoint):
    open_ledger(tmp_path).close()
    with pytest.raises(DataError, match="no group with two answers"):
        write_ledger_pairs(tmp_path, checkpoint, tmp_path / "pairs.jsonl", 5)


def test_a_general_stage_whose_parts_do_not_fit_is_refused(tmp_path):
    reward = PreferenceConfig(name="other", steps=1)
    rl = RLConfig(name="general", tasksets={"writing": 1.0}, reward_model="stage:reward-model",
                  rewards={"writing": RewardConfig(model=1.0)})
    with pytest.raises(ConfigError, match="stage:other"):
        train_reward_model(reward, rl, tmp_path, 4)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="holds no finished run"):
        train_reward_model(dataclasses.replace(reward, name="reward-model", init="stage:sft"), rl, tmp_path, 4)
    assert len((tmp_path / "preferences.jsonl").read_text().splitlines()) == 4
