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
    ids_MA, weights_MA, scores_ME = router(x_MD)
    expected = (torch.sigmoid(x_MD @ router.weight.T) + router.e_score_correction_bias).topk(4).indices
    assert torch.equal(ids_MA.sort().values, expected.sort().values)
    chosen_MA = scores_ME.gather(1, ids_MA)
    torch.testing.assert_close(weights_MA, 2.5 * chosen_MA / chosen_MA.sum(-1, keepdim=True))
    torch.testing.assert_close(weights_MA.sum(-1), torch.full((50,), 2.5))


@torch.no_grad()
def test_norm_topk_prob_false_keeps_the_raw_scores() -> None:
    router = random_router(norm_topk_prob=False)
    ids_MA, weights_MA, scores_ME = router(torch.randn(9, 32))
    torch.testing.assert_close(weights_MA, 2.5 * scores_ME.gather(1, ids_MA))


@torch.no_grad()
def test_bf16_inputs_are_routed_in_fp32() -> None:
    router = random_router().to(torch.bfloat16)
    x_MD = torch.randn(50, 32).bfloat16()
    _, weights_MA, scores_ME = router(x_MD)
    assert weights_MA.dtype == torch.float32
    torch.testing.assert_close(scores_ME, torch.sigmoid(x_MD.float() @ router.weight.float().T))


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
        ids_MA, _, scores_ME = mlp.gate(x_BTD[row, :length])
        share_E = (scores_ME / scores_ME.sum(-1, keepdim=True)).mean(0)
        chosen_E = torch.stack([(ids_MA == expert).sum() for expert in range(4)]) * 4 / (2 * length)
        expected = expected + (chosen_E * share_E).sum() / 2
    torch.testing.assert_close(statistics.balance_loss, expected)
    assert statistics.load_E.sum() == 32
    statistics.balance_loss.backward()
    assert mlp.gate.weight.grad.abs().sum() > 0 and mlp.experts.down_proj.grad is None
