"""OpenAI completions: raw text in, raw text out; several prompts and several answers to each. Free of torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from glm5.serve.answer import Answer, AnswerRequest, Piece, Run
from glm5.serve.conversation import check_model
from glm5.serve.openai import DONE, choice_count, event, new_id, parse_stops, usage
from glm5.serve.protocol import ApiError, field, sampling
from glm5.tokenizer.bpe import Tokenizer

_MAX_PROMPTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormat:
    """How one completion is written."""

    request: AnswerRequest
    tokenizer: Tokenizer
    base: dict[str, Any]
    """``id``, ``object``, ``created`` and ``model`` of every chunk."""
    wants_logprobs: bool
    wants_token_ids: bool
    wants_usage: bool
    """Whether a stream ends with a chunk of token counts."""

    def whole(self, run: Run) -> dict[str, Any]:
        """A ``text_completion``."""
        choices = []
        for index, answer in enumerate(run.answers):
            end = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
            choices.append(self._choice(index, answer, answer.text_of("content"), 0, end))
        return {**self.base, "choices": choices, "usage": usage(run)}

    def begin(self, run: Run) -> list[bytes]:
        """Nothing."""
        return []

    def piece(self, piece: Piece) -> list[bytes]:
        """One chunk of text, log-probs and ids; the last one carries the finish reason."""
        answer = piece.answer
        text = "".join(growth.text for growth in piece.growth)
        end = {"finish_reason": None, "stop_reason": None}
        if answer.is_finished:
            end = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        elif not (text or self.wants_logprobs or self.wants_token_ids):
            return []
        return [event({**self.base, "choices": [self._choice(piece.index, answer, text, piece.start, end)]})]

    def end(self, run: Run) -> list[bytes]:
        """Token counts if asked for, and the end mark."""
        return [event({**self.base, "choices": [], "usage": usage(run)}), DONE] if self.wants_usage else [DONE]

    def failure(self, error: ApiError) -> list[bytes]:
        """The error in place of the rest."""
        return [event(error.body("")), DONE]

    def _choice(self, index: int, answer: Answer, text: str, start: int, end: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, **end}
        if self.wants_logprobs:
            choice["logprobs"] = self._logprobs(answer, start)
        if self.wants_token_ids:
            prompt = self.request.prompts[index // self.request.n]
            choice |= {"token_ids": answer.output_ids[start:], "prompt_token_ids": prompt}
        return choice

    def _logprobs(self, answer: Answer, start: int) -> dict[str, Any]:
        tokens = [self.tokenizer.decode([token_id]) for token_id in answer.output_ids]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        tops = [{self.tokenizer.decode([i]): value for i, value in top} for top in answer.top_logprobs[start:]]
        return {
            "tokens": tokens[start:],
            "token_logprobs": answer.logprobs[start:],
            "top_logprobs": tops or None,
            "text_offset": offsets[start:-1],
        }


def parse_completion(data: dict[str, Any], tokenizer: Tokenizer, model: str) -> CompletionFormat:
    """Check and encode the body of ``/v1/completions``. Raises ApiError."""
    check_model(data, model)
    for name in ("echo", "suffix"):
        if data.get(name):
            raise ApiError(400, f"{name}: not supported; leave it out", "unsupported", name)
    n = choice_count(data)
    if field(data, "best_of", int, n) != n:
        raise ApiError(400, "best_of: only the value of n is supported; leave it out", "unsupported", "best_of")
    max_tokens = field(data, "max_tokens", int, 16)
    if max_tokens < 1:
        raise ApiError(400, f"max_tokens: got {max_tokens}, expected at least 1", "invalid_request", "max_tokens")
    logprobs = field(data, "logprobs", int)
    request = AnswerRequest(
        prompts=_parse_prompts(field(data, "prompt", (str, list), required=True), tokenizer),
        params=sampling(data, max_new_tokens=max_tokens, top_logprobs=logprobs or 0),
        n=n,
        stops=parse_stops(data, "stop"),
        is_chat=False,
        thinking=False,
        stream=field(data, "stream", bool, False),
        session_id=field(data, "session_id", str),
    )
    return CompletionFormat(
        request=request,
        tokenizer=tokenizer,
        base={"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": model},
        wants_logprobs=logprobs is not None,
        wants_token_ids=field(data, "return_token_ids", bool, False),
        wants_usage=field(field(data, "stream_options", dict, {}), "include_usage", bool, False),
    )


def _parse_prompts(prompt: str | list[Any], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each prompt: a text, a list of ids, or a list of either."""
    is_one = isinstance(prompt, str) or all(type(item) is int for item in prompt)
    prompts = [prompt] if is_one else prompt
    if len(prompts) > _MAX_PROMPTS:
        raise ApiError(400, f"prompt: at most {_MAX_PROMPTS} prompts a request", "invalid_request", "prompt")
    ids = []
    for item in prompts:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(part) is int for part in item)):
            raise ApiError(400, "prompt: expected texts or lists of token ids", "invalid_request", "prompt")
        ids.append(tokenizer.encode(item) if isinstance(item, str) else item)
    return ids
