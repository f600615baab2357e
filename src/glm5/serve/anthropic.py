"""Anthropic messages: content blocks → messages, parts of an answer → content blocks and their events. Free of torch.

Thinking follows the model's default (on) unless ``thinking`` says ``disabled``; a budget is accepted and not enforced.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from glm5.serve.answer import Answer, AnswerRequest, Growth, Part, Piece, Run
from glm5.serve.conversation import Conversation, ToolChoice, check_model, check_tools, thinking_switches
from glm5.serve.openai import new_id, parse_stops
from glm5.serve.protocol import ApiError, dump, field, sampling
from glm5.tokenizer.bpe import Tokenizer

_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


@dataclass(slots=True, kw_only=True)
class MessageFormat:
    """How one message is written."""

    request: AnswerRequest
    model: str
    id: str
    _open: Part | None = None

    def whole(self, run: Run) -> dict[str, Any]:
        """A ``message``."""
        answer = run.answers[0]
        content = [_block(part, part.text) for part in answer.parts]
        return {**self._message(), "content": content, **_stop(answer), "usage": _usage(run)}

    def begin(self, run: Run) -> list[bytes]:
        """The message without content."""
        counts = {**_usage(run), "output_tokens": 0}
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
        return [_event("message_start", message=message)]

    def piece(self, piece: Piece) -> list[bytes]:
        """Growth of content blocks; a block ends where the next begins."""
        events = []
        for growth in piece.growth:
            if growth.is_first:
                events += self._close()
                self._open = growth.part
                block = _block(growth.part, "")
                events.append(_event("content_block_start", index=growth.part.index, content_block=block))
            if growth.text:
                events.append(_event("content_block_delta", index=growth.part.index, delta=_delta(growth)))
        return events

    def end(self, run: Run) -> list[bytes]:
        """End of the last block, how the answer ended, and the end mark."""
        ending = _event("message_delta", delta=_stop(run.answers[0]), usage=_usage(run))
        return [*self._close(), ending, _event("message_stop")]

    def failure(self, error: ApiError) -> list[bytes]:
        """The error in place of the rest."""
        body = error.body("/v1/messages")
        return [_event("error", error=body["error"])]

    def _message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _close(self) -> list[bytes]:
        part, self._open = self._open, None
        if part is None:
            return []
        events = [_event("content_block_stop", index=part.index)]
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _signature(part.text)}
            events.insert(0, _event("content_block_delta", index=part.index, delta=delta))
        return events


def parse_message(data: dict[str, Any], tokenizer: Tokenizer, model: str) -> MessageFormat:
    """Check and render the body of ``/v1/messages``. Raises ApiError or DataError."""
    conversation = _conversation(data, model)
    limit = field(data, "max_tokens", int, required=True)
    if limit < 1:
        raise ApiError(400, f"max_tokens: got {limit}, expected at least 1", "invalid_request", "max_tokens")
    request = AnswerRequest(
        prompts=[conversation.render(tokenizer)],
        params=sampling(data, max_new_tokens=limit, grammar=conversation.grammar(tokenizer)),
        stops=parse_stops(data, "stop_sequences"),
        tools=conversation.declared_tools,
        thinking=conversation.thinking,
        stream=field(data, "stream", bool, False),
        session_id=field(field(data, "metadata", dict, {}), "user_id", str),
    )
    return MessageFormat(request=request, model=model, id=new_id("msg").replace("-", "_"))


def count_tokens(data: dict[str, Any], tokenizer: Tokenizer, model: str) -> dict[str, Any]:
    """The answer of ``/v1/messages/count_tokens``. Raises ApiError or DataError."""
    return {"input_tokens": len(_conversation(data, model).render(tokenizer))}


def _conversation(data: dict[str, Any], model: str) -> Conversation:
    check_model(data, model)
    system = _text(field(data, "system", (str, list)), "system")
    messages = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(field(data, "messages", list, required=True)):
        if not isinstance(message, dict):
            raise ApiError(400, f"messages[{index}]: expected an object", "invalid_type", "messages")
        messages += _parse_turn(message, f"messages[{index}]")
    if not any(message["role"] != "system" for message in messages):
        raise ApiError(400, "messages: empty; send at least one message", "invalid_request", "messages")
    enable_thinking, clear_thinking = thinking_switches(data)
    return Conversation(
        messages=messages,
        tools=_parse_tools(field(data, "tools", list)),
        choice=_parse_choice(field(data, "tool_choice", dict, {})),
        schema=_parse_format(field(field(data, "output_config", dict, {}), "format", dict)),
        enable_thinking=enable_thinking,
        clear_thinking=clear_thinking,
    )


def _parse_turn(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Messages of one turn: an assistant turn is one, a user turn may carry tool results before its text."""
    role, content = field(message, "role", str, required=True), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where}.role: got {role!r}, expected user or assistant", "invalid_request", "messages")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ApiError(400, f"{where}.content: expected a text or a list of blocks", "invalid_type", "messages")
    if role == "assistant":
        return [_parse_assistant(blocks, where)]
    results = [block for block in blocks if block.get("type") == "tool_result"]
    texts = [block for block in blocks if block.get("type") != "tool_result"]
    turn = [{"role": "tool", "content": _text(block.get("content"), f"{where}.tool_result")} for block in results]
    return [*turn, {"role": role, "content": _text(texts, where)}] if texts or not results else turn


