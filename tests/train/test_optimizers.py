"""Muon Split and AdamW against plain loops over matrices, and exact continuation."""

import math

import pytest
import torch

from glm5.errors import CheckpointError
from glm5.train.config import OptimizerConfig
from glm5.train.optimizers import build_optimizer, matrix_cuts, orthogonalize

from .conftest import tiny_config, tiny_model


def random_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def plain_newton_schulz(matrix):
    x = matrix / (matrix.norm() + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if transposed else x


def plain_muon_update(slices, gradients_of_steps, lr, decay=0.1, momentum=0.95):
    """Each matrix alone through the textbook rule; gives the matrices after all steps."""
    for index, weight in enumerate(slices):
        buffer = torch.zeros_like(weight)
        for gradients in gradients_of_steps:
            gradient = gradients[index]
            buffer = momentum * buffer + (1 - momentum) * gradient
            update = plain_newton_schulz((1 - momentum) * gradient + momentum * buffer)
            weight = weight * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(weight.shape)) * update
        slices[index] = weight
    return slices


def head_slices(name, tensor):
    """The matrices of one parameter written out by hand, without the code under test."""
    config = tiny_config()
    heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    if name.endswith("q_b_proj.weight"):
        return list(tensor.chunk(heads))
    if name.endswith("kv_b_proj.weight"):
        return [part for head in tensor.chunk(heads) for part in head.split([nope, value])]
    if name.endswith("gate_up_proj"):
        return [part for expert in tensor for part in expert.chunk(2)]
    if name.endswith("experts.down_proj"):
        return list(tensor)
    return [tensor]


@pytest.mark.parametrize("suffix", ["q_b_proj.weight", "kv_b_proj.weight", "experts.gate_up_proj", "experts.down_proj",
                                    "o_proj.weight", "q_a_proj.weight", "eh_proj.weight", "mlp.up_proj.weight"])
def test_muon_split_equals_muon_on_each_head_and_expert_alone(suffix):
    model = tiny_model()
    names = [name for name, _ in model.named_parameters() if name.endswith(suffix)]
    before = {name: head_slices(name, model.get_parameter(name).detach().clone()) for name in names}
    gradients = {name: [] for name in names}
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.02, clip_norm=0.0))
    for seed in range(3):
        random_gradients(model, seed)
        for name in names:
            gradients[name].append(head_slices(name, model.get_parameter(name).grad.clone()))
        optimizer.step()
    for name in names:
        expected = plain_muon_update(before[name], gradients[name], lr=0.02)
        found = head_slices(name, model.get_parameter(name).detach())
        for ours, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, plain, atol=2e-6, rtol=1e-4)


def test_muon_without_split_differs_only_in_the_up_projections():
    models = [tiny_model(), tiny_model()]
    for model, split in zip(models, (True, False), strict=True):
        random_gradients(model, 1)
        build_optimizer(model, OptimizerConfig(lr=0.02, muon_split=split)).step()
    pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    different = {name for (name, ours), other in pairs if not torch.allclose(ours, other, atol=1e-6)}
    up_projections = ("q_b_proj.weight", "kv_b_proj.weight")
    assert different == {name for name, _ in models[0].named_parameters() if name.endswith(up_projections)}


def test_orthogonalized_slices_have_singular_values_near_one():
    update_PMN = torch.randn(5, 24, 40, generator=torch.Generator().manual_seed(0)) * 1e-3
    singular = torch.linalg.svdvals(orthogonalize(update_PMN, 5))
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4), 5), torch.zeros(2, 3, 4))


def test_muon_agrees_with_the_one_of_torch_in_direction_and_size():
    model = tiny_model()
    weight = model.model.layers[0].self_attn.o_proj.weight
    other = torch.nn.Parameter(weight.detach().clone())
    oracle = torch.optim.Muon([other], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True,
                              adjust_lr_fn="match_rms_adamw")
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.02))
    before = weight.detach().clone()
    for seed in range(3):
        random_gradients(model, seed)
        other.grad = weight.grad.clone()
        optimizer.step()
        oracle.step()
    ours, theirs = (weight - before).flatten(), (other - before).flatten()
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.995  # torch iterates in bf16
    assert float(ours.detach().norm() / theirs.detach().norm()) == pytest.approx(1.0, abs=0.02)


