"""Training for an export: the stage computes with rounded weights, keeps exact ones, and its checkpoint says so."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from glm5.cli import app
from glm5.config import load_config
from glm5.errors import CheckpointError, ConfigError
from glm5.eval.quantization import CalibrationConfig, quantise_directory
from glm5.model.checkpoint import load_model
from glm5.model.quantize.fake import rounded
from glm5.model.quantize.plan import TRAINED_FOR, QuantisationPlan
from glm5.runlog import read_jsonl
from glm5.tokenizer.bpe import train_tokenizer
from glm5.train.config import DataConfig, OptimizerConfig, ScheduleConfig, StageConfig
from glm5.train.stages import run_stage

from .conftest import tiny_config
from .test_stages import SHAPE

PLAN = QuantisationPlan(attention="int4", mlp="none", group_size=8)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A corpus, and a stage of three steps for PLAN."""
    root = tmp_path_factory.mktemp("quantization")
    (root / "corpus").mkdir()
    for number in range(8):
        words = " ".join(f"word{(number * 7 + k) % 23} = value({k});" for k in range(90))
        (root / "corpus" / f"{number}.txt").write_text(words)
    train_tokenizer((path.read_text() for path in sorted((root / "corpus").iterdir())), 310).save(root / "tokenizer")
    shape = tiny_config().to_json()
    config = StageConfig(
        stage="pretrain", name="qat", tokenizer=str(root / "tokenizer"), model={key: shape[key] for key in SHAPE},
        steps=3, batch_rows=2, length=32, mtp_steps=1, quantization=PLAN,
        data=DataConfig(sources=(str(root / "corpus"),), held_out_fraction=0.3, held_out_rows=4),
        optimizer=OptimizerConfig(lr=0.01), schedule=ScheduleConfig(kind="constant"))
    return root, config, run_stage(config, root / "qat")


def test_the_checkpoint_holds_exact_weights_and_names_its_export(world):
    root, config, checkpoint = world
    model = load_model(checkpoint)
    assert QuantisationPlan.from_json(model.config.extra[TRAINED_FOR], "x") == PLAN
    weight = model.model.layers[1].mlp.experts.down_proj
    exact = weight.detach().clone()
    with rounded(model, PLAN):
        assert not torch.equal(weight, exact)
    plain = run_stage(dataclasses.replace(config, name="plain", quantization=None), root / "plain")
    losses = [next(iter(read_jsonl(root / name / "metrics.jsonl")))["loss"] for name in ("qat", "plain")]
    assert losses[0] != losses[1]  # the same batch and weights, rounded and not
    after = run_stage(dataclasses.replace(config, name="after", init=str(checkpoint), model={}, quantization=None),
                      root / "after")
    assert TRAINED_FOR not in load_model(after).config.extra and TRAINED_FOR not in load_model(plain).config.extra


def test_the_loss_of_the_stage_is_that_of_the_exported_weights(world):
    """Without rounding of inputs, what the stage reports as held-out loss is what the directory gives."""
    root, config, _ = world
    plan = dataclasses.replace(PLAN, rounds_inputs=False)
    run = run_stage(dataclasses.replace(config, name="only", quantization=plan), root / "only")
    rows = quantise_directory(run, root / "only-int4", {}, None, None,
                              CalibrationConfig(sources=(str(root / "corpus"),), rows=1, length=32))
    assert {row.name for row in rows} >= {"quantize.loss.quantized", "quantize.kl.quantized"}
    exported, model = load_model(root / "only-int4"), load_model(run)
    ids = torch.arange(30)[None] % 300
    with torch.no_grad(), rounded(model, plan):
        torch.testing.assert_close(exported(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert TRAINED_FOR not in exported.config.extra


def test_another_export_than_the_trained_one_and_training_of_integers_are_refused(world):
    root, config, checkpoint = world
    text = CalibrationConfig(sources=(str(root / "corpus"),), rows=1, length=32)
    with pytest.raises(ConfigError, match="was trained for"):
        quantise_directory(checkpoint, root / "x", {"experts": "int8"}, None, None, text)
    with pytest.raises(ConfigError, match="fewer than length=4000"):
        quantise_directory(checkpoint, root / "x", {}, None, None, dataclasses.replace(text, length=4000))
    quantise_directory(checkpoint, root / "int4", {}, None, None, text)
    with pytest.raises((ConfigError, CheckpointError), match="cannot be trained"):
        run_stage(dataclasses.replace(config, name="again", init=str(root / "int4"), model={}), root / "again")


def test_the_command_prints_rows_for_every_part(world):
    root, _, checkpoint = world
    arguments = ["quantize", str(checkpoint), str(root / "cli"), "--calibration", str(root / "corpus"), "--length",
                 "32", "--calibration-rows", "2", "--compare", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.strip().splitlines()[-1])
    names = {row["name"] for row in printed["rows"]}
    parts = ("quantized", "plain", "rotation", "scaling", "experts", "attention")
    assert {f"quantize.kl.{part}" for part in parts} <= names
    sizes = {row["name"]: row["value"] for row in printed["rows"]}
    assert sizes["quantize.bytes.quantized"] < sizes["quantize.bytes.original"]


def test_the_key_of_a_stage_file(tmp_path):
    path = tmp_path / "sft.toml"
    path.write_text('stage = "pretrain"\nname = "x"\nsteps = 1\ntokenizer = "t"\n[quantization]\ngroup_size = 32\n')
    assert load_config(StageConfig, path, ["quantization.mlp=none"]).quantization == QuantisationPlan(
        group_size=32, mlp="none")
    with pytest.raises(ConfigError, match="group"):
        load_config(StageConfig, path, ["quantization.group=none"])
    with pytest.raises(ConfigError, match="group_size=5"):
        load_config(StageConfig, path, ["quantization.group_size=5"])
