"""One answer as it arrives: ids become text, text becomes parts. Free of torch, and of any dialect of the API.

An answer is a list of *parts* in order: reasoning, content, tool calls. A part is complete before the next one begins;
text that the model wrote inside a tool call, which the parser gives out at once, waits for the end of the call. Every
dialect writes its answer from the parts and its events from their growth, so that a streamed answer adds up to the
whole one by construction, however the text was cut into pieces.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from glm5.dialects.protocol import ApiError, to_api_error
from glm5.dialects.text import Detokenizer, StopText
from glm5.errors import Glm5Error
from glm5.records import Chunk, Completion, SamplingParams, TopLogprobs
from glm5.tokenizer.bpe import Tokenizer
from glm5.tokenizer.parse import Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """What a request of any dialect asks of the engine, checked and rendered."""

    prompts: list[list[int]]
    """Ids of each prompt; more than one in completions only."""
    params: SamplingParams
    n: int = 1
    """Answers to each prompt."""
    stops: list[str] = field(default_factory=list)
    """Texts that end an answer."""
    is_chat: bool = True
    """Whether the text is parsed into reasoning, content and tool calls."""
    tools: list[dict[str, Any]] | None = None
    """Declared tools, in the form of chat completions."""
    thinking: bool = True
    """Whether the answer begins with reasoning."""
    stream: bool = False
    session_id: str | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(12))
    """Text that the identifiers of the answer are made of."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds that the answer carries."""

    def nth_params(self, number: int) -> SamplingParams:
        """Sampling of answer ``number`` to a prompt: a given seed counts up, so that the answers differ."""
        if number == 0 or self.params.seed is None:
            return self.params
        return replace(self.params, seed=self.params.seed + number)


PartKind = Literal["reasoning", "content", "call"]


@dataclass(slots=True, eq=False)
class Part:
    """A piece of an answer that grows until the next one begins."""

    index: int
    kind: PartKind
    name: str = ""
    """Function of a call."""
    token: str = ""
    """Text that the identifier of the part is made of, unique in the request."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Reasoning, content, or the arguments of a call as JSON."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Growth:
    """``text`` was added to ``part``."""

    part: Part
    text: str
    is_first: bool
    """True when the part has just begun."""


class Answer:
    """The parts of one generation, and how it ended."""

    def __init__(self, request: AnswerRequest, tokenizer: Tokenizer, number: int = 0) -> None:
        """``number`` counts the answers to one request."""
        self._token = f"{request.token}{number:02x}"
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_text = StopText(request.stops)
        self._parser = tokenizer.stream_parser(request.tools, request.thinking) if request.is_chat else None
        self._thinking = request.is_chat and request.thinking
        self.parts: list[Part] = []
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.stop_reason: int | str | None = None
        """The stop id or stop string that ended the answer."""
        self.is_finished = False
        self._reason: Literal["stop", "length"] = "length"
        self._is_in_call = False
        self._held = ""

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why the answer ended, in the words of chat completions."""
        has_calls = any(part.kind == "call" for part in self.parts)
        return "tool_calls" if has_calls and self._reason == "stop" else self._reason

    @property
    def reasoning_tokens(self) -> int:
        """Output ids up to the end of the reasoning."""
        if not self._thinking:
            return 0
        end = self._tokenizer.special_id("</think>")
        if end in self.output_ids:
            return self.output_ids.index(end) + 1
        return len(self.output_ids) if all(part.kind == "reasoning" for part in self.parts) else 0

    def text_of(self, kind: PartKind) -> str:
        """All text of the parts of ``kind``."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    def feed(self, chunk: Chunk) -> list[Growth]:
        """What became certain. Raises ApiError 503 when the request was aborted from outside."""
        if chunk.finish_reason == "abort":
            raise ApiError(503, "The request was aborted; send it again", "aborted")
        self.output_ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        self.top_logprobs += chunk.top_logprobs
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
        return [item for delta in self._parse(text) for item in self._place(delta)]

    def _parse(self, text: str) -> list[Delta]:
        if self._parser is None:
            return [Delta("content", text)] if text else []
        if self.is_finished:
            return self._parser.finish(text)
        return self._parser.feed(text) if text else []

    def _place(self, delta: Delta) -> list[Growth]:
        if delta.kind == "tool_call_start":
            self._is_in_call = True
            return [Growth(self._add("call", delta.name or ""), "", is_first=True)]
        if delta.kind == "tool_call_arguments":
            growth = [self._grow("call", delta.text)]
            return growth + self._release() if delta.ends_call else growth
        if self._is_in_call:
            self._held += delta.text
            return []
        return [self._grow(delta.kind, delta.text)]

    def _release(self) -> list[Growth]:
        """The open call is over: give out what waited for its end."""
        held, self._held, self._is_in_call = self._held, "", False
        return [self._grow("content", held)] if held else []

    def _add(self, kind: PartKind, name: str = "") -> Part:
        index = len(self.parts)
        self.parts.append(Part(index, kind, name, f"{self._token}{index:02x}"))
        return self.parts[-1]

    def _grow(self, kind: PartKind, text: str) -> Growth:
        is_first = not self.parts or self.parts[-1].kind != kind
        if is_first:
            self._add(kind)
        self.parts[-1].pieces.append(text)
        return Growth(self.parts[-1], text, is_first)


class Progress(Protocol):
    """What is known of a running generation beside its chunks."""

    cached_tokens: int
    top_logprobs: list[TopLogprobs]


class Source(Protocol):
    """What a run needs of the engine's ``Generation``."""

    sequence: Any
    """A ``Progress``; the engine's knows more."""

    def stream(self, timeout_s: float) -> Any:
        """Async generator of chunks."""

    async def wait(self, timeout_s: float) -> Completion:
        """The whole."""

    def abort(self) -> None:
        """Stop it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one chunk added to the answer ``index`` of a run."""

    index: int
    answer: Answer
    growth: list[Growth]
    start: int
    """Output ids that the answer had before."""


