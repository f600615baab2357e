"""OpenAI chat completions: the request's body → what the engine needs, an answer → the body or the chunks.

Free of torch. Options that change an answer and that the server does not have are refused with a 400 rather than
ignored.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from glm5.serve.answer import Answer, AnswerRequest, Growth, Part, Piece, Run
from glm5.serve.conversation import (
    Conversation,
    check_choice,
    check_format,
    check_messages,
    check_model,
    check_tools,
    thinking_switches,
)
from glm5.serve.openai import DONE, choice_count, event, new_id, parse_stops, token_logprobs, usage
from glm5.serve.protocol import ApiError, field, sampling
from glm5.tokenizer.bpe import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """How one chat completion is written."""

    request: AnswerRequest
    tokenizer: Tokenizer
    base: dict[str, Any]
    """``id``, ``created`` and ``model`` of every chunk."""
    wants_logprobs: bool
    wants_token_ids: bool
    wants_usage: bool
    """Whether a stream ends with a chunk of token counts."""

    def whole(self, run: Run) -> dict[str, Any]:
        """A ``chat.completion``."""
        body = {
            **self.base,
            "object": "chat.completion",
            "choices": [self._choice(index, answer) for index, answer in enumerate(run.answers)],
            "usage": usage(run),
        }
        return {**body, "prompt_token_ids": self.request.prompts[0]} if self.wants_token_ids else body

    def begin(self, run: Run) -> list[bytes]:
        """The role of every choice."""
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(run.answers))]

    def piece(self, piece: Piece) -> list[bytes]:
        """One chunk for each growth; log-probs and ids of all new tokens are in the first."""
        answer, deltas = piece.answer, [_delta(growth, piece.answer) for growth in piece.growth]
        extra: dict[str, Any] = {}
        if len(answer.output_ids) > piece.start:
            if self.wants_logprobs:
                extra["logprobs"] = {"content": token_logprobs(answer, self.tokenizer, piece.start)}
            if self.wants_token_ids:
                extra["token_ids"] = answer.output_ids[piece.start :]
        if extra and not deltas:
            deltas = [{}]
        chunks = [self._chunk(piece.index, delta, **(extra if i == 0 else {})) for i, delta in enumerate(deltas)]
        if answer.is_finished:
            end = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
            chunks.append(self._chunk(piece.index, {}, **end))
        return chunks

    def end(self, run: Run) -> list[bytes]:
        """Token counts if asked for, and the end mark."""
        body = {**self.base, "object": "chat.completion.chunk", "choices": [], "usage": usage(run)}
        return [event(body), DONE] if self.wants_usage else [DONE]

    def failure(self, error: ApiError) -> list[bytes]:
        """The error in place of the rest."""
        return [event(error.body("")), DONE]

    def _chunk(self, index: int, delta: dict[str, Any], **extra: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **extra}
        return event({**self.base, "object": "chat.completion.chunk", "choices": [choice]})

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": message_of(answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "logprobs": None,
        }
        if self.wants_logprobs:
            choice["logprobs"] = {"content": token_logprobs(answer, self.tokenizer, 0)}
        if self.wants_token_ids:
            choice["token_ids"] = answer.output_ids
        return choice


def parse_chat(data: dict[str, Any], tokenizer: Tokenizer, model: str, max_context: int) -> ChatFormat:
    """Check and render the body of ``/v1/chat/completions``. Raises ApiError or DataError."""
    check_model(data, model)
    for name in ("functions", "function_call", "audio", "prediction", "web_search_options"):
        if data.get(name):
            raise ApiError(400, f"{name}: not supported; leave it out", "unsupported", name)
    enable_thinking, clear_thinking = thinking_switches(data)
    conversation = Conversation(
        messages=check_messages(field(data, "messages", list, required=True)),
        tools=check_tools(field(data, "tools", list)),
        choice=check_choice(data.get("tool_choice"), field(data, "parallel_tool_calls", bool, True)),
        schema=check_format(data, "response_format"),
        enable_thinking=enable_thinking,
        clear_thinking=clear_thinking,
    )
    limit = field(data, "max_completion_tokens", int, field(data, "max_tokens", int, max_context))
    if limit < 1:
        raise ApiError(400, f"max_tokens: got {limit}, expected at least 1", "invalid_request", "max_tokens")
    wants_logprobs, top = field(data, "logprobs", bool, False), field(data, "top_logprobs", int, 0)
    if top and not wants_logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs: true", "invalid_request", "top_logprobs")
    request = AnswerRequest(
        prompts=[conversation.render(tokenizer)],
        params=sampling(data, max_new_tokens=limit, top_logprobs=top, grammar=conversation.grammar(tokenizer)),
        n=choice_count(data),
        stops=parse_stops(data, "stop"),
        tools=conversation.declared_tools,
        thinking=conversation.thinking,
        stream=field(data, "stream", bool, False),
        session_id=field(data, "session_id", str, field(data, "prompt_cache_key", str)),
    )
    return ChatFormat(
        request=request,
        tokenizer=tokenizer,
        base={"id": new_id("chatcmpl"), "created": int(time.time()), "model": model},
        wants_logprobs=wants_logprobs,
        wants_token_ids=field(data, "return_token_ids", bool, False),
        wants_usage=field(field(data, "stream_options", dict, {}), "include_usage", bool, False),
    )


def message_of(answer: Answer) -> dict[str, Any]:
    """The assistant message of an answer."""
    reasoning, content = answer.text_of("reasoning"), answer.text_of("content")
    calls = [_call(part, part.text) for part in answer.parts if part.kind == "call"]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"tool_calls": calls, "content": content or None}
    return message


def _call(part: Part, arguments: str) -> dict[str, Any]:
    function = {"name": part.name, "arguments": arguments}
    return {"id": f"call_{part.token}", "type": "function", "function": function}


def _delta(growth: Growth, answer: Answer) -> dict[str, Any]:
    part = growth.part
    if part.kind != "call":
        return {"reasoning_content" if part.kind == "reasoning" else "content": growth.text}
    number = sum(other.kind == "call" for other in answer.parts[: part.index])
    if growth.is_first:
        return {"tool_calls": [{"index": number, **_call(part, "")}]}
    return {"tool_calls": [{"index": number, "function": {"arguments": growth.text}}]}
