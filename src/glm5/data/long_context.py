"""Synthetic texts that reward copying from far back, for mid-training at longer context.

GLM-5 mixes a small share of multi-turn recall data (MRCR-like) into its longest stage. Here: facts first, then
questions whose answers can only be copied from the facts. Keys and values are random letters and digits, so nothing can
be answered from memory. The surface forms are plain text, tables and data files; none looks like a chat or a tool call.

The kinds: lookups (key → value), exact repetition of whole lines, numbered entries of which several share a topic, so
that the ordinal decides; needles, facts that are hidden at random depths of other text (arXiv:2406.10774 and RULER,
arXiv:2404.06654, test this form); turns, a transcript in which the same request is made several times and one of the
replies is asked for again by its ordinal (the multi-round coreference form, MRCR, arXiv:2409.12640).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from glm5.data.config import DEFAULT_RECALL, RecallKind
from glm5.data.packing import Batch, Row, RowSource, batches, make_row
from glm5.tokenizer import Tokenizer

_LETTERS, _DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_CHARACTERS_PER_TOKEN = 1.4  # of these texts under a small vocabulary; only sizes the documents of a row


@dataclass(frozen=True, slots=True)
class _Form:
    """Surface form of a lookup text."""

    head: str
    fact: str
    turn: str
    """Line between facts and questions."""
    question: str


_FORMS = (
    _Form("", "{key} = {value}\n", "\n", "{key} = {value}\n"),
    _Form("", "{key}: {value}\n", "---\n", "{key}? {value}\n"),
    _Form("name,value\n", "{key},{value}\n", "\nlookup\n", "{key} -> {value}\n"),
    _Form("{{\n", '  "{key}": "{value}",\n', "}}\n", 'get("{key}") == "{value}"\n'),
    _Form("", "The code of {key} is {value}.\n", "\n", "Which code has {key}? {value}.\n"),
    _Form("| item | mark |\n", "| {key} | {value} |\n", "\n", "mark of {key} is {value}\n"),
    _Form("<list>\n", '<entry id="{key}">{value}</entry>\n', "</list>\n", "{key} holds {value}\n"),
    _Form("[values]\n", "{key}={value}\n", "\n[check]\n", "assert {key} == {value}\n"),
)


def recall_document(
    rng: np.random.Generator, length: int, kinds: Sequence[RecallKind] = DEFAULT_RECALL, haystack: str = ""
) -> str:
    """A text of at most ``length`` characters, and from 200 up at least half of that: facts, then questions.

    ``haystack`` is the text that hides needles; random sentences without one.
    """
    lines: list[str] = []
    used = 0
    for line in _KINDS[kinds[int(rng.integers(len(kinds)))]](rng, length, haystack):
        if used + len(line) > length:
            break
        lines.append(line)
        used += len(line)
    return "".join(lines)


class RecallSource:
    """Endless rows of recall texts; row n is a pure function of (n, length, seed)."""

    def __init__(
        self, tokenizer: Tokenizer, kinds: Sequence[RecallKind] = DEFAULT_RECALL, haystack: RowSource | None = None
    ) -> None:
        """``haystack`` gives the rows whose text hides the needles."""
        self._tokenizer = tokenizer
        self._kinds = tuple(kinds)
        self._haystack = haystack if "needles" in kinds else None

    def row(self, number: int, length: int, seed: int) -> Row:
        """Documents, each ended by ``<|endoftext|>``, until the row is full; the last one is cut off."""
        rng = np.random.default_rng([seed, number])
        haystack = self._text(number, length, seed)
        ids: list[int] = []
        documents: list[int] = []
        count = 0
        while len(ids) < length:
            characters = max(200, int((length - len(ids)) * _CHARACTERS_PER_TOKEN * rng.uniform(0.3, 1.0)))
            text = recall_document(rng, characters, self._kinds, haystack)
            piece = [*self._tokenizer.encode(text), self._tokenizer.pad_id]
            ids += piece
            documents += [count] * len(piece)
            count += 1
        return make_row(np.array(ids[:length]), np.array(documents[:length]), length, self._tokenizer.pad_id)

    def _text(self, number: int, length: int, seed: int) -> str:
        """Text of the haystack's row of this number, without the special tokens."""
        if self._haystack is None:
            return ""
        row = self._haystack.row(number, length, seed)
        return self._tokenizer.decode(row.ids[row.documents >= 0].tolist(), skip_special=True)

    def batches(self, batch_rows: int, length: int, seed: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """Endless training batches from ``start_step`` on."""
        return batches(self, batch_rows, length, seed, start_step)


def _lookups(rng: np.random.Generator, length: int, _haystack: str) -> Iterator[str]:
    """Key-value facts in one surface form, then questions in random order."""
    form = _FORMS[int(rng.integers(len(_FORMS)))]
    value_kind = int(rng.integers(len(_VALUES)))
    facts: dict[str, str] = {}
    budget = length * rng.uniform(0.3, 0.6)
    used = 0
    yield form.head.format()
    while used < budget or not facts:
        key, value = _name(rng), _VALUES[value_kind](rng)
        if key not in facts:
            facts[key] = value
            line = form.fact.format(key=key, value=value)
            used += len(line)
            yield line
    yield form.turn.format()
    keys = list(facts)
    while True:
        for index in rng.permutation(len(keys)):
            key = keys[int(index)]
            yield form.question.format(key=key, value=facts[key])


def _repetitions(rng: np.random.Generator, length: int, _haystack: str) -> Iterator[str]:
    """Lines that are written again, exactly, after a mark."""
    first, again = (("", "> "), ("write ", "again "), ("a: ", "b: "), ("# ", "copy "))[int(rng.integers(4))]
    block = max(1, min(int(rng.integers(1, 9)), length // 120))
    while True:
        lines = [" ".join(_value(rng) for _ in range(int(rng.integers(2, 7)))) for _ in range(block)]
        yield from (f"{first}{line}\n" for line in lines)
        yield from (f"{again}{line}\n" for line in lines)


def _entries(rng: np.random.Generator, length: int, _haystack: str) -> Iterator[str]:
    """Numbered entries on few topics; questions name topic and ordinal."""
    topics = [_word(rng) for _ in range(int(rng.integers(2, 5)))]
    entries: dict[str, list[str]] = {topic: [] for topic in topics}
    budget = length * rng.uniform(0.4, 0.6)
    used = 0
    while used < budget:
        topic = topics[int(rng.integers(len(topics)))]
        text = " ".join(_value(rng) for _ in range(int(rng.integers(2, 6))))
        entries[topic].append(text)
        line = f"note on {topic}: {text}\n"
        used += len(line)
        yield line
    yield "\n"
    for topic, number, text in _by_ordinal(rng, entries):
        yield f"{topic} number {number}: {text}\n"


def _needles(rng: np.random.Generator, length: int, haystack: str) -> Iterator[str]:
    """Facts at random depths of other text, then a question about each, in random order."""
    facts = {_name(rng): _value(rng) for _ in range(int(rng.integers(1, max(2, min(9, length // 200)))))}
    needles = [f"The special code of {key} is {value}.\n" for key, value in facts.items()]
    questions = [f"What is the special code of {key}? {value}\n" for key, value in facts.items()]
    room = length - sum(map(len, [*needles, *questions])) - 1
    lines = []
    for line in _haystack_lines(rng, haystack):
        if len(line) > room:
            break
        lines.append(line)
        room -= len(line)
    depths = sorted(rng.integers(len(lines) + 1, size=len(needles)).tolist())
    for needle, depth in zip(reversed(needles), reversed(depths), strict=True):
        lines.insert(depth, needle)
    yield from lines
    yield "\n"
    for index in rng.permutation(len(questions)):
        yield questions[int(index)]


def _haystack_lines(rng: np.random.Generator, haystack: str) -> Iterator[str]:
    yield from (line if line.endswith("\n") else line + "\n" for line in haystack.splitlines(keepends=True))
    while True:
        yield " ".join(_word(rng) for _ in range(int(rng.integers(4, 12)))).capitalize() + ".\n"


def _turns(rng: np.random.Generator, length: int, _haystack: str) -> Iterator[str]:
    """Requests and replies; a few requests come again and again with another reply; then replies are asked for by
    their ordinal, to be repeated after a mark that shows that the question was read."""
    requests = [f"{form} about {_word(rng)}" for form in ("a verse", "a list", "a story")[: int(rng.integers(2, 4))]]
    replies: dict[str, list[str]] = {request: [] for request in requests}
    budget = length * rng.uniform(0.5, 0.7)
    used = 0
    while used < budget:
        request = requests[int(rng.integers(len(requests)))]
        reply = " ".join(_word(rng) for _ in range(int(rng.integers(3, 12))))
        replies[request].append(reply)
        line = f"Q: Write {request}.\nA: {reply}\n"
        used += len(line)
        yield line
    for request, number, reply in _by_ordinal(rng, replies):
        mark = _letters(rng)
        yield f"Q: Begin with {mark} and repeat {request}, number {number}.\n"
        yield f"A: {mark} {reply}\n"


def _by_ordinal(rng: np.random.Generator, told: dict[str, list[str]]) -> Iterator[tuple[str, int, str]]:
    """(subject, ordinal from 1, text) of everything that was told, in random order, again and again."""
    asked = [(subject, number, text) for subject, texts in told.items() for number, text in enumerate(texts, 1)]
    while True:
        for index in rng.permutation(len(asked)):
            yield asked[int(index)]


_KINDS: dict[RecallKind, Callable[[np.random.Generator, int, str], Iterator[str]]] = {
    "lookups": _lookups, "repetitions": _repetitions, "entries": _entries, "needles": _needles, "turns": _turns,
}


def _word(rng: np.random.Generator) -> str:
    """A pronounceable word of two to four syllables."""
    syllables = int(rng.integers(2, 5))
    consonants, vowels = _string(rng, _CONSONANTS, syllables), _string(rng, _VOWELS, syllables)
    return "".join(first + second for first, second in zip(consonants, vowels, strict=True))


def _letters(rng: np.random.Generator) -> str:
    return _string(rng, _LETTERS, int(rng.integers(3, 8)))


def _digits(rng: np.random.Generator) -> str:
    return _string(rng, _DIGITS, int(rng.integers(1, 7)))


def _name(rng: np.random.Generator) -> str:
    """A word, two joined words, or a word with a number."""
    kind = int(rng.integers(4))
    if kind == 0:
        return f"{_word(rng)}_{_word(rng)}"
    return f"{_word(rng)}{_digits(rng)}" if kind == 1 else _word(rng)


def _value(rng: np.random.Generator) -> str:
    """A value of any kind."""
    return _VALUES[int(rng.integers(len(_VALUES)))](rng)


_VALUES = (_digits, _word, _letters, _name)


def _string(rng: np.random.Generator, alphabet: str, size: int) -> str:
    return "".join(alphabet[index] for index in rng.integers(len(alphabet), size=size).tolist())
