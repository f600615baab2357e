"""The OpenAI chat dialect: what a request may ask for, and the shapes of answers, streams and errors.

Streams are synthesised from whole answers: the engine is always asked for ids, without streaming, because streamed text
loses the exact ids. Parameters that would make the recorded ids differ from the text that the client sees (``stop``) or
that the engine cannot honour are refused; temperature, top_p and the other sampling parameters are read by nobody: the
session decides them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm5.errors import GatewayError

DEFAULT_MODEL = "glm5"


class RequestError(GatewayError):
    """A request that is answered with an OpenAI-shaped error."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What the gateway reads of a chat completion request."""

    model: str
    messages: Any
    tools: list[dict[str, Any]] | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


def read_chat_request(body: bytes) -> ChatRequest:
    """Parse and check a request body. Raises RequestError (400)."""
    try:
        data = json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError(400, f"the body is {type(data).__name__}, expected an object")
    _refuse_unsupported(data)
    tools = data.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(_is_tool(tool) for tool in tools)):
        raise RequestError(400, "tools: expected a list of {'type': 'function', 'function': {…}}", param="tools")
    max_tokens = data.get("max_completion_tokens", data.get("max_tokens"))
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise RequestError(400, f"max_tokens: got {max_tokens!r}, expected a positive integer", param="max_tokens")
    options = data.get("stream_options") or {}
    return ChatRequest(model=str(data.get("model") or DEFAULT_MODEL), messages=data.get("messages"), tools=tools,
                       max_tokens=max_tokens, stream=bool(data.get("stream")),
                       include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
                       logprobs=bool(data.get("logprobs")), return_token_ids=bool(data.get("return_token_ids")))


def _refuse_unsupported(data: dict[str, Any]) -> None:
    tool_choice, response_format = data.get("tool_choice"), data.get("response_format")
    refused = {
        "n": data.get("n") not in (None, 1),
        "stop": bool(data.get("stop")),
        "logit_bias": bool(data.get("logit_bias")),
        "tool_choice": tool_choice not in (None, "auto", "none"),
        "response_format": response_format not in (None, {"type": "text"}),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise RequestError(400, f"{name}: {data[name]!r} is not supported in a recorded session; leave it out",
                               code="unsupported_parameter", param=name)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def completion(answer_id: str, model: str, message: dict[str, Any], finish_reason: str, prompt_tokens: int,
               completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """A chat completion object with one choice."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
             "total_tokens": prompt_tokens + completion_tokens,
             "prompt_tokens_details": {"cached_tokens": cached_tokens}}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return {"id": answer_id, "object": "chat.completion", "created": int(time.time()), "model": model,
            "choices": [choice], "usage": usage}


def with_token_details(answer: dict[str, Any], prompt_ids: Sequence[int] | None, output_ids: Sequence[int],
                       logprobs: Sequence[float] | None, texts: Sequence[str]) -> dict[str, Any]:
    """``answer`` with ids (when ``prompt_ids`` is given) and per-token log-probs (when ``logprobs`` is given)."""
    choice = dict(answer["choices"][0])
    detailed = {**answer, "choices": [choice]}
    if prompt_ids is not None:
        choice["token_ids"] = list(output_ids)
        detailed["prompt_token_ids"] = list(prompt_ids)
    if logprobs is not None:
        choice["logprobs"] = {"content": [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, logprobs, strict=True)]}
    return detailed


def sse_events(answer: dict[str, Any], include_usage: bool) -> bytes:
    """The answer as the server-sent events of a streamed completion, ``[DONE]`` included."""
    choice, message = answer["choices"][0], answer["choices"][0]["message"]
    frame = {**{key: answer[key] for key in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.get("reasoning_content"):
        deltas.append({"reasoning_content": message["reasoning_content"]})
    if message.get("content"):
        deltas.append({"content": message["content"]})
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls", ()))]
    chunks = [{**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    last.update({key: choice[key] for key in ("logprobs", "token_ids") if choice.get(key) is not None})
    chunks.append({**frame, "choices": [last]})
    if "prompt_token_ids" in answer:
        chunks[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    if include_usage:
        chunks.append({**frame, "choices": [], "usage": answer["usage"]})
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def sse_error(error: RequestError) -> bytes:
    """An error inside a stream whose status line has already been sent."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\ndata: [DONE]\n\n"


def model_list() -> dict[str, Any]:
    """Answer of ``GET /v1/models``."""
    return {"object": "list", "data": [{"id": DEFAULT_MODEL, "object": "model", "created": 0, "owned_by": "glm5"}]}
