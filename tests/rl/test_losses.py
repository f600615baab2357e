import math

import pytest
import torch

from glm5.records import Sample
from glm5.rl.config import LossConfig
from glm5.rl.losses import LOSSES, PolicyTokens, teacher_advantages, token_coefficients, value_loss

from .factories import make_trajectory


def run(kind, theta, *, mu, old=None, advantages, coefficients=None, samples=None, **settings):
    """(result, gradient of theta)."""
    theta = torch.as_tensor(theta, dtype=torch.float32).clone().requires_grad_()
    size = len(theta)
    tokens = PolicyTokens(theta, theta.detach() if old is None else torch.tensor(old), torch.tensor(mu),
                          torch.tensor(advantages), torch.tensor(coefficients or [1.0] * size),
                          torch.tensor(samples or [0] * size))
    result = LOSSES[kind](tokens, LossConfig(kind=kind, **settings))
    result.loss.backward()
    return result, theta.grad.tolist()


def log(*ratios):
    return [math.log(ratio) for ratio in ratios]


def test_double_sided_loss_and_gradient_equal_the_formula_by_hand():
    # ratios 1.1 (kept), 0.7 (too low), 1.5 (too high), 1 (kept)
    theta = [-1.0 + value for value in log(1.1, 0.7, 1.5)] + [-2.0]
    result, gradient = run("double_sided", theta, mu=[-1.0, -1.0, -1.0, -2.0], advantages=[2.0, 2.0, -1.0, -1.0],
                           coefficients=[0.25, 0.25, 0.5, 0.5])
    by_hand = -(1.1 * 2.0 * (-1.0 + math.log(1.1)) * 0.25 + 1.0 * -1.0 * -2.0 * 0.5)
    assert result.loss.item() == pytest.approx(by_hand, rel=1e-6)
    assert gradient == pytest.approx([-1.1 * 2.0 * 0.25, 0.0, 0.0, 0.5], rel=1e-6)
    assert result.low.tolist() == [False, True, False, False]
    assert result.high.tolist() == [False, False, True, False]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_both_bounds_of_the_double_sided_mask_are_excluded_whatever_the_sign(advantage):
    result, gradient = run("double_sided", log(0.5, 1.5), mu=[0.0, 0.0], advantages=[advantage] * 2, eps_low=0.5,
                           eps_high=0.5)
    assert result.low.tolist() == [True, False] and result.high.tolist() == [False, True]
    assert result.loss.item() == 0.0 and gradient == [0.0, 0.0]


def test_ppo_takes_the_pessimistic_of_both_terms():
    # ratio, A → loss, gradient of theta: (1.5, +1) clipped to 1.28; (1.5, -1) kept; (0.5, +1) kept; (0.5, -1) clipped
    result, gradient = run("ppo", log(1.5, 1.5, 0.5, 0.5), old=[0.0] * 4, mu=[9.0] * 4,
                           advantages=[1.0, -1.0, 1.0, -1.0])
    assert result.loss.item() == pytest.approx(-1.28 + 1.5 - 0.5 + 0.8, rel=1e-6)
    assert gradient == pytest.approx([0.0, 1.5, -0.5, 0.0], rel=1e-6)
    assert result.high.tolist() == [True, False, False, False] and result.low.tolist() == [False, False, False, True]


def test_ppo_can_take_the_engine_as_the_old_policy():
    result, gradient = run("ppo", log(1.5), old=[0.0], mu=[math.log(1.5)], advantages=[1.0], reference="engine")
    assert result.loss.item() == pytest.approx(-1.0) and gradient == pytest.approx([-1.0])


def test_the_dual_clip_bounds_the_loss_of_bad_tokens():
    result, gradient = run("ppo", log(5.0, 2.0), old=[0.0] * 2, mu=[0.0] * 2, advantages=[-1.0, -1.0], dual_clip=3.0)
    assert result.loss.item() == pytest.approx(3.0 + 2.0, rel=1e-6)
    assert gradient == pytest.approx([0.0, 2.0], rel=1e-6) and result.high.tolist() == [True, False]


