"""A turn as its client reads it, in the dialect of its request.

The engine is always asked for ids, without streaming, because streamed text loses the exact ids; events are made from
the whole answer. Nothing of the written form is stored: the request, which a retry repeats, and the recorded ids give
the same bytes again.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from glm5.dialects.answer import Answers, Format, Growth, Part, Piece
from glm5.dialects.chat import message_of
from glm5.dialects.protocol import dump
from glm5.gateway.upstream import Generation
from glm5.records import Chunk
from glm5.tokenizer.bpe import Tokenizer


class Reply:
    """One finished answer."""

    def __init__(self, form: Format, tokenizer: Tokenizer, generation: Generation) -> None:
        self.is_stream = form.request.stream
        self._form = form
        self._answers = Answers(form.request, tokenizer, cached_tokens=generation.cached_tokens)
        self._answers.answers[0].feed(Chunk(
            output_ids=generation.output_ids, logprobs=generation.logprobs, weight_versions=generation.versions,
            finish_reason=generation.finish_reason))

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of chat completions."""
        return message_of(self._answers.answers[0])

    @cached_property
    def content(self) -> bytes:
        """The body of the answer: JSON, or all events of the stream."""
        form, answers = self._form, self._answers
        if not self.is_stream:
            return dump(form.whole(answers))
        answer = answers.answers[0]
        piece = Piece(0, answer, [growth for part in answer.parts for growth in _at_once(part)], 0)
        return b"".join([*form.begin(answers), *form.piece(piece), *form.end(answers)])


def _at_once(part: Part) -> list[Growth]:
    """The whole part in as few events as clients accept: a call begins before its arguments come."""
    if part.kind == "call":
        return [Growth(part, "", is_first=True), Growth(part, part.text, is_first=False)]
    return [Growth(part, part.text, is_first=True)]
