import math

import pytest
import torch

from glm5.records import Sample
from glm5.rl.losses import Mismatch, double_sided_mask_loss, token_coefficients

from .factories import make_trajectory


def loss_of(logprobs, behaviour, advantages, coefficients, eps_low=0.2, eps_high=0.28):
    return double_sided_mask_loss(logprobs, torch.tensor(behaviour), torch.tensor(advantages),
                                  torch.tensor(coefficients), eps_low=eps_low, eps_high=eps_high)


def test_loss_and_gradient_equal_the_formula_by_hand():
    # ratios 1.1 (kept), 0.7 (too low), 1.5 (too high), 1 (kept)
    behaviour = [-1.0, -1.0, -1.0, -2.0]
    logprobs = torch.tensor([-1.0 + math.log(ratio) for ratio in (1.1, 0.7, 1.5)] + [-2.0], requires_grad=True)
    result = loss_of(logprobs, behaviour, [2.0, 2.0, -1.0, -1.0], [0.25, 0.25, 0.5, 0.5])
    by_hand = -(1.1 * 2.0 * (-1.0 + math.log(1.1)) * 0.25 + 1.0 * -1.0 * -2.0 * 0.5)
    assert result.loss.item() == pytest.approx(by_hand, rel=1e-6)
    result.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.1 * 2.0 * 0.25, 0.0, 0.0, 0.5], rel=1e-6)
    assert result.low.tolist() == [False, True, False, False]
    assert result.high.tolist() == [False, False, True, False]


def test_both_bounds_are_excluded_whatever_the_sign_of_the_advantage():
    edges = torch.tensor([0.5, 1.5]).log().requires_grad_()
    for advantage in (1.0, -1.0):
        result = loss_of(edges, [0.0, 0.0], [advantage] * 2, [1.0, 1.0], eps_low=0.5, eps_high=0.5)
        assert result.low.tolist() == [True, False] and result.high.tolist() == [False, True]
        assert result.loss.item() == 0.0


def test_values_that_are_not_finite_give_zero_gradient():
    logprobs = torch.tensor([-math.inf, math.nan, -1.0, -1.0], requires_grad=True)
    result = loss_of(logprobs, [-1.0, -1.0, -math.inf, -1.0], [1.0] * 4, [1.0] * 4)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(1.0)
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0, -1.0]
    assert result.not_finite.tolist() == [True, True, True, False]


def test_an_impossible_token_stays_finite_through_log_softmax():
    logits = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    loss_of(torch.log_softmax(logits, -1)[:, 1], [-0.5], [1.0], [1.0]).loss.backward()
    assert torch.isfinite(logits.grad).all()


def test_extreme_ratios_are_clamped_not_infinite():
    result = loss_of(torch.tensor([0.0, -500.0]), [-500.0, 0.0], [1.0, 1.0], [1.0, 1.0])
    assert result.log_ratio.tolist() == [20.0, -20.0]
    mismatch = Mismatch()
    mismatch.add(result, torch.tensor([0, 0]))
    assert all(math.isfinite(value) for value in mismatch.metrics().values())


def test_a_batch_where_everything_is_masked_keeps_its_graph():
    logprobs = torch.tensor([-5.0, -5.0], requires_grad=True)
    loss_of(logprobs, [-1.0, -1.0], [1.0, 1.0], [1.0, 1.0]).loss.backward()
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_coefficients_average_tokens_within_episodes_and_then_episodes():
    def sample(episode, sampled, weight):
        return Sample(sample_id=f"{episode}/{sampled}", episode_id=episode, group_id="g", taskset="t",
                      trajectory=make_trajectory(sampled), advantage=1.0, weight=weight)

    # episode a: two siblings with 3 + 1 tokens; episode b: 2 tokens, repeated once by padding
    coefficients = token_coefficients([sample("a", 3, 0.75), sample("a", 1, 0.25), sample("b", 2, 2.0)], episodes=3)
    assert coefficients == pytest.approx([1 / 4 / 3, 1 / 4 / 3, 2 / 2 / 3])


def test_the_loss_does_not_depend_on_how_the_batch_is_split():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, generator=generator)
    behaviour, advantages = start + 0.2 * torch.randn(64, generator=generator), torch.randn(64, generator=generator)
    coefficients = torch.rand(64, generator=generator)
    gradients = []
    for size in (64, 16, 5, 1):
        logprobs = start.clone().requires_grad_()
        for rows in torch.arange(64).split(size):
            double_sided_mask_loss(logprobs[rows], behaviour[rows], advantages[rows], coefficients[rows],
                                   eps_low=0.2, eps_high=0.28).loss.backward()
        gradients.append(logprobs.grad)
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


def test_mismatch_is_reported_over_all_tokens_and_by_staleness():
    logprobs = torch.tensor([-1.0, -1.0 + math.log(2.0), -1.0 + math.log(0.5)])
    result = loss_of(logprobs, [-1.0, -1.0, -1.0], [1.0] * 3, [1.0] * 3)
    mismatch = Mismatch()
    mismatch.add(result, torch.tensor([0, 0, 2]))
    metrics = mismatch.metrics()
    assert metrics["k1.staleness_0"] == pytest.approx(-math.log(2.0) / 2, rel=1e-6)
    assert metrics["k3"] == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 3, rel=1e-6)
    assert metrics["masked_high.staleness_0"] == 0.5 and metrics["masked_low.staleness_2"] == 1.0
    assert metrics["sampled_tokens"] == 3.0
