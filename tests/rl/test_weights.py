import json
import shutil

import pytest
import torch

from glm5.errors import WeightSyncError
from glm5.model.checkpoint import load_model
from glm5.rl.weights import (
    latest,
    newest_version,
    publish,
    read_version,
    retain,
    score_canary,
    verify,
    version_directory,
)


@pytest.fixture
def model(checkpoint):
    return load_model(checkpoint)


def publish_some(model, checkpoint, run_dir, versions):
    return [publish(model, run_dir, version=version, step=10 * version, parent=version - 1 or None,
                    tokenizer_dir=checkpoint) for version in versions]


def test_a_published_version_is_a_complete_checkpoint_with_a_manifest(model, checkpoint, tmp_path):
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    (published,) = publish_some(model, checkpoint, tmp_path, [1])
    verify(published)
    assert latest(tmp_path) == read_version(published.directory) == published
    assert {"config.json", "tokenizer.json", "manifest.json"} <= {path.name for path in published.directory.iterdir()}
    loaded = load_model(published.directory)
    assert all(torch.equal(mine, theirs) for mine, theirs in
               zip(model.state_dict().values(), loaded.state_dict().values(), strict=True))
    assert score_canary(loaded) == (published.canary_ids, published.canary_logprobs)


def test_the_canary_notices_changed_weights(model, checkpoint, tmp_path):
    (published,) = publish_some(model, checkpoint, tmp_path, [1])
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    assert score_canary(model)[1] != published.canary_logprobs


def test_versions_only_grow(model, checkpoint, tmp_path):
    publish_some(model, checkpoint, tmp_path, [1, 5])
    assert newest_version(tmp_path) == 5
    for version in (5, 3):
        with pytest.raises(WeightSyncError, match=f"{version} is not newer than 5"):
            publish_some(model, checkpoint, tmp_path, [version])


def test_a_flipped_bit_is_found_by_its_checksum(model, checkpoint, tmp_path):
    (published,) = publish_some(model, checkpoint, tmp_path, [1])
    path = published.directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightSyncError, match=r"model\.safetensors: SHA-256"):
        verify(published)


def test_a_version_without_manifest_is_one_line(tmp_path):
    version_directory(tmp_path, 3).mkdir(parents=True)
    with pytest.raises(WeightSyncError, match="no readable manifest"):
        read_version(version_directory(tmp_path, 3))
    (version_directory(tmp_path, 3) / "manifest.json").write_text(json.dumps({"version": 3}))
    with pytest.raises(WeightSyncError, match="no readable manifest"):
        read_version(version_directory(tmp_path, 3))


def test_retention_keeps_the_newest(model, checkpoint, tmp_path):
    publish_some(model, checkpoint, tmp_path, [1, 2, 3, 4])
    retain(tmp_path, 2)
    assert newest_version(tmp_path) == 4
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["LATEST", "v00000003", "v00000004"]
    assert latest(tmp_path).version == 4


def test_the_router_bias_is_published_in_fp32_by_a_bf16_policy(model, checkpoint, tmp_path):
    routers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for bias in routers.values():
            bias.copy_(6.9 + 0.25 * torch.rand(bias.shape, generator=torch.Generator().manual_seed(1)))
    expected = {name: bias.clone() for name, bias in routers.items()}
    model.to(torch.bfloat16)
    (published,) = publish_some(model, checkpoint, tmp_path, [1])
    received = dict(load_model(published.directory, dtype=torch.bfloat16).named_buffers())
    for name, bias in expected.items():
        assert received[name].dtype == torch.float32 and torch.equal(received[name], bias)
        assert not torch.equal(bias, bias.bfloat16().float())


def change(model, factor):
    with torch.no_grad():
        model.model.norm.weight.mul_(factor)


def test_differences_are_written_between_whole_versions_and_load_to_the_bit(model, checkpoint, tmp_path):
    links, sizes = [], []
    for version in range(1, 6):
        change(model, 1.25)
        published = publish(model, tmp_path, version=version, step=version, parent=version - 1 or None,
                            tokenizer_dir=checkpoint, full_every=3)
        links.append(published.links)
        sizes.append(published.weight_bytes)
        verify(published)
        loaded = load_model(published.directory)
        assert all(torch.equal(mine, theirs) for mine, theirs in
                   zip(model.state_dict().values(), loaded.state_dict().values(), strict=True))
    assert links == [0, 1, 2, 0, 1]
    assert max(sizes[1], sizes[2], sizes[4]) < sizes[0] / 20
    assert score_canary(load_model(latest(tmp_path).directory))[1] == latest(tmp_path).canary_logprobs


def test_a_version_whose_base_is_gone_or_damaged_is_whole(model, checkpoint, tmp_path):
    def next_version(version):
        change(model, 1.25)
        return publish(model, tmp_path, version=version, step=version, parent=version - 1 or None,
                       tokenizer_dir=checkpoint, full_every=9)

    next_version(1)
    assert next_version(2).links == 1
    shutil.rmtree(version_directory(tmp_path, 2))
    assert next_version(3).links == 0
    (version_directory(tmp_path, 3) / "model.safetensors").write_bytes(b"damaged")
    whole = next_version(4)
    assert whole.links == 0
    verify(whole)


def test_retention_keeps_what_the_newest_builds_on(model, checkpoint, tmp_path):
    for version in range(1, 6):
        change(model, 1.25)
        publish(model, tmp_path, version=version, step=version, parent=version - 1 or None, tokenizer_dir=checkpoint,
                full_every=3)
    retain(tmp_path, 1)  # version 5 is the difference to 4, which is whole
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["LATEST", "v00000004", "v00000005"]
    verify(latest(tmp_path))
    path = version_directory(tmp_path, 4) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(WeightSyncError, match=r"v00000004/model\.safetensors: SHA-256"):
        verify(latest(tmp_path))
