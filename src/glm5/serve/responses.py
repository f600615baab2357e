"""OpenAI responses: input items → messages, parts of an answer → output items and their events. Free of torch.

A stored response can be continued by ``previous_response_id`` for as long as ``ResponseMemory`` remembers it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glm5.serve.answer import Answer, AnswerRequest, Growth, Part, Piece, Run
from glm5.serve.chat import message_of
from glm5.serve.conversation import (
    Conversation,
    check_choice,
    check_effort,
    check_format,
    check_model,
    check_tools,
    thinking_switches,
)
from glm5.serve.memory import Remembered
from glm5.serve.openai import new_id
from glm5.serve.protocol import ApiError, dump, sampling
from glm5.serve.protocol import field as value_of
from glm5.tokenizer.bpe import Tokenizer

_REFUSED = ("background", "conversation", "prompt", "top_logprobs", "max_tool_calls", "context_management")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ECHOED = ("instructions", "metadata", "previous_response_id", "temperature", "tool_choice", "tools", "top_p", "text")


@dataclass(slots=True, kw_only=True)
class ResponseFormat:
    """How one response is written."""

    request: AnswerRequest
    base: dict[str, Any]
    """Fields that are the same at every moment of the response."""
    messages: list[dict[str, Any]]
    """The conversation before the answer, instructions left out."""
    remember: Callable[[Remembered], None] | None
    """Called with the finished response; None stores nothing."""
    _sequence: int = 0
    _open: Part | None = None

    def whole(self, run: Run) -> dict[str, Any]:
        """A finished ``response``."""
        answer = run.answers[0]
        is_cut = answer.finish_reason == "length"
        body = {
            **self.base,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [_item(part, _status(answer, part)) for part in answer.parts],
            "usage": _usage(run),
        }
        if self.remember is not None:
            self.remember(Remembered(body, [*self.messages, message_of(answer)]))
        return body

    def begin(self, run: Run) -> list[bytes]:
        """The response without output, twice: created, in progress."""
        started = {**self.base, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return [self._event(f"response.{name}", response=started) for name in ("created", "in_progress")]

    def piece(self, piece: Piece) -> list[bytes]:
        """Growth of output items; an item ends where the next begins."""
        events = []
        for growth in piece.growth:
            if growth.is_first:
                events += self._close("completed") + self._start(growth.part)
            if growth.text:
                events.append(self._grow(growth))
        if piece.answer.is_finished and self._open is not None:
            events += self._close(_status(piece.answer, self._open))
        return events

    def end(self, run: Run) -> list[bytes]:
        """The finished response."""
        body = self.whole(run)
        return [self._event(f"response.{body['status']}", response=body)]

    def failure(self, error: ApiError) -> list[bytes]:
        """The error in place of the rest."""
        return [self._event("error", code=error.code, message=str(error), param=error.param)]

    def _event(self, kind: str, **body: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return f"event: {kind}\ndata: ".encode() + dump({"type": kind, "sequence_number": number, **body}) + b"\n\n"

    def _start(self, part: Part) -> list[bytes]:
        self._open = part
        events = [
            self._event("response.output_item.added", output_index=part.index, item=_item(part, "in_progress", ""))
        ]
        if part.kind != "call":
            events.append(self._event("response.content_part.added", **_place(part), part=_content(part, "")))
        return events

    def _grow(self, growth: Growth) -> bytes:
        part = growth.part
        if part.kind == "call":
            place = {"item_id": _item_id(part), "output_index": part.index}
            return self._event("response.function_call_arguments.delta", **place, delta=growth.text)
        extra: dict[str, Any] = {"logprobs": []} if part.kind == "content" else {}
        return self._event(f"response.{_CONTENT_TYPES[part.kind]}.delta", **_place(part), delta=growth.text, **extra)

    def _close(self, status: str) -> list[bytes]:
        part, self._open = self._open, None
        if part is None:
            return []
        item = {"output_index": part.index, "item": _item(part, status)}
        if part.kind == "call":
            place = {"item_id": _item_id(part), "output_index": part.index}
            events = [self._event("response.function_call_arguments.done", **place, arguments=part.text)]
        else:
            extra: dict[str, Any] = {"logprobs": []} if part.kind == "content" else {}
            name = f"response.{_CONTENT_TYPES[part.kind]}.done"
            events = [
                self._event(name, **_place(part), text=part.text, **extra),
                self._event("response.content_part.done", **_place(part), part=_content(part, part.text)),
            ]
        return [*events, self._event("response.output_item.done", **item)]


def parse_response(
    data: dict[str, Any],
    tokenizer: Tokenizer,
    model: str,
    max_context: int,
    recall: Callable[[str], Remembered | None],
    remember: Callable[[Remembered], None],
) -> ResponseFormat:
    """Check and render the body of ``/v1/responses``. Raises ApiError or DataError.

    ``recall`` finds an earlier response by its id; ``remember`` stores the new one unless ``store`` is false.
    """
    check_model(data, model)
    for name in _REFUSED:
        if data.get(name):
            raise ApiError(400, f"{name}: not supported; leave it out", "unsupported", name)
    if value_of(data, "truncation", str, "disabled") != "disabled":
        raise ApiError(400, "truncation: only disabled is supported", "unsupported", "truncation")
    messages = _history(value_of(data, "previous_response_id", str), recall) + _parse_input(
        value_of(data, "input", (str, list), required=True)
    )
    if not messages:
        raise ApiError(400, "input: empty; send a text or at least one item", "invalid_request", "input")
    conversation = _conversation(data, messages)
    limit = value_of(data, "max_output_tokens", int, max_context)
    if limit < 1:
        raise ApiError(
            400, f"max_output_tokens: got {limit}, expected at least 1", "invalid_request", "max_output_tokens"
        )
    request = AnswerRequest(
        prompts=[conversation.render(tokenizer)],
        params=sampling(data, max_new_tokens=limit, grammar=conversation.grammar(tokenizer)),
        tools=conversation.declared_tools,
        thinking=conversation.thinking,
        stream=value_of(data, "stream", bool, False),
        session_id=value_of(data, "prompt_cache_key", str),
    )
    is_stored = value_of(data, "store", bool, True)
    return ResponseFormat(
        request=request,
        base=_base(data, model, is_stored),
        messages=messages,
        remember=remember if is_stored else None,
    )


def _base(data: dict[str, Any], model: str, is_stored: bool) -> dict[str, Any]:
    defaults = {
        "metadata": {},
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
    }
    return {
        "id": new_id("resp").replace("-", "_"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "parallel_tool_calls": value_of(data, "parallel_tool_calls", bool, True),
        "max_output_tokens": value_of(data, "max_output_tokens", int),
        "reasoning": value_of(data, "reasoning", dict, {"effort": None, "summary": None}),
        "truncation": "disabled",
        "store": is_stored,
        **{name: defaults.get(name) if data.get(name) is None else data[name] for name in _ECHOED},
    }


def _history(response_id: str | None, recall: Callable[[str], Remembered | None]) -> list[dict[str, Any]]:
    if response_id is None:
        return []
    remembered = recall(response_id)
    if remembered is None:
        raise ApiError(
            404,
            f"previous_response_id: response {response_id!r} is not stored (any more); send the whole input instead",
            "previous_response_not_found",
            "previous_response_id",
        )
    return remembered.messages


def _conversation(data: dict[str, Any], messages: list[dict[str, Any]]) -> Conversation:
    instructions = value_of(data, "instructions", str)
    system = [{"role": "system", "content": instructions}] if instructions else []
    effort = check_effort(value_of(value_of(data, "reasoning", dict, {}), "effort", str))
    enable_thinking, clear_thinking = thinking_switches(data)
    return Conversation(
        messages=[*system, *messages],
        tools=_parse_tools(value_of(data, "tools", list)),
        choice=check_choice(data.get("tool_choice"), value_of(data, "parallel_tool_calls", bool, True)),
        schema=check_format(value_of(data, "text", dict, {}), "format"),
        enable_thinking=effort if enable_thinking is None else enable_thinking,
        clear_thinking=clear_thinking,
    )


def _parse_tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Function tools in the form of chat completions."""
    wrapped = []
    for index, tool in enumerate(tools or []):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise ApiError(
                400, f"tools[{index}]: only tools of type function can be used, got {kind!r}", "unsupported", "tools"
            )
        wrapped.append({"type": "function", "function": {key: tool[key] for key in tool if key != "type"}})
    return check_tools(wrapped)


