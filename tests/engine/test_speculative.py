"""Acceptance length against a plain loop that really drafts and verifies."""

from __future__ import annotations

import pytest
import torch

from glm5.engine.speculative import mtp_acceptance
from glm5.errors import EngineError
from glm5.model.transformer import GlmMoeDsaForCausalLM

from .conftest import make_model


@torch.no_grad()
def by_drafting(model: GlmMoeDsaForCausalLM, prompt: list[int], drafts: int, new_tokens: int) -> tuple[int, int]:
    """(tokens, steps) of self-drafting one sequence: every draft is fed back, then checked by the main model."""
    limit = len(prompt) + new_tokens
    ids = list(prompt)
    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    tokens = steps = 0
    while len(ids) + drafts < limit + 1:
        chain = list(ids)
        hidden = model.hidden(torch.tensor([ids[:-1]])).hidden_BTD
        for depth in range(1, drafts + 1):
            hidden = model.mtp(hidden, torch.tensor([chain[depth:]])).hidden_BTD
            chain.append(int(model.lm_head(hidden[0, -1]).argmax()))
        checked = model(torch.tensor([chain])).logits[0].argmax(-1).tolist()
        position = len(ids) - 1
        while position + 1 < len(chain) and chain[position + 1] == checked[position]:
            position += 1
        gained = position - len(ids) + 2
        ids = [*chain[: position + 1], checked[position]]
        tokens, steps = tokens + gained, steps + 1
    return tokens, steps


@pytest.mark.parametrize("drafts", [1, 3])
def test_acceptance_equals_real_self_drafting(drafts: int) -> None:
    model = make_model(0)
    with torch.no_grad():  # a nearly constant head, so that some drafts are right
        model.lm_head.weight.mul_(0.2)
        model.lm_head.weight[7:9].mul_(8)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5, 4], [20]]
    counted = [by_drafting(model, prompt, drafts, 24) for prompt in prompts]
    expected = sum(tokens for tokens, _ in counted) / sum(steps for _, steps in counted)
    found = mtp_acceptance(model, prompts, drafts=drafts, new_tokens=24)
    assert 1 < found < drafts + 1
    assert found == pytest.approx(expected)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(EngineError, match="non-empty"):
        mtp_acceptance(make_model(0), [], drafts=2)
    with pytest.raises(EngineError, match="new_tokens"):
        mtp_acceptance(make_model(0), [[1]], drafts=4, new_tokens=5)
