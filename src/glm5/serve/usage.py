"""How many tokens a request took, said by the engine's server to the process in front of it, for one access log.

A request with ``HEADER`` asks for it. The answer is a header of that name, or, since a stream's head leaves before its
tokens are known, a last comment in the stream, which the process in front takes out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from glm5.engine.requests import Sequence

HEADER = "x-glm5-usage"
_COMMENT = b": usage "
Usage = dict[str, int]


def usage_of(sequences: Iterable[Sequence]) -> Usage:
    """Tokens of all answers of one request."""
    sequences = list(sequences)
    return {
        "prompt_tokens": sum(len(sequence.prompt) for sequence in sequences),
        "cached_tokens": sum(sequence.cached_tokens for sequence in sequences),
        "output_tokens": sum(len(sequence.output_ids) for sequence in sequences),
    }


def write_comment(usage: Usage) -> bytes:
    """``usage`` as an event that clients of streams skip."""
    return _COMMENT + json.dumps(usage).encode() + b"\n\n"


def split_comment(events: bytes) -> tuple[bytes, Usage | None]:
    """Whole ``events`` without the comment of ``write_comment`` at their end, and what it said."""
    before, mark, text = events.rpartition(_COMMENT)
    usage = read_usage(text) if mark and (not before or before.endswith(b"\n\n")) else None
    return (events, None) if usage is None else (before, usage)


def read_usage(text: str | bytes | None) -> Usage | None:
    """What a header or comment says; None for anything else."""
    try:
        usage = json.loads(text or "")
    except ValueError:
        return None
    return usage if isinstance(usage, dict) else None
