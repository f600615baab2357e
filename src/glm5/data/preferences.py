"""Preference pairs: JSON lines → rendered conversations → batches of packed rows.

A line is ``{"messages": [...], "chosen": …, "rejected": …, "tools": [...]?}``: a conversation that waits for an answer,
and two ways to go on, each a text or a list of messages that ends with an answer. Pairs with the same conversation are
together on one side of the split into training and held-out pairs.

Letters: B rows, T tokens, P pairs, N = 2P conversations, the chosen ones first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glm5.data.conversations import Conversation, ConversationSample, render_conversation
from glm5.data.packing import Batch, collate, make_row, pack_first_fit
from glm5.data.sources import read_jsonl
from glm5.errors import DataError
from glm5.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rendered conversations with the same beginning."""

    chosen: ConversationSample
    rejected: ConversationSample
    prompt: bytes
    """Digest of the common beginning."""


@dataclass(frozen=True, slots=True)
class PairBatch:
    """The conversations of some pairs in packed rows."""

    rows: Batch
    owners_BT: torch.Tensor
    """Conversation that each token belongs to, int64; -1 is padding."""
    ends_N: torch.Tensor
    """Place of the last token of each conversation in the flattened rows, int64."""
    tokens: int
    """Tokens, padding not counted."""


def read_pairs(path: str | Path, tokenizer: Tokenizer, length: int, declare_tools: bool = False) -> list[Pair]:
    """All pairs of a ``.jsonl`` file. Raises DataError naming file and line, also when there is none."""
    pairs = [_pair(record, f"{path}:{number}", tokenizer, length, declare_tools)
             for number, record in read_jsonl(Path(path))]
    if not pairs:
        raise DataError(f"{path}: no pair; write one JSON object with 'messages', 'chosen' and 'rejected' a line")
    return pairs


def split_pairs(pairs: Sequence[Pair], held_out_fraction: float) -> tuple[list[Pair], list[Pair]]:
    """(training, held-out) pairs; about ``held_out_fraction`` of the conversations are held out, always the same."""
    limit = held_out_fraction * 2**64
    held_out = [int.from_bytes(pair.prompt[:8], "big") < limit for pair in pairs]
    return ([pair for pair, out in zip(pairs, held_out, strict=True) if not out],
            [pair for pair, out in zip(pairs, held_out, strict=True) if out])


def pair_batch(pairs: Sequence[Pair], length: int, pad_id: int) -> PairBatch:
    """``pairs`` packed into as few rows of ``length`` tokens as first-fit finds."""
    import torch

    samples = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    rows, owners, ends = [], [], np.zeros(len(samples), dtype=np.int64)
    for number, members in enumerate(pack_first_fit([len(sample.ids) for sample in samples], length)):
        sizes = [len(samples[index].ids) for index in members]
        ends[members] = number * length + np.cumsum(sizes) - 1
        owners.append(np.concatenate([np.repeat(members, sizes), np.full(length - sum(sizes), -1)]))
        rows.append(make_row(np.concatenate([samples[index].ids for index in members]),
                             np.repeat(np.arange(len(members)), sizes), length, pad_id,
                             np.concatenate([samples[index].trained for index in members])))
    return PairBatch(collate(rows), torch.from_numpy(np.stack(owners)), torch.from_numpy(ends),
                     sum(len(sample.ids) for sample in samples))


def _pair(record: Mapping[str, Any], origin: str, tokenizer: Tokenizer, length: int, declare_tools: bool) -> Pair:
    messages, tools = record.get("messages"), record.get("tools") or []
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise DataError(f"{origin}: no list of objects in field 'messages'; found {sorted(record)[:8]}")
    answers = [_answer(record.get(name), f"{origin}.{name}") for name in ("chosen", "rejected")]
    if answers[0] == answers[1]:
        raise DataError(f"{origin}: chosen and rejected are the same; remove the pair")
    samples = [render_conversation(Conversation([*messages, *answer], tools, origin), tokenizer, declare_tools)
               for answer in answers]
    for sample in samples:
        if len(sample.ids) > length:
            raise DataError(f"{origin}: {len(sample.ids)} tokens exceed the row length {length}; raise length or "
                            "shorten the conversation")
    prompt = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).digest()
    return Pair(samples[0], samples[1], prompt)


def _answer(value: Any, origin: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
            and value[-1].get("role") == "assistant"):
        return value
    raise DataError(f"{origin}: got {str(value)[:60]!r}; expected a text, or messages that end with an answer")
