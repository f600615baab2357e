from __future__ import annotations

import copy

import pytest
import torch

from glm5.kernels.reference import experts as reference_experts
from glm5.model.config import preset
from glm5.model.moe import Experts
from glm5.model.quantize.formats import fake_quantise, round_inputs
from glm5.model.quantize.hadamard import block_of, down_block, hadamard, rotate_down, rotate_layer
from glm5.model.quantize.plan import QuantisationPlan, WeightFormat
from glm5.model.quantize.projections import QuantisedExperts, QuantisedMatrix, quantise_modules
from glm5.model.quantize.scaling import Recorder, best_scale, scale_layer
from model.tiny import random_ids, tiny_model

NOTHING = QuantisationPlan(experts="none", attention="none", mlp="none")


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def test_hadamard_by_hand_and_in_blocks() -> None:
    x = torch.tensor([[1.0, 2, 3, 4, 5, 6]])
    assert torch.allclose(hadamard(x, 2), torch.tensor([[3.0, -1, 7, -1, 11, -1]]) / 2**0.5)
    assert torch.allclose(hadamard(x[:, :4], 4), torch.tensor([[5.0, -1, -2, 0]]), atol=1e-6)
    assert torch.equal(hadamard(x, 1), x)


@pytest.mark.parametrize("block", [2, 8, 32, 64])
def test_hadamard_is_orthogonal_and_its_own_inverse(block: int) -> None:
    x = torch.randn(5, 3 * block, dtype=torch.float64, generator=torch.Generator().manual_seed(block))
    turned = hadamard(x, block)
    assert torch.allclose(hadamard(turned, block), x) and torch.allclose(turned @ turned.T, x @ x.T)
    spike = torch.zeros(1, block, dtype=torch.float64)
    spike[0, 1] = 1.0
    assert torch.allclose(hadamard(spike, block).abs(), torch.full_like(spike, block**-0.5))


def test_blocks_are_the_largest_powers_of_two() -> None:
    widths = ((2048,), (160,), (7,), (12288, 2048), (384, 64))
    assert [block_of(*group) for group in widths] == [2048, 32, 1, 2048, 64]
    assert down_block(preset("glm-5")) == 2048


