"""What comes in over HTTP and how it is refused. Free of torch.

Bodies are read with a size limit and checked field by field by hand: on the path of reinforcement learning every
model call passes here, and a schema library would cost more than the sampling. Unknown keys are ignored, as OpenAI
does; a known key of the wrong type is a 400 that names it. Every error has OpenAI's shape: ``{"error": {"message",
"type", "param", "code"}}``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from glm5.engine.requests import ContextLengthError, EngineClosedError, InvalidRequestError, QueueFullError
from glm5.errors import DataError, EngineError, Glm5Error
from glm5.records import SamplingParams

MAX_BODY_BYTES = 16 << 20


class ApiError(EngineError):
    """An answer with ``status`` and an error body."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def to_api_error(error: Glm5Error) -> ApiError:
    """The HTTP form of an error of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), "context_length_exceeded", "messages")
    if isinstance(error, InvalidRequestError | DataError):
        return ApiError(400, str(error), "invalid_request")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), "queue_full")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), "shutting_down")
    return ApiError(500, str(error), "engine_error")


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError 400 when it is not one, 413 when it is too large."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"body: larger than {MAX_BODY_BYTES} bytes; send less", "body_too_large")
        parts.append(part)
    try:
        data = json.loads(b"".join(parts), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"body: not valid JSON ({error}); send a JSON object", "invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"body: got {_kind(data)}, expected a JSON object", "invalid_json")
    return data


def field(
    data: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None, required: bool = False
) -> Any:
    """``data[name]`` of type ``kind``; ``default`` when absent or null. An int is a float, a bool is no number."""
    value = data.get(name)
    if value is None:
        if required:
            raise ApiError(400, f"{name}: missing; add it", "missing_field", name)
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool) and bool not in kinds:
        raise _wrong_type(name, value, kinds)
    if float in kinds and isinstance(value, int):
        return _finite(name, value)
    if not isinstance(value, kinds):
        raise _wrong_type(name, value, kinds)
    return value


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Body of ``POST /generate``."""

    ids: list[int]
    params: SamplingParams
    stream: bool
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    session_id: str | None


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
    )


def parse_sampling(data: dict[str, Any]) -> SamplingParams:
    """``sampling_params`` of the token protocol; an unknown name is refused, since it would change what is sampled."""
    known = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "seed")
    for name in data:
        if name not in known:
            raise ApiError(
                400, f"sampling_params.{name}: unknown; known names: {', '.join(known)}", "invalid_request", name
            )
    defaults = SamplingParams()
    stop_ids = field(data, "stop_token_ids", list)
    if stop_ids is not None and not all(type(item) is int for item in stop_ids):
        raise ApiError(400, "stop_token_ids: expected a list of integers", "invalid_request", "stop_token_ids")
    return SamplingParams(
        temperature=field(data, "temperature", float, defaults.temperature),
        top_p=field(data, "top_p", float, defaults.top_p),
        top_k=field(data, "top_k", int, defaults.top_k),
        max_new_tokens=field(data, "max_new_tokens", int, defaults.max_new_tokens),
        stop_token_ids=None if stop_ids is None else tuple(stop_ids),
        seed=field(data, "seed", int),
    )


def _finite(name: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ApiError(400, f"{name}: the number is too large; correct it", "invalid_request", name) from None


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _wrong_type(name: str, value: Any, kinds: tuple[type, ...]) -> ApiError:
    expected = " or ".join(_KIND_NAMES[kind] for kind in kinds)
    return ApiError(400, f"{name}: got {_kind(value)}, expected {expected}", "invalid_type", name)


_KIND_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KIND_NAMES[type(value)]
