from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.errors import CheckpointError, ConfigError
from glm5.kernels.integer import unpack_int4
from glm5.model.cache import KeyCache
from glm5.model.checkpoint import load_model, read_published, save_model, state_dict_published
from glm5.model.quantize.export import Transforms, Variant, quantise_checkpoint
from glm5.model.quantize.fake import rounded
from glm5.model.quantize.formats import dequantise, fake_quantise
from glm5.model.quantize.plan import TRAINED_FOR, QuantisationPlan, StoredFormats, WeightFormat
from glm5.model.quantize.projections import QuantisedExperts, QuantisedMatrix
from model.tiny import random_ids, tiny_model

NONE = Transforms(rotation="none", scaling=False)
PLAN = QuantisationPlan(group_size=16)
ALL_INT4 = QuantisationPlan(experts="int4", attention="int4", mlp="int4", indexer="int4", group_size=16)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(tiny_model(), tmp_path / "model")
    return tmp_path / "model"


def export(source: Path, plan: QuantisationPlan, transforms: Transforms = NONE, **others: Variant):
    target = source.with_name("quantised")
    variants = {"written": Variant(plan=plan, transforms=transforms), **others}
    exported = quantise_checkpoint(source, target, variants, random_ids(3, 40, seed=2), random_ids(2, 40, seed=3))
    return target, exported


def kl_from(model, quantised, ids: torch.Tensor) -> float:
    with torch.no_grad():
        exact, log_p = (torch.log_softmax(one(ids).logits[:, :-1], -1) for one in (model, quantised))
    return float((exact.exp() * (exact - log_p)).sum(-1).mean())


def awkward_model(dtype: torch.dtype):
    """Planned matrices with zeros, subnormal and huge weights, in widths that are no multiple of the group."""
    model = tiny_model().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 3 or name.endswith("_proj.weight"):
                parameter[..., 0, :] = 0.0
                parameter[..., 1, :] = 1e-41
                parameter[..., 2, :9] = 3.3e38
                parameter[..., 3, :] = -0.0
                parameter[..., 4, 1::2] *= -1e-30
    return model


@pytest.mark.parametrize(("dtype", "plan"), [
    (torch.bfloat16, PLAN), (torch.float32, ALL_INT4),
    (torch.float32, QuantisationPlan(experts="fp8", attention="fp8", mlp="fp8"))])
def test_training_computes_with_exactly_the_exported_weights(tmp_path: Path, dtype: torch.dtype,
                                                            plan: QuantisationPlan) -> None:
    model = awkward_model(dtype)
    save_model(model, tmp_path / "model")
    masters = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with rounded(model, plan):
        seen = {name: tensor.clone() for name, tensor in state_dict_published(model).items()}
    assert all(torch.equal(tensor.view(torch.uint8), masters[name].view(torch.uint8))
               for name, tensor in model.state_dict().items())
    target = tmp_path / "quantised"
    ids = random_ids(1, 8)
    quantise_checkpoint(tmp_path / "model", target, {"written": Variant(plan=plan, transforms=NONE)}, ids, ids)
    stored = read_published(target)
    planned = 0
    for name, tensor in seen.items():
        module = name.removesuffix(".weight")
        form = plan.format_of(module)
        if form is None:
            assert torch.equal(stored[name], tensor)
            continue
        planned += 1
        levels = stored.get(name)
        if form.kind == "int4":
            assert stored[f"{module}.weight_shape"].tolist() == list(tensor.shape)
            levels = unpack_int4(stored[f"{module}.weight_packed"], tensor.shape[1])
        exported = dequantise(levels, stored[f"{module}.weight_scale"], form, dtype)
        assert torch.equal(exported.view(torch.uint8), tensor.view(torch.uint8)), name
    assert planned > 50
    loaded = dict(load_model(target).named_modules())
    for name, module in loaded.items():
        if isinstance(module, QuantisedMatrix) and module.stored.dim() == 2:
            assert torch.equal(module.expand(dtype), seen[f"{name}.weight"])
        elif isinstance(module, QuantisedExperts):
            assert torch.equal(module.gate_up_proj.expand(dtype)[1, 1], seen[f"{name}.1.up_proj.weight"])
            assert torch.equal(module.down_proj.expand(dtype)[3], seen[f"{name}.3.down_proj.weight"])


