"""Output of models with a chat template of their own → reasoning, content and tool calls, whole or in pieces.

What such models write differs by family; the parser reads the two forms that most of them share:

- ``<tool_call>`` and ``</tool_call>`` around a JSON object ``{"name": ..., "arguments": {...}}`` or a list of these
  (Qwen, Hermes, SmolLM); ``parameters`` stands for ``arguments`` as well;
- an answer that is nothing but such an object naming a declared tool (Llama).

Reasoning is what stands between ``<think>`` and ``</think>`` at the start of an answer; the opening tag may be part of
the prompt. As in ``parse``, no text is lost: what does not form a call stays content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.tokenizer.parse import Delta, StreamParser

_CALL, _CALL_END, _THINK, _THINK_END = "<tool_call>", "</tool_call>", "<think>", "</think>"


class JsonCallParser(StreamParser):
    """Takes sampled text in pieces of any size and yields deltas; ``finish`` ends the message."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None, in_reasoning: bool = False) -> None:
        """``in_reasoning`` tells whether the prompt ended with ``<think>``."""
        self._names = {(tool.get("function") or tool).get("name") for tool in tools or ()}
        self._in_reasoning = in_reasoning
        self._has_begun = in_reasoning
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._calls = 0

    def feed(self, piece: str) -> list[Delta]:
        """Deltas that ``piece`` makes certain. Text that may become a tag or a call waits for what follows."""
        self._buffer += piece
        return self._run(final=False)

    def finish(self, piece: str = "") -> list[Delta]:
        """The remaining deltas, those of a last ``piece`` included. The parser takes no more text."""
        self._buffer += piece
        return self._run(final=True)

    def _run(self, final: bool) -> list[Delta]:
        while self._read_opening(final) and (self._read_reasoning(final) or self._read_call(final)):
            continue
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read_opening(self, final: bool) -> bool:
        """What the answer begins with decides how it is read; False while that is open."""
        if self._has_begun:
            return True
        start = self._buffer.lstrip()
        if not final and (not start or _THINK.startswith(start)):
            return False
        if start.startswith("{") and self._names:
            if final and (calls := _read_calls(start)) and {call["name"] for call in calls} <= self._names:
                self._emit_calls(calls)
                self._buffer = ""
            if not final:
                return False
        elif start.startswith(_THINK):
            self._buffer, self._in_reasoning = start.removeprefix(_THINK), True
        self._has_begun = True
        return True

    def _read_reasoning(self, final: bool) -> bool:
        if not self._in_reasoning:
            return False
        text, is_found = self._take_until(_THINK_END, final)
        self._emit("reasoning", text)
        self._in_reasoning = not is_found
        return is_found

    def _read_call(self, final: bool) -> bool:
        """Content up to the next call, and the call; False when more text is needed."""
        if self._in_reasoning:
            return False
        if not self._buffer.startswith(_CALL):
            position = self._buffer.find(_CALL)
            end = position if position >= 0 else len(self._buffer) - (0 if final else _suffix(self._buffer, _CALL))
            self._emit("content", self._buffer[:end])
            self._buffer = self._buffer[end:]
            if position < 0:
                return False
        body, closed, rest = self._buffer.removeprefix(_CALL).partition(_CALL_END)
        if not closed and not final:
            return False
        if calls := _read_calls(body):
            self._emit_calls(calls)
        else:
            self._emit("content", _CALL + body + closed)
        self._buffer = rest
        return bool(rest)

    def _take_until(self, tag: str, final: bool) -> tuple[str, bool]:
        """Text before ``tag``, both consumed; without the tag, the text that cannot be part of it."""
        text, found, rest = self._buffer.partition(tag)
        if not found and not final:
            cut = len(text) - _suffix(text, tag)
            text, rest = text[:cut], text[cut:]
        self._buffer = rest
        return text, bool(found)

    def _emit(self, kind: str, text: str) -> None:
        if text:
            self._deltas.append(Delta("reasoning" if kind == "reasoning" else "content", text))

    def _emit_calls(self, calls: Sequence[Mapping[str, Any]]) -> None:
        for call in calls:
            self._deltas += [Delta("tool_call_start", "", self._calls, call["name"]),
                             Delta("tool_call_arguments", json.dumps(call["arguments"], ensure_ascii=False),
                                   self._calls, ends_call=True)]
            self._calls += 1


def _read_calls(text: str) -> list[dict[str, Any]]:
    """Names and arguments of the calls that ``text`` spells; none unless all of it is calls."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for value in values if isinstance(values, list) else [values]:
        arguments = (value.get("arguments", value.get("parameters", {}))) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            return []
        calls.append({"name": value["name"], "arguments": arguments})
    return calls


def _suffix(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that a following piece could complete to ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
