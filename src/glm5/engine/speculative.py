"""How many tokens one verification step would yield if the MTP layer drafted (GLM-5 report, multi-token prediction).

For greedy decoding this needs no speculative loop. The model's own greedy continuation is generated once; then one
packed pass gives, at every position t and depth j, the draft that the chained MTP layer makes for token t+1+j. As
long as all earlier drafts of a step were right, the ids it was fed are those of the continuation, so comparing with
the continuation is exact. A verification step at t yields the accepted drafts and the one token that the main model
adds.

Letters: B sequences, T tokens, M flattened tokens, W vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.errors import EngineError
from glm5.model.cache import KeyCache
from glm5.model.transformer import GlmMoeDsaForCausalLM


@torch.inference_mode()
def mtp_acceptance(
    model: GlmMoeDsaForCausalLM, prompts: Sequence[Sequence[int]], drafts: int = 4, new_tokens: int = 64
) -> float:
    """Mean tokens per verification step, from 1 (no draft accepted) to ``drafts`` + 1, over greedy continuations.

    ``prompts`` are non-empty id lists. Raises EngineError when there is nothing to measure or no MTP layer.
    """
    if not prompts or not all(prompts) or drafts < 1 or new_tokens < drafts + 2:
        raise EngineError(
            f"mtp_acceptance: got {len(prompts)} prompts, drafts={drafts}, new_tokens={new_tokens}; expected non-empty "
            "prompts, drafts >= 1 and new_tokens >= drafts + 2"
        )
    if not model.config.num_nextn_predict_layers:
        raise EngineError(
            "mtp_acceptance: the model has no MTP layer; load a checkpoint with num_nextn_predict_layers 1"
        )
    sequences = _continue_greedily(model, prompts, new_tokens)
    accepted_BT = _accepted_drafts(model, sequences, drafts)
    steps = tokens = 0
    for row, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        # At t the main model has just given token t+1; the drafts for t+2 … must all lie inside the continuation.
        t = len(prompt) - 1
        while t + 1 + drafts < len(sequence):
            gained = int(accepted_BT[row, t]) + 1
            steps, tokens, t = steps + 1, tokens + gained, t + gained
    return tokens / steps


def _continue_greedily(
    model: GlmMoeDsaForCausalLM, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """Each prompt with ``new_tokens`` greedy ids behind it; stop ids do not stop."""
    weight = model.lm_head.weight
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    cache = KeyCache(model.config, len(prompts), int(lengths.max()) + new_tokens, weight.dtype, weight.device)
    slots = torch.arange(len(prompts))
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    logits_BW = model.ragged(
        ids.to(weight.device),
        positions.to(weight.device),
        slots.repeat_interleave(lengths).to(weight.device),
        cache,
        (lengths.cumsum(0) - 1).to(weight.device),
    )
    slots, lengths = slots.to(weight.device), lengths.to(weight.device)
    produced = [logits_BW.argmax(-1)]
    for step in range(new_tokens - 1):
        produced.append(model.ragged(produced[-1], lengths + step, slots, cache, None).argmax(-1))
    return [list(prompt) + row for prompt, row in zip(prompts, torch.stack(produced, 1).tolist(), strict=True)]


def _accepted_drafts(model: GlmMoeDsaForCausalLM, sequences: list[list[int]], drafts: int) -> Tensor:
    """int [B, T]: how many drafts made at t agree with the continuation before the first that does not."""
    width = max(len(sequence) for sequence in sequences)
    ids_BT = torch.zeros(len(sequences), width, dtype=torch.int64)
    documents_BT = torch.full_like(ids_BT, -1)
    for row, sequence in enumerate(sequences):
        ids_BT[row, : len(sequence)] = torch.tensor(sequence)
        documents_BT[row, : len(sequence)] = 0
    ids_BT, documents_BT = ids_BT.to(model.lm_head.weight.device), documents_BT.to(model.lm_head.weight.device)
    hidden_BTD, selection = model.hidden(ids_BT, None, documents_BT).hidden_BTD, None
    alive_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    accepted_BT = torch.zeros_like(ids_BT)
    for depth in range(1, drafts + 1):
        step = model.mtp(hidden_BTD, _shift(ids_BT, depth), None, documents_BT, selection=selection)
        hidden_BTD, selection = step.hidden_BTD, step.selection
        alive_BT = alive_BT & (model.lm_head(hidden_BTD).argmax(-1) == _shift(ids_BT, depth + 1))
        accepted_BT += alive_BT
    return accepted_BT


def _shift(ids_BT: Tensor, by: int) -> Tensor:
    """Token t + ``by`` at t; zeros behind the end, which no verification step reads."""
    return torch.nn.functional.pad(ids_BT[:, by:], (0, min(by, ids_BT.shape[1])))
