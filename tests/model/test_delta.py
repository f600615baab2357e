"""Differences between checkpoints: exact to the bit, or an error."""

import json
import shutil
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.errors import CheckpointError
from glm5.model.delta import DELTA_FILE, DELTA_INDEX, chain, hash_tensor, open_tensors, write_delta

RANDOM = torch.Generator().manual_seed(3)


def some_tensors():
    return {"same": torch.arange(6, dtype=torch.float32), "half": torch.randn(7, 3, generator=RANDOM).bfloat16(),
            "wide": torch.randn(64, 33, generator=RANDOM), "count": torch.tensor([5, 7], dtype=torch.int64),
            "empty": torch.empty(0, 4), "scalar": torch.tensor(0.5)}


def write_whole(directory, tensors):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("tokens")


def write_next(directory, base, tensors):
    directory.mkdir()
    return write_delta(tensors, base, directory)


@pytest.fixture
def versions(tmp_path):
    """Three versions, each the difference to the one before, and their tensors."""
    first = some_tensors()
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["wide"][3, 5] += 1e-3
    second["half"][0, 0] = float("nan")
    third = {name: tensor.clone() for name, tensor in second.items()}
    third["wide"] = -third["wide"]
    third["count"][1] = -(2**40)
    third["scalar"].fill_(-0.0)
    write_whole(tmp_path / "v1", first)
    write_next(tmp_path / "v2", tmp_path / "v1", second)
    write_next(tmp_path / "v3", tmp_path / "v2", third)
    return tmp_path, [first, second, third]


def test_every_version_of_a_chain_is_rebuilt_to_the_bit(versions):
    folder, expected = versions
    for number, tensors in enumerate(expected, start=1):
        found = open_tensors(folder / f"v{number}")
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert hash_tensor(found[name]) == hash_tensor(tensor), name
    assert [path.name for path in chain(folder / "v3")] == ["v3", "v2", "v1"]


def test_only_what_changed_is_written(versions):
    folder, _ = versions
    assert set(load_file(folder / "v2" / DELTA_FILE)) == {"wide", "half"}
    assert set(load_file(folder / "v3" / DELTA_FILE)) == {"wide", "count", "scalar"}
    # one element of 2112 changed: a few dozen bytes instead of 8448
    assert load_file(folder / "v2" / DELTA_FILE)["wide"].numel() < 120
    assert (folder / "v3" / "tokenizer.json").samefile(folder / "v1" / "tokenizer.json")


def test_nothing_changed_is_an_empty_difference(versions):
    folder, (first, _, _) = versions
    assert write_next(folder / "again", folder / "v1", first) == 0
    assert hash_tensor(open_tensors(folder / "again")["wide"]) == hash_tensor(first["wide"])


def test_a_missing_base_is_one_line(versions):
    folder, (first, _, _) = versions
    shutil.rmtree(folder / "v2")
    with pytest.raises(CheckpointError, match=r"is a difference to .*v2, which is missing"):
        open_tensors(folder / "v3")
    with pytest.raises(CheckpointError, match="missing"):
        write_next(folder / "v4", folder / "v3", first)


def test_a_base_with_other_values_is_found_by_its_checksum(versions):
    folder, (first, _, _) = versions
    changed = {**first, "wide": first["wide"] * 2}
    save_file(changed, folder / "v1" / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor wide: SHA-256 of the base is"):
        open_tensors(folder / "v2")["wide"]


def test_a_damaged_difference_is_found(versions):
    folder, _ = versions
    changes = {name: change.clone() for name, change in load_file(folder / "v3" / DELTA_FILE).items()}
    other = torch.frombuffer(bytearray(zlib.compress(bytes(64 * 33 * 4))), dtype=torch.uint8)
    for wrong, said in ((changes["wide"][:-5].clone(), "tensor wide is damaged"), (other, "SHA-256 of the result"),
                        (changes["count"].clone(), "tensor wide is damaged")):
        save_file({**changes, "wide": wrong}, folder / "v3" / DELTA_FILE)
        with pytest.raises(CheckpointError, match=said):
            open_tensors(folder / "v3")["wide"]
    (folder / "v3" / DELTA_INDEX).write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="not an index of differences of format 1"):
        open_tensors(folder / "v3")


def test_other_names_or_shapes_cannot_be_a_difference(versions):
    folder, (first, _, _) = versions
    for wrong in ({**first, "more": torch.zeros(1)}, {**first, "wide": first["wide"].T.contiguous()},
                  {**first, "wide": first["wide"].double()}):
        with pytest.raises(CheckpointError, match="differ in name, shape or type"):
            write_delta(wrong, folder / "v1", folder / "v3")
