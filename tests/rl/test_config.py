import dataclasses
import json
from pathlib import Path

import pytest

from glm5.config import build_config, load_config
from glm5.errors import ConfigError
from glm5.rl.config import CurriculumConfig, RLConfig, read_rl_config
from glm5.rl.credit import TeacherConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def test_synchronous_mode_is_the_same_configuration_with_no_run_ahead():
    config = RLConfig(name="r", tasksets={"calculator": 1.0}, publish_every=2, max_staleness=3, pacing_eta=2)
    assert (config.eta, config.tau, config.publication_interval) == (2, 3, 2)
    sync = dataclasses.replace(config, mode="sync")
    assert (sync.eta, sync.tau, sync.publication_interval) == (0, 0, 1)


def test_a_staleness_bound_that_would_drop_everything_is_refused():
    with pytest.raises(ConfigError, match=r"max_staleness=1 is below pacing_eta \+ publish_every - 1 = 3"):
        RLConfig(name="r", tasksets={"calculator": 1.0}, publish_every=3, max_staleness=1)


@pytest.mark.parametrize("wrong", [{"group_size": 1}, {"temperature": 0.0}, {"tasksets": {}},
                                   {"tasksets": {"shell": 0.0}}, {"steps": 0}, {"max_attempts": 0}])
def test_values_out_of_range_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RLConfig(**{"name": "r", "tasksets": {"calculator": 1.0}, **wrong})


def test_an_unknown_key_is_one_line_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"rl.toml: group_sizes: unknown key; did you mean 'group_size'\?"):
        build_config(RLConfig, {"name": "r", "tasksets": {"calculator": 1}, "group_sizes": 4}, "rl.toml")


def test_the_resolved_configuration_reads_back_the_same(tmp_path):
    config = RLConfig(name="r", tasksets={"calculator": 1.0, "shell": 2.0}, steps=3)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    assert read_rl_config(tmp_path / "config.json") == config


def test_a_torn_configuration_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"name": ')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rl_config(tmp_path / "config.json")


TEACHERS = {"reasoning": {"checkpoint": "stage:reasoning", "tasksets": {"maths": 1.0, "code": 3.0}},
            "agentic": {"checkpoint": "stage:rl", "tasksets": {"shell": 1.0}, "share": 2.0}}


def test_prompts_of_teachers_are_mixed_by_their_shares(tmp_path):
    config = build_config(RLConfig, {"name": "d", "teachers": TEACHERS, "group_size": 1}, "distill.toml")
    assert config.tasksets == {"maths": 0.25, "code": 0.75, "shell": 2.0}
    assert config.comparison is None and config.screened == 1
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    assert read_rl_config(tmp_path / "config.json") == config
    evaluated = config.for_evaluation(["shell", "maths"])
    assert (evaluated.tasksets, evaluated.teachers) == ({"shell": 1.0, "maths": 1.0}, {})


def test_an_evaluation_knows_only_the_verifiers():
    general = load_config(RLConfig, CONFIGS / "nano" / "general.toml")
    evaluated = dataclasses.replace(general, anchors_per_group=1).for_evaluation(["writing", "shell"])
    assert (evaluated.rewards, evaluated.reward_model, evaluated.anchors_per_group) == ({}, "", 0)
    assert (evaluated.max_context, evaluated.tasksets) == (general.max_context, {"writing": 1.0, "shell": 1.0})


def test_distillation_needs_episodes_of_the_student():
    with pytest.raises(ConfigError, match=r"offline.* with teachers"):
        build_config(RLConfig, {"name": "d", "teachers": TEACHERS, "mode": "offline", "replay": {"source": "x"}}, "d")


@pytest.mark.parametrize(("change", "words"), [
    ({"agentic": {"checkpoint": "stage:rl", "tasksets": {"maths": 1.0}}}, "'maths' has another teacher"),
    ({"agentic": {"checkpoint": "stage:rl", "tasksets": {}}}, "at least one taskset"),
    ({"agentic": {"checkpoint": "stage:rl", "tasksets": {"shell": 1.0}, "share": 0.0}}, "shares above 0")])
def test_teachers_that_cannot_be_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        build_config(RLConfig, {"name": "d", "teachers": {**TEACHERS, **change}}, "distill.toml")
    with pytest.raises(ConfigError, match="leave it out"):
        build_config(RLConfig, {"name": "d", "teachers": TEACHERS, "tasksets": {"shell": 1.0}}, "distill.toml")


def test_groups_are_screened_only_where_their_rewards_decide():
    config = RLConfig(name="r", tasksets={"calculator": 1.0}, curriculum=CurriculumConfig(screen=4))
    distilled = RLConfig(name="d", teachers={"t": TeacherConfig(checkpoint="c", tasksets={"calculator": 1.0})},
                         curriculum=CurriculumConfig(screen=4))
    assert config.screened == 4 and distilled.screened == 8
    assert dataclasses.replace(config, advantage="turn").screened == 8


def test_the_published_stages_hold_the_published_numbers():
    reasoning, agentic, general, distill = (load_config(RLConfig, CONFIGS / "glm-5" / f"{name}.toml")
                                            for name in ("reasoning-rl", "agentic-rl", "general-rl", "distill"))
    for stage in (reasoning, distill):
        assert (stage.loss.kind, stage.loss.beta, stage.loss.eps_low, stage.loss.eps_high) == ("icepop", 2.0, 0.2, 0.28)
        assert stage.tau == stage.eta == 0  # strictly on-policy
    assert (reasoning.group_size, reasoning.groups_per_batch, reasoning.advantage) == (32, 32, "mean_std")
    assert (distill.group_size, distill.groups_per_batch, distill.comparison) == (1, 1024, None)
    assert agentic.loss.kind == "double_sided" and agentic.reset_optimizer and agentic.advantage == "mean"
    rewards = general.rewards["writing"]
    assert general.anchors_per_group and rewards.model and rewards.judge is not None
    domains = {"maths": 0.0, "science": 0.0, "code": 0.0, "python": 0.0}
    for taskset, share in reasoning.tasksets.items():
        domains["maths" if taskset == "gym" else taskset] += share
    assert len(set(domains.values())) == 1


def test_nano_reasons_as_published_in_smaller_groups():
    nano, published = (load_config(RLConfig, CONFIGS / path)
                       for path in ("nano/reasoning.toml", "glm-5/reasoning-rl.toml"))
    assert (nano.loss, nano.advantage, nano.mode, nano.temperature) == (
        published.loss, published.advantage, published.mode, published.temperature)
    assert len(set(nano.tasksets.values())) == 1