def _parse_input(data: str | list[Any]) -> list[dict[str, Any]]:
    """Messages of input items; items that belong to one assistant turn become one message."""
    if isinstance(data, str):
        return [{"role": "user", "content": data}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(data):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise ApiError(400, f"{where}: expected an object", "invalid_type", "input")
        kind = value_of(item, "type", str, "message")
        if kind == "message":
            content, role = _text(item.get("content"), f"{where}.content"), value_of(item, "role", str, required=True)
            if role != "assistant":
                messages.append({"role": role, "content": content})
            else:
                turn = _assistant(messages)
                turn["content"] = (turn["content"] or "") + content
        elif kind == "reasoning":
            text = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})
        elif kind == "function_call":
            function = {name: value_of(item, name, str, required=True) for name in ("name", "arguments")}
            _assistant(messages).setdefault("tool_calls", []).append({"type": "function", "function": function})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": _text(item.get("output"), f"{where}.output")})
        else:
            raise ApiError(400, f"{where}: items of type {kind!r} are not supported", "unsupported", "input")
    return messages


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message at the end, a new one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    """Text of a string or of a list of text parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in _TEXT_PARTS]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise ApiError(
            400, f"{where}: expected a text or text parts; nothing else is supported", "unsupported", "input"
        )
    return "".join(texts)


_CONTENT_TYPES = {"reasoning": "reasoning_text", "content": "output_text"}
_PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc"}


def _item_id(part: Part) -> str:
    return f"{_PREFIXES[part.kind]}_{part.token}"


def _place(part: Part) -> dict[str, Any]:
    return {"item_id": _item_id(part), "output_index": part.index, "content_index": 0}


def _content(part: Part, text: str) -> dict[str, Any]:
    content: dict[str, Any] = {"type": _CONTENT_TYPES[part.kind], "text": text}
    return {**content, "annotations": [], "logprobs": []} if part.kind == "content" else content


def _item(part: Part, status: str, text: str | None = None) -> dict[str, Any]:
    """The output item of ``part``, with its present text unless ``text`` is given."""
    text = part.text if text is None else text
    item: dict[str, Any] = {"id": _item_id(part), "status": status}
    contents = [_content(part, text)] if part.kind != "call" and (text or status != "in_progress") else []
    if part.kind == "call":
        return {**item, "type": "function_call", "call_id": f"call_{part.token}", "name": part.name, "arguments": text}
    if part.kind == "reasoning":
        return {**item, "type": "reasoning", "summary": [], "content": contents}
    return {**item, "type": "message", "role": "assistant", "content": contents}


def _status(answer: Answer, part: Part) -> str:
    """Only the last item of an answer that ran out of tokens is incomplete."""
    is_cut = answer.finish_reason == "length" and part is answer.parts[-1]
    return "incomplete" if is_cut else "completed"


def _usage(run: Run) -> dict[str, Any]:
    return {
        "input_tokens": run.prompt_tokens,
        "input_tokens_details": {"cached_tokens": run.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": run.output_tokens,
        "output_tokens_details": {"reasoning_tokens": run.reasoning_tokens},
        "total_tokens": run.prompt_tokens + run.output_tokens,
    }