def test_icepop_weighs_by_the_engine_mismatch_and_drops_outside_its_bounds():
    # rho = exp(old - mu): 2 (bound, kept), 0.5 (bound, kept), 2.1 (dropped), 0.4 (dropped); theta = old, so r = 1
    rho = (2.0, 0.5, 2.1, 0.4)
    result, gradient = run("icepop", [0.0] * 4, old=[0.0] * 4, mu=[-value for value in log(*rho)],
                           advantages=[1.0, -1.0, 1.0, 1.0], beta=2.0000001)
    assert result.loss.item() == pytest.approx(-2.0 + 0.5, rel=1e-5)
    assert gradient == pytest.approx([-2.0, 0.5, 0.0, 0.0], rel=1e-5)
    assert result.high.tolist() == [False, False, True, False] and result.low.tolist() == [False, False, False, True]


def test_icepop_clips_the_policy_ratio_as_ppo_does():
    result, gradient = run("icepop", log(1.5), old=[0.0], mu=[-math.log(1.2)], advantages=[1.0])
    assert result.loss.item() == pytest.approx(-1.2 * 1.28, rel=1e-6) and gradient == [0.0]


def test_truncated_importance_sampling_clamps_its_weight():
    result, gradient = run("tis", [0.0] * 3, old=[0.0] * 3, mu=[-value for value in log(3.0, 1.5, 0.1)],
                           advantages=[1.0] * 3)
    assert gradient == pytest.approx([-2.0, -1.5, -0.5], rel=1e-6)
    assert result.loss.item() == pytest.approx(-4.0, rel=1e-6)


