"""Names of files, directories and functions, and words to write: a letter and two digits, always used with a space in
front, so that they tokenise alike wherever a task asks to copy them, under any vocabulary that keeps digits apart."""

from __future__ import annotations

import random

_LETTERS = "bcdfghkm"


def distinct_words(rng: random.Random, count: int) -> list[str]:
    """``count`` different names, of 720."""
    found: list[str] = []
    while len(found) < count:
        new = f"{rng.choice(_LETTERS)}{rng.randint(10, 99)}"
        if new not in found:
            found.append(new)
    return found
