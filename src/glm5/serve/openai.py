"""The OpenAI API over the engine: chat completions and completions; streaming and not. Free of torch.

A chat request is rendered to ids by the tokenizer, sampled as ids, and parsed back into reasoning, content and tool
calls. Whether it streams or not, the same parser reads the text; it only gets it in one piece or in many. What the
engine cannot do (several choices, forced tool choice, JSON mode, top log-probs) is refused with a 400 rather than
ignored.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal

from glm5.engine.generation import Generation
from glm5.engine.requests import Chunk
from glm5.records import SamplingParams
from glm5.serve.answer import Answer, TextRequest
from glm5.serve.protocol import ApiError, field
from glm5.tokenizer.bpe import Tokenizer
from glm5.tokenizer.parse import Delta

_MAX_STOPS = 16
_DONE = b"data: [DONE]\n\n"


def parse_chat(data: dict[str, Any], tokenizer: Tokenizer, model: str, max_context: int) -> TextRequest:
    """Check and render the body of ``/v1/chat/completions``. Raises ApiError or DataError."""
    _check_model(data, model)
    _refuse_unsupported(data)
    messages = _check_messages(field(data, "messages", list, required=True))
    tools = _check_tools(field(data, "tools", list), data.get("tool_choice"))
    enable_thinking, clear_thinking = _thinking(data)
    ids = tokenizer.render(messages, tools, True, enable_thinking, clear_thinking).ids
    limit = field(data, "max_completion_tokens", int, field(data, "max_tokens", int))
    return _request(
        "chat",
        data,
        model,
        ids,
        max_context if limit is None else limit,
        tools,
        enable_thinking is not False,
        field(data, "logprobs", bool, False),
    )


def parse_completion(data: dict[str, Any], tokenizer: Tokenizer, model: str) -> TextRequest:
    """Check and encode the body of ``/v1/completions``: one prompt, as text or ids. Raises ApiError."""
    _check_model(data, model)
    _refuse_unsupported(data)
    for name in ("echo", "suffix"):
        if data.get(name):
            raise ApiError(400, f"{name}: not supported; leave it out", "unsupported", name)
    prompt = field(data, "prompt", (str, list), required=True)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and not all(type(item) is int for item in prompt):
        raise ApiError(
            400,
            "prompt: expected one text or one list of token ids; send one request per prompt",
            "invalid_request",
            "prompt",
        )
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return _request(
        "text",
        data,
        model,
        ids,
        field(data, "max_tokens", int, 16),
        None,
        False,
        field(data, "logprobs", int) is not None,
    )


def _request(
    kind: Literal["chat", "text"],
    data: dict[str, Any],
    model: str,
    ids: list[int],
    max_tokens: int,
    tools: list[dict[str, Any]] | None,
    thinking: bool,
    wants_logprobs: bool,
) -> TextRequest:
    if max_tokens < 1:
        raise ApiError(400, f"max_tokens: got {max_tokens}, expected at least 1", "invalid_request", "max_tokens")
    stops = field(data, "stop", (str, list), [])
    stops = [stops] if isinstance(stops, str) else stops
    if len(stops) > _MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(400, f"stop: expected up to {_MAX_STOPS} non-empty strings", "invalid_request", "stop")
    options = field(data, "stream_options", dict, {})
    params = SamplingParams(
        temperature=field(data, "temperature", float, 1.0),
        top_p=field(data, "top_p", float, 1.0),
        top_k=field(data, "top_k", int, -1),
        max_new_tokens=max_tokens,
        seed=field(data, "seed", int),
    )
    return TextRequest(
        kind=kind,
        model=model,
        ids=ids,
        params=params,
        stops=stops,
        stream=field(data, "stream", bool, False),
        include_usage=field(options, "include_usage", bool, False),
        wants_logprobs=wants_logprobs,
        wants_token_ids=field(data, "return_token_ids", bool, False),
        session_id=field(data, "session_id", str),
        tools=tools,
        thinking=thinking,
    )


def _check_model(data: dict[str, Any], model: str) -> None:
    name = field(data, "model", str, required=True)
    if name != model:
        raise ApiError(404, f"The model `{name}` does not exist; this server has `{model}`", "model_not_found", "model")


def _refuse_unsupported(data: dict[str, Any]) -> None:
    """A 400 for options that change the answer and that the engine does not have."""
    n = field(data, "n", int, 1)
    if n != 1:
        raise ApiError(
            400, f"n: got {n}; only 1 is supported, send the request again for another answer", "unsupported", "n"
        )
    if field(data, "top_logprobs", int, 0):
        raise ApiError(
            400,
            "top_logprobs: only the chosen token's log-prob is available; leave it out",
            "unsupported",
            "top_logprobs",
        )
    response_format = field(data, "response_format", dict, {})
    if response_format.get("type", "text") != "text":
        raise ApiError(
            400, "response_format: only text is supported; ask for JSON in the prompt", "unsupported", "response_format"
        )
    for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
        if data.get(name):
            raise ApiError(400, f"{name}: not supported; leave it out", "unsupported", name)


def _check_messages(messages: list[Any]) -> list[dict[str, Any]]:
    if not messages:
        raise ApiError(400, "messages: empty; send at least one message", "invalid_request", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ApiError(400, f"messages[{index}]: expected an object", "invalid_type", "messages")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(
            isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
        ):
            raise ApiError(
                400, f"messages[{index}].tool_calls: expected a list of function calls", "invalid_type", "messages"
            )
    return messages


def _check_tools(tools: list[Any] | None, choice: Any) -> list[dict[str, Any]] | None:
    """The tools to declare; None when there are none or ``tool_choice`` is ``none``."""
    for index, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                400, f"tools[{index}]: expected {{type: function, function: {{name, …}}}}", "invalid_type", "tools"
            )
    if choice == "none":
        return None
    if choice not in (None, "auto"):
        raise ApiError(400, "tool_choice: only auto and none are supported", "unsupported", "tool_choice")
    return tools or None


def _thinking(data: dict[str, Any]) -> tuple[bool | None, bool | None]:
    """(enable_thinking, clear_thinking): top level, then ``chat_template_kwargs``, then ``thinking: {type}``."""
    kwargs = field(data, "chat_template_kwargs", dict, {})
    thinking = field(data, "thinking", dict, {})
    by_type = {"enabled": True, "disabled": False}.get(field(thinking, "type", str, ""))
    enable = field(data, "enable_thinking", bool, field(kwargs, "enable_thinking", bool, by_type))
    clear = field(
        data, "clear_thinking", bool, field(kwargs, "clear_thinking", bool, field(thinking, "clear_thinking", bool))
    )
    return enable, clear


async def answer_whole(request: TextRequest, tokenizer: Tokenizer, generation: Generation) -> dict[str, Any]:
    """The body of a non-streaming answer. Raises the request's EngineError."""
    answer = Answer(request, tokenizer)
    deltas: list[Delta] = []
    if request.stops:
        async with aclosing(generation.stream()) as chunks:  # leaving early aborts the rest
            async for chunk in chunks:
                deltas += answer.feed(chunk)
                if answer.is_finished:
                    break
    else:
        done = await generation.wait()
        deltas = answer.feed(
            Chunk(
                output_ids=done.output_ids,
                logprobs=done.logprobs,
                weight_versions=done.weight_versions,
                finish_reason=done.finish_reason,
            )
        )
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "logprobs": None,
    }
    if request.kind == "chat":
        choice["message"] = _message(deltas)
    else:
        choice["text"] = "".join(delta.text for delta in deltas)
    if request.wants_logprobs:
        choice["logprobs"] = answer.logprob_content(0) if request.kind == "chat" else answer.legacy_logprobs(0)
    body = {
        "id": request.new_id(),
        "object": "chat.completion" if request.kind == "chat" else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": answer.usage(generation),
    }
    if request.wants_token_ids:
        choice["token_ids"], body["prompt_token_ids"] = answer.output_ids, request.ids
    return body


