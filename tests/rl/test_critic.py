"""Critic PPO: advantages by hand, a value model that learns, and a state that continues exactly."""

import dataclasses

import pytest
import torch

from glm5.errors import CheckpointError, ConfigError
from glm5.records import Sample, Trajectory
from glm5.rl.config import LossConfig, RLConfig
from glm5.rl.credit import CriticConfig
from glm5.rl.critic import Critic, Together, estimate
from glm5.rl.ledger import LeasedBatch
from glm5.rl.packing import micro_batches
from glm5.rl.policy import freeze
from glm5.rl.step import policy_step
from glm5.train.config import OptimizerConfig
from glm5.train.optimizers import build_optimizer

from .conftest import build_model

VOCABULARY = 64
CONFIG = RLConfig(name="critic", tasksets={"maths": 1.0}, advantage="critic", group_size=1, loss=LossConfig(kind="ppo"),
                  critic=CriticConfig(optimizer=OptimizerConfig(lr=1e-2, kind="adamw", weight_decay=0.0)))


def tensors(*rows):
    return [torch.tensor(row) for row in rows]


@pytest.mark.parametrize(("config", "advantages"), [
    (CriticConfig(lam=1.0), [0.5, 0.75, 0.25, 0.75]),
    (CriticConfig(lam=0.0), [-0.25, 0.5, 0.25, 0.75]),
    (CriticConfig(lam=0.5), [0.0625, 0.625, 0.25, 0.75]),  # 0.25; 0.5 + 0.5 * 0.25; -0.25 + 0.5 * 0.625
    (CriticConfig(length_alpha=1.0), [7 / 36, 2 / 3, 0.25, 0.75])])  # lambda 2/3 for three tokens, 0 for one
def test_advantages_of_two_samples_by_hand(config, advantages):
    """Values 0.5, 0.25, 0.75 before a reward of 1, and 0.25 before another: deltas -0.25, 0.5, 0.25, and 0.75."""
    rewards, values, samples = tensors([0.0, 0.0, 1.0, 1.0], [0.5, 0.25, 0.75, 0.25], [4, 4, 4, 1])
    found, returns = estimate(rewards, values, samples, config)
    assert found.tolist() == pytest.approx(advantages) and returns.tolist() == [1.0] * 4


def test_a_discount_counts_sampled_tokens():
    rewards, values, samples = tensors([0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0, 0, 0])
    advantages, returns = estimate(rewards, values, samples, CriticConfig(gamma=0.5, lam=1.0))
    assert advantages.tolist() == returns.tolist() == [0.25, 0.5, 1.0]


def batch_of(count=8, length=10):
    """The reward is 1 where the second id is even: known from the prompt."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index in range(count):
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        ids[1] = 2 + index % 2
        mask = [t >= 4 for t in range(length)]
        reward = float(index % 2 == 0)
        credits = [0.0] * (length - 1) + [reward]
        trajectory = Trajectory(ids=ids, loss_mask=mask, logprobs=[-1.0 if on else 0.0 for on in mask],
                                versions=[0 if on else -1 for on in mask])
        samples.append(Sample(sample_id=f"e{index}/0", episode_id=f"e{index}", group_id="g", taskset="maths",
                              trajectory=trajectory, advantage=reward, weight=1.0, token_credits=credits))
    return LeasedBatch(1, 0, count, count, samples, {sample.sample_id: 0 for sample in samples})


def build_critic():
    trunk = build_model(VOCABULARY)
    freeze(trunk)
    return Critic(trunk, CONFIG.critic)


def train(critic, steps):
    """Metrics of the last step."""
    metrics = {}
    for _ in range(steps):
        critic.begin()
        for part in micro_batches(batch_of(), 1024):
            critic.look(part)
        metrics = critic.step()
    return metrics


def test_a_new_critic_expects_nothing():
    critic = build_critic()
    (part,) = micro_batches(batch_of(), 1024)
    critic.begin()
    lam = CONFIG.critic.lam
    expected = [reward * lam**later for reward in (1.0, 0.0) * 4 for later in range(5, -1, -1)]
    assert critic.look(part).tolist() == pytest.approx(expected, rel=1e-5)
    # every return is 1 or 0, half of them each: c/2 * 1 for the former
    assert critic.step() == pytest.approx({"value_loss": 0.25, "explained": -1.0, "value_grad_norm": 0.0}, abs=10)


def test_a_critic_learns_what_the_prompt_tells():
    metrics = train(build_critic(), 40)
    assert metrics["explained"] > 0.9 and metrics["value_loss"] < 0.02


def test_a_critic_continues_exactly():
    """Policy and critic in one state; the other start has other weights until it is loaded."""
    first, second = build_critic(), build_critic()
    train(first, 3)
    policies = [build_optimizer(build_model(VOCABULARY), CONFIG.optimizer) for _ in range(2)]
    state = {name: tensor.clone() for name, tensor in Together(policies[0], first).state_dict().items()}
    assert any(name.startswith("critic.weights.model.") for name in state)
    Together(policies[1], second).load_state_dict(state)
    assert train(first, 2) == train(second, 2)
    with pytest.raises(CheckpointError, match=r"does not fit.*critic"):
        Together(policies[0], None).load_state_dict(state)


def test_only_the_critic_learns_while_it_warms_up():
    model, critic = build_model(VOCABULARY), build_critic()
    freeze(model)
    optimizer = build_optimizer(model, CONFIG.optimizer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    head = critic.state_dict()["weights.value_head.weight"].clone()
    metrics = policy_step(model, optimizer, batch_of(), CONFIG, 0.0, critic).metrics
    assert {"value_loss", "value_grad_norm", "explained"} <= metrics.keys()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert not torch.equal(head, critic.state_dict()["weights.value_head.weight"])
    policy_step(model, optimizer, batch_of(), CONFIG, 1.0, critic)
    assert not torch.equal(before["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize(("change", "words"), [
    ({"gamma": 0.0}, "gamma=0.0"), ({"lam": 1.5}, "lam=1.5"), ({"clip": 0.0}, "clip=0.0"),
    ({"warmup_steps": -1}, "warmup_steps=-1")])
def test_a_critic_that_cannot_be_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        CriticConfig(**change)


def test_with_a_critic_one_episode_is_a_group_and_none_is_screened():
    assert CONFIG.comparison == "critic" and not CONFIG.compares_episodes and CONFIG.screened == 1
    with pytest.raises(ConfigError, match="group_size"):
        dataclasses.replace(CONFIG, advantage="mean")
