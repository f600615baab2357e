"""Model output → reasoning, content and tool calls, whole or in pieces.

``parse_message`` is the stream parser fed once, so streaming and not streaming cannot differ. The grammar, after a
generation prompt that ends with ``<think>`` (thinking) or ``</think>`` (no thinking)::

    reasoning </think> content <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call> content

Invariants:

- No text is lost. What does not form a call (no name, a key without a value, words between arguments, a repeated key)
  becomes content, or stays reasoning when it stood there.
- ``<tool_call>`` ends reasoning as ``</think>`` does, once a call really follows.
- The argument deltas of a call concatenate to ``json.dumps(arguments, ensure_ascii=False)``, however the text is cut
  into pieces and wherever it ends. A value that ends with the text is kept as far as it goes.
- A value is a string unless the tool's schema names another type for that key and the text is JSON of that type.
- One role token or ``<|endoftext|>`` at the very end is the stop token and is dropped.

String values are passed on as they arrive; the others are held until they are complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

from glm5.tokenizer.schema import ArgumentTypes, coerce

DeltaKind = Literal["reasoning", "content", "tool_call_start", "tool_call_arguments"]

STOP_TEXTS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_JSON = json.JSONEncoder(ensure_ascii=False)
_RAW_KEY, _RAW_KEY_END, _RAW_VALUE, _RAW_VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_CALL, _CALL_END, _THINK, _THINK_END = "<tool_call>", "</tool_call>", "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Delta:
    """One increment of a message."""

    kind: DeltaKind
    text: str
    """Text to append: reasoning, content or argument JSON; "" for ``tool_call_start``."""
    index: int | None = None
    """Number of the tool call, from 0; None for text."""
    name: str | None = None
    """Function name, on ``tool_call_start`` only."""
    ends_call: bool = False
    """Whether the arguments are complete."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A complete tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """An assistant message."""

    reasoning: str
    content: str
    tool_calls: list[ParsedToolCall]


class _State(Enum):
    OPENING = auto()  # before the first character: a tag that repeats the prompt's is dropped
    REASONING = auto()
    CONTENT = auto()
    NAME = auto()  # after <tool_call>
    ARGUMENTS = auto()  # between arguments
    KEY = auto()
    AFTER_KEY = auto()  # between </arg_key> and <arg_value>
    VALUE = auto()


@dataclass(slots=True)
class _Call:
    """The call being read."""

    index: int
    types: ArgumentTypes
    keys: set[str] = field(default_factory=set)
    key: str = ""
    raw_key: str = ""
    """Text from ``<arg_key>`` on, as it stood, in case that it turns out to be no argument."""
    value: str = ""
    """Text of a value that is held until it is complete."""
    gap: str = ""
    """White space between arguments, dropped unless words turn up in it."""
    has_stray_words: bool = False
    """Words turned up since the last argument."""


class StreamParser:
    """Takes sampled text in pieces of any size and yields deltas; ``finish`` ends the message."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None, thinking: bool = True) -> None:
        """``tools`` type the arguments; ``thinking`` tells whether the prompt ended with ``<think>``."""
        self._tools = tools
        self._thinking = thinking
        self._state = _State.OPENING
        self._text_state = _State.REASONING if thinking else _State.CONTENT
        self._held_stop = ""
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._calls = 0
        self._call: _Call | None = None
        self._steps = {
            _State.OPENING: self._read_opening,
            _State.REASONING: self._read_text,
            _State.CONTENT: self._read_text,
            _State.NAME: self._read_name,
            _State.ARGUMENTS: self._read_between_arguments,
            _State.KEY: self._read_key,
            _State.AFTER_KEY: self._read_after_key,
            _State.VALUE: self._read_value,
        }

    def feed(self, piece: str) -> list[Delta]:
        """Deltas that ``piece`` makes certain. Text that may be the start of a tag waits for the next piece."""
        text = self._held_stop + piece
        kept = len(text) - _stop_suffix(text)
        self._held_stop = text[kept:]
        self._buffer += text[:kept]
        return self._run(final=False)

    def finish(self, piece: str = "") -> list[Delta]:
        """The remaining deltas, those of a last ``piece`` included; closes an open call. The parser takes no more
        text."""
        text = self._held_stop + piece
        stop = next((stop for stop in STOP_TEXTS if text.endswith(stop)), "")
        self._buffer += text[: len(text) - len(stop)]
        self._held_stop = ""
        deltas = self._run(final=True)
        self._close_call()
        return deltas + self._drain()

    def _run(self, final: bool) -> list[Delta]:
        while self._steps[self._state](final):
            pass
        return self._drain()

    def _drain(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # Each _read method consumes from the buffer and returns False when it needs more text.

    def _read_opening(self, final: bool) -> bool:
        tag = _THINK if self._thinking else _THINK_END
        if not final and len(self._buffer) < len(tag) and tag.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(tag)
        self._state = self._text_state
        return True

    def _read_text(self, final: bool) -> bool:
        """Reasoning or content, up to the tag that ends it."""
        tags = (_CALL, _THINK_END) if self._state is _State.REASONING else (_CALL,)
        text, tag = self._take_until(tags, final)
        self._emit_text(text)
        if tag == _CALL:
            self._state = _State.NAME
        elif tag == _THINK_END:
            self._state = self._text_state = _State.CONTENT
        return tag is not None

    def _read_name(self, final: bool) -> bool:
        """The name of a call; nothing is certain before the tag that ends it."""
        tags = (_RAW_KEY, _CALL_END, _CALL, *((_THINK_END,) if self._text_state is _State.REASONING else ()))
        position, tag = _find_first(self._buffer, tags)
        if tag is None and not final:
            return False
        raw = self._buffer if tag is None else self._buffer[:position]
        name = raw.strip()
        if tag in (_RAW_KEY, _CALL_END) and name and not any(character.isspace() for character in name):
            self._buffer = self._buffer[position:]
            self._start_call(name)
            return True
        # Not a call: the tag was text of the reasoning or content around it.
        self._emit_text(_CALL + raw)
        self._buffer = self._buffer[len(raw) :]
        self._state = self._text_state
        return bool(self._buffer)

    def _read_between_arguments(self, final: bool) -> bool:
        call = self._open_call()
        text, tag = self._take_until((_RAW_KEY, _CALL_END, _CALL), final)
        call.gap += text
        if call.has_stray_words or call.gap.strip():
            self._emit_content(call.gap)
            call.gap, call.has_stray_words = "", tag is None
        if tag == _RAW_KEY:
            call.gap, call.raw_key = "", _RAW_KEY
            self._state = _State.KEY
        elif tag is not None:
            self._close_call()
            self._state = _State.CONTENT if tag == _CALL_END else _State.NAME
        return tag is not None

    def _read_key(self, final: bool) -> bool:
        """A key; it is held, so that one that never gets a value can be given back as text."""
        call = self._open_call()
        text, tag = self._take_until((_RAW_KEY_END, _RAW_VALUE, _CALL_END), final)
        call.raw_key += text
        if tag == _RAW_KEY_END:
            call.raw_key += tag
            call.key = call.raw_key[len(_RAW_KEY) : -len(_RAW_KEY_END)].strip()
            self._state = _State.AFTER_KEY
        elif tag == _RAW_VALUE:
            call.key = call.raw_key[len(_RAW_KEY) :].strip()
            self._start_value()
        elif tag == _CALL_END or final:
            self._give_back_key(tag)
        return tag is not None

    def _read_after_key(self, final: bool) -> bool:
        call = self._open_call()
        text, tag = self._take_until((_RAW_VALUE, _RAW_KEY, _CALL_END), final)
        call.raw_key += text
        if tag == _RAW_VALUE:
            between = call.raw_key.partition(_RAW_KEY_END)[2]
            if between.strip():
                self._emit_content(between)
            self._start_value()
        elif tag is not None or final:
            self._give_back_key(tag)
        return tag is not None

    def _read_value(self, final: bool) -> bool:
        call = self._open_call()
        text, tag = self._take_until((_RAW_VALUE_END,), final)
        if call.key in call.keys:  # a repeated key: the first value stands, the text is kept
            self._emit_content(text + (tag or ""))
        elif call.types.is_text(call.key):
            self._emit_arguments(_json_characters(text))
        else:
            call.value += text
        if tag is not None or final:
            self._end_value(call)
            self._state = _State.ARGUMENTS
        return tag is not None

    def _start_call(self, name: str) -> None:
        self._call = _Call(self._calls, ArgumentTypes.of_tool(self._tools, name))
        self._deltas.append(Delta("tool_call_start", "", self._calls, name))
        self._calls += 1
        self._text_state = _State.CONTENT
        self._state = _State.ARGUMENTS

    def _start_value(self) -> None:
        call = self._open_call()
        call.value = ""
        self._state = _State.VALUE
        if call.key in call.keys:
            self._emit_content(f"{_RAW_KEY}{call.key}{_RAW_KEY_END}{_RAW_VALUE}")
            return
        opening = ", " if call.keys else "{"
        quote = '"' if call.types.is_text(call.key) else ""
        self._emit_arguments(f"{opening}{_JSON.encode(call.key)}: {quote}")

    def _end_value(self, call: _Call) -> None:
        if call.key in call.keys:
            return
        if call.types.is_text(call.key):
            self._emit_arguments('"')
        else:
            value = coerce(call.value, call.types.of_key(call.key))
            self._emit_arguments(_JSON.encode(value))
        call.keys.add(call.key)

    def _give_back_key(self, tag: str | None) -> None:
        """A key without a value is text; ``tag`` is what came in its place."""
        call = self._open_call()
        self._emit_content(call.raw_key)
        call.raw_key = _RAW_KEY
        self._state = _State.KEY if tag == _RAW_KEY else _State.ARGUMENTS
        if tag == _CALL_END:
            self._close_call()
            self._state = _State.CONTENT

    def _close_call(self) -> None:
        if self._call is not None:
            end = "}" if self._call.keys else "{}"
            self._deltas.append(Delta("tool_call_arguments", end, self._call.index, ends_call=True))
            self._call = None

    def _open_call(self) -> _Call:
        assert self._call is not None, "argument states have a call"
        return self._call

    def _take_until(self, tags: Sequence[str], final: bool) -> tuple[str, str | None]:
        """Text before the first of ``tags``, both consumed; without a tag, the text that cannot be part of one."""
        position, tag = _find_first(self._buffer, tags)
        if tag is None and not final:
            position = len(self._buffer) - _tag_suffix(self._buffer, tags)
        text = self._buffer[:position]
        self._buffer = self._buffer[position + len(tag or "") :]
        return text, tag

    def _emit_text(self, text: str) -> None:
        if text:
            self._deltas.append(Delta("reasoning" if self._text_state is _State.REASONING else "content", text))

    def _emit_content(self, text: str) -> None:
        if text:
            self._deltas.append(Delta("content", text))

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(Delta("tool_call_arguments", text, self._open_call().index))


def parse_message(
    text: str, tools: Sequence[Mapping[str, Any]] | None = None, thinking: bool = True
) -> ParsedMessage:
    """The message that sampled ``text`` spells."""
    return join_deltas(StreamParser(tools, thinking).finish(text))


def join_deltas(deltas: Iterable[Delta]) -> ParsedMessage:
    """The message that ``deltas`` add up to."""
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.kind == "tool_call_start":
            names.append(delta.name or "")
            arguments.append([])
        elif delta.kind == "tool_call_arguments":
            assert delta.index is not None, "argument deltas name their call"
            arguments[delta.index].append(delta.text)
        else:
            texts[delta.kind].append(delta.text)
    calls = [
        ParsedToolCall(name, json.loads("".join(pieces))) for name, pieces in zip(names, arguments, strict=True)
    ]
    return ParsedMessage("".join(texts["reasoning"]), "".join(texts["content"]), calls)


def _find_first(text: str, tags: Sequence[str]) -> tuple[int, str | None]:
    """Position and name of the first of ``tags`` in ``text``; (len(text), None) when there is none."""
    found = [(position, tag) for tag in tags if (position := text.find(tag)) >= 0]
    return min(found) if found else (len(text), None)


def _tag_suffix(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a following piece could complete to one of ``tags``."""
    longest = max(len(tag) for tag in tags) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


def _stop_suffix(text: str) -> int:
    """Length of the end of ``text`` that is, or could become, a stop token at the end of the message."""
    for stop in STOP_TEXTS:
        if text.endswith(stop):
            return len(stop)
    return _tag_suffix(text, STOP_TEXTS)


def _json_characters(text: str) -> str:
    """``text`` as it stands between the quotes of a JSON string."""
    return _JSON.encode(text)[1:-1]