@pytest.mark.filterwarnings("ignore")
def test_an_independent_reader_finds_the_same_weights_in_the_directory(saved: Path) -> None:
    """The compressed-tensors library, which vLLM and Transformers use, parses the configuration and unpacks."""
    compressed = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    plan = QuantisationPlan(attention="int8", mlp="fp8", group_size=8)
    model = load_model(saved)
    with rounded(model, plan):
        seen = {name: tensor.clone() for name, tensor in state_dict_published(model).items()}
    target, _ = export(saved, plan)
    config = QuantizationConfig.model_validate(json.loads((target / "config.json").read_text())["quantization_config"])
    assert config.format == "mixed-precision" and compressed.__version__
    stored, read = read_published(target), 0
    for name, tensor in seen.items():
        module = name.removesuffix(".weight")
        schemes = [scheme for scheme in config.config_groups.values()
                   if any(match_name(module, pattern) for pattern in scheme.targets)]
        assert len(schemes) == (plan.format_of(module) is not None), name
        assert not schemes or not any(match_name(module, pattern) for pattern in config.ignore), name
        if schemes:
            parts = {key.removeprefix(f"{module}."): value for key, value in stored.items()
                     if key.rpartition(".")[0] == module}
            compressor = BaseCompressor.get_value_from_registry(schemes[0].format)
            found = compressor.decompress(parts, schemes[0])["weight"]
            torch.testing.assert_close(found.float(), tensor.float(), rtol=2**-8, atol=0)  # it multiplies in bf16
            read += 1
    assert read > 50


@pytest.mark.parametrize("transforms", [NONE, Transforms(), Transforms(rotation="online")])
def test_figures_are_those_of_the_directory_that_was_written(saved: Path, transforms: Transforms) -> None:
    model, ids = load_model(saved), random_ids(2, 40, seed=3)
    target, exported = export(saved, PLAN, transforms)
    quantised = load_model(target)
    assert kl_from(model, quantised, ids) == pytest.approx(exported.variants["written"].kl, rel=1e-3)
    assert 0.001 < exported.variants["written"].kl < 0.3 and exported.original.kl == 0
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert exported.original.loss == pytest.approx(float(loss), rel=1e-5) and exported.tokens == 78


def test_a_quantised_model_generates_over_a_cache_as_it_scores(saved: Path) -> None:
    model = load_model(export(saved, PLAN, Transforms(rotation="online"))[0])
    ids = random_ids(1, 30)
    cache = KeyCache(model.config, 1, 64)
    logits = model.ragged(ids[0], torch.arange(30), torch.zeros(30, dtype=torch.long), cache)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids).logits[0], rtol=0.05, atol=0.15)
    assert model.model.layers[3].mlp.experts.down_proj.rotation == 8


def test_finer_formats_lose_less_and_variants_are_measured_but_not_written(saved: Path) -> None:
    plans = {"int8": QuantisationPlan(experts="int8"), "experts": QuantisationPlan(attention="none", mlp="none",
                                                                                group_size=16)}
    others = {name: Variant(plan=plan, transforms=NONE) for name, plan in plans.items()}
    target, exported = export(saved, QuantisationPlan(experts="none", attention="none", mlp="none"), **others)
    kl = {name: quality.kl for name, quality in exported.variants.items()}
    assert abs(kl["written"]) < 1e-7 < kl["int8"] and kl["experts"] > 1e-3
    stored, original = read_published(target), read_published(saved)
    assert set(stored) == set(original)
    assert all(torch.equal(stored[name], tensor) for name, tensor in original.items())


