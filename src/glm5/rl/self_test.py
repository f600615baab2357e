"""Start-up test of an external engine: does it compute the function that the trainer computes?

A few fixed prompts are sampled from, as a run will sample, and the trainer scores prompts and answers with the same
weights. Small differences are arithmetic; other weights, another tokenizer, log-probs before the temperature instead of
after it, or a precision that does not suffice show as large ones, and the run does not start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from glm5.errors import EngineError
from glm5.model.families import CausalLM
from glm5.rl.config import RLConfig
from glm5.tokenizer.bpe import load_tokenizer

PROMPTS = ("What is 12 plus 30?", "Name three colours, and say why you chose them.", "def add(a, b):",
           "ü — 東京 😀 1234567")
_NEW_TOKENS = 24
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the engine's log-probs lie from the trainer's, in nats."""

    prompt_mean: float
    """Mean |difference| over the tokens of the prompts."""
    sampled_mean: float
    """Mean |difference| over the sampled tokens, at the run's temperature."""
    largest: float
    tokens: int
    """Tokens compared."""


def self_test(model: CausalLM, tokenizer_dir: Path, url: str, config: RLConfig) -> Agreement:
    """Compare the engine at ``url`` with ``model``, whose weights it holds.

    Raises EngineError, in one line that says what differs, beyond ``config.engine.tolerance``.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    prompts: list[float] = []
    sampled: list[float] = []
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
        for number, text in enumerate(PROMPTS):
            ids = tokenizer.render([{"role": "user", "content": text}], add_generation_prompt=True,
                                   enable_thinking=config.enable_thinking).ids
            # engines disagree on whether the temperature is for the prompt as well: that is scored without one
            scored = _ask(client, url, ids, {"temperature": 1.0, "max_new_tokens": 0})
            prompts += _differences(url, scored["prompt_logprobs"][1:], _score(model, ids, 1.0))
            answer = _ask(client, url, ids, {"temperature": config.temperature, "max_new_tokens": _NEW_TOKENS,
                                             "seed": number, "stop_token_ids": list(tokenizer.stop_ids)})
            expected = _score(model, [*ids, *answer["output_ids"]], config.temperature)
            sampled += _differences(url, answer["logprobs"], expected[len(ids) - 1 :])
    found = Agreement(sum(prompts) / len(prompts), sum(sampled) / len(sampled), max(*prompts, *sampled),
                      len(prompts) + len(sampled))
    for name, value, advice in (
            ("prompt", found.prompt_mean, "it runs other weights, another architecture or another precision"),
            ("sampled", found.sampled_mean, "its log-probs are not those of the distribution it samples from; check "
                                            "temperature and logprobs mode")):
        if not value <= config.engine.tolerance:
            raise EngineError(f"{config.engine.url or url}: log-probs of {name} tokens differ from the trainer's by "
                              f"{value:.4f} nats on average, at most {config.engine.tolerance} is accepted; {advice}")
    return found


def _ask(client: httpx.Client, url: str, ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    response = client.post(f"{url}/generate", json={
        "input_ids": ids, "return_logprob": True, "return_prompt_logprob": sampling["max_new_tokens"] == 0,
        "stream": False, "sampling_params": sampling})
    if response.status_code != 200:
        raise EngineError(f"{url}: self-test: HTTP {response.status_code} {response.text[:200]}")
    answer: dict[str, Any] = response.json()
    return answer


@torch.no_grad()
def _score(model: CausalLM, ids: list[int], temperature: float) -> list[float]:
    """Log-prob of ``ids[1:]`` given what precedes each."""
    device = model.lm_head.weight.device
    logits_TW = model(torch.tensor([ids], device=device)).logits[0, :-1].float() / temperature
    labels = torch.tensor(ids[1:], device=device)
    scored: list[float] = torch.log_softmax(logits_TW, -1).gather(-1, labels[:, None])[:, 0].tolist()
    return scored


def _differences(url: str, found: list[float], expected: list[float]) -> list[float]:
    if len(found) != len(expected) or any(value is None for value in found):
        raise EngineError(f"{url}: self-test: {len(found)} log-probs for {len(expected)} tokens; the engine does not "
                          "answer return_prompt_logprob or return_logprob")
    return [abs(mine - theirs) for mine, theirs in zip(expected, found, strict=True)]
