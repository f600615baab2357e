from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.errors import CheckpointError
from glm5.model.checkpoint import load_model, load_published, read_published, save_model, state_dict_published
from glm5.model.transformer import GlmMoeDsaForCausalLM
from model.tiny import random_ids, tiny_config, tiny_model


def rewrite(directory: Path, change) -> None:
    """Apply ``change`` to the dict of tensors of a single-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(tiny_model(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 20_000])
def test_save_and_load_keep_every_byte_with_the_mtp_layer(tmp_path: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=("full", "shared", "full", "full")).to(dtype)
    save_model(model, tmp_path / "a", max_shard_bytes=shard_bytes)
    loaded = load_model(tmp_path / "a")
    save_model(loaded, tmp_path / "b", max_shard_bytes=shard_bytes)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert ("model.safetensors.index.json" in names) == (shard_bytes == 20_000)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    stored = read_published(tmp_path / "a")
    assert stored["model.layers.4.eh_proj.weight"].shape == (32, 64)
    for name, tensor in state_dict_published(model).items():
        assert torch.equal(stored[name], tensor)
        assert stored[name].dtype == (torch.float32 if name.endswith("e_score_correction_bias") else dtype)
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")]
    assert len(sizes) == 1 or max(sizes) < 40_000


def test_published_names_and_shapes_are_those_of_the_checkpoint_layout() -> None:
    model = tiny_model(num_hidden_layers=2, indexer_types=("full", "shared"))
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict_published(model).items()}
    norms = {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}
    attention = {"q_a_proj.weight": (24, 32), "q_a_layernorm.weight": (24,), "q_b_proj.weight": (40, 24),
                 "kv_a_proj_with_mqa.weight": (24, 32), "kv_a_layernorm.weight": (16,), "kv_b_proj.weight": (56, 16),
                 "o_proj.weight": (32, 32)}
    indexer = {"wq_b.weight": (256, 24), "wk.weight": (16, 32), "k_norm.weight": (16,), "k_norm.bias": (16,),
               "weights_proj.weight": (16, 32)}
    mlp = {"gate_proj.weight": (24, 32), "up_proj.weight": (24, 32), "down_proj.weight": (32, 24)}
    block = norms | {f"self_attn.{name}": shape for name, shape in attention.items()}
    indexed = {f"self_attn.indexer.{name}": shape for name, shape in indexer.items()}
    sparse = {"mlp.gate.weight": (4, 32), "mlp.gate.e_score_correction_bias": (4,)}
    for owner in (*(f"experts.{number}" for number in range(4)), "shared_experts"):
        sparse |= {f"mlp.{owner}.{name}": shape for name, shape in mlp.items()}
    dense = {"mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32), "mlp.down_proj.weight": (32, 48)}
    mtp = {"eh_proj.weight": (32, 64), "enorm.weight": (32,), "hnorm.weight": (32,), "shared_head.norm.weight": (32,)}
    layers = [block | indexed | dense, block | sparse, block | indexed | sparse | mtp]
    expected = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    for number, layer in enumerate(layers):
        expected |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    assert shapes == expected


def test_dtype_converts_weights_and_leaves_the_router_bias_in_fp32(saved: Path) -> None:
    exact = read_published(saved)
    model = load_model(saved, dtype=torch.bfloat16)
    for name, tensor in state_dict_published(model).items():
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(tensor, exact[name])
        else:
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, exact[name].bfloat16())


def test_weights_are_swapped_in_place_and_the_router_bias_keeps_its_bits(saved: Path) -> None:
    model = tiny_model(seed=9).to(torch.bfloat16)
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    tensors = read_published(saved)
    load_published(state_dict_published(model), tensors)
    assert places == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert torch.equal(state_dict_published(model)[bias], tensors[bias])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].bfloat16())


def test_a_failed_swap_leaves_the_old_weights(saved: Path) -> None:
    model = tiny_model(seed=9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = read_published(saved)
    tensors["model.norm.weight"] = torch.zeros(31)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[31\]"):
        load_published(state_dict_published(model), tensors)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("model.layers.1.self_attn.indexer.wk.weight"), "layers.1.self_attn.indexer.wk.weight is missing"),
    (lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"), "experts.3.up_proj.weight is missing"),
    (lambda t: t.pop("model.layers.3.enorm.weight"), "layers.3.enorm.weight is missing"),
    (lambda t: t.update(stray=torch.zeros(1)), "unexpected tensor stray"),
    (lambda t: t.update({"lm_head.weight": torch.zeros(63, 32)}), r"lm_head.weight has shape \[63, 32\]"),
    (lambda t: t.update({"lm_head.weight": torch.zeros(64, 32, dtype=torch.int8)}), "torch.int8"),
    (lambda t: t.update({"model.layers.3.shared_head.head.weight": torch.zeros(64, 32)}), "differs from lm_head"),
])
def test_missing_extra_and_misshapen_tensors_are_named_with_their_file(saved: Path, change, message: str) -> None:
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(saved)
    assert str(saved) in str(caught.value) and "\n" not in str(caught.value)


def test_indexers_of_full_layers_are_required_and_those_of_shared_layers_refused(tmp_path: Path) -> None:
    """A shared layer with weights of its own would select other keys; a full one without would select at random."""
    model = tiny_model(num_hidden_layers=4, indexer_types=("full", "shared", "full", "shared"))
    save_model(model, tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if ".layers.2.self_attn.indexer." in name}
    assert len(own) == 5
    extra = {name.replace("layers.2", "layers.1"): tensor.clone() for name, tensor in own.items()}
    save_file({**tensors, **extra}, tmp_path / "model/model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor model.layers.1.self_attn.indexer.\S+ \(and 4 more\)"):
        load_model(tmp_path / "model")
    save_file({name: tensor for name, tensor in tensors.items() if name not in own},
              tmp_path / "model/model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.2.self_attn.indexer.\S+ is missing \(and 4 more\)"):
        load_model(tmp_path / "model")
    save_file(tensors, tmp_path / "model/model.safetensors")
    everywhere = ["full"] * 4
    with pytest.raises(CheckpointError, match=r"model.layers.1.self_attn.indexer.\S+ is missing \(and 9 more\)"):
        load_model(tmp_path / "model", config_overrides={"indexer_types": everywhere})


def test_a_partly_missing_mtp_layer_is_an_error_and_a_wholly_missing_one_is_reported(
        saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drop_mtp(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    whole = load_model(saved)
    rewrite(saved, drop_mtp)
    model = load_model(saved)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "num_nextn_predict_layers" in lines[0] and str(saved) in lines[0]
    assert model.config.num_nextn_predict_layers == 0
    ids = random_ids(1, 30)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole(ids).logits)
    with pytest.raises(CheckpointError, match=r"layers\.3\..* is missing"):
        load_model(saved, config_overrides={"num_nextn_predict_layers": 1})


def test_an_override_leaves_the_mtp_layer_out_silently(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(saved, config_overrides={"num_nextn_predict_layers": 0})
    assert len(model.model.layers) == 3 and capsys.readouterr().err == ""


def test_copies_of_embedding_and_head_in_the_mtp_layer_are_accepted(saved: Path) -> None:
    rewrite(saved, lambda t: t.update({"model.layers.3.embed_tokens.weight": t["model.embed_tokens.weight"].clone(),
                                       "model.layers.3.shared_head.head.weight": t["lm_head.weight"].clone()}))
    assert set(state_dict_published(load_model(saved))) == set(state_dict_published(tiny_model()))


@pytest.mark.parametrize("keep", [0, 4, 300, -1])
def test_a_truncated_file_is_named(saved: Path, keep: int) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged or truncated") as caught:
        load_model(saved)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_shard_or_directory_is_named(tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path / "model", max_shard_bytes=20_000)
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    tensors = load_file(shard)
    dropped = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, shard)
    with pytest.raises(CheckpointError, match=dropped):
        load_model(tmp_path / "model")
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_model(tmp_path / "model")
    (tmp_path / "model/model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("quantisation", [{"quant_method": "awq"}, {"quant_method": "fp8"},
                                          {"quant_method": "fp8", "weight_block_size": [64, 64]}])
def test_other_kinds_of_quantised_checkpoints_are_refused(saved: Path, quantisation: dict) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    with pytest.raises(CheckpointError, match=r"quantization_config: quant_method=.*expected 'fp8' with \[128, 128\]"):
        load_model(saved)


def test_saving_copies_the_tokenizer_and_replaces_only_checkpoints(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        save_model(tiny_model(), tmp_path / "model", source)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    (source / "model.safetensors").write_text("not copied")
    save_model(tiny_model(), tmp_path / "model", source)
    save_model(tiny_model(seed=2), tmp_path / "model", source)
    names = {path.name for path in (tmp_path / "model").iterdir()} - {"config.json", "generation_config.json"}
    assert names == {"chat_template.jinja", "model.safetensors", "tokenizer.json"}
    assert torch.equal(load_model(tmp_path / "model").lm_head.weight, tiny_model(seed=2).lm_head.weight)
    assert json.loads((tmp_path / "model/generation_config.json").read_text())["eos_token_id"] == [1, 2, 3]
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        save_model(tiny_model(), source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tokenizer"]


def test_a_full_disk_is_one_line_and_leaves_nothing(saved: Path) -> None:
    """A file-size limit stands in for the full disk: the same write call fails."""
    code = ("import resource, sys; from glm5.errors import CheckpointError; from model.tiny import tiny_model\n"
            "from glm5.model.checkpoint import save_model\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
            "for target in sys.argv[1:]:\n"
            "    try: save_model(tiny_model(seed=3), target)\n"
            "    except CheckpointError as error: print(error)")
    result = subprocess.run([sys.executable, "-c", code, saved, saved.with_name("new")], capture_output=True, text=True,
                            timeout=120, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, check=False)
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and len(lines) == 2, result.stderr
    assert all("cannot be written" in line for line in lines)
    assert [path.name for path in saved.parent.iterdir()] == ["model"]
    assert torch.equal(load_model(saved).lm_head.weight, tiny_model().lm_head.weight)


def test_a_model_on_the_meta_device_costs_no_memory() -> None:
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(tiny_config())
    assert all(tensor.is_meta for tensor in model.state_dict().values())
