from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from glm5.cli import app
from glm5.errors import ConfigError
from glm5.model.checkpoint import save_model
from glm5.model.config import ModelConfig, preset
from glm5.model.counts import parameter_counts
from glm5.model.info import describe
from glm5.model.memory import Layout, parse_layout, serving_memory, training_memory
from glm5.model.transformer import GlmMoeDsaForCausalLM
from model.tiny import tiny_config, tiny_model


def test_json_rows_have_the_published_numbers() -> None:
    result = CliRunner().invoke(app, ["model", "info", "glm-5.2", "--context", "131072", "--layout", "fsdp=4,ep=8",
                                      "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout.splitlines()[-1])
    values = {row["name"]: row["value"] for row in data["rows"]}
    assert values["parameters.total"] == 743_377_000_704 and values["parameters.with_mtp"] == 753_329_921_024
    assert values["cache_bytes_per_token.total"] == 89_856 + 5_376 + 1_408
    assert values["layout.devices"] == 32
    assert all(isinstance(value, int) for value in values.values())


def test_a_checkpoint_directory_is_described_too(tmp_path) -> None:
    save_model(tiny_model(), tmp_path / "model")
    result = CliRunner().invoke(app, ["model", "info", str(tmp_path / "model"), "--json"])
    values = {row["name"]: row["value"] for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    assert values["parameters.with_mtp"] == sum(parameter.numel() for parameter in tiny_model().parameters())


def test_training_memory_of_one_device_is_that_of_the_real_tensors() -> None:
    config = tiny_config()
    model = GlmMoeDsaForCausalLM(config)
    elements = sum(parameter.numel() for parameter in model.parameters())
    vectors = sum(parameter.numel() for name, parameter in model.named_parameters()
                  if parameter.dim() == 1 or name in ("model.embed_tokens.weight", "lm_head.weight"))
    plan = training_memory(config, Layout(), tokens=64)
    assert plan.weights == plan.gradients == 4 * elements
    assert plan.optimizer == 4 * (elements - vectors) + 8 * vectors
    sparse_layer = sum(parameter.numel() for name, parameter in model.model.layers[1].named_parameters()
                       if parameter.dim() > 1)
    assert plan.gathered == 2 * 2 * sparse_layer


@pytest.mark.parametrize("config", [tiny_config(), tiny_config(first_k_dense_replace=3, num_nextn_predict_layers=0)])
def test_serving_memory_of_one_device_is_that_of_the_checkpoint(config: ModelConfig) -> None:
    plan = serving_memory(config, Layout(), context=100, sequences=3, chunk=10)
    assert plan.weights_bf16 == 2 * parameter_counts(config)["with_mtp"]
    latents = 3 * (16 + 8 + 16) + config.num_nextn_predict_layers * (16 + 8 + 16)
    assert plan.cache == 3 * 100 * 2 * latents
    dense = training_memory(tiny_config(first_k_dense_replace=3, num_nextn_predict_layers=0), Layout(), tokens=8)
    model = GlmMoeDsaForCausalLM(tiny_config(first_k_dense_replace=3, num_nextn_predict_layers=0))
    assert dense.gathered == 4 * sum(parameter.numel() for parameter in model.model.layers[0].parameters()
                                     if parameter.dim() > 1)


def test_axes_divide_what_they_should() -> None:
    config = preset("glm-5")
    one = training_memory(config, Layout(), tokens=8192)
    many = training_memory(config, Layout(fsdp=16, ep=8, cp=2), tokens=8192)
    assert many.weights == -(-one.weights // (4 * 256)) * 4 or abs(many.weights - one.weights / 256) < 16
    assert many.gathered < one.gathered / 6
    serve = serving_memory(config, Layout(ep=8, tp=8), context=1000, sequences=1, chunk=1000)
    alone = serving_memory(config, Layout(), context=1000, sequences=1, chunk=1000)
    experts = 2 * (724_775_731_200 + 256 * 3 * 6144 * 2048)
    per_head = 2 * 79 * (16384 * 2048 + 28672 * 512 + 6144 * 16384)
    assert serve.weights_bf16 == alone.weights_bf16 - (experts + per_head) * 7 // 8
    assert serve.cache == alone.cache == 1000 * (89_856 + 19_968 + 1_408)
    assert serving_memory(config, Layout(cp=4), 1000, 1, 1000).cache == alone.cache // 4


@pytest.mark.parametrize(("text", "message"), [
    ("fsdp=8,pp=2", "got 'pp=2'"), ("fsdp", "got 'fsdp'"), ("tp=-1", "got 'tp=-1'"), ("tp=0", "tp=0: expected"),
])
def test_a_wrong_layout_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layout(text)


def test_what_does_not_fit_the_model_is_named() -> None:
    assert parse_layout("fsdp=2, ep=4") == Layout(fsdp=2, ep=4) and parse_layout("") == Layout()
    for layout, message in ((Layout(tp=3), "tp=3 does not divide num_attention_heads=64"),
                            (Layout(ep=3), "ep=3 does not divide n_routed_experts=256")):
        with pytest.raises(ConfigError, match=message):
            describe(preset("glm-5"), context=4096, layout=layout, sequences=1)
    with pytest.raises(ConfigError, match="context=300000"):
        describe(preset("glm-5"), context=300_000, layout=Layout(), sequences=1)
    with pytest.raises(ConfigError, match="sequences=0"):
        describe(preset("glm-5"), context=1, layout=Layout(), sequences=0)


def test_the_description_needs_no_weights() -> None:
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(preset("mini"))
    rows = {row["name"]: row["value"] for row in describe(preset("mini"), context=4096, layout=Layout(), sequences=1)}
    assert rows["parameters.with_mtp"] == sum(parameter.numel() for parameter in model.parameters())
