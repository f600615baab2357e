from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from glm5.cli import app
from glm5.errors import CheckpointError, ConfigError
from glm5.model import shards
from glm5.model.checkpoint import load_model, read_published, save_model, state_dict_published
from glm5.model.convert import Conversion, convert_checkpoint, parse_dtype, parse_size
from glm5.model.shards import ShardReader, ShardWriter, TensorSpec
from model.tiny import random_ids, tiny_model

BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_model(tiny_model().to(torch.bfloat16), tmp_path / "source")
    return tmp_path / "source"


def stored_bytes(directory: Path) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in read_published(directory).items()}


def test_a_new_division_into_files_keeps_every_byte(source: Path, tmp_path: Path) -> None:
    done = convert_checkpoint(source, tmp_path / "small", Conversion(max_shard_bytes=9_000))
    assert stored_bytes(tmp_path / "small") == stored_bytes(source)
    index = json.loads((tmp_path / "small/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(read_published(source)) and done.tensors == len(index["weight_map"])
    assert index["metadata"]["total_size"] == done.nbytes == sum(map(len, stored_bytes(source).values()))
    assert done.files == len(set(index["weight_map"].values())) == len(list((tmp_path / "small").glob("*.safetensors")))
    for path in (tmp_path / "small").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118 - not a mapping
        assert sum(sizes) <= 9_000 or len(sizes) == 1
    convert_checkpoint(tmp_path / "small", tmp_path / "one", Conversion())
    assert (tmp_path / "one/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (tmp_path / "one/config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_type_leaves_the_router_bias_in_fp32(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    convert_checkpoint(source, tmp_path / "out", Conversion(dtype=dtype))
    before, after = read_published(source), read_published(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    for name, tensor in after.items():
        expected = before[name] if name.endswith("e_score_correction_bias") else before[name].to(dtype)
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name


def test_fp8_and_back_keeps_what_is_not_quantised_and_the_router_bias(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "fp8", Conversion(fp8=True, max_shard_bytes=9_000))
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    quantisation = config["quantization_config"]
    assert {key: quantisation[key] for key in ("quant_method", "fmt", "activation_scheme", "weight_block_size")} == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert config["dtype"] == "bfloat16"
    convert_checkpoint(tmp_path / "fp8", tmp_path / "again", Conversion())
    assert stored_bytes(tmp_path / "again") == stored_bytes(tmp_path / "fp8")
    assert json.loads((tmp_path / "again/config.json").read_text()) == config
    convert_checkpoint(tmp_path / "fp8", tmp_path / "back", Conversion(dtype=torch.bfloat16))
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    before, after = read_published(source), read_published(tmp_path / "back")
    fp8 = read_published(tmp_path / "fp8")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        if name + "_scale_inv" not in fp8:
            assert torch.equal(tensor, before[name]), name
        else:
            assert not torch.equal(tensor, before[name])
            limit = before[name].abs().max() / 448 + before[name].abs() / 16 * 1.01
            assert ((tensor - before[name]).abs() <= limit).all(), name
    assert fp8[BIAS].dtype == torch.float32 and torch.equal(fp8[BIAS], before[BIAS])
    loaded = state_dict_published(load_model(tmp_path / "fp8"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in after.items())


def test_fewer_layers_keep_the_mtp_layer_under_its_new_number(tmp_path: Path) -> None:
    schedule = ("full", "shared", "full", "shared")
    model = tiny_model(num_hidden_layers=4, indexer_types=schedule, index_topk_pattern="FSFS",
                       mlp_layer_types=("dense", "sparse", "sparse", "sparse"))
    save_model(model, tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "out", Conversion(layers=2))
    short = load_model(tmp_path / "out")
    assert short.config.num_hidden_layers == 2 and short.config.indexer_types == ("full", "shared")
    assert short.config.mlp_layer_types == ("dense", "sparse") and short.config.index_topk_pattern == "FS"
    mtp = model.model.layers[4].state_dict()
    assert all(torch.equal(tensor, mtp[name]) for name, tensor in short.model.layers[2].state_dict().items())
    assert not any(name.startswith(("model.layers.3", "model.layers.4")) for name in read_published(tmp_path / "out"))
    ids = random_ids(1, 40)
    with torch.no_grad():
        assert torch.equal(short(ids).logits, load_short_reference(model, 2)(ids).logits)
    with pytest.raises(ConfigError, match="layers=5: expected 1 to num_hidden_layers=4"):
        convert_checkpoint(tmp_path / "source", tmp_path / "other", Conversion(layers=5))


def load_short_reference(model, layers: int):
    model.config = model.config.replace(num_hidden_layers=layers, indexer_types=model.config.indexer_types[:layers],
                                        mlp_layer_types=model.config.mlp_layer_types[:layers], index_topk_pattern=None)
    return model


def test_a_source_without_its_mtp_layer_and_with_copies_converts(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "out", Conversion())
    assert "model.layers.3.shared_head.head.weight" not in read_published(tmp_path / "out")
    save_file({name: tensor for name, tensor in tensors.items() if "layers.3." not in name},
              source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "main", Conversion(fp8=True))
    assert load_model(tmp_path / "main").config.num_nextn_predict_layers == 0


def test_what_cannot_be_converted_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="not a checkpoint to replace"):
        convert_checkpoint(source, tmp_path / "mine", Conversion())
    with pytest.raises(CheckpointError, match="same directory"):
        convert_checkpoint(source, tmp_path / "mine/../source", Conversion(fp8=True))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 4] = torch.nan
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj.weight: values that are not finite"):
        convert_checkpoint(source, tmp_path / "out", Conversion(fp8=True))
    assert sorted(os.listdir(tmp_path)) == ["mine", "source"]
    with pytest.raises(ConfigError, match="leave one out"):
        Conversion(fp8=True, dtype=torch.float32)
    with pytest.raises(ConfigError, match="max_shard_bytes=0"):
        Conversion(max_shard_bytes=0)


@pytest.mark.parametrize(("text", "expected"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1.5KB", 1500), ("7B", 7)])
def test_sizes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert parse_size(text) == expected


def test_unreadable_options_are_named() -> None:
    for text in ("5", "GB", "-1GB", "5GiB"):
        with pytest.raises(ConfigError, match="expected a number and a unit"):
            parse_size(text)
    assert parse_dtype("float16") == torch.float16
    with pytest.raises(ConfigError, match="bfloat16, float16, float32"):
        parse_dtype("int8")


def test_the_command_prints_results_and_copies_the_tokenizer(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--fp8", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row["value"] for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    assert rows["convert.tensors"] == len(read_published(tmp_path / "out")) and rows["convert.files"] == 1
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


def test_the_writer_takes_tensors_in_any_order_and_wants_them_all(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(5, dtype=torch.int8), "b": torch.randn(3, 2), "c": torch.tensor(2.0).bfloat16(),
               "d": torch.randn(2, 2).to(torch.float8_e4m3fn), "e": torch.zeros(0, 4)}
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = ShardWriter(tmp_path, specs, 10**9)
    for name in ("d", "b", "a", "e"):
        writer.write(name, tensors[name])
    with pytest.raises(ValueError, match="c was announced and not written"):
        writer.close()
    with pytest.raises(ValueError, match="announced"):
        writer.write("c", torch.zeros(3))
    writer.write("c", tensors["c"])
    writer.close()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor.float(), tensors[name].float())
    reader = ShardReader(tmp_path)
    assert dict(reader.specs) == specs and len(reader) == 5


def test_the_reader_lets_go_of_what_it_has_mapped(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAPPED_BYTES", 1)
    reader = ShardReader(source)
    kept = {name: reader[name] for name in reader}
    assert len(reader._open) == 1
    assert all(torch.equal(kept[name], tensor) for name, tensor in load_file(source / "model.safetensors").items())
