"""Stage configuration: what is refused, and in which words; the shipped files are valid."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm5.config import build_config, load_config
from glm5.errors import ConfigError
from glm5.model.config import preset
from glm5.train.config import RECIPES, StageConfig
from glm5.train.parallel.layout import Layout

GLM5 = Path(__file__).parents[2] / "configs" / "glm-5"
NANO = Path(__file__).parents[2] / "configs" / "nano"
MINIMAL = {"stage": "pretrain", "name": "p", "tokenizer": "t", "steps": 3}


def test_an_unknown_key_is_named_with_a_near_one():
    with pytest.raises(ConfigError, match=r"nano.toml: optimizer.lrr: unknown key; did you mean 'lr'"):
        build_config(StageConfig, {**MINIMAL, "optimizer": {"lrr": 1e-3}}, "nano.toml")


@pytest.mark.parametrize(("change", "message"), [
    ({"steps": 0}, "steps=0"),
    ({"tokenizer": ""}, "tokenizer"),
    ({"stage": "sft"}, "data.conversations"),
    ({"stage": "dsa-warmup", "train_indexer": False}, "train_indexer"),
    ({"schedule": {"warmup_steps": 4}}, "warmup_steps=4 exceeds steps=3"),
    ({"evaluation": {"patience": 2}}, "patience=2"),
    ({"optimizer": {"lr": -1.0}}, "lr=-1.0"),
    ({"batch_ramp": {"first_rows": 4}}, "give both or neither"),
    ({"batch_ramp": {"first_rows": 32, "steps": 9}}, "first_rows=32 exceeds batch_rows=16"),
    ({"micro_rows": 4, "batch_ramp": {"first_rows": 6, "steps": 9}}, "whole micro-batches of micro_rows=4"),
    ({"guard": {"loss_rise": -1.0}}, "loss_rise=-1.0"),
    ({"guard": {"max_skipped": 0}}, "max_skipped=0"),
    ({"data": {"held_out_fraction": 0.0}}, "held_out_rows"),
    ({"stage": "pre-train"}, "stage"),
])
def test_a_wrong_value_is_refused_in_one_line(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_config(StageConfig, {**MINIMAL, **change}, "nano.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", RECIPES)
def test_every_shipped_stage_file_is_valid(stage):
    config = load_config(StageConfig, NANO / f"{stage}.toml")
    assert config.stage == config.name == stage


@pytest.mark.parametrize(("name", "tokens", "devices"), [
    ("pretrain", 27e12, 1024), ("midtrain-32k", 1e12, 1024), ("midtrain-128k", 500e9, 1024),
    ("midtrain-200k", 50e9, 1024), ("dsa-warmup", 2.84e9, 896), ("dsa-sparse", 20e9, 1024), ("sft", None, 1024)])
def test_the_published_stages_have_their_tokens_and_divide_over_their_devices(name, tokens, devices):
    config = load_config(StageConfig, GLM5 / f"{name}.toml")
    if tokens is not None:
        assert config.steps * config.batch_rows * config.length == pytest.approx(tokens, rel=1e-3)
    axes = config.parallel
    fsdp, rest = divmod(devices, axes.ep * axes.cp * axes.tp)
    assert rest == 0
    Layout(torch.device("meta"), fsdp, axes.ep, axes.cp, axes.tp).check(config, preset("glm-5"))


def test_the_configuration_needs_no_torch():
    program = "import sys, glm5.train.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
