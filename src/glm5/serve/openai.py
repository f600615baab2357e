"""What chat completions and completions share: choices, stops, counts, log-probs, events."""

from __future__ import annotations

import secrets
from typing import Any

from glm5.serve.answer import Answer, Run
from glm5.serve.protocol import ApiError, dump, field
from glm5.tokenizer.bpe import Tokenizer

DONE = b"data: [DONE]\n\n"
_MAX_STOPS = 16
_MAX_CHOICES = 128


def new_id(prefix: str) -> str:
    """A fresh identifier."""
    return f"{prefix}-{secrets.token_hex(12)}"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(body) + b"\n\n"


def choice_count(data: dict[str, Any]) -> int:
    """``n``. Raises ApiError 400 out of range."""
    n: int = field(data, "n", int, 1)
    if not 1 <= n <= _MAX_CHOICES:
        raise ApiError(400, f"n: got {n}, expected 1 to {_MAX_CHOICES}", "invalid_request", "n")
    return n


def parse_stops(data: dict[str, Any], name: str) -> list[str]:
    """Stop strings under ``name``: one text or a list of them. Raises ApiError 400."""
    stops = field(data, name, (str, list), [])
    stops = [stops] if isinstance(stops, str) else stops
    if len(stops) > _MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(400, f"{name}: expected up to {_MAX_STOPS} non-empty strings", "invalid_request", name)
    return stops


def usage(run: Run) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.output_tokens,
        "total_tokens": run.prompt_tokens + run.output_tokens,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": run.reasoning_tokens},
    }


def token_logprobs(answer: Answer, tokenizer: Tokenizer, start: int) -> list[dict[str, Any]]:
    """Log-probs of the ids from ``start`` on, in the form of chat completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = tokenizer.decode([token_id])
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    chosen = zip(answer.output_ids[start:], answer.logprobs[start:], strict=True)
    tops = answer.top_logprobs[start:] or [[]] * (len(answer.output_ids) - start)
    return [
        {**entry(*pair), "top_logprobs": [entry(*other) for other in top]}
        for pair, top in zip(chosen, tops, strict=True)
    ]