def test_gspo_gives_every_token_the_ratio_of_its_sample():
    # sample 0: mean log-ratio of (log 2, 0) → sqrt 2, inside the bounds; sample 1: ratio 3 → clipped
    theta = [math.log(2.0), 0.0, math.log(3.0)]
    result, gradient = run("gspo", theta, old=[0.0] * 3, mu=[0.0] * 3, advantages=[1.0] * 3, samples=[0, 0, 4],
                           eps_high=0.5)
    root = math.sqrt(2.0)
    assert result.loss.item() == pytest.approx(-2 * root - 1.5, rel=1e-6)
    assert gradient == pytest.approx([-root, -root, 0.0], rel=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    result, gradient = run("cispo", log(3.0, 0.1), old=[0.0] * 2, mu=[0.0] * 2, advantages=[1.0, -1.0])
    assert gradient == pytest.approx([-1.28, 0.8], rel=1e-6)
    assert result.loss.item() == pytest.approx(-1.28 * math.log(3.0) + 0.8 * math.log(0.1), rel=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(kind):
    theta = [-0.3, -1.7, -0.9]
    _, gradient = run(kind, theta, mu=theta, advantages=[1.0, -2.0, 0.5], coefficients=[0.5, 0.25, 0.25],
                      samples=[0, 0, 1])
    assert gradient == pytest.approx([-0.5, 0.5, -0.125], rel=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
def test_values_that_are_not_finite_give_zero_gradient(kind):
    result, gradient = run(kind, [-math.inf, math.nan, -1.0, -1.0], mu=[-1.0, -1.0, -math.inf, -1.0],
                           old=[-1.0, -1.0, -1.0, -1.0], advantages=[1.0] * 4)
    assert gradient == pytest.approx([0.0, 0.0, 0.0, -1.0]) and math.isfinite(result.loss.item())
    assert result.not_finite.tolist() == [True, True, True, False]


@pytest.mark.parametrize("kind", LOSSES)
def test_extreme_ratios_are_clamped_not_infinite(kind):
    result, gradient = run(kind, [0.0, -500.0], mu=[-500.0, 0.0], old=[-500.0, 0.0], advantages=[1.0, -1.0])
    assert result.log_ratio.tolist() == [20.0, -20.0]
    assert all(math.isfinite(value) for value in [*gradient, result.loss.item()])


@pytest.mark.parametrize("kind", LOSSES)
def test_no_token_at_all_is_a_loss_of_zero_with_a_graph(kind):
    empty = torch.zeros(0)
    theta = empty.clone().requires_grad_()
    tokens = PolicyTokens(theta, empty, empty, empty, empty, torch.zeros(0, dtype=torch.int64))
    loss = LOSSES[kind](tokens, LossConfig(kind=kind)).loss
    loss.backward()
    assert loss.item() == 0.0 and theta.grad.shape == (0,)


def test_an_impossible_token_stays_finite_through_log_softmax():
    logits = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    theta = torch.log_softmax(logits, -1)[:, 1]
    one = torch.ones(1)
    LOSSES["double_sided"](PolicyTokens(theta, -one, -one, one, one, torch.zeros(1, dtype=torch.int64)),
                           LossConfig()).loss.backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("wrong", [{"eps_low": 0.0}, {"eps_high": 0.0}, {"beta": 0.5}, {"tis_low": 3.0},
                                   {"dual_clip": 0.5}])
def test_bounds_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LossConfig(**wrong)


def test_coefficients_average_tokens_within_episodes_and_then_episodes():
    def sample(episode, sampled, weight):
        return Sample(sample_id=f"{episode}/{sampled}", episode_id=episode, group_id="g", taskset="t",
                      trajectory=make_trajectory(sampled), advantage=1.0, weight=weight)

    # episode a: two siblings with 3 + 1 tokens; episode b: 2 tokens, repeated once by padding
    coefficients = token_coefficients([sample("a", 3, 0.75), sample("a", 1, 0.25), sample("b", 2, 2.0)], episodes=3)
    assert coefficients == pytest.approx([1 / 4 / 3, 1 / 4 / 3, 2 / 2 / 3])


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_does_not_depend_on_how_the_batch_is_split(kind):
    generator = torch.Generator().manual_seed(0)
    start, old, mu, advantages, coefficients = (
        torch.randn(64, generator=generator) * scale for scale in (1.0, 1.0, 1.0, 1.0, 0.1))
    old, mu = start + 0.2 * old, start + 0.2 * mu
    samples = torch.arange(64) // 4
    gradients = []
    for size in (64, 16, 4):
        theta = start.clone().requires_grad_()
        for rows in torch.arange(64).split(size):
            LOSSES[kind](PolicyTokens(theta[rows], old[rows], mu[rows], advantages[rows], coefficients[rows],
                                      samples[rows]), LossConfig(kind=kind)).loss.backward()
        gradients.append(theta.grad)
    assert all(torch.allclose(gradients[0], other, rtol=1e-6, atol=0) for other in gradients[1:])


def test_the_critic_loss_is_the_worse_of_the_clipped_and_the_free_value():
    # V 2, R 0, V_old 1, clip 0.5: max(4, 1.5^2); V 1.2, R 1: max(0.04, 0.04)
    values = torch.tensor([2.0, 1.2], requires_grad=True)
    loss = value_loss(values, torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25]), 0.5)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 4.0 + 0.25 * 0.04), rel=1e-6)


def test_a_teacher_that_likes_a_token_more_than_the_student_raises_it():
    student = torch.tensor([-2.0, -1.0, -1.0, -1.0], requires_grad=True)
    advantages = teacher_advantages(torch.tensor([-1.0, -3.0, -math.inf, math.nan]), student)
    assert advantages.tolist() == [1.0, -2.0, 0.0, 0.0] and not advantages.requires_grad


def test_distillation_is_the_reasoning_loss_with_the_teacher_as_advantage():
    """Student at -2 and -1, teacher at -1 and -3, engine as the student except for a mismatch of 3 on the second: the
    first token has gradient -(A = 1) * c, the second is dropped."""
    theta = [-2.0, -1.0]
    advantages = teacher_advantages(torch.tensor([-1.0, -3.0]), torch.tensor(theta)).tolist()
    result, gradient = run("icepop", theta, mu=[-2.0, -1.0 - math.log(3.0)], advantages=advantages,
                           coefficients=[0.5, 0.5], beta=2.0)
    assert gradient == pytest.approx([-0.5, 0.0])
    assert result.high.tolist() == [False, True]
