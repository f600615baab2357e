"""Scores of whole conversations by a reward model: one pass over padded rows, a few conversations at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glm5.device import find_device
from glm5.errors import DataError
from glm5.model.reward import load_reward_model
from glm5.tokenizer.bpe import load_tokenizer

_TOKENS = 8192
"""Tokens of one pass, padding included; a single longer conversation is a pass of its own."""


class Scorer:
    """A reward model and its tokenizer. Not for use by several threads at once."""

    def __init__(self, directory: str | Path, device: str = "auto") -> None:
        """Raises CheckpointError, or ConfigError for a device that is not there."""
        self._device = find_device(device)
        self._model = load_reward_model(directory, device=self._device)
        self._tokenizer = load_tokenizer(directory)
        self.max_tokens = self._model.trunk.config.max_position_embeddings

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a finished conversation, the token that closes it included. Raises DataError for one that does not end
        with an answer or is too long."""
        if not messages or messages[-1].get("role") != "assistant" or messages[-1].get("tool_calls"):
            raise DataError("conversation: expected one that ends with an answer of the assistant")
        ids = [*self._tokenizer.render(messages, clear_thinking=False).ids, self._tokenizer.special_id("<|user|>")]
        if len(ids) > self.max_tokens:
            raise DataError(f"conversation: {len(ids)} tokens exceed the {self.max_tokens} of the reward model")
        return ids

    @torch.inference_mode()
    def score(self, conversations: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
        """(scores, rewards) of conversations of ids, each with at least one."""
        order = sorted(range(len(conversations)), key=lambda index: len(conversations[index]))
        scores, rewards = [0.0] * len(order), [0.0] * len(order)
        start = 0
        while start < len(order):
            end = start + 1
            while end < len(order) and (end + 1 - start) * len(conversations[order[end]]) <= _TOKENS:
                end += 1
            found = self._pass([conversations[index] for index in order[start:end]])
            for index, score, reward in zip(order[start:end], found.tolist(), self._model.reward(found).tolist(),
                                            strict=True):
                scores[index], rewards[index] = score, reward
            start = end
        return scores, rewards

    def _pass(self, conversations: Sequence[Sequence[int]]) -> torch.Tensor:
        lengths = torch.tensor([len(ids) for ids in conversations])
        length = int(lengths.max())
        ids_BT = torch.full((len(conversations), length), self._tokenizer.pad_id)
        for row, ids in enumerate(conversations):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        positions_BT = torch.arange(length).expand(ids_BT.shape)
        documents_BT = torch.where(positions_BT < lengths[:, None], 0, -1)
        ends_N = torch.arange(len(conversations)) * length + lengths - 1
        inputs = (ids_BT, positions_BT, documents_BT, ends_N)
        return self._model(*(tensor.to(self._device) for tensor in inputs)).cpu()
