"""Bodies of the token-level protocol: ids in, ids out. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glm5.dialects.protocol import SAMPLING_FIELDS, ApiError, field, sampling
from glm5.records import SamplingParams

_FIELDS = (*SAMPLING_FIELDS, "logit_bias", "max_new_tokens", "stop_token_ids", "top_logprobs", "grammar")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Body of ``POST /generate``."""

    ids: list[int]
    params: SamplingParams
    stream: bool
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    session_id: str | None
    priority: int


def parse_generate(data: dict[str, Any]) -> GenerateRequest:
    """Check the body of ``/generate``. Ids are checked by the engine, which knows the vocabulary."""
    ids = field(data, "input_ids", list, required=True)
    if not all(type(item) is int for item in ids):
        raise ApiError(400, "input_ids: expected a list of integers; send token ids", "invalid_request", "input_ids")
    return GenerateRequest(
        ids,
        parse_sampling(field(data, "sampling_params", dict, {})),
        field(data, "stream", bool, False),
        field(data, "return_logprob", bool, True),
        field(data, "return_prompt_logprob", bool, False),
        field(data, "session_id", str),
        field(data, "priority", int, 0),
    )


def parse_sampling(data: dict[str, Any]) -> SamplingParams:
    """``sampling_params`` of the token protocol; an unknown name is refused, since it would change what is sampled."""
    for name in data:
        if name not in _FIELDS:
            raise ApiError(
                400,
                f"sampling_params.{name}: unknown; known names: {', '.join(_FIELDS)}",
                "invalid_request",
                name,
            )
    stop_ids = field(data, "stop_token_ids", list)
    if stop_ids is not None and not all(type(item) is int for item in stop_ids):
        raise ApiError(400, "stop_token_ids: expected a list of integers", "invalid_request", "stop_token_ids")
    return sampling(
        data,
        max_new_tokens=field(data, "max_new_tokens", int, SamplingParams().max_new_tokens),
        stop_token_ids=None if stop_ids is None else tuple(stop_ids),
        top_logprobs=field(data, "top_logprobs", int, 0),
        grammar=field(data, "grammar", str),
    )