class Answers:
    """The answers to one request and their counts: what a dialect writes."""

    def __init__(self, request: AnswerRequest, tokenizer: Tokenizer, count: int = 1, cached_tokens: int = 0) -> None:
        self.request = request
        self.answers = [Answer(request, tokenizer, number) for number in range(count)]
        self._cached_tokens = cached_tokens

    @property
    def prompt_tokens(self) -> int:
        """Ids of all prompts, each counted once."""
        return sum(len(ids) for ids in self.request.prompts)

    @property
    def cached_tokens(self) -> int:
        """Prompt ids whose keys were found, in the first answer to each prompt."""
        return self._cached_tokens

    @property
    def output_tokens(self) -> int:
        """Ids sampled for all answers."""
        return sum(len(answer.output_ids) for answer in self.answers)

    @property
    def reasoning_tokens(self) -> int:
        """Those of them that belong to reasoning."""
        return sum(answer.reasoning_tokens for answer in self.answers)


class Run(Answers):
    """The answers to one request, from the generations that produce them."""

    def __init__(
        self, request: AnswerRequest, tokenizer: Tokenizer, sources: list[Source], timeout_s: float = 3600.0
    ) -> None:
        super().__init__(request, tokenizer, len(sources))
        self.sequences = [source.sequence for source in sources]
        self._sources, self._timeout_s = sources, timeout_s

    @property
    def cached_tokens(self) -> int:
        """Prompt ids whose keys were found, in the first answer to each prompt."""
        return sum(sequence.cached_tokens for sequence in self.sequences[:: self.request.n])

    def abort(self) -> None:
        """Stop what still runs."""
        for source in self._sources:
            source.abort()

    async def finish(self) -> None:
        """Read all answers to their ends. Raises the first one's EngineError; the others are then aborted."""
        try:
            if self.request.stops:  # a stop string ends the answer early
                async with aclosing(self.pieces()) as pieces:
                    async for _ in pieces:
                        continue
                return
            for answer, source in zip(self.answers, self._sources, strict=True):
                answer.feed(_as_chunk(await source.wait(self._timeout_s), source.sequence))
        finally:
            self.abort()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces of all answers as they arrive. Raises the first EngineError; leaving early aborts the rest."""
        chunks = self._chunks_of(0) if len(self._sources) == 1 else self._merged()
        try:
            async with aclosing(chunks):
                # An answer grows only here, when its last piece has been written: a piece tells what is new in it.
                async for index, chunk in chunks:
                    answer = self.answers[index]
                    if not answer.is_finished:
                        start = len(answer.output_ids)
                        piece = Piece(index, answer, answer.feed(chunk), start)
                        if answer.is_finished:  # perhaps by a stop string, of which the engine knows nothing
                            self._sources[index].abort()
                        yield piece
                    if all(answer.is_finished for answer in self.answers):
                        return
        finally:
            self.abort()

    async def _chunks_of(self, index: int) -> AsyncGenerator[tuple[int, Chunk], None]:
        async with aclosing(self._sources[index].stream(self._timeout_s)) as chunks:
            async for chunk in chunks:
                yield index, chunk

    async def _merged(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue()

        async def read(index: int) -> None:
            try:
                async with aclosing(self._chunks_of(index)) as chunks:
                    async for chunk in chunks:
                        queue.put_nowait(chunk)
                queue.put_nowait(None)
            except Glm5Error as error:
                queue.put_nowait(error)

        readers = [asyncio.create_task(read(index)) for index in range(len(self._sources))]
        try:
            running = len(readers)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


def _as_chunk(completion: Completion, sequence: Progress) -> Chunk:
    return Chunk(
        output_ids=completion.output_ids,
        logprobs=completion.logprobs,
        weight_versions=completion.weight_versions,
        finish_reason=completion.finish_reason,
        top_logprobs=sequence.top_logprobs,
    )


class Format(Protocol):
    """A dialect's way of writing the answers to one request."""

    request: AnswerRequest

    def whole(self, run: Answers) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def begin(self, run: Answers) -> list[bytes]:
        """Events before the first piece."""

    def piece(self, piece: Piece) -> list[bytes]:
        """Events of one piece."""

    def end(self, run: Answers) -> list[bytes]:
        """Events after the last piece."""

    def failure(self, error: ApiError) -> list[bytes]:
        """Events of a stream that cannot go on."""


async def answer_whole(form: Format, run: Run) -> dict[str, Any]:
    """The body of an answer. Raises the run's EngineError."""
    await run.finish()
    return form.whole(run)


async def answer_events(form: Format, run: Run) -> AsyncGenerator[bytes, None]:
    """Server-sent events of an answer. Raises the run's EngineError before the first event; later it is an event."""
    has_begun = False
    try:
        async with aclosing(run.pieces()) as pieces:
            async for piece in pieces:
                events = [] if has_begun else form.begin(run)
                has_begun = True
                events += form.piece(piece)
                if events:
                    yield b"".join(events)
        yield b"".join(form.end(run))
    except Glm5Error as error:
        if not has_begun:
            raise
        yield b"".join(form.failure(to_api_error(error)))
