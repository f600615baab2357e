import dataclasses

import pytest
import torch

from glm5.errors import ConfigError
from glm5.model.checkpoint import load_model
from glm5.records import Sample, Trajectory
from glm5.rl.config import RLConfig
from glm5.rl.ledger import LeasedBatch
from glm5.rl.policy import freeze
from glm5.rl.step import policy_step
from glm5.rl.trainer import pass_rows, resolve_init
from glm5.train.config import OptimizerConfig
from glm5.train.optimizers import build_optimizer

from .factories import make_episode

CONFIG = RLConfig(name="t", tasksets={"calculator": 1.0},
                  optimizer=OptimizerConfig(lr=1e-3, kind="adamw", weight_decay=0.0, clip_norm=0.0))


@pytest.fixture
def model(checkpoint):
    loaded = load_model(checkpoint)
    freeze(loaded)
    return loaded


def logprobs_of(model, ids):
    with torch.no_grad():
        logprobs_TW = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return [0.0, *(float(logprobs_TW[t - 1, ids[t]]) for t in range(1, len(ids)))]


def on_policy_batch(model, advantages, length=20):
    """Samples whose behaviour log-probs are the model's own, half of the tokens sampled."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index, advantage in enumerate(advantages):
        ids = torch.randint(10, 300, (length + 3 * index,), generator=generator).tolist()
        mask = [t > 0 and t % 2 == 0 for t in range(len(ids))]
        logprobs = [value if on else 0.0 for value, on in zip(logprobs_of(model, ids), mask, strict=True)]
        samples.append(Sample(
            sample_id=f"e{index}/0", episode_id=f"e{index}", group_id="g", taskset="calculator", advantage=advantage,
            weight=1.0, trajectory=Trajectory(ids=ids, loss_mask=mask, logprobs=logprobs,
                                              versions=[0 if on else -1 for on in mask])))
    return LeasedBatch(1, 0, 1, len(samples), samples, {sample.sample_id: 0 for sample in samples})


def mean_logprob(model, sample):
    values = logprobs_of(model, sample.trajectory.ids)
    chosen = [value for value, on in zip(values, sample.trajectory.loss_mask, strict=True) if on]
    return sum(chosen) / len(chosen)


def test_a_step_favours_what_was_better_than_its_group_and_nothing_frozen_moves(model):
    batch = on_policy_batch(model, [0.5, -0.5])
    before = [mean_logprob(model, sample) for sample in batch.samples]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = policy_step(model, build_optimizer(model, CONFIG.optimizer), batch, CONFIG, 1.0)
    after = [mean_logprob(model, sample) for sample in batch.samples]
    assert after[0] > before[0] and after[1] < before[1]
    assert result.finite and result.tokens == sum(len(sample.trajectory.ids) for sample in batch.samples)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, weights[name])}
    assert moved and not [name for name in moved
                          if ".indexer." in name or ".layers.2." in name or "correction_bias" in name]


def test_packed_scoring_equals_scoring_each_sample_alone(model):
    """On-policy, every ratio is 1: packing, positions and documents change no log-prob."""
    result = policy_step(model, build_optimizer(model, CONFIG.optimizer), on_policy_batch(model, [0.5, -0.5, 1.0, 0.0]),
                         CONFIG, 0.0)
    assert result.metrics["k3"] < 1e-9 and abs(result.metrics["ratio"] - 1) < 1e-5
    assert result.metrics["masked_low"] == result.metrics["masked_high"] == 0.0


@pytest.mark.parametrize("max_tokens", [1, 50])
def test_micro_batching_leaves_the_gradient_as_it_is(checkpoint, max_tokens):
    gradients = []
    for limit in (10_000, max_tokens):
        model = load_model(checkpoint)
        freeze(model)
        config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=limit)
        batch = on_policy_batch(model, [0.5, -0.5, 1.0])
        policy_step(model, build_optimizer(model, config.optimizer), batch, config, 0.0)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()
                          if parameter.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-7)


def test_a_step_that_is_not_finite_changes_nothing(model):
    batch = on_policy_batch(model, [0.5, -0.5])
    broken = [dataclasses.replace(sample, advantage=float("nan")) for sample in batch.samples]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = policy_step(model, build_optimizer(model, CONFIG.optimizer), dataclasses.replace(batch, samples=broken),
                         CONFIG, 1.0)
    assert not result.finite
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_an_initial_checkpoint_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"init='stage:sft': .*sft has no finished run"):
        resolve_init("stage:sft", tmp_path / "rl")
    with pytest.raises(ConfigError, match="no checkpoint there"):
        resolve_init(str(tmp_path), tmp_path / "rl")


def test_pass_rates_leave_out_what_was_not_measured():
    episodes = [make_episode("g", 0, 1.0), make_episode("g", 1, 0.5), make_episode("g", 2, None, "infra_error")]
    rows = pass_rows("pass_at_1.rl", episodes, lambda passed, n: (passed / n - 0.1, passed / n + 0.1))
    assert [(row["name"], row["value"], row["n"], row["low"]) for row in rows] == [
        ("pass_at_1.rl.calculator", 0.5, 2, 0.4), ("pass_at_1.rl.mean", 0.5, 2, 0.4)]