def _parse_assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + field(block, "thinking", str, "")
        elif kind == "tool_use":
            function = {
                "name": field(block, "name", str, required=True),
                "arguments": field(block, "input", dict, {}),
            }
            message.setdefault("tool_calls", []).append({"type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(block)
    return {**message, "content": _text(texts, where)}


def _text(content: Any, where: str) -> str:
    """Text of a string, None ("") or a list of text blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for block in content if isinstance(content, list) else [content]:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise ApiError(400, f"{where}: got a block of type {kind!r}; only text is supported here", "unsupported")
        texts.append(text)
    return "".join(texts)


def _parse_tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Custom tools in the form of chat completions."""
    wrapped = []
    for index, tool in enumerate(tools or []):
        kind = tool.get("type") if isinstance(tool, dict) else "?"
        if kind not in (None, "custom"):
            raise ApiError(400, f"tools[{index}]: only custom tools can be used, got {kind!r}", "unsupported")
        function = {key: tool[key] for key in ("name", "description", "strict") if key in tool}
        wrapped.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}})
    return check_tools(wrapped)


def _parse_choice(choice: dict[str, Any]) -> ToolChoice:
    kind = field(choice, "type", str, "auto")
    if kind not in _CHOICES:
        raise ApiError(400, f"tool_choice.type: got {kind!r}, expected {', '.join(_CHOICES)}", "invalid_request")
    name = field(choice, "name", str, required=True) if kind == "tool" else None
    is_parallel = not field(choice, "disable_parallel_tool_use", bool, False) and name is None
    return ToolChoice(mode=_CHOICES[kind], name=name, parallel=is_parallel)


def _parse_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise ApiError(400, "output_config.format: expected type json_schema and a schema", "invalid_request")
    return wanted["schema"]


def _event(kind: str, **body: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + dump({"type": kind, **body}) + b"\n\n"


def _block(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "call":
        arguments = json.loads(text) if text else {}
        return {"type": "tool_use", "id": f"toolu_{part.token}", "name": part.name, "input": arguments}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": _signature(text) if text else ""}
    return {"type": "text", "text": text}


def _delta(growth: Growth) -> dict[str, Any]:
    if growth.part.kind == "call":
        return {"type": "input_json_delta", "partial_json": growth.text}
    if growth.part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": growth.text}
    return {"type": "text_delta", "text": growth.text}


def _signature(thinking: str) -> str:
    """Clients send it back with the block and drop blocks without one; nothing here reads it."""
    return hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).hexdigest()


def _stop(answer: Answer) -> dict[str, Any]:
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason]
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(run: Run) -> dict[str, Any]:
    """Anthropic counts cached input apart."""
    return {
        "input_tokens": run.prompt_tokens - run.cached_tokens,
        "cache_read_input_tokens": run.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": run.output_tokens,
        "output_tokens_details": {"thinking_tokens": run.reasoning_tokens},
    }