def test_rotations_and_scales_keep_the_function() -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=("full", "shared", "full", "full"))
    ids = random_ids(2, 40)
    changed = copy.deepcopy(model)
    for number, layer in enumerate(changed.model.layers):
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        rotate_layer(layer)
        changed_names = {name for name, tensor in layer.state_dict().items() if not torch.equal(tensor, before[name])}
        expected = {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
                    "o_proj"}
        expected |= {"indexer.wq_b"} if layer.self_attn.indexer is not None else set()
        assert changed_names == {f"self_attn.{name}.weight" for name in expected}, number
    torch.testing.assert_close(logits(changed, ids), logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rotated", [False, True])
def test_scaling_keeps_the_function_of_dense_sparse_and_mtp_layers(rotated: bool) -> None:
    model = tiny_model()
    ids = random_ids(2, 40)
    changed = copy.deepcopy(model)
    with Recorder(changed) as recorder, torch.no_grad():
        output = changed(ids)
        mtp = changed.mtp(output.hidden_BTD, ids.roll(-1, 1)).hidden_BTD
    for number, layer in enumerate(changed.model.layers):
        prefix = f"model.layers.{number}."
        inputs = {name.removeprefix(prefix): kept for name, kept in recorder.inputs.items() if name.startswith(prefix)}
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        if rotated:
            rotate_layer(layer)
        scale_layer(layer, prefix, QuantisationPlan(group_size=8, indexer="int8"), inputs, rotated)
        assert not torch.equal(layer.input_layernorm.weight, before["input_layernorm.weight"])
        assert not torch.equal(layer.post_attention_layernorm.weight, before["post_attention_layernorm.weight"])
    with torch.no_grad():
        found = changed(ids)
        torch.testing.assert_close(found.logits, output.logits, rtol=1e-4, atol=1e-4)
        found_mtp = changed.mtp(output.hidden_BTD, ids.roll(-1, 1)).hidden_BTD
        torch.testing.assert_close(found_mtp, mtp, rtol=1e-4, atol=1e-4)


def test_online_rotation_of_down_proj_keeps_the_function_of_the_quantised_modules() -> None:
    model = tiny_model()
    ids = random_ids(2, 30)
    fine = QuantisationPlan(experts="int8", attention="none", mlp="int8", rounds_inputs=False)
    rotated, plain = copy.deepcopy(model), copy.deepcopy(model)
    for layer in rotated.model.layers:
        rotate_down(layer, 8)
    quantise_modules(rotated, fine, down_rotation=8)
    quantise_modules(plain, fine)
    exact = logits(model, ids)
    usual = float((logits(plain, ids) - exact).abs().max())
    torch.testing.assert_close(logits(rotated, ids), exact, rtol=0, atol=3 * usual)


def outliers(tokens: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with three channels fifty times as large as the others, and weights."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, inputs, generator=generator)
    x[:, :3] *= 50
    return x, torch.randn(outputs, inputs, generator=generator)


def product_error(x: torch.Tensor, weight: torch.Tensor, form: WeightFormat) -> float:
    return float((round_inputs(x, form) @ fake_quantise(weight, form).T - x @ weight.T).square().mean())


@pytest.mark.parametrize("form", [WeightFormat("int4", 32), WeightFormat("int8")])
def test_rotation_and_scaling_each_shrink_the_error_of_outliers(form: WeightFormat) -> None:
    x, weight = outliers(256, 64, 48)
    plain = product_error(x, weight, form)
    rotated = product_error(hadamard(x, 64), hadamard(weight, 64), form)
    scale = best_scale(x[:128], [(weight, form)])
    scaled = product_error(x[128:] / scale, weight * scale, form)  # other tokens than those of the search
    assert scaled < 0.7 * product_error(x[128:], weight, form)
    assert scale[:3].min() > 1.5 * scale[3:].max()
    if form.kind == "int8":  # with W4A8 the error of the weights stays what it was
        assert rotated < 0.5 * plain
    large_weight = weight.clone()
    large_weight[:, 5] *= 50
    smooth = torch.randn(256, 64, generator=torch.Generator().manual_seed(8))
    turned = product_error(hadamard(smooth, 64), hadamard(large_weight, 64), form)
    assert turned < 0.7 * product_error(smooth, large_weight, form)


def test_no_scale_is_chosen_where_none_helps() -> None:
    form = WeightFormat("int8")
    weight = torch.tensor([[127.0, 1.0], [-5.0, 127.0]])  # exact in INT8
    x = torch.tensor([[127.0, 3.0], [4.0, -127.0]] * 8)  # exact in 8 bits
    assert best_scale(x, [(weight, form)]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_quantised_experts_compute_what_their_expanded_weights_say(kind: str, rounds_inputs: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    gate_up, down = torch.randn(4, 2, 24, 32, generator=generator), torch.randn(4, 32, 24, generator=generator)
    form = WeightFormat(kind, 16, rounds_inputs)
    experts = QuantisedExperts(QuantisedMatrix.from_float(gate_up, form), QuantisedMatrix.from_float(down, form))
    x = torch.randn(9, 32, generator=generator)
    ids, weights = torch.randint(0, 3, (9, 2), generator=generator), torch.rand(9, 2, generator=generator)
    exact = reference_experts(x, ids, weights, experts.gate_up_proj.expand().flatten(1, 2), experts.down_proj.expand())
    y = experts(x, ids, weights)
    limit = 0.0 if not rounds_inputs else 0.08 if kind == "fp8" else 0.02
    assert (y - exact).norm() <= limit * exact.norm() + 1e-5
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, 32)


def test_casts_leave_stored_types_alone() -> None:
    model = tiny_model()
    quantise_modules(model, QuantisationPlan(attention="fp8", group_size=8))
    stored = {name: (tensor.dtype, tensor.clone()) for name, tensor in model.state_dict().items() if "_scale" in name
              or "packed" in name or tensor.dtype in (torch.int8, torch.float8_e4m3fn)}
    assert len(stored) > 20
    model.to(torch.bfloat16)
    for name, tensor in model.state_dict().items():
        if name in stored:
            assert tensor.dtype == stored[name][0] and torch.equal(tensor.float(), stored[name][1].float())
        elif not name.endswith("e_score_correction_bias"):
            assert tensor.dtype == torch.bfloat16
    assert torch.isfinite(logits(model, random_ids(1, 20)).float()).all()
    assert not any(isinstance(module, Experts) for module in model.modules())
