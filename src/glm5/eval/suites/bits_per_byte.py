"""Bits per byte of documents: how many bits the model needs for each byte of text, whatever its tokenizer.

    bits/byte = Σ −ln p(token | tokens before it in its window) / (ln 2 · UTF-8 bytes)

A document is cut into windows of ``length`` predictions that share one token, so every id but the first of the document
is predicted exactly once. Pass documents with a start token if their first real token shall count.

Letters: B windows of a batch, T tokens of a window, W vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal

from glm5.errors import DataError

if TYPE_CHECKING:
    from glm5.model.transformer import GlmMoeDsaForCausalLM


def bits_per_byte(model: GlmMoeDsaForCausalLM, documents: Sequence[Sequence[int]], num_bytes: int, *, length: int,
                  batch_rows: int = 8, attention: Literal["sparse", "dense"] = "sparse") -> float:
    """Score token ids of ``documents``, which are ``num_bytes`` bytes of UTF-8 in all.

    Raises DataError when there is nothing to predict.
    """
    if num_bytes < 1 or all(len(ids) < 2 for ids in documents):
        raise DataError(f"bits_per_byte: {len(documents)} documents of {num_bytes} bytes hold nothing to predict; "
                        "give documents of at least two tokens")
    windows = iter([window for ids in documents for window in split_windows(ids, length)])
    nats = 0.0
    while rows := list(islice(windows, batch_rows)):
        nats += _nats(model, rows, attention)
    return nats / (math.log(2) * num_bytes)


def split_windows(ids: Sequence[int], length: int) -> Iterator[list[int]]:
    """Windows of at most ``length + 1`` ids, each starting with the last id of the one before."""
    return (list(ids[start:start + length + 1]) for start in range(0, len(ids) - 1, length))


def _nats(model: GlmMoeDsaForCausalLM, rows: Sequence[list[int]], attention: Literal["sparse", "dense"]) -> float:
    import torch

    # Rows are padded at the end; causal attention keeps the padding out of what is scored.
    ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=0)
    documents_BT = torch.nn.utils.rnn.pad_sequence([torch.zeros(len(row), dtype=torch.long) for row in rows],
                                                   batch_first=True, padding_value=-1)
    ids_BT, documents_BT = (tensor.to(model.lm_head.weight.device) for tensor in (ids_BT, documents_BT))
    with torch.no_grad():
        output = model(ids_BT[:, :-1], None, documents_BT[:, :-1], attention=attention)
        losses = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), ids_BT[:, 1:].flatten(),
                                                   reduction="none")
    return float(losses.double()[(documents_BT[:, 1:] >= 0).flatten()].sum())