async def answer_events(request: TextRequest, tokenizer: Tokenizer, generation: Generation) -> AsyncIterator[bytes]:
    """Server-sent events of a streaming answer, ``[DONE]`` included."""
    answer = Answer(request, tokenizer)
    base = {
        "id": request.new_id(),
        "object": "chat.completion.chunk" if request.kind == "chat" else "text_completion",
        "created": int(time.time()),
        "model": request.model,
    }
    if request.kind == "chat":
        yield _event({**base, "choices": [_choice({"role": "assistant", "content": ""})]})
    async with aclosing(generation.stream()) as chunks:
        async for chunk in chunks:
            start = len(answer.output_ids)
            choices = [_delta_choice(request, delta) for delta in answer.feed(chunk)]
            needs_carrier = (request.wants_logprobs or request.wants_token_ids) and len(answer.output_ids) > start
            if needs_carrier and not choices:
                choices = [_choice({}) if request.kind == "chat" else _text_choice("")]
            if needs_carrier and request.wants_logprobs:
                choices[0]["logprobs"] = (
                    answer.logprob_content(start) if request.kind == "chat" else answer.legacy_logprobs(start)
                )
            if needs_carrier and request.wants_token_ids:
                choices[0]["token_ids"] = answer.output_ids[start:]
            for choice in choices:
                yield _event({**base, "choices": [choice]})
            if answer.is_finished:
                break
    last = _choice({}) if request.kind == "chat" else _text_choice("")
    last |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
    yield _event({**base, "choices": [last]})
    if request.include_usage:
        yield _event({**base, "choices": [], "usage": answer.usage(generation)})
    yield _DONE


def _message(deltas: list[Delta]) -> dict[str, Any]:
    """An assistant message from all deltas of an answer."""
    text = {kind: "".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "content")}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.kind == "tool_call_start" and delta.index is not None:
            calls[delta.index] = _call(delta)
        elif delta.kind == "tool_call_arguments" and delta.index is not None:
            calls[delta.index]["function"]["arguments"] += delta.text
    message: dict[str, Any] = {"role": "assistant", "content": text["content"]}
    if text["reasoning"]:
        message["reasoning_content"] = text["reasoning"]
    if calls:
        message["tool_calls"] = list(calls.values())
        message["content"] = text["content"] or None
    return message


def _call(delta: Delta) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": delta.name, "arguments": ""},
    }


def _delta_choice(request: TextRequest, delta: Delta) -> dict[str, Any]:
    if request.kind == "text":
        return _text_choice(delta.text)
    if delta.kind == "reasoning":
        return _choice({"reasoning_content": delta.text})
    if delta.kind == "content":
        return _choice({"content": delta.text})
    if delta.kind == "tool_call_start":
        return _choice({"tool_calls": [{"index": delta.index, **_call(delta)}]})
    return _choice({"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]})


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}


def _text_choice(text: str) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": None, "logprobs": None}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
