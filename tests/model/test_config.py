from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.errors import ConfigError
from glm5.model.config import ModelConfig, preset, presets
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


def test_both_published_rope_bases_are_read_and_never_guessed() -> None:
    assert [preset(name).rope_theta for name in ("glm-5", "glm-5.2")] == [1e6, 8e6]
    five = {**PUBLISHED, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    assert ModelConfig.from_json(five).rope_theta == 1e6 and ModelConfig.from_json(PUBLISHED).rope_theta == 8e6


def test_an_indexer_without_the_interleave_key_is_interleaved() -> None:
    assert "indexer_rope_interleave" not in PUBLISHED
    assert ModelConfig.from_json(PUBLISHED).indexer_rope_interleave
    assert not ModelConfig.from_json({**PUBLISHED, "indexer_rope_interleave": False}).indexer_rope_interleave


def test_keys_of_ours_are_written_only_when_they_differ_from_the_default() -> None:
    written = preset("glm-5").to_json()
    assert not {"latent_norm_eps", "mtp_zero_first_embedding"} & set(written)
    changed = preset("glm-5").replace(latent_norm_eps=1e-5, mtp_zero_first_embedding=True)
    assert ModelConfig.from_json(changed.to_json()) == changed


def test_a_schedule_key_that_is_null_is_absent_and_lists_count_decoder_layers_only() -> None:
    nulls = {"indexer_types": None, "mlp_layer_types": None, "n_group": None, "index_topk_pattern": None}
    config = ModelConfig.from_json({**PUBLISHED, **nulls})
    assert len(config.indexer_schedule) == len(config.mlp_schedule) == 78 and config.n_group == 1
    assert config.indexer_schedule.count("full") == 21 and config.indexer_schedule.count("shared") == 57
    with pytest.raises(ConfigError, match="indexer_types has 79 entries for num_hidden_layers=78"):
        ModelConfig.from_json({**PUBLISHED, "indexer_types": [*config.indexer_schedule, "full"]})


def test_a_config_without_stop_ids_or_optional_keys_survives_the_round_trip() -> None:
    for config in (*presets().values(), tiny_config(mlp_layer_types=("sparse", "dense", "sparse"))):
        assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_rope_theta_at_top_level_is_understood_and_its_absence_is_an_error() -> None:
    legacy = {key: value for key, value in PUBLISHED.items() if key != "rope_parameters"}
    assert ModelConfig.from_json({**legacy, "rope_theta": 5000}).rope_theta == 5000
    for absent in (legacy, {**legacy, "rope_parameters": None}, {**legacy, "rope_theta": None}):
        with pytest.raises(ConfigError, match=r"config\.json: rope_parameters is missing"):
            ModelConfig.from_json(absent)


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "deepseek_v32"}, "model_type='deepseek_v32'"),
    ({"n_group": 6}, "n_group=6: must divide n_routed_experts=256"),
    ({"n_group": 256}, "n_group=256: must divide"),
    ({"n_group": 8, "topk_group": 9}, "topk_group=9 exceeds n_group=8"),
    ({"n_group": 64, "topk_group": 1}, "num_experts_per_tok=8 exceeds the 4 experts of topk_group=1"),
    ({"rope_interleave": False}, "rope_interleave=False"),
    ({"indexer_rope_interleave": "yes"}, "indexer_rope_interleave='yes': expected true or false"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0: expected a positive number"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
    ({"latent_norm_eps": float("inf")}, "latent_norm_eps=inf"),
    ({"hidden_size": 0}, "hidden_size=0"),
    ({"hidden_size": "big"}, "hidden_size='big'"),
    ({"num_experts_per_tok": 300}, "num_experts_per_tok=300 exceeds"),
    ({"num_key_value_heads": 8}, "num_key_value_heads=8"),
    ({"rope_parameters": {"rope_theta": 1, "rope_type": "yarn"}}, "rope_type='yarn'"),
    ({"rope_parameters": {"rope_type": "default"}}, "expected rope_theta"),
    ({"rope_parameters": {"rope_theta": "1e6"}}, "expected rope_theta"),
    ({"rope_parameters": 1000000}, "rope_parameters=1000000: expected rope_theta"),
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
