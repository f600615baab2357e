from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from glm5.errors import CheckpointError
from glm5.model.checkpoint import load_model, read_published, save_model, state_dict_published
from glm5.model.config import ModelConfig
from glm5.model.transformer import GlmMoeDsaForCausalLM
from model.tiny import random_ids, tiny_config, tiny_model


def checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def test_every_stored_mtp_tensor_is_loaded_once_and_none_is_left_to_chance(tmp_path: Path) -> None:
    save_model(tiny_model(seed=7), tmp_path / "model")
    stored = {name: checksum(tensor) for name, tensor in read_published(tmp_path / "model").items()
              if name.startswith("model.layers.3.")}
    loaded = {name: checksum(tensor) for name, tensor in state_dict_published(load_model(tmp_path / "model")).items()
              if name.startswith("model.layers.3.")}
    assert loaded == stored and len(set(stored.values())) == len(stored) == 9 + 5 + 4 + 2 + 3 * 4 + 3


@torch.no_grad()
def test_every_mtp_tensor_takes_part_in_the_step() -> None:
    model = tiny_model()
    ids = random_ids(1, 40)
    hidden_BTD = model.hidden(ids).hidden_BTD
    before = model.mtp(hidden_BTD, ids).hidden_BTD
    main = model(ids).logits
    for name, tensor in model.model.layers[-1].state_dict(keep_vars=True).items():
        kept = tensor.clone()
        tensor.copy_(torch.randn(kept.shape, generator=torch.Generator().manual_seed(1)))
        assert not torch.equal(model.mtp(hidden_BTD, ids).hidden_BTD, before), name
        assert torch.equal(model(ids).logits, main), name
        tensor.copy_(kept)


def test_the_mtp_layer_has_no_embedding_and_no_head_of_its_own() -> None:
    names = {name for name in state_dict_published(tiny_model()) if name.startswith("model.layers.3.")}
    assert not any("embed" in name or "head.head" in name for name in names)
    assert {"model.layers.3.shared_head.norm.weight", "model.layers.3.eh_proj.weight"} <= names


@pytest.mark.parametrize(("suffix", "original"), [("embed_tokens.weight", "model.embed_tokens.weight"),
                                                  ("shared_head.head.weight", "lm_head.weight")])
def test_copies_of_embedding_and_head_must_equal_the_main_ones(tmp_path: Path, suffix: str, original: str) -> None:
    from safetensors.torch import save_file

    save_model(tiny_model(), tmp_path / "model")
    tensors = read_published(tmp_path / "model")
    equal = {**tensors, f"model.layers.3.{suffix}": tensors[original].clone()}
    save_file(equal, tmp_path / "model/model.safetensors")
    assert set(state_dict_published(load_model(tmp_path / "model"))) == set(tensors)
    equal[f"model.layers.3.{suffix}"][0, 0] += 1e-3
    save_file(equal, tmp_path / "model/model.safetensors")
    with pytest.raises(CheckpointError, match=f"layers.3.{suffix} differs from {original}"):
        load_model(tmp_path / "model")


def test_the_mtp_layer_is_found_by_its_number_not_by_its_first_digit(tmp_path: Path) -> None:
    """Layers 1 and 10 to 12 of a model of 12: only number 12 is the MTP layer."""
    model = tiny_model(num_hidden_layers=12)
    save_model(model, tmp_path / "model")
    without = load_model(tmp_path / "model", config_overrides={"num_nextn_predict_layers": 0})
    dropped = set(state_dict_published(model)) - set(state_dict_published(without))
    assert {int(name.split(".")[2]) for name in dropped} == {12}
    ids = random_ids(1, 30)
    with torch.no_grad():
        assert torch.equal(without(ids).logits, model(ids).logits)


@pytest.mark.parametrize("changes", [
    {}, {"mlp_layer_types": ("dense", "sparse", "dense")}, {"first_k_dense_replace": 3}, {"first_k_dense_replace": 0},
    {"indexer_types": ("full", "shared", "shared")}, {"index_topk_pattern": "FSS"},
    {"index_topk_freq": 4, "index_skip_topk_offset": 3}, {"rope_parameters": {"rope_theta": 8e6}}])
def test_every_kind_of_schedule_gives_a_sparse_mtp_layer_with_an_indexer(changes: dict) -> None:
    config = ModelConfig.from_json(tiny_config(**changes).to_json())
    with torch.device("meta"):
        layer = GlmMoeDsaForCausalLM(config).model.layers[-1]
    names = {name for name, _ in layer.named_parameters()}
    assert {"mlp.experts.down_proj", "mlp.gate.weight", "self_attn.indexer.wq_b.weight", "eh_proj.weight"} <= names


