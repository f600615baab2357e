"""One answer as it arrives: ids become text, text becomes reasoning, content and tool calls. Free of torch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal

from glm5.engine.generation import Generation
from glm5.engine.requests import Chunk
from glm5.records import SamplingParams
from glm5.serve.protocol import ApiError
from glm5.serve.text import Detokenizer, StopText
from glm5.tokenizer.bpe import Tokenizer
from glm5.tokenizer.parse import Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A chat or completion request, checked and rendered."""

    kind: Literal["chat", "text"]
    model: str
    ids: list[int]
    params: SamplingParams
    stops: list[str]
    stream: bool
    include_usage: bool
    wants_logprobs: bool
    wants_token_ids: bool
    session_id: str | None
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True

    def new_id(self) -> str:
        """A fresh identifier of an answer."""
        return f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"


class Answer:
    """The text of one generation as it arrives, and how it ended."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_text = StopText(request.stops)
        self._parser = tokenizer.stream_parser(request.tools, request.thinking) if request.kind == "chat" else None
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.stop_reason: int | str | None = None
        """The stop id or stop string that ended the answer."""
        self.is_finished = False
        self._reason = "length"
        self._has_calls = False

    @property
    def finish_reason(self) -> str:
        """``stop``, ``length`` or ``tool_calls``."""
        return "tool_calls" if self._has_calls and self._reason == "stop" else self._reason

    def feed(self, chunk: Chunk) -> list[Delta]:
        """Deltas of the text that became certain. Raises ApiError 503 when the request was aborted from outside."""
        if chunk.finish_reason == "abort":
            raise ApiError(503, "The request was aborted; send it again", "aborted")
        self.output_ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        visible = chunk.output_ids
        if chunk.finish_reason == "stop":
            self._reason, self.stop_reason = "stop", chunk.output_ids[-1]
            visible = visible[:-1]
        text = self._stop_text.feed(self._detokenizer.feed(visible))
        is_last = chunk.finish_reason is not None
        if is_last:
            text += self._stop_text.feed(self._detokenizer.finish())
            text += self._stop_text.finish()
        if self._stop_text.matched is not None:
            self._reason, self.stop_reason = "stop", self._stop_text.matched
        self.is_finished = is_last or self._stop_text.matched is not None
        return self._parse(text)

    def _parse(self, text: str) -> list[Delta]:
        if self._parser is None:
            return [Delta("content", text)] if text else []
        deltas = self._parser.feed(text) if text else []
        if self.is_finished:
            deltas += self._parser.finish()
        self._has_calls = self._has_calls or any(delta.kind == "tool_call_start" for delta in deltas)
        return deltas

    def logprob_content(self, start: int) -> dict[str, Any]:
        """Log-probs of the ids from ``start`` on, in the chat format."""
        content = []
        for token_id, logprob in zip(self.output_ids[start:], self.logprobs[start:], strict=True):
            token = self._tokenizer.decode([token_id])
            content.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
        return {"content": content}

    def legacy_logprobs(self, start: int) -> dict[str, Any]:
        """Log-probs of the ids from ``start`` on, in the completions format."""
        return {
            "tokens": [self._tokenizer.decode([token_id]) for token_id in self.output_ids[start:]],
            "token_logprobs": self.logprobs[start:],
            "top_logprobs": None,
            "text_offset": [],
        }

    def usage(self, generation: Generation) -> dict[str, Any]:
        """Token counts."""
        prompt, output = len(self._request.ids), len(self.output_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": generation.sequence.cached_tokens},
        }
