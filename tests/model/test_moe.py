from __future__ import annotations

import pytest
import torch

from glm5.model.moe import Router, SparseMlp, update_router_bias
from model.tiny import random_ids, tiny_config, tiny_model


def random_router(**changes) -> Router:
    router = Router(tiny_config(n_routed_experts=16, num_experts_per_tok=4, **changes))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


@torch.no_grad()
def test_bias_decides_the_choice_but_not_the_weights() -> None:
    router = random_router()
    x_MD = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    router.e_score_correction_bias.copy_(6.9 + 0.25 * torch.rand(16, generator=torch.Generator().manual_seed(2)))
    ids_MA, weights_MA, logits_ME = router(x_MD)
    expected = (torch.sigmoid(x_MD @ router.weight.T) + router.e_score_correction_bias).topk(4).indices
    assert torch.equal(ids_MA.sort().values, expected.sort().values)
    chosen_MA = logits_ME.sigmoid().gather(1, ids_MA)
    torch.testing.assert_close(weights_MA, 2.5 * chosen_MA / chosen_MA.sum(-1, keepdim=True))
    torch.testing.assert_close(weights_MA.sum(-1), torch.full((50,), 2.5))


@torch.no_grad()
def test_norm_topk_prob_false_keeps_the_raw_scores() -> None:
    router = random_router(norm_topk_prob=False)
    ids_MA, weights_MA, logits_ME = router(torch.randn(9, 32))
    torch.testing.assert_close(weights_MA, 2.5 * logits_ME.sigmoid().gather(1, ids_MA))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_inputs_of_every_type_are_routed_in_fp32(dtype: torch.dtype, normalise: bool) -> None:
    router = random_router(norm_topk_prob=normalise)
    router.e_score_correction_bias.copy_(6.9 + 0.25 * torch.rand(16, generator=torch.Generator().manual_seed(2)))
    router.to(dtype)
    x_MD = torch.randn(50, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    ids_MA, weights_MA, logits_ME = router(x_MD)
    assert weights_MA.dtype == logits_ME.dtype == torch.float32
    torch.testing.assert_close(logits_ME, x_MD.float() @ router.weight.float().T)
    scores_ME = logits_ME.sigmoid()
    expected_MA = (scores_ME + router.e_score_correction_bias).topk(4).indices
    assert torch.equal(ids_MA.sort().values, expected_MA.sort().values)
    chosen_MA = scores_ME.gather(1, ids_MA)
    torch.testing.assert_close(weights_MA, 2.5 * chosen_MA / (chosen_MA.sum(-1, keepdim=True) if normalise else 1))


@torch.no_grad()
def test_a_bias_rounded_to_bf16_would_route_otherwise_and_a_cast_model_routes_alike() -> None:
    """Published biases lie in [6.8, 7.1], where bf16 has steps of 1/32."""
    router = random_router()
    router.e_score_correction_bias.copy_(6.9 + 0.25 * torch.rand(16, generator=torch.Generator().manual_seed(2)))
    router.weight.copy_(router.weight.bfloat16())
    x_MD = torch.randn(200, 32, generator=torch.Generator().manual_seed(3))
    exact_MA = router(x_MD)[0].sort().values
    router.to(torch.bfloat16)
    assert torch.equal(router(x_MD)[0].sort().values, exact_MA)
    router.e_score_correction_bias.copy_(router.e_score_correction_bias.bfloat16().float())
    assert (router(x_MD)[0].sort().values != exact_MA).any(-1).sum() > 20


@pytest.mark.parametrize(("groups", "open_groups"), [(4, 2), (8, 3), (2, 1), (4, 4)])
@torch.no_grad()
def test_experts_come_from_the_groups_whose_two_best_sum_highest(groups: int, open_groups: int) -> None:
    router = random_router(n_group=groups, topk_group=open_groups)
    router.e_score_correction_bias.copy_(0.5 * torch.randn(16, generator=torch.Generator().manual_seed(2)))
    x_MD = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    ids_MA, weights_MA, logits_ME = router(x_MD)
    size = 16 // groups
    for token, scores in enumerate(logits_ME.sigmoid().tolist()):
        choice = [score + bias for score, bias in zip(scores, router.e_score_correction_bias.tolist(), strict=True)]
        ranks = [sum(sorted(choice[group * size : (group + 1) * size])[-2:]) for group in range(groups)]
        best = sorted(range(groups), key=lambda group: ranks[group])[-open_groups:]
        allowed = [expert for expert in range(16) if expert // size in best]
        expected = sorted(sorted(allowed, key=lambda expert: choice[expert])[-4:])
        assert sorted(ids_MA[token].tolist()) == expected
        total = sum(scores[expert] for expert in expected)
        for expert, weight in zip(ids_MA[token].tolist(), weights_MA[token].tolist(), strict=True):
            assert weight == pytest.approx(2.5 * scores[expert] / total, rel=1e-5)


@pytest.mark.parametrize("shift", [0.0, -60.0, -200.0])
def test_scores_that_vanish_do_not_lower_the_balance_loss(shift: float) -> None:
    """Below 1e-20 an epsilon in the normaliser would let the router shrink the loss by making every score tiny."""
    mlp = SparseMlp(tiny_config())
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mlp.gate.weight[:, 0] = shift
    x_BTD = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(1))
    x_BTD[..., 0] = 1.0
    _, statistics = mlp(x_BTD, None)
    exact_BTE = (x_BTD.double() @ mlp.gate.weight.double().T)
    share_BTE = torch.nn.functional.logsigmoid(exact_BTE).softmax(-1)
    ids_BTA = mlp.gate(x_BTD.flatten(0, 1))[0].view(2, 10, 2)
    chosen_BTE = torch.zeros_like(share_BTE).scatter(-1, ids_BTA, 1.0)
    expected = (chosen_BTE.mean(1) * share_BTE.mean(1)).sum() * 4 / (2 * 2)
    torch.testing.assert_close(statistics.balance_loss.double(), expected, rtol=1e-4, atol=0)
    assert statistics.balance_loss > 0.7
    statistics.balance_loss.backward()
    assert torch.isfinite(mlp.gate.weight.grad).all() and mlp.gate.weight.grad.abs().sum() > 1e-3


@pytest.mark.parametrize("cast", [lambda module: module.to(torch.bfloat16), lambda module: module.half(),
                                  lambda module: module.double(), lambda module: module.to("meta", torch.bfloat16)])
def test_the_bias_stays_fp32_through_every_cast(cast) -> None:
    router = random_router()
    values = 6.9 + 0.25 * torch.rand(16)
    router.e_score_correction_bias.copy_(values)
    cast(router)
    assert router.e_score_correction_bias.dtype == torch.float32
    assert router.e_score_correction_bias.device == router.weight.device
    if not router.weight.is_meta:
        assert torch.equal(router.e_score_correction_bias, values)


def test_update_moves_biases_towards_even_load_in_layer_order() -> None:
    model = tiny_model()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    before = [router.e_score_correction_bias.clone() for router in routers]
    load_LE = torch.tensor([[10.0, 0.0, 4.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    update_router_bias(model, load_LE, 0.01)
    change = [router.e_score_correction_bias - old for router, old in zip(routers, before, strict=True)]
    torch.testing.assert_close(change[0], torch.tensor([-0.01, 0.01, 0.0, 0.01]), atol=1e-6, rtol=0)
    assert not change[1].any() and not change[2].any()
    with pytest.raises(ValueError, match="4 rows for 3 routers"):
        update_router_bias(model, torch.zeros(4, 4), 0.01)


def test_repeated_updates_even_out_the_load() -> None:
    model = tiny_model(num_hidden_layers=2)
    ids = random_ids(4, 60)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([7.9, 6.9, 6.9, 6.9]))
        first = model.hidden(ids).expert_load_LE
        for _ in range(60):
            update_router_bias(model, model.hidden(ids).expert_load_LE, 0.03)
        last = model.hidden(ids).expert_load_LE
    assert first.max() == 240 and last.max() - last.min() < 40


def test_balance_loss_equals_the_formula_and_ignores_padding() -> None:
    mlp = SparseMlp(tiny_config())
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    x_BTD = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(1))
    counted_BT = torch.ones(2, 10, dtype=torch.bool)
    counted_BT[1, 6:] = False
    _, statistics = mlp(x_BTD, counted_BT)
    expected = 0.0
    for row, length in ((0, 10), (1, 6)):
        ids_MA, _, logits_ME = mlp.gate(x_BTD[row, :length])
        scores_ME = logits_ME.sigmoid()
        share_E = (scores_ME / scores_ME.sum(-1, keepdim=True)).mean(0)
        chosen_E = torch.stack([(ids_MA == expert).sum() for expert in range(4)]) * 4 / (2 * length)
        expected = expected + (chosen_E * share_E).sum() / 2
    torch.testing.assert_close(statistics.balance_loss, expected)
    assert statistics.load_E.sum() == 32
    statistics.balance_loss.backward()
    assert mlp.gate.weight.grad.abs().sum() > 0 and mlp.experts.down_proj.grad is None
