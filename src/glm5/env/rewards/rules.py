"""Rule rewards: small pure verifiers of an answer's text, each from 0 to 1, found by name.

A verifier is a function of the answer and keyword options. A rule in a configuration names a verifier and its options;
both are checked when the configuration is read, so that a typing error never becomes a reward. An empty answer
satisfies no verifier except ``forbidden``, ``length`` with ``least = 0``, and ``repetition``.
"""

from __future__ import annotations

import inspect
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glm5.errors import ConfigError

Verifier = Callable[..., float]
VERIFIERS: dict[str, Verifier] = {}
"""Every verifier by its name."""


def verifier(function: Verifier) -> Verifier:
    """Register ``function`` under its name."""
    VERIFIERS[function.__name__] = function
    return function


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleConfig:
    """One rule of a taskset's reward."""

    kind: str
    """Name of a verifier in ``glm5.env.rewards.rules``."""
    weight: float = 1.0
    """Share among the rules of the taskset."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword options of the verifier."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ConfigError(f"rule {self.kind!r}: weight={self.weight} must be above 0")
        check_rule(self.kind, self.options)

    def score(self, answer: str) -> float:
        """How far ``answer`` satisfies the rule, 0 to 1."""
        return VERIFIERS[self.kind](answer, **self.options)


def check_rule(kind: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError when there is no verifier ``kind`` or it cannot work with ``options``."""
    if kind not in VERIFIERS:
        raise ConfigError(f"rule {kind!r}: unknown; known rules: {', '.join(sorted(VERIFIERS))}")
    known = [name for name in inspect.signature(VERIFIERS[kind]).parameters if name != "answer"]
    for name in options:
        if name not in known:
            raise ConfigError(f"rule {kind!r}: unknown option {name!r}; options: {', '.join(known)}")
    try:
        VERIFIERS[kind]("a trial", **options)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, re.error) as error:
        raise ConfigError(f"rule {kind!r} with options {dict(options)}: {error}") from None


@verifier
def exact(answer: str, *, text: str) -> float:
    """1 when the answer is ``text``, spaces around both aside."""
    return float(answer.strip() == text.strip() != "")


@verifier
def length(answer: str, *, least: int = 1, most: int = 1_000_000,
           unit: Literal["words", "characters", "lines"] = "words") -> float:
    """1 when the answer has ``least`` to ``most`` units."""
    counts = {"words": len(answer.split()), "characters": len(answer), "lines": len(answer.splitlines())}
    return float(least <= counts[unit] <= most)


@verifier
def required(answer: str, *, texts: Sequence[str], count: int | None = None, ignore_case: bool = False) -> float:
    """Share of ``texts`` that the answer contains; each exactly ``count`` times where that is given."""
    where, wanted = _folded(answer, ignore_case), [_folded(text, ignore_case) for text in _texts(texts)]
    found = [where.count(text) for text in wanted]
    return sum(number >= 1 if count is None else number == count for number in found) / len(found)


@verifier
def forbidden(answer: str, *, texts: Sequence[str], ignore_case: bool = False) -> float:
    """1 when the answer contains none of ``texts``."""
    where = _folded(answer, ignore_case)
    return float(not any(_folded(text, ignore_case) in where for text in _texts(texts)))


@verifier
def pattern(answer: str, *, regex: str, whole: bool = True) -> float:
    """1 when the whole answer (a part of it without ``whole``) matches; ``.`` matches newlines too."""
    compiled = re.compile(regex, re.DOTALL)
    return float((compiled.fullmatch if whole else compiled.search)(answer.strip()) is not None)


@verifier
def json_schema(answer: str, *, schema: Mapping[str, Any]) -> float:
    """1 when the whole answer is JSON that satisfies the schema. Needs the extra ``rewards``."""
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
    except ImportError:
        raise ConfigError("rule 'json_schema': jsonschema is not installed; pip install 'glm5[rewards]'") from None
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"rule 'json_schema': the schema is none: {error.message}") from None
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return 0.0
    return float(Draft202012Validator(schema).is_valid(value))


@verifier
def json_value(answer: str, *, value: Any) -> float:
    """1 when the whole answer is JSON that equals ``value``."""
    try:
        return float(json.loads(answer) == value)
    except (ValueError, RecursionError):
        return 0.0


@verifier
def language(answer: str, *, code: str) -> float:
    """1 when the answer is most likely written in the language of this ISO 639-1 code. Needs the extra ``data``."""
    try:
        import py3langid
    except ImportError:
        raise ConfigError("rule 'language': py3langid is not installed; pip install 'glm5[data]'") from None
    return float(bool(answer.strip()) and py3langid.classify(answer)[0] == code)


@verifier
def script(answer: str, *, name: str, least: float = 0.9) -> float:
    """1 when at least this share of the letters belongs to a script, by the first word of their Unicode names
    (``LATIN``, ``CYRILLIC``, ``CJK`` …)."""
    letters = [character for character in answer if character.isalpha()]
    inside = sum(unicodedata.name(character, "").split(" ")[0] == name.upper() for character in letters)
    return float(bool(letters) and inside >= least * len(letters))


@verifier
def repetition(answer: str, *, size: int = 3, most: float = 0.2) -> float:
    """1 when at most this share of the runs of ``size`` words repeats an earlier run."""
    if size < 1:
        raise ValueError(f"size={size} must be at least 1")
    words = answer.split()
    runs = Counter(tuple(words[start:start + size]) for start in range(len(words) - size + 1))
    total = sum(runs.values())
    return float(total - len(runs) <= most * total)


@verifier
def items(answer: str, *, least: int = 1, most: int = 1_000_000, mark: str = "- ") -> float:
    """1 when every line that is not empty begins with ``mark`` and there are ``least`` to ``most`` of them."""
    lines = [line for line in answer.splitlines() if line.strip()]
    return float(least <= len(lines) <= most and all(line.startswith(mark) for line in lines))


def _texts(texts: Sequence[str]) -> Sequence[str]:
    if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"texts={texts!r}: expected a list of texts that are not empty")
    return texts


def _folded(text: str, ignore_case: bool) -> str:
    return text.casefold() if ignore_case else text
