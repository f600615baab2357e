"""The independent implementation: Transformers' ``glm_moe_dsa``, fp32, on random tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model.tiny import random_ids, tiny_model

from glm5.model.checkpoint import load_model, read_published, state_dict_published
from glm5.model.config import ModelConfig
from parity.compare import SHARED, TOLERANCE, distance, in_transformers


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 4, "indexer_types": SHARED}])
@torch.no_grad()
def test_logits_equal_transformers_below_and_above_index_topk(tmp_path: Path, changes: dict) -> None:
    model = tiny_model(**changes)
    theirs = in_transformers(model, tmp_path / "model")
    for length in (1, 15, 16, 17, 32, 70):
        ids = random_ids(2, length, seed=length)
        assert distance(model(ids).logits, theirs(ids).logits) <= TOLERANCE
    assert distance(model(ids, attention="dense").logits, theirs(ids).logits) > 0.1, "the sparse path was not exercised"


@torch.no_grad()
def test_packed_documents_equal_transformers_and_each_document_alone(tmp_path: Path) -> None:
    model = tiny_model()
    theirs = in_transformers(model, tmp_path / "model")
    ids = random_ids(1, 60)
    positions = torch.cat([torch.arange(22), torch.arange(38)])[None]
    documents = torch.tensor([0] * 22 + [1] * 38)[None]
    packed = model(ids, positions, documents).logits
    assert distance(packed, theirs(ids, position_ids=positions, use_cache=False).logits) <= TOLERANCE
    assert distance(packed[:, 22:], model(ids[:, 22:]).logits) <= TOLERANCE


@torch.no_grad()
def test_left_padding_equals_transformers_and_the_unpadded_row(tmp_path: Path) -> None:
    model = tiny_model()
    theirs = in_transformers(model, tmp_path / "model")
    ids = random_ids(1, 40)
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), ids], dim=1)
    documents = torch.tensor([-1] * 9 + [0] * 40)[None]
    logits = model(padded, None, documents).logits[:, 9:]
    theirs_logits = theirs(padded, attention_mask=(documents >= 0).long()).logits[:, 9:]
    assert distance(logits, theirs_logits) <= TOLERANCE
    assert distance(logits, model(ids).logits) <= TOLERANCE


@torch.no_grad()
def test_tiny_activations_show_the_latent_norm_epsilon(tmp_path: Path) -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.input_layernorm.weight.mul_(0.002)
    theirs = in_transformers(model, tmp_path / "model")
    ids = random_ids(1, 30)
    assert distance(model(ids).logits, theirs(ids).logits) <= TOLERANCE
    other = load_model(tmp_path / "model", config_overrides={"latent_norm_eps": 1e-5})
    assert distance(other(ids).logits, theirs(ids).logits) > TOLERANCE


@torch.no_grad()
def test_round_trip_through_transformers_keeps_every_tensor_but_the_mtp_layer(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=SHARED)
    in_transformers(model, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs/config.json").read_text())["num_nextn_predict_layers"] == 1
    back = load_model(tmp_path / "theirs")
    assert "num_nextn_predict_layers" in capsys.readouterr().err
    assert back.config.num_nextn_predict_layers == 0
    before, after = read_published(tmp_path / "ours"), state_dict_published(back)
    assert set(before) - set(after) == {name for name in before if name.startswith("model.layers.4.")}
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
    assert back.config.indexer_schedule == SHARED
    ids = random_ids(1, 40)
    assert torch.equal(back(ids).logits, model(ids).logits)


@torch.no_grad()
def test_chained_mtp_steps_equal_the_transformers_decoder_layer(tmp_path: Path) -> None:
    """The MTP layer's weights in a one-layer Transformers model, fed by hand, embedding half first."""
    model = tiny_model()
    mtp = model.model.layers[-1]
    alone = tiny_model(seed=5, num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0)
    alone.model.layers[0].load_state_dict({name: tensor for name, tensor in mtp.state_dict().items()
                                           if name in alone.model.layers[0].state_dict()})
    alone.model.norm.load_state_dict(mtp.shared_head.norm.state_dict())
    theirs = in_transformers(alone, tmp_path / "layer").model

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    ids = random_ids(2, 50)
    ours = reference = model.hidden(ids[:, :-2]).hidden_BTD
    for step in (1, 2):
        next_ids = ids[:, step : 48 + step]
        ours = model.mtp(ours, next_ids).hidden_BTD
        embedding = norm(model.model.embed_tokens.weight[next_ids], mtp.enorm.weight)
        merged = torch.cat([embedding, norm(reference, mtp.hnorm.weight)], dim=-1) @ mtp.eh_proj.weight.T
        reference = theirs(inputs_embeds=merged, use_cache=False).last_hidden_state
        assert distance(ours, reference) <= TOLERANCE


@pytest.mark.parametrize("keys", [{}, {"index_topk_freq": 4, "index_skip_topk_offset": 3}, {"index_topk_freq": 3},
                                  {"index_topk_pattern": "FSSFSSSFSS"}])
def test_indexer_schedules_equal_transformers(keys: dict) -> None:
    from transformers import GlmMoeDsaConfig

    theirs = GlmMoeDsaConfig(num_hidden_layers=10, **keys).indexer_types
    assert list(ModelConfig(num_hidden_layers=10, **keys).indexer_schedule) == theirs
