from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.errors import CheckpointError
from glm5.model.cache import KeyCache
from glm5.model.checkpoint import load_model, read_published, save_model, state_dict_published
from glm5.model.convert import Conversion, convert_checkpoint
from glm5.model.fp8 import FP8, dequantise, is_quantised_name, quantise
from model.tiny import random_ids, tiny_config, tiny_model


def plain_dequantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """From the definition: element (r, c) times scale (r // 128, c // 128)."""
    rows, columns = (torch.arange(size) // 128 for size in values.shape)
    return values.float() * scale[rows][:, columns]


@pytest.mark.parametrize("shape", [(576, 130), (128, 128), (1, 1), (129, 7), (40, 256)])
def test_blocks_are_128_wide_and_the_last_one_is_partial(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[1])
    values, scale = quantise(weight)
    assert values.dtype == FP8 and values.shape == shape
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128)) and scale.dtype == torch.float32
    for o in range(scale.shape[0]):
        for i in range(scale.shape[1]):
            block = weight[o * 128 : (o + 1) * 128, i * 128 : (i + 1) * 128]
            torch.testing.assert_close(scale[o, i], block.abs().max() / 448, rtol=1e-6, atol=0)
    back = dequantise(values, scale, torch.float32)
    rows, columns = torch.arange(shape[0]) // 128, torch.arange(shape[1]) // 128
    spacing = 448 * scale[rows][:, columns] / 14  # of the largest values: 3 mantissa bits
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, spacing / 448)).all()
    assert torch.equal(back, plain_dequantise(values, scale))


def test_the_scale_multiplies_and_zero_blocks_stay_zero() -> None:
    weight = torch.zeros(256, 128)
    weight[:128] = 896.0
    values, scale = quantise(weight)
    assert scale.tolist() == [[2.0], [1.0]] and values[0, 0].float() == 448 and not values[128:].float().any()
    assert torch.equal(dequantise(values, scale, torch.float32), weight)


def test_quantising_what_was_dequantised_in_fp32_changes_nothing() -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    values, scale = quantise(weight)
    again, same = quantise(dequantise(values, scale, torch.float32))
    torch.testing.assert_close(same, scale, rtol=1e-6, atol=0)
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.zeros(130, 3)
    weight[129, 2] = value
    with pytest.raises(ValueError, match="not finite"):
        quantise(weight)


def test_the_published_choice_of_quantised_weights() -> None:
    model = tiny_model(num_hidden_layers=2, indexer_types=("full", "shared"))
    names = list(state_dict_published(model))
    stored = {name for name in names if is_quantised_name(name)}
    kept = {re.sub(r"^model\.layers\.\d+\.", "", name) for name in names if name not in stored}
    assert kept == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "input_layernorm.weight",
        "post_attention_layernorm.weight", "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight",
        "self_attn.indexer.weights_proj.weight", "self_attn.indexer.k_norm.weight", "self_attn.indexer.k_norm.bias",
        "mlp.gate.weight", "mlp.gate.e_score_correction_bias", "eh_proj.weight", "enorm.weight", "hnorm.weight",
        "shared_head.norm.weight"}
    assert sum(name.startswith("model.layers.2.") for name in stored) == 5 + 2 + 3 * 4 + 3


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    """An FP8 checkpoint whose matrices have partial blocks in both directions."""
    save_model(tiny_model(hidden_size=136, kv_lora_rank=132, v_head_dim=72), tmp_path / "plain")
    convert_checkpoint(tmp_path / "plain", tmp_path / "fp8", Conversion(fp8=True))
    return tmp_path / "fp8"