@torch.no_grad()
def test_the_mtp_layer_makes_its_own_selection_never_that_of_the_main_model() -> None:
    model = tiny_model()
    ids = random_ids(1, 60)
    hidden_BTD = model.hidden(ids).hidden_BTD
    before = model.mtp(hidden_BTD, ids).hidden_BTD
    for layer in model.model.layers[:-1]:
        layer.self_attn.indexer.weights_proj.weight.mul_(-1)
    assert torch.equal(model.mtp(hidden_BTD, ids).hidden_BTD, before)
    model.model.layers[-1].self_attn.indexer.weights_proj.weight.mul_(-1)
    assert (model.mtp(hidden_BTD, ids).hidden_BTD - before).abs().max() > 0.1


@torch.no_grad()
def test_chained_steps_share_the_first_selection_only_when_the_configuration_says_so() -> None:
    ids = random_ids(2, 60)
    alone, sharing = tiny_model(), tiny_model(index_share_for_mtp_iteration=True)
    hidden_BTD = alone.hidden(ids[:, :-2]).hidden_BTD
    first = alone.mtp(hidden_BTD, ids[:, 1:-1])
    shared_first = sharing.mtp(hidden_BTD, ids[:, 1:-1])
    assert first.selection is None and shared_first.selection is not None
    assert torch.equal(first.hidden_BTD, shared_first.hidden_BTD)
    kept_BT = (shared_first.selection[0] >= 0).sum(-1)  # lists of positions, padded with -1
    assert (kept_BT == torch.arange(1, 59).clamp_max(16)).all()
    own = alone.mtp(first.hidden_BTD, ids[:, 2:], selection=first.selection)
    second = sharing.mtp(first.hidden_BTD, ids[:, 2:], selection=shared_first.selection, indexer_loss=True)
    assert torch.equal(second.selection[0], shared_first.selection[0]) and second.indexer_kl is None
    assert (own.hidden_BTD - second.hidden_BTD).abs().max() > 1e-3
    sharing.model.layers[-1].self_attn.indexer.weights_proj.weight.mul_(-1)  # not used any more
    again = sharing.mtp(first.hidden_BTD, ids[:, 2:], selection=shared_first.selection)
    assert torch.equal(again.hidden_BTD, second.hidden_BTD)


@torch.no_grad()
def test_a_chained_step_is_fed_the_output_after_the_shared_head_norm() -> None:
    model = tiny_model()
    layer = model.model.layers[-1]
    ids = random_ids(1, 30)
    seen: list[torch.Tensor] = []
    handle = layer.shared_head.norm.register_forward_hook(lambda _m, inputs, output: seen.extend([inputs[0], output]))
    step = model.mtp(model.hidden(ids).hidden_BTD, ids)
    handle.remove()
    before_norm, after_norm = seen
    assert torch.equal(step.hidden_BTD, after_norm)
    right = model.mtp(step.hidden_BTD, ids).hidden_BTD
    assert (model.mtp(before_norm, ids).hidden_BTD - right).abs().max() > 0.05


@torch.no_grad()
def test_the_first_embedding_of_each_document_can_be_zeroed() -> None:
    ids = random_ids(1, 20)
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    documents = torch.tensor([[0] * 12 + [1] * 8])
    plain, zeroing = tiny_model(), tiny_model(mtp_zero_first_embedding=True)
    hidden_BTD = plain.hidden(ids, positions, documents).hidden_BTD
    found = zeroing.mtp(hidden_BTD, ids, positions, documents).hidden_BTD
    expected_rows = plain.model.embed_tokens.weight.clone()
    marked = ids.clone()
    marked[0, [0, 12]] = 1  # an id that occurs nowhere else gets a zero row
    plain.model.embed_tokens.weight[1] = 0.0
    torch.testing.assert_close(found, plain.mtp(hidden_BTD, marked, positions, documents).hidden_BTD)
    plain.model.embed_tokens.weight.copy_(expected_rows)
    assert (found - plain.mtp(hidden_BTD, ids, positions, documents).hidden_BTD).abs().max() > 0.05
    row = zeroing.mtp(hidden_BTD[:, :12], ids[:, :12]).hidden_BTD
    torch.testing.assert_close(row, found[:, :12], rtol=0, atol=1e-5)
