"""Texts scored by a checkpoint, for the perplexity filter of the data layer, which knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from glm5.data.filters import Scorer
from glm5.data.packing import collate, make_row
from glm5.model.checkpoint import load_model
from glm5.tokenizer.bpe import load_tokenizer
from glm5.train.losses import token_logprobs

SCORED_TOKENS = 1024
"""Tokens from the beginning of a text that are scored at most."""
_ROWS = 8


def load_scorer(checkpoint: str) -> Scorer:
    """A function that gives the nats per UTF-8 byte of each text under the model in ``checkpoint``, dense attention.

    The first token counts: it is predicted from ``<|endoftext|>``, which ends the document before. A text without
    bytes scores 0. Raises CheckpointError.
    """
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    limit = min(SCORED_TOKENS, model.config.max_position_embeddings) - 1

    @torch.no_grad()
    def score(texts: Sequence[str]) -> list[float]:
        pieces = [ids[:limit] for ids in tokenizer.encode_batch(texts)]
        nats: list[float] = []
        for start in range(0, len(pieces), _ROWS):
            group = [[tokenizer.pad_id, *ids] for ids in pieces[start : start + _ROWS]]
            length = max(map(len, group))
            batch = collate([make_row(np.array(ids), np.zeros(len(ids), dtype=np.int64), length, tokenizer.pad_id)
                             for ids in group])
            output = model.hidden(batch.ids_BT, batch.positions_BT, batch.documents_BT, attention="dense")
            labels_BT = batch.ids_BT.roll(-1, dims=1)
            logprobs = token_logprobs(output.hidden_BTD.flatten(0, 1), model.lm_head.weight, labels_BT.flatten())
            nats += (-logprobs.view_as(labels_BT) * batch.loss_mask_BT).sum(1).tolist()
        sizes = [len(tokenizer.decode(ids).encode()) for ids in pieces]
        return [value / size if size else 0.0 for value, size in zip(nats, sizes, strict=True)]

    return score
