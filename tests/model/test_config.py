from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm5.errors import ConfigError
from glm5.model.config import ModelConfig, parameter_counts, preset, presets
from glm5.model.transformer import GlmMoeDsaForCausalLM
from model.tiny import tiny_config

PUBLISHED = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3, "head_dim": 192,
    "hidden_act": "silu", "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    "index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": None,
    "index_share_for_mtp_iteration": True, "initializer_range": 0.02, "intermediate_size": 12288,
    "kv_lora_rank": 512, "max_position_embeddings": 1048576, "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "pad_token_id": 154820,
    "pretraining_tp": 1, "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_interleave": True, "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "transformers_version": "5.4.0", "use_cache": True, "v_head_dim": 256,
    "vocab_size": 154880,
}


@pytest.mark.parametrize(("name", "total", "with_mtp", "active"), [
    ("glm-5", 743_911_199_232, 753_864_119_552, 41_784_709_632),
    ("glm-5.2", 743_377_000_704, 753_329_921_024, 41_250_511_104),
])
def test_published_presets_have_the_published_counts(name: str, total: int, with_mtp: int, active: int) -> None:
    assert parameter_counts(preset(name)) == {"total": total, "with_mtp": with_mtp, "active": active}


@pytest.mark.parametrize("config", [*presets().values(), tiny_config(num_nextn_predict_layers=0),
                                    tiny_config(n_shared_experts=2, first_k_dense_replace=0)])
def test_counts_equal_a_model_on_the_meta_device(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    counts = parameter_counts(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == counts["with_mtp"]
    main = model.model.layers[: config.num_hidden_layers]
    extra = sum(parameter.numel() for layer in model.model.layers[len(main) :] for parameter in layer.parameters())
    assert counts["with_mtp"] - extra == counts["total"]


def test_a_published_file_is_read_and_written_back_with_every_key(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED))
    config = ModelConfig.from_json_file(path)
    written = config.to_json()
    assert {key: written.get(key) for key in PUBLISHED} == PUBLISHED
    assert ModelConfig.from_json(written) == config
    full = [layer for layer, kind in enumerate(config.indexer_schedule) if kind == "full"]
    assert full == [0, 1, *range(2, 78, 4)]


@pytest.mark.parametrize("first", ["head_dim", "qk_rope_head_dim"])
def test_head_dim_never_changes_the_rotary_width(first: str) -> None:
    ordered = {first: PUBLISHED[first], **PUBLISHED}
    assert ModelConfig.from_json(ordered).qk_rope_head_dim == 64


def test_explicit_indexer_types_win_over_pattern_and_pattern_over_frequency() -> None:
    base = tiny_config(index_topk_freq=2, index_skip_topk_offset=1)
    assert base.indexer_schedule == ("full", "shared", "full")
    assert base.replace(index_topk_pattern="FSS").indexer_schedule == ("full", "shared", "shared")
    explicit = base.replace(index_topk_pattern="FSS", indexer_types=["full", "full", "shared"])
    assert explicit.indexer_schedule == ("full", "full", "shared")


def test_a_config_without_stop_ids_or_optional_keys_survives_the_round_trip() -> None:
    for config in (*presets().values(), tiny_config(mlp_layer_types=("sparse", "dense", "sparse"))):
        assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_rope_theta_at_top_level_is_understood_and_its_absence_is_an_error() -> None:
    legacy = {key: value for key, value in PUBLISHED.items() if key != "rope_parameters"}
    assert ModelConfig.from_json({**legacy, "rope_theta": 5000}).rope_theta == 5000
    with pytest.raises(ConfigError, match=r"config\.json: rope_parameters is missing"):
        ModelConfig.from_json(legacy)


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "deepseek_v32"}, "model_type='deepseek_v32'"),
    ({"n_group": 8}, "n_group=8"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave=False"),
    ({"hidden_size": 0}, "hidden_size=0"),
    ({"hidden_size": "big"}, "hidden_size='big'"),
    ({"num_experts_per_tok": 300}, "num_experts_per_tok=300 exceeds"),
    ({"num_key_value_heads": 8}, "num_key_value_heads=8"),
    ({"rope_parameters": {"rope_theta": 1, "rope_type": "yarn"}}, "rope_type"),
    ({"indexer_types": ["full"] * 77}, "indexer_types has 77 entries"),
    ({"indexer_types": ["shared"] * 78}, "first layer"),
    ({"mlp_layer_types": ["moe"] * 78}, r"mlp_layer_types\[0\]='moe'"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
])
def test_a_wrong_value_is_named_in_one_line(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_json({**PUBLISHED, **change}, "there/config.json")
    assert str(caught.value).startswith("there/config.json: ") and "\n" not in str(caught.value)


def test_missing_keys_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_lora_rank is missing"):
        ModelConfig.from_json({key: value for key, value in PUBLISHED.items() if key != "kv_lora_rank"})
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_json_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_json_file(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="nano, micro"):
        preset("mega")
    with pytest.raises(ConfigError, match="hiden_size"):
        tiny_config().replace(hiden_size=3)


def test_the_configuration_module_loads_without_torch() -> None:
    code = "import sys, glm5.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
