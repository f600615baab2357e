"""From sampled ids to text that can be sent: whole characters only, nothing from a stop string on. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from glm5.tokenizer.bpe import Tokenizer

_REPLACEMENT = "\ufffd"
_LONG_WINDOW = 16
_LONGEST_TAIL = 3
"""A character has at most four bytes and a token at least one: at most three tokens form an unfinished one."""


class Detokenizer:
    """Incremental ``tokenizer.decode``: the pieces add up to the decoded whole and never split a character.

    Bytes that may still become a character are held back. The window of undecided ids is cut wherever the two sides
    decode to the same text apart as together, so that garbage cannot make it grow without bound.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Text that became certain with ``ids``."""
        self._window += ids
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        if len(certain) == len(text):
            self._window, self._sent = [], 0
        elif len(self._window) >= _LONG_WINDOW:
            piece += self._shorten(text)
        return piece

    def finish(self) -> str:
        """What was held back: unfinished bytes read as U+FFFD."""
        if not self._window:
            return ""
        piece = self._tokenizer.decode(self._window)[self._sent :]
        self._window, self._sent = [], 0
        return piece

    def _shorten(self, text: str) -> str:
        """Cut the window at a boundary between characters; the text before it that was not sent yet."""
        for cut in range(len(self._window) - _LONGEST_TAIL, len(self._window) - 2 * _LONGEST_TAIL - 1, -1):
            before, after = (self._tokenizer.decode(part) for part in (self._window[:cut], self._window[cut:]))
            if before + after == text and len(before) >= self._sent:
                piece = before[self._sent :]
                self._window, self._sent = self._window[cut:], 0
                return piece
        return ""


class StopText:
    """Holds back what may be the beginning of a stop string, and everything from one on."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, piece: str) -> str:
        """The part of the text so far that may be sent now."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back in vain."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
