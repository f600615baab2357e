"""Fill-in-the-middle for code (arXiv:2207.14255): a document is cut at two places and rearranged before packing.

Every section follows its own special token, and the middle, which is to be predicted from the others, comes last:
``<|code_prefix|> P <|code_suffix|> S <|code_middle|> M`` (prefix-suffix-middle), or with S before P
(suffix-prefix-middle). The cuts are uniform over the characters, and depend on the document's name and copy alone.
"""

from __future__ import annotations

import hashlib

import numpy as np

from glm5.data.config import InfillingConfig

PREFIX_TOKEN, SUFFIX_TOKEN, MIDDLE_TOKEN = "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"
Section = tuple[str, str]
"""A special token (empty for none) and the text after it."""


def arrange(text: str, path: str, copy: int, config: InfillingConfig) -> list[Section]:
    """The sections of a document in the order in which they are trained; one without a token when it stays as it is."""
    identity = hashlib.sha256(f"{path}\0{copy}".encode("utf-8", "replace")).digest()
    rng = np.random.default_rng(int.from_bytes(identity[:8], "big"))
    if not text or rng.random() >= config.rate:
        return [("", text)]
    suffix_first = rng.random() < config.suffix_first
    first, second = sorted(rng.integers(len(text) + 1, size=2).tolist())
    prefix, suffix = (PREFIX_TOKEN, text[:first]), (SUFFIX_TOKEN, text[second:])
    outer = [suffix, prefix] if suffix_first else [prefix, suffix]
    return [*outer, (MIDDLE_TOKEN, text[first:second])]
