from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from glm5.kernels import fused, reference
from glm5.model.checkpoint import state_dict_published
from glm5.model.config import ModelConfig, preset, presets
from glm5.model.counts import (
    cache_bytes_per_token,
    decode_flops,
    parameter_counts,
    prefill_flops,
    stored_bytes,
    tensor_counts,
    train_flops,
)
from glm5.model.fp8 import is_quantised_name, quantization_config, scale_shape
from glm5.model.transformer import GlmMoeDsaForCausalLM
from model.tiny import random_ids, tiny_config, tiny_model

CONFIGS = [*presets().values(), tiny_config(num_nextn_predict_layers=0),
           tiny_config(n_shared_experts=2, first_k_dense_replace=0), tiny_config(first_k_dense_replace=3),
           tiny_config(indexer_types=("full", "shared", "shared"))]


def meta_model(config: ModelConfig) -> GlmMoeDsaForCausalLM:
    with torch.device("meta"):
        return GlmMoeDsaForCausalLM(config)


@pytest.mark.parametrize(("name", "counts"), [
    ("glm-5", {"total": 743_911_199_232, "with_mtp": 753_864_119_552, "active": 41_784_709_632,
               "active_without_embedding": 40_833_126_912, "active_without_embedding_and_head": 39_881_544_192,
               "active_with_mtp": 42_375_943_424, "routed_experts": 724_775_731_200, "router_bias": 19_200,
               "router_bias_with_mtp": 19_456}),
    ("glm-5.2", {"total": 743_377_000_704, "with_mtp": 753_329_921_024, "active": 41_250_511_104,
                 "active_without_embedding": 40_298_928_384, "active_without_embedding_and_head": 39_347_345_664,
                 "active_with_mtp": 41_841_744_896, "routed_experts": 724_775_731_200, "router_bias": 19_200,
                 "router_bias_with_mtp": 19_456}),
])
def test_published_presets_have_the_published_counts(name: str, counts: dict[str, int]) -> None:
    assert parameter_counts(preset(name)) == counts


@pytest.mark.parametrize("config", CONFIGS)
def test_counts_equal_a_model_on_the_meta_device(config: ModelConfig) -> None:
    model = meta_model(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    counts = parameter_counts(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == counts["with_mtp"]
    assert sum(buffer.numel() for buffer in model.buffers()) == counts["router_bias_with_mtp"]
    main = model.model.layers[: config.num_hidden_layers]
    extra = sum(parameter.numel() for layer in model.model.layers[len(main) :] for parameter in layer.parameters())
    assert counts["with_mtp"] - extra == counts["total"]
    assert counts["routed_experts"] == sum(parameter.numel() for layer in main for name, parameter
                                           in layer.named_parameters() if ".experts." in name)


def test_presets_have_their_sizes() -> None:
    assert 20e6 < parameter_counts(preset("micro"))["total"] < 40e6
    assert 0.9e9 < parameter_counts(preset("mini"))["total"] < 1.1e9


@pytest.mark.parametrize(("name", "bf16", "fp8"), [("glm-5", 59_870, 119_028), ("glm-5.2", 59_585, 118_629)])
def test_published_models_have_the_published_number_of_tensors(name: str, bf16: int, fp8: int) -> None:
    assert tensor_counts(preset(name)) == {"bf16": bf16, "fp8": fp8}


@pytest.mark.parametrize("config", [preset("glm-5.2").replace(n_routed_experts=8), preset("nano"),
                                    *CONFIGS[len(presets()) :]])
def test_numbers_and_bytes_of_stored_tensors_equal_the_manifest(config: ModelConfig) -> None:
    published = state_dict_published(meta_model(config))
    quantised = [name for name in published if is_quantised_name(name)]
    assert tensor_counts(config) == {"bf16": len(published), "fp8": len(published) + len(quantised)}
    bf16 = sum(tensor.numel() * (4 if name.endswith("_bias") else 2) for name, tensor in published.items())
    scales = sum(4 * torch.Size(scale_shape(tuple(published[name].shape))).numel() for name in quantised)
    assert stored_bytes(config) == {"bf16": bf16, "fp8": bf16 + scales - sum(published[name].numel()
                                                                             for name in quantised)}


def test_the_manifest_of_glm_5_2_has_the_published_sizes() -> None:
    config = preset("glm-5.2")
    assert stored_bytes(config) == {"bf16": 2 * 753_329_921_024 + 4 * 19_456, "fp8": 755_617_140_416}
    kept = quantization_config(config)["modules_to_not_convert"]
    assert len(kept) == len(set(kept)) == 541
    indexers = [name for name in kept if name.endswith("indexers_proj")]
    assert len(indexers) == 22 and "model.layers.78.self_attn.indexers_proj" in indexers


@pytest.mark.parametrize(("name", "latent", "index"), [("glm-5", 78 * 576 * 2, 78 * 128 * 2),
                                                       ("glm-5.2", 78 * 576 * 2, 21 * 128 * 2)])
def test_cache_bytes_per_token(name: str, latent: int, index: int) -> None:
    assert cache_bytes_per_token(preset(name)) == {"latent": latent, "index": index, "mtp": (576 + 128) * 2}
    assert cache_bytes_per_token(preset(name), itemsize=1)["latent"] == latent // 2


def test_flops_of_a_long_context_by_hand() -> None:
    config = tiny_config()  # 2 heads, latent 16, rope 8, head 20, value 16; 16 index heads of 16; topk 16; 3 layers
    flops = decode_flops(config, 100)
    assert flops.attention == 3 * 16 * 2 * 2 * (16 + 8 + 16)
    assert flops.indexer == 3 * 100 * 16 * 2 * (16 + 1)
    active = parameter_counts(config)["active_without_embedding_and_head"]
    norms = 3 * (2 * 32 + 24 + 16 + 2 * 16) + 32
    assert flops.projections == 2 * (active - norms + 64 * 32)
    assert decode_flops(config, 16).indexer == 0 and decode_flops(config, 9).attention == 3 * 9 * 2 * 2 * 40
    prompt = prefill_flops(config, 20)
    assert prompt.attention == pytest.approx(3 * (sum(range(1, 17)) + 4 * 16) / 20 * 2 * 2 * 40)
    assert prompt.indexer == pytest.approx(3 * (17 + 18 + 19 + 20) / 20 * 16 * 2 * 17)
    assert prompt.projections == pytest.approx(2 * (active - norms) + 2 * 64 * 32 / 20)
    trained = train_flops(config, 20)
    assert trained.attention == pytest.approx(3 * 3 * (sum(range(1, 17)) + 4 * 16) / 20 * 2 * 2 * (20 + 16))
    assert trained.total == trained.projections + trained.attention + trained.indexer


@torch.no_grad()
def test_flops_of_one_token_equal_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token in bf16 runs the reference forms, whose products the counter sees, with one key to attend to."""
    for name in ("masked_attention", "experts"):
        monkeypatch.setattr(fused, name, getattr(reference, name))
    model = tiny_model(num_nextn_predict_layers=0).to(torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        model(random_ids(1, 1), indexer_loss=True)  # the loss makes the indexers run on one key too
    config = model.config
    expected = train_flops(config, 1).total / 3
    scores = config.num_hidden_layers * 2 * 16 * (16 + 1)
    targets = config.num_hidden_layers * 2 * 2 * 20  # what the indexers are compared with
    values = config.num_hidden_layers * 2 * 2 * 16  # of a single key: a plain multiplication, which is not counted
    assert counter.get_total_flops() == expected + scores + targets - values
