"""The step loop: exact continuation after a kill, skipped steps, patience, time limits, router bias."""

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from glm5.errors import ConfigError
from glm5.model.checkpoint import load_model
from glm5.runlog import read_jsonl
from glm5.tokenizer.bpe import train_tokenizer
from glm5.train.checkpoint import TrainerState, latest_checkpoint, load_trainer_state
from glm5.train.config import EvaluationConfig, GuardConfig, OptimizerConfig, ScheduleConfig, StageConfig
from glm5.train.loop import Training
from glm5.train.optimizers import build_optimizer

from .conftest import packed_batch, tiny_model

ROOT = Path(__file__).parents[2]
CONFIG = StageConfig(
    stage="pretrain", name="p", tokenizer="t", steps=12, batch_rows=4, length=24, mtp_steps=2, checkpoint_every=3,
    bias_rate=0.05, optimizer=OptimizerConfig(lr=0.01), schedule=ScheduleConfig(kind="cosine", warmup_steps=2))


def batches(start):
    return (packed_batch(seed=step) for step in itertools.count(start))


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some text to have a vocabulary from"], 300).save(directory)
    return directory


def training(run_dir, tokenizer_dir, config=CONFIG, evaluate=None, model=None):
    """A run at its start, or at its newest checkpoint."""
    latest = latest_checkpoint(run_dir)
    model = model or (load_model(latest) if latest else tiny_model())
    optimizer = build_optimizer(model, config.optimizer)
    state = load_trainer_state(latest, optimizer) if latest else TrainerState()
    return Training(config, run_dir, model, optimizer, state, tokenizer_dir, evaluate)


def curve(run_dir):
    """Loss and gradient norm by step; a step trained twice must have had equal values."""
    points = {}
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        point = {key: value for key, value in record.items() if key not in ("time", "tokens_per_s", "data_wait")}
        assert points.setdefault(record["step"], point) == point
    return points


def run_slowly(run_dir, tokenizer_dir):
    """Train with a pause in each step, so that a kill hits the middle of the run."""
    def paused():
        for batch in batches(0):
            time.sleep(0.1)
            yield batch
    training(Path(run_dir), Path(tokenizer_dir)).run(paused())


def test_a_killed_run_continues_with_the_curve_of_an_uninterrupted_one(tmp_path, tokenizer_dir):
    straight = training(tmp_path / "straight", tokenizer_dir)
    final = straight.run(batches(0))
    program = "import sys; from tests.train.test_loop import run_slowly; run_slowly(*sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "killed"), str(tokenizer_dir)],
                               cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(read_jsonl(tmp_path / "killed" / "metrics.jsonl")) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait(30)
    resumed = training(tmp_path / "killed", tokenizer_dir)
    assert 6 <= resumed.state.step < 12
    continued = resumed.run(batches(resumed.state.data_step))
    assert curve(tmp_path / "killed") == curve(tmp_path / "straight")
    assert len(curve(tmp_path / "straight")) == 12
    ours, theirs = load_model(final), load_model(continued)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))


def test_training_lowers_the_loss_and_moves_the_router_bias(tmp_path, tokenizer_dir):
    run = training(tmp_path, tokenizer_dir)
    run.run(itertools.repeat(packed_batch()))
    points = curve(tmp_path)
    assert points[12]["loss"] < 0.8 * points[1]["loss"]
    assert points[12]["mtp_loss"] < points[1]["mtp_loss"]
    biases = [buffer for name, buffer in run.model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and all(bias.any() for bias in biases)  # the sparse layer and the MTP layer


def test_a_step_that_is_not_finite_changes_nothing_and_is_kept_and_counted(tmp_path, tokenizer_dir):
    config = dataclasses.replace(CONFIG, guard=GuardConfig(max_skipped=2), steps=4)
    run = training(tmp_path, tokenizer_dir, config)
    with torch.no_grad():
        run.model.lm_head.weight[0, 0] = float("inf")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"2 steps were skipped .* not finite; lower optimizer.lr"):
        run.run(batches(0))
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    kept = sorted(path.name for path in (tmp_path / "skipped").iterdir())
    assert kept == ["000001.safetensors", "000002.safetensors"]
    assert [event["kind"] for event in read_jsonl(tmp_path / "events.jsonl")] == ["step_skipped", "step_skipped"]


def test_patience_stops_the_run_and_hands_on_the_best_checkpoint(tmp_path, tokenizer_dir):
    config = dataclasses.replace(CONFIG, steps=40, evaluation=EvaluationConfig(every=2, metric="score", patience=3))
    scores = {2: 0.1, 4: 0.5, 6: 0.4, 8: 0.5, 10: 0.3}
    run = training(tmp_path, tokenizer_dir, config, lambda model, step: {"score": scores[step]})
    final = run.run(batches(0))
    assert final.name == "000004" and final.is_dir()
    assert run.state.step == 10 and run.state.best_metric == 0.5
    steps = [event["step"] for event in read_jsonl(tmp_path / "events.jsonl") if event["kind"] == "evaluation"]
    assert steps == [2, 4, 6, 8, 10]
    with pytest.raises(ConfigError, match="'score' is not measured by the hook; choose of: other"):
        training(tmp_path / "b", tokenizer_dir, config, lambda model, step: {"other": 1.0}).run(batches(0))


def test_a_time_limit_ends_the_run_with_a_checkpoint_and_a_finished_schedule(tmp_path, tokenizer_dir):
    config = dataclasses.replace(CONFIG, steps=100_000, max_minutes=1.5 / 60)
    run = training(tmp_path, tokenizer_dir, config)
    final = run.run(batches(0))
    assert run.state.step < 100_000 and final == latest_checkpoint(tmp_path)
    last = read_jsonl(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == run.state.step
    assert last["lr"] < 0.5 * config.optimizer.lr  # cosine by time, not by the steps that were never reached


def test_a_finished_run_has_two_checkpoints_left(tmp_path, tokenizer_dir):
    training(tmp_path, tokenizer_dir).run(batches(0))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000009", "000012"]
    state = json.loads((tmp_path / "checkpoints" / "000012" / "trainer" / "state.json").read_text())
    assert state["step"] == state["data_step"] == 12 and state["tokens"] == 12 * 4 * 22