def test_size_and_files_of_a_sharded_export(saved: Path) -> None:
    target = saved.with_name("sharded")
    ids = random_ids(1, 20)
    exported = quantise_checkpoint(saved, target, {"q": Variant(plan=ALL_INT4, transforms=NONE)}, ids, ids,
                                   max_shard_bytes=40_000)
    files = list(target.glob("*.safetensors"))
    assert len(files) > 2 and max(path.stat().st_size for path in files) < 80_000
    stored = read_published(target)
    assert exported.bytes_after == sum(tensor.nbytes for tensor in stored.values()) < exported.bytes_before / 2
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert load_model(target).config.extra["quantization_config"]["format"] == "pack-quantized"


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(saved: Path) -> None:
    ids = random_ids(1, 20)
    variant = {"q": Variant(plan=PLAN, transforms=NONE)}
    with pytest.raises(CheckpointError, match="same directory"):
        quantise_checkpoint(saved, saved, variant, ids, ids)
    with pytest.raises(ConfigError, match="calibration"):
        quantise_checkpoint(saved, saved.with_name("q"), variant, ids[:0], ids)
    target, _ = export(saved, PLAN)
    with pytest.raises(CheckpointError, match="quantised already"):
        quantise_checkpoint(target, saved.with_name("q"), variant, ids, ids)
    tensors = load_file(saved / "model.safetensors")
    tensors["model.layers.2.mlp.experts.1.up_proj.weight"][3, 2] = float("nan")
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.experts: a weight is not a finite number"):
        quantise_checkpoint(saved, saved.with_name("q"), variant, ids, ids)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["model", "quantised"]


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c.update(quant_method="gptq"), "quant_method"),
    (lambda c: c["config_groups"].pop("group_0"), "int4 weights, which quantization_config does not describe"),
    (lambda c: c["config_groups"]["group_0"]["weights"].update(symmetric=False), "expected symmetric int4"),
    (lambda c: c["config_groups"]["group_0"]["weights"].update(group_size=32), "weight_scale has shape"),
    (lambda c: c["config_groups"]["group_0"]["input_activations"].update(dynamic=False), "input_activations"),
    (lambda c: c.update(transform_config={"config_groups": {"R1": {}}}), "Hadamard rotation"),
])
def test_a_directory_that_cannot_be_computed_is_named(saved: Path, change, message: str) -> None:
    target, _ = export(saved, PLAN)
    config = json.loads((target / "config.json").read_text())
    change(config["quantization_config"])
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises((ConfigError, CheckpointError), match=message) as caught:
        load_model(target)
    assert "\n" not in str(caught.value)


def test_a_quantised_kv_b_proj_is_refused(saved: Path) -> None:
    target, _ = export(saved, PLAN)
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.int8)
    tensors[name + "_scale"] = torch.ones(tensors[name].shape[0], 1)
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(CheckpointError, match="needs this matrix itself"):
        load_model(target)


def test_plans_are_checked_and_read_back() -> None:
    with pytest.raises(ConfigError, match="group_size=12"):
        QuantisationPlan(group_size=12)
    with pytest.raises(ConfigError, match="experts='int3'"):
        QuantisationPlan(experts="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{TRAINED_FOR}.*unexpected keyword"):
        QuantisationPlan.from_json({"expert": "int4"}, "config.json")
    formats = StoredFormats.from_json(QuantisationPlan(rounds_inputs=False, group_size=32).to_json(64), "x")
    assert formats.down_rotation == 64
    assert formats.by_kind == {"int4": WeightFormat("int4", 32, False), "int8": WeightFormat("int8", 128, False)}


def test_none_rounds_nothing_and_errors_restore_the_masters() -> None:
    model = tiny_model()
    before = model.lm_head.weight.clone(), model.model.layers[1].mlp.experts.down_proj.detach().clone()
    with rounded(model, None):
        assert torch.equal(model.model.layers[1].mlp.experts.down_proj, before[1])
    with pytest.raises(RuntimeError, match="inside"):
        with rounded(model, PLAN):
            assert torch.equal(model.lm_head.weight, before[0])
            assert not torch.equal(model.model.layers[1].mlp.experts.down_proj, before[1])
            raise RuntimeError("inside")
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj, before[1])


def test_gradients_are_those_at_the_rounded_weights() -> None:
    """The straight-through estimator: the gradient that a model with the rounded weights as parameters would get."""
    model, other = tiny_model(), tiny_model()
    with torch.no_grad():
        for layer in other.model.layers[1:]:
            experts = layer.mlp.experts
            experts.gate_up_proj.copy_(fake_quantise(experts.gate_up_proj, WeightFormat("int4", 16)))
            experts.down_proj.copy_(fake_quantise(experts.down_proj, WeightFormat("int4", 16)))
    ids = random_ids(2, 20)
    with rounded(model, QuantisationPlan(attention="none", mlp="none", group_size=16)):
        model(ids, attention="dense").logits.square().mean().backward()
    other(ids, attention="dense").logits.square().mean().backward()
    for (name, parameter), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, expected.grad), name
