import math

import pytest
import torch

from glm5.rl.kl import KL_ESTIMATORS, Mismatch, k1, k2, k3, k3_value_k2_gradient
from glm5.rl.losses import PolicyLoss

PI = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
REFERENCE = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64).log()


def test_estimators_equal_the_formulas_by_hand():
    delta = math.log(2.0)
    one, other = torch.tensor([delta]), torch.tensor([0.0])
    assert k1(one, other).item() == pytest.approx(delta)
    assert k2(one, other).item() == pytest.approx(delta**2 / 2)
    assert k3(one, other).item() == pytest.approx(0.5 - 1 + delta)


def test_k1_and_k3_are_unbiased():
    exact = float((PI.exp() * (PI - REFERENCE)).sum())
    for estimator in (k1, k3):
        assert float((PI.exp() * estimator(PI, REFERENCE)).sum()) == pytest.approx(exact, rel=1e-12)


def test_the_straight_through_form_has_the_value_of_k3_and_the_expected_gradient_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    probabilities = logprobs.detach().exp()
    assert torch.allclose(k3_value_k2_gradient(logprobs, REFERENCE), k3(logprobs, REFERENCE))
    expected, = torch.autograd.grad((probabilities * k3_value_k2_gradient(logprobs, REFERENCE)).sum(), logits,
                                    retain_graph=True)
    exact, = torch.autograd.grad((logprobs.exp() * (logprobs - REFERENCE)).sum(), logits)
    assert torch.allclose(expected, exact)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_values_that_are_not_finite_add_nothing(name):
    logprobs = torch.tensor([-math.inf, math.nan, -1.0, -1.0], requires_grad=True)
    values = KL_ESTIMATORS[name](logprobs, torch.tensor([-1.0, -1.0, -math.inf, -1.5]))
    values.sum().backward()
    assert values[:3].tolist() == [0.0] * 3 and logprobs.grad[:3].tolist() == [0.0] * 3


def result_of(log_ratio, low=(), high=()):
    size = len(log_ratio)
    flags = [torch.tensor([m in chosen for m in range(size)]) for chosen in (low, high, ())]
    return PolicyLoss(torch.tensor(0.0), torch.tensor(log_ratio), *flags)


def test_mismatch_is_reported_over_all_tokens_and_by_staleness():
    mismatch = Mismatch()
    mismatch.add(result_of([0.0, math.log(2.0), math.log(0.5)], low=[2], high=[1]), torch.tensor([0, 0, 2]))
    metrics = mismatch.metrics()
    assert metrics["k1.staleness_0"] == pytest.approx(-math.log(2.0) / 2, rel=1e-6)
    assert metrics["k3"] == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 3, rel=1e-6)
    assert metrics["masked_high.staleness_0"] == 0.5 and metrics["masked_low.staleness_2"] == 1.0
    assert metrics["sampled_tokens"] == 3.0


def test_the_metrics_of_extreme_ratios_are_finite():
    mismatch = Mismatch()
    mismatch.add(result_of([20.0, -20.0]), torch.tensor([0, 0]))
    assert all(math.isfinite(value) for value in mismatch.metrics().values())
