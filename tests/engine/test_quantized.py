"""Serving quantised checkpoints: what is sampled follows the quantised model, and weights are swapped as any others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5.model.checkpoint import load_model
from glm5.model.quantize.export import Transforms, Variant, quantise_checkpoint
from glm5.model.quantize.plan import QuantisationPlan
from glm5.records import SamplingParams

from .conftest import STOP, MakeEngine

PLANS = {"w4a8": QuantisationPlan(group_size=16), "fp8": QuantisationPlan(experts="fp8", attention="fp8", mlp="fp8"),
         "w8a16": QuantisationPlan(experts="int8", rounds_inputs=False)}


@pytest.mark.parametrize("name", list(PLANS))
def test_log_probs_are_those_of_the_quantised_model_and_a_swap_is_served(
    name: str, make_engine: MakeEngine, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    ids = torch.arange(64).view(2, 32)
    for number, source in enumerate(checkpoints):
        variant = Variant(plan=PLANS[name], transforms=Transforms(rotation="online", scaling=False))
        quantise_checkpoint(source, tmp_path / str(number), {"q": variant}, ids, ids)
    engine = make_engine(load_model(tmp_path / "0"))
    prompt = [(7 * k) % STOP for k in range(20)]
    params = SamplingParams(temperature=0, max_new_tokens=8, stop_token_ids=())
    for number in (0, 1):
        if number:
            outcome = engine.update_weights(tmp_path / "1", 1)
            assert outcome.success, outcome.message
        found = engine.submit(prompt, params).result(60)
        model = load_model(tmp_path / str(number))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found.output_ids])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(found.output_ids)[:, None])[:, 0]
        # Absorbed and expanded attention differ in the last bits, which may move a rounded input by one level.
        tolerance = 1e-4 if name == "w8a16" else 0.1
        torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=tolerance)