def test_tables_and_vectors_follow_adamw_with_their_own_decay():
    model = tiny_model()
    head, norm = model.lm_head.weight, model.model.norm.weight
    twins = [torch.nn.Parameter(head.detach().clone()), torch.nn.Parameter(norm.detach().clone())]
    groups = [{"params": [twins[0]], "weight_decay": 0.1}, {"params": [twins[1]], "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95))
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.006))
    for seed in range(3):
        random_gradients(model, seed)
        twins[0].grad, twins[1].grad = head.grad.clone(), norm.grad.clone()
        optimizer.step(lr_scale=0.5)
        oracle.step()
    torch.testing.assert_close(head, twins[0])
    torch.testing.assert_close(norm, twins[1])


def test_cuts_cover_every_matrix_exactly_once():
    model = tiny_model()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and ".indexer." not in name:
            visits = torch.zeros_like(parameter)
            for cut in matrix_cuts(name, parameter, model.config, split_heads=True):
                cut(visits).add_(1)
            assert torch.equal(visits, torch.ones_like(visits)), name


def test_frozen_parameters_and_their_state_do_not_exist_for_the_optimizer():
    model = tiny_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    frozen = {name: value for name, value in before.items() if ".indexer." not in name}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
    assert all(".indexer." in name for name in optimizer.state_dict())
    random_gradients(model, 0)
    optimizer.step()
    assert all(torch.equal(model.get_parameter(name), value) for name, value in frozen.items())


def test_clipping_treats_indexers_apart():
    model = tiny_model()
    optimizer = build_optimizer(model, OptimizerConfig(clip_norm=1.0))
    random_gradients(model, 0)
    for name, parameter in model.named_parameters():
        parameter.grad *= 1e-6 if ".indexer." in name else 1.0
    small = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if ".indexer." in name}
    norms = optimizer.clip_gradients()
    assert norms.main > 1 > norms.indexer and norms.finite
    assert all(torch.equal(model.get_parameter(name).grad, gradient) for name, gradient in small.items())
    main = [parameter.grad for name, parameter in model.named_parameters() if name not in small]
    assert float(torch.nn.utils.get_total_norm(main)) == pytest.approx(1.0, abs=1e-4)


def test_a_gradient_that_is_not_finite_is_reported_and_left_alone():
    model = tiny_model()
    optimizer = build_optimizer(model, OptimizerConfig())
    random_gradients(model, 0)
    model.lm_head.weight.grad[0, 0] = float("nan")
    before = model.model.norm.weight.grad.clone()
    assert not optimizer.clip_gradients().finite
    assert torch.equal(model.model.norm.weight.grad, before)


def test_a_loaded_state_continues_bit_for_bit():
    straight, resumed = tiny_model(), tiny_model()
    config = OptimizerConfig(lr=0.02)
    optimizer = build_optimizer(straight, config)
    for seed in range(5):
        random_gradients(straight, seed)
        optimizer.step(1 - seed / 10)
        if seed == 1:
            state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
            resumed.load_state_dict(straight.state_dict())
    continued = build_optimizer(resumed, config)
    continued.load_state_dict(state)
    for seed in range(2, 5):
        random_gradients(resumed, seed)
        continued.step(1 - seed / 10)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_state_of_another_configuration_is_refused_by_name():
    model = tiny_model()
    state = build_optimizer(model, OptimizerConfig()).state_dict()
    with pytest.raises(CheckpointError, match="optimizer state does not fit"):
        build_optimizer(model, OptimizerConfig(kind="adamw")).load_state_dict(state)
    state["adamw.exp_avg.lm_head.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"adamw\.exp_avg\.lm_head\.weight"):
        build_optimizer(model, OptimizerConfig()).load_state_dict(state)


def test_a_reset_optimizer_steps_like_a_new_one():
    """Same weights, same gradients: after a reset the update is the first of a fresh optimizer."""
    used, fresh = tiny_model(), tiny_model()
    optimizer = build_optimizer(used, OptimizerConfig())
    for seed in (1, 2):
        random_gradients(used, seed)
        optimizer.step()
    with torch.no_grad():
        for parameter, start in zip(used.parameters(), fresh.parameters(), strict=True):
            parameter.copy_(start)
    optimizer.reset()
    for model, steps in ((used, optimizer), (fresh, build_optimizer(fresh, OptimizerConfig()))):
        random_gradients(model, 3)
        steps.step()
    for mine, other in zip(used.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, other)