def test_an_fp8_checkpoint_loads_dequantised_in_the_type_asked_for(quantised: Path) -> None:
    stored = read_published(quantised)
    kv_a = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert stored[kv_a].dtype == FP8 and stored[kv_a].shape == (140, 136)
    assert stored[kv_a + "_scale_inv"].shape == (2, 2)
    exact = load_model(quantised, dtype=torch.float32)
    torch.testing.assert_close(state_dict_published(exact)[kv_a],
                               plain_dequantise(stored[kv_a], stored[kv_a + "_scale_inv"]), rtol=0, atol=0)
    rounded = load_model(quantised)
    for name, tensor in state_dict_published(rounded).items():
        expected = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == expected
        torch.testing.assert_close(tensor, state_dict_published(exact)[name].to(expected), rtol=0, atol=0)
    assert "quantization_config" not in rounded.config.extra
    with torch.no_grad():
        logits = exact(random_ids(1, 12)).logits
        original = load_model(quantised.parent / "plain")(random_ids(1, 12)).logits
    assert torch.nn.functional.cosine_similarity(logits.flatten(), original.flatten(), dim=0) > 0.9


def test_the_kv_up_projection_is_split_after_it_is_dequantised(quantised: Path) -> None:
    """A scale of one block row covers rows of several heads and of both parts; the cached form splits them by head."""
    model = load_model(quantised, dtype=torch.float32)
    up = model.model.layers[0].self_attn.kv_b_proj.weight
    assert up.shape[0] == 2 * (12 + 72)  # two heads in two block rows: the second head begins inside the first
    ids = random_ids(1, 30)
    with torch.no_grad():
        cache = KeyCache(model.config, 1, 32)
        cached = model.ragged(ids[0], torch.arange(30), torch.zeros(30, dtype=torch.long), cache)
        torch.testing.assert_close(cached, model(ids).logits[0], rtol=0, atol=2e-4)


def change_config(directory: Path, **changes) -> None:
    data = json.loads((directory / "config.json").read_text())
    data["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(data))


@pytest.mark.parametrize("names", [[], ["model.layers.0.self_attn.indexer.weights_proj"],
                                   ["model.layers.0.self_attn.indexers_proj"], ["model.layers.1.self_attn.o_proj"]])
def test_weights_proj_stays_bf16_whatever_modules_to_not_convert_says(quantised: Path, names: list[str]) -> None:
    """The scales in the file decide: the published list names a module ``indexers_proj`` that does not exist."""
    published = json.loads((quantised / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.self_attn.indexers_proj" in published
    assert read_published(quantised)["model.layers.0.self_attn.indexer.weights_proj.weight"].dtype == torch.bfloat16
    before = state_dict_published(load_model(quantised))
    change_config(quantised, modules_to_not_convert=names)
    for name, tensor in state_dict_published(load_model(quantised)).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("model.layers.0.self_attn.o_proj.weight_scale_inv"), "o_proj.weight has type torch.float8_e4m3fn"),
    (lambda t: t.pop("model.layers.0.self_attn.o_proj.weight"), "is a scale but .*o_proj.weight is missing"),
    (lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1, 1)}), "is a scale but model.norm.weight is"),
    (lambda t: t.update({"model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv": torch.ones(1, 2)}),
     r"kv_a_proj_with_mqa.weight of shape \[140, 136\] needs torch.float32 \[2, 2\]"),
    (lambda t: t.update({"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(2, 2).bfloat16()}),
     "weight_scale_inv is torch.bfloat16"),
])
def test_scales_that_do_not_fit_are_named(quantised: Path, change, message: str) -> None:
    tensors = load_file(quantised / "model.safetensors")
    change(tensors)
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(quantised)
    assert str(quantised) in str(caught.value) and "\n" not in str(caught.value)


def test_a_checkpoint_without_scales_loads_although_its_configuration_says_fp8(tmp_path: Path) -> None:
    model = tiny_model().to(torch.bfloat16)
    save_model(model, tmp_path / "model")
    data = json.loads((tmp_path / "model/config.json").read_text())
    data["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "model/config.json").write_text(json.dumps(data))
    for name, tensor in state_dict_published(load_model(tmp_path / "model")).items():
        assert torch.equal(tensor, state_dict_published(model)[name])
    assert tiny_config().extra == {}
