"""The guard: which steps are refused, in which words, what is kept of them, and that a kept batch runs again."""

import dataclasses
import itertools
import json

import pytest
import torch

from glm5.errors import CheckpointError, ConfigError
from glm5.model.checkpoint import load_model
from glm5.runlog import read_jsonl
from glm5.train.checkpoint import TrainerState, latest_checkpoint
from glm5.train.config import GuardConfig
from glm5.train.guard import judge, keep_batch, load_batch, remember, replay, replay_weights
from glm5.train.loop import Training, objective_of
from glm5.train.optimizers import build_optimizer

from .conftest import packed_batch, tiny_model
from .test_loop import CONFIG

RULES = GuardConfig(loss_rise=1.0, norm_factor=4.0, window=3)
FULL = TrainerState(recent_losses=(2.0, 3.0, 4.0), recent_norms=(1.0, 1.0, 1.0))


@pytest.mark.parametrize(("state", "loss", "norms", "reason"), [
    (FULL, 4.0, (4.0, 9.0), ""),
    (FULL, 4.01, (1.0, 1.0), "loss 4.01 is more than 1 above the mean 3"),
    (FULL, 3.0, (4.1, 1.0), "gradient norm 4.1 is more than 4 times the mean 1"),
    (FULL, float("nan"), (1.0, 1.0), "not finite"),
    (TrainerState(), float("inf"), (1.0, 1.0), "not finite"),
    (TrainerState(), 3.0, (1.0, float("nan")), "not finite"),
    (TrainerState(recent_losses=(2.0, 2.0), recent_norms=(1.0, 1.0)), 99.0, (99.0, 1.0), ""),  # too few to compare with
])
def test_a_step_is_judged_by_the_means_of_the_last_applied_ones(state, loss, norms, reason):
    verdict = judge(RULES, state, loss, norms)
    assert verdict.reason == reason and verdict.applies == (not reason)


def test_the_window_holds_the_last_applied_steps():
    state = TrainerState()
    for number in range(5):
        state = remember(RULES, state, float(number), 10.0 * number)
    assert state.recent_losses == (2.0, 3.0, 4.0) and state.recent_norms == (20.0, 30.0, 40.0)
    off = GuardConfig(loss_rise=0.0, window=3)
    assert judge(off, state, 1e9, (1e9, 0.0)).applies


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    from glm5.tokenizer.bpe import train_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some text to have a vocabulary from"], 300).save(directory)
    return directory


def spiking(config, run_dir, tokenizer_dir, spike_at):
    """A run whose batch of step ``spike_at`` has other labels than the one text that it learns by heart."""
    model = tiny_model()
    known, other = packed_batch(seed=0), packed_batch(seed=9)
    run = Training(config, run_dir, model, build_optimizer(model, config.optimizer), TrainerState(), tokenizer_dir)
    return run, (other if step == spike_at else known for step in itertools.count(1))


def test_a_loss_spike_changes_no_weight_and_no_optimizer_state_and_its_batch_runs_again(tmp_path, tokenizer_dir):
    config = dataclasses.replace(CONFIG, steps=30, checkpoint_every=29, guard=GuardConfig(loss_rise=0.5, window=4),
                                 optimizer=dataclasses.replace(CONFIG.optimizer, lr=0.03))
    run, batches = spiking(config, tmp_path, tokenizer_dir, spike_at=30)
    run.run(batches)
    before = load_model(tmp_path / "checkpoints" / "000029").state_dict()
    after = load_model(latest_checkpoint(tmp_path)).state_dict()
    assert run.state.skipped == 1 and all(torch.equal(value, after[name]) for name, value in before.items())
    first, second = ((tmp_path / "checkpoints" / name / "trainer" / "optimizer.safetensors").read_bytes()
                     for name in ("000029", "000030"))
    assert first == second
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert event["kind"] == "step_skipped" and event["step"] == 30 and "above the mean" in event["reason"]
    assert 30 not in {record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")}

    batch, reason = load_batch(tmp_path, 30)
    assert reason == event["reason"] and torch.equal(batch.ids_BT, packed_batch(seed=9).ids_BT)
    weights = replay_weights(tmp_path, 30, None)
    model = load_model(weights)
    rows = {row["name"]: row["value"] for row in replay(tmp_path, 30, objective_of(config), model, 29)}
    assert weights.name == "000029" and rows["replay.weights_step"] == 29
    losses = [rows[f"replay.loss.row{row}"] for row in range(4)]
    labels = batch.loss_mask_BT.sum(1)
    mean = float((torch.tensor(losses) * labels).sum() / labels.sum())
    assert mean == pytest.approx(float(event["losses"]["loss"]), rel=1e-4)  # what the step saw
    with pytest.raises(CheckpointError, match="steps with one: 000030"):
        load_batch(tmp_path, 12)
    with pytest.raises(CheckpointError, match="no checkpoint before step 12"):
        replay_weights(tmp_path, 12, None)


def test_the_run_gives_up_after_the_stated_number_of_spikes(tmp_path, tokenizer_dir):
    guard = GuardConfig(loss_rise=0.5, window=4, max_skipped=2)
    config = dataclasses.replace(CONFIG, steps=60, guard=guard,
                                 optimizer=dataclasses.replace(CONFIG.optimizer, lr=0.03))
    run, _ = spiking(config, tmp_path, tokenizer_dir, spike_at=0)
    stream = (packed_batch(seed=step if step > 30 else 0) for step in itertools.count(1))
    with pytest.raises(ConfigError, match=r"2 steps were skipped \(guard.max_skipped\), the last one: loss") as caught:
        run.run(stream)
    assert "\n" not in str(caught.value)
    assert sorted(path.stem for path in (tmp_path / "skipped").iterdir()) == ["000031", "000032"]
    state = json.loads((latest_checkpoint(tmp_path) / "trainer" / "state.json").read_text())
    assert len(state["recent_losses"]) == 4  # a resumed run compares with the same steps



def test_the_parts_of_several_processes_are_joined_and_shared_rows_taken_once(tmp_path):
    halves = [packed_batch(seed=seed) for seed in (1, 2)]
    for number, batch in enumerate((halves[0], halves[0], halves[1])):
        keep_batch(tmp_path, 7, batch, "why", f".process{number}")
    joined, reason = load_batch(tmp_path, 7)
    assert reason == "why" and torch.equal(joined.ids_BT, torch.cat([half.ids_BT for half in halves]))
    assert not list(tmp_path.rglob("*.tmp"))
