"""What comes in over HTTP and how it is refused. Free of torch.

Bodies are read with a size limit and a deadline, and checked field by field by hand: on the path of reinforcement
learning every model call passes here, and a schema library would cost more than the sampling. Unknown keys are
ignored, as OpenAI does; a known key of the wrong type is a 400 that names it. An error has the shape of the API that
was called: ``{"error": {"message", "type", "param", "code"}}`` for OpenAI's and everything else, ``{"type": "error",
"error": {"type", "message"}}`` for Anthropic's.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from starlette.requests import Request

from glm5.errors import Glm5Error
from glm5.records import SamplingParams

RETRY_AFTER_S = 1
"""What a client is told to wait when the server is full."""
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Glm5Error):
    """An answer with ``status`` and an error body."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self, path: str) -> dict[str, Any]:
        """The JSON of the answer to a request of ``path``."""
        if _ANTHROPIC_PATH in path:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def to_api_error(error: Glm5Error) -> ApiError:
    """The HTTP form of an error of ours."""
    if isinstance(error, ApiError):
        return error
    param = "messages" if error.code == "context_length_exceeded" else None
    return ApiError(error.status, str(error), error.code, param)


def dump(body: Any) -> bytes:
    """``body`` as one line of JSON.

    A lone surrogate, which has no UTF-8 form, is written as its escape, and so are the characters beyond ASCII at
    which some readers of event streams end a line.
    """
    text = _JSON.encode(body)
    if not text.isascii():
        for character, escape in _LINE_ENDS.items():
            text = text.replace(character, escape)
    return text.encode("utf-8", "backslashreplace")


_JSON = json.JSONEncoder(ensure_ascii=False)
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError 400 when it is not one, and as ``read_body`` does."""
    body = await read_body(request, max_bytes, timeout_s)
    try:
        data = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"body: not valid JSON ({error}); send a JSON object", "invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"body: got {_kind(data)}, expected a JSON object", "invalid_json")
    return data


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body. Raises ApiError 413 when it is too large, 408 when it takes longer than ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"body: not complete after {timeout_s:g} s; send it faster", "body_timeout") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"body: larger than {max_bytes} bytes; send less", "body_too_large")
    if int(request.headers.get("content-length") or 0) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)


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
    if float in kinds and isinstance(value, int | float):
        return _finite(name, value)
    if not isinstance(value, kinds):
        raise _wrong_type(name, value, kinds)
    return value


SAMPLING_FIELDS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "seed": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
}


def sampling(data: dict[str, Any], **rest: Any) -> SamplingParams:
    """The fields that have one name in every dialect, read from ``data``, and ``rest``. The engine checks ranges."""
    given = {name: field(data, name, kind) for name, kind in SAMPLING_FIELDS.items() if data.get(name) is not None}
    return SamplingParams(**given, logit_bias=_logit_bias(field(data, "logit_bias", dict, {})), **rest)


def _logit_bias(data: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """Bias by id; JSON keys are text."""
    pairs = []
    for key, value in data.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise ApiError(400, f"logit_bias: got key {key!r}, expected a token id", "invalid_request", "logit_bias")
        bias = field({"logit_bias": value}, "logit_bias", float, required=True)
        if not -100 <= bias <= 100:
            raise ApiError(400, f"logit_bias: got {bias}, expected -100 to 100", "invalid_request", "logit_bias")
        pairs.append((int(key), bias))
    return tuple(pairs)


def _finite(name: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):  # 1e999 is read as infinity
        raise ApiError(400, f"{name}: the number is too large; correct it", "invalid_request", name)
    return number


def refuse_constant(text: str) -> float:
    """``parse_constant`` of ``json.loads``: NaN and infinities are Python's own and not JSON. Raises ValueError."""
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
