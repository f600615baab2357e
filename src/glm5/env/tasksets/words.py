"""Made-up words: short, pronounceable, and always used with a space in front, so that they tokenise alike wherever a
task asks to copy them."""

from __future__ import annotations

import random

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
SHELL_WORDS = frozenset({"time", "type", "date", "file", "less", "kill", "true", "make"})
"""Words of the scheme that are commands or words of an instruction."""


def word(rng: random.Random) -> str:
    """A word of two syllables, one of 4,900."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(2))


def distinct_words(rng: random.Random, count: int) -> list[str]:
    """``count`` different words."""
    found: list[str] = []
    while len(found) < count:
        new = word(rng)
        if new not in found and new not in SHELL_WORDS:
            found.append(new)
    return found
