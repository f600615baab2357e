"""Selected keys, layer by layer, against Transformers: logits can hide a wrong indexer, sets of keys cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model.tiny import random_ids, tiny_model

from glm5.model.cache import KeyCache
from glm5.model.checkpoint import load_model, save_model
from glm5.model.indexer import Indexer
from glm5.model.mla import MultiHeadLatentAttention
from glm5.model.transformer import GlmMoeDsaForCausalLM
from parity.compare import SHARED, TOLERANCE, as_mask, distance, in_transformers, load_in_transformers

LENGTH = 64
"""Four times ``index_topk`` of the tiny model."""


def our_selections(model: GlmMoeDsaForCausalLM, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """Selected pairs [B, T, S] of every decoder layer."""
    found: dict[int, torch.Tensor] = {}

    def keep(number: int) -> Callable:
        return lambda _module, _inputs, result: found.update({number: as_mask(result.selection[0], ids.shape[1])})

    handles = [layer.self_attn.register_forward_hook(keep(number)) for number, layer in enumerate(model.model.layers)]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


def their_selections(theirs: torch.nn.Module, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """The same of the layers with an indexer, keys in the future left out."""
    found: dict[int, torch.Tensor] = {}

    def keep(number: int) -> Callable:
        def hook(_module, _inputs, indices_BTK: torch.Tensor) -> None:
            length = ids.shape[1]
            chosen = torch.zeros(*ids.shape, length, dtype=torch.bool).scatter_(-1, indices_BTK.long(), True)
            found[number] = chosen & torch.ones(length, length, dtype=torch.bool).tril()
        return hook

    handles = [layer.self_attn.indexer.register_forward_hook(keep(number))
               for number, layer in enumerate(theirs.model.layers) if layer.self_attn.indexer is not None]
    theirs(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
def test_every_layer_selects_the_keys_that_transformers_selects(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=SHARED)
    theirs = in_transformers(model, tmp_path / "model")
    ids = random_ids(2, LENGTH)
    mine, other = our_selections(model, ids), their_selections(theirs, ids)
    assert sorted(other) == [0, 2] and sorted(mine) == [0, 1, 2, 3]
    for number, chosen in other.items():
        assert (chosen.sum(-1) == torch.arange(1, LENGTH + 1).clamp_max(16)).all()
        assert torch.equal(mine[number], chosen)


@torch.no_grad()
def test_shared_layers_use_exactly_the_keys_of_the_full_layer_before_them() -> None:
    mine = our_selections(tiny_model(num_hidden_layers=4, indexer_types=("full", "shared", "shared", "full")),
                          random_ids(2, LENGTH))
    assert torch.equal(mine[1], mine[0]) and torch.equal(mine[2], mine[0]) and not torch.equal(mine[3], mine[0])


def half_split(model: GlmMoeDsaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.self_attn.indexer.interleaved = False


def raw_latent(model: GlmMoeDsaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    original = MultiHeadLatentAttention._index

    def index(self, x_BTD, _latent, packed, mode):
        return original(self, x_BTD, self.q_a_proj(x_BTD), packed, mode)
    monkeypatch.setattr(MultiHeadLatentAttention, "_index", index)


def no_key_bias(model: GlmMoeDsaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.self_attn.indexer.k_norm.bias.zero_()


def half_weights(model: GlmMoeDsaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Indexer.queries

    def queries(self, *arguments):
        q_BTJX, w_BTJ = original(self, *arguments)
        return q_BTJX, w_BTJ.abs()
    monkeypatch.setattr(Indexer, "queries", queries)


@pytest.mark.parametrize("mistake", [half_split, raw_latent, no_key_bias, half_weights])
@torch.no_grad()
def test_a_wrong_indexer_selects_other_keys_from_index_topk_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               mistake: Callable) -> None:
    """Each public mistake leaves short contexts intact, which is why selected sets are compared beyond index_topk."""
    model = tiny_model()
    theirs = in_transformers(model, tmp_path / "model")
    ids = random_ids(2, LENGTH)
    mistake(model, monkeypatch)
    mine, other = our_selections(model, ids)[0], their_selections(theirs, ids)[0]
    assert torch.equal(mine[:, :16], other[:, :16])
    assert (mine[:, 32:] != other[:, 32:]).any(-1).float().mean() > 0.5
    assert distance(model(ids[:, :16]).logits, theirs(ids[:, :16]).logits) <= TOLERANCE
    assert distance(model(ids).logits, theirs(ids).logits) > 0.1


@torch.no_grad()
def test_prefill_chunks_and_decoded_tokens_equal_the_cached_steps_of_transformers(tmp_path: Path) -> None:
    from transformers import DynamicCache

    model = tiny_model(num_hidden_layers=4, indexer_types=SHARED)
    theirs = in_transformers(model, tmp_path / "model")
    ids = random_ids(1, LENGTH)
    cache, past, ours, others = KeyCache(model.config, 1, LENGTH), DynamicCache(config=theirs.config), [], []
    for start, stop in ((0, 20), (20, 21), (21, 22), (22, 25), (25, 40), (40, 41), (41, 45), (45, LENGTH)):
        positions = torch.arange(start, stop)
        ours.append(model.ragged(ids[0, start:stop], positions, torch.zeros_like(positions), cache))
        others.append(theirs(ids[:, start:stop], cache=past, use_cache=True).logits[0])
    assert distance(torch.cat(ours), torch.cat(others)) <= TOLERANCE


@pytest.mark.parametrize("keys", [{"head_dim": 192}, {"head_dim": 64}])
@torch.no_grad()
def test_head_dim_in_the_file_changes_nothing_here_nor_in_transformers(tmp_path: Path, keys: dict) -> None:
    model = tiny_model()
    save_model(model, tmp_path / "model")
    path = tmp_path / "model/config.json"
    data = json.loads(path.read_text())
    ids = random_ids(1, 40)
    for ordered in ({**keys, **data}, {**data, **keys}):
        path.write_text(json.dumps(ordered))
        theirs = load_in_transformers(tmp_path / "model")
        assert torch.equal(load_model(tmp_path / "model")(ids).logits, model(ids).logits)
        assert distance(model(ids).logits, theirs(ids).logits) <= TOLERANCE


@torch.no_grad()
def test_grouped_routing_equals_transformers(tmp_path: Path) -> None:
    model = tiny_model(n_routed_experts=8, n_group=4, topk_group=2)
    theirs = in_transformers(model, tmp_path / "model")
    ids = random_ids(2, 40)
    assert distance(model(ids).logits, theirs(ids).logits) <= TOLERANCE
    plain = load_model(tmp_path / "model", config_overrides={"n_group": 1, "topk_group": 1})
    assert distance(plain(ids).logits, theirs(ids).logits) > 0.1


@pytest.mark.parametrize("theta", [1e6, 8e6])
@torch.no_grad()
def test_both_published_rope_bases_equal_transformers(tmp_path: Path, theta: float) -> None:
    model = tiny_model(rope_parameters={"rope_theta": theta, "rope_type": "default"})
    theirs = in_transformers(model, tmp_path / "model")
    ids = random_ids(1, LENGTH)
    assert distance(model(ids).logits, theirs(ids).logits) <= TOLERANCE
    assert distance(tiny_model()(ids).logits, theirs(ids).logits) > 0.1


@torch.no_grad()
def test_a_checkpoint_that_transformers_wrote_returns_to_it_byte_for_byte(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=4, indexer_types=SHARED, num_nextn_predict_layers=0)
    in_transformers(model, tmp_path / "seed").save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours")
    first, second = (load_in_transformers(tmp_path / name).state_dict() for name in ("theirs", "ours"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name
