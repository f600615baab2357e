"""Conversations for fine-tuning: JSON lines → rendered samples → packed rows.

A line is ``{"messages": [...], "tools": [...]?}`` with messages of the OpenAI form. Each becomes one sample: the ids of
the chat format and a mask of what the model would have sampled. A final assistant turn is closed by the role token that
the model must learn to stop with: ``<|observation|>`` after tool calls, else ``<|user|>``; it is trained, without it a
model never learns to end its turn. An assistant message with ``"erroneous": true`` stays in the context, so that later
turns learn to recover from it, and is masked whole, its closing role token included (GLM-5 report, SFT).

Several samples share a row (first-fit decreasing); each is a document of its own, so they do not see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm5.data.packing import Batch, Row, ShuffledOrder, batches, make_row, pack_first_fit
from glm5.data.sources import read_jsonl
from glm5.errors import DataError
from glm5.tokenizer import Tokenizer
from glm5.tokenizer.chat import is_erroneous


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and the tools that they use."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    origin: str
    """Where it was read, for error messages."""


@dataclass(frozen=True, slots=True)
class ConversationSample:
    """A rendered conversation; both arrays have one entry per token."""

    ids: np.ndarray
    trained: np.ndarray
    """True where predicting this token counts."""
    origin: str


def read_conversations(path: str | Path) -> list[Conversation]:
    """All conversations of a ``.jsonl`` file. Raises DataError naming file and line, also when there is none."""
    conversations = []
    for number, record in read_jsonl(Path(path)):
        origin = f"{path}:{number}"
        messages, tools = record.get("messages"), record.get("tools") or []
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError(f"{origin}: no list of objects in field 'messages'; found {sorted(record)[:8]}")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise DataError(f"{origin}: field 'tools' is {type(tools).__name__}; expected a list of objects")
        conversations.append(Conversation(messages, tools, origin))
    if not conversations:
        raise DataError(f"{path}: no conversation; write one JSON object with 'messages' a line")
    return conversations


def render_conversation(
    conversation: Conversation, tokenizer: Tokenizer, declare_tools: bool = True, clear_thinking: bool | None = False
) -> ConversationSample:
    """The sample of one conversation.

    ``declare_tools`` False leaves the tool declarations out of the prompt, for models that know their tools from
    demonstrations. ``clear_thinking`` False keeps the reasoning of all turns. Raises DataError when a message cannot be
    rendered or when no token would be trained.
    """
    tools = conversation.tools if declare_tools else None
    try:
        rendered = tokenizer.render(conversation.messages, tools, clear_thinking=clear_thinking)
    except DataError as error:
        raise DataError(f"{conversation.origin}: {error}") from None
    ids, trained = list(rendered.ids), list(rendered.loss_mask)
    last = conversation.messages[-1] if conversation.messages else {}
    if last.get("role") == "assistant":
        closing = tokenizer.closing_ids(bool(last.get("tool_calls")))
        ids += closing
        trained += [not is_erroneous(last, conversation.origin)] * len(closing)
    if not any(trained):
        raise DataError(f"{conversation.origin}: no assistant message that is trained; add one or remove it")
    return ConversationSample(np.array(ids, dtype=np.int64), np.array(trained, dtype=bool), conversation.origin)


class ConversationDataset:
    """Samples packed into rows; each epoch shuffles the rows."""

    def __init__(self, samples: Sequence[ConversationSample], length: int, pad_id: int) -> None:
        """Pack ``samples`` into rows of ``length`` tokens. Raises DataError naming a sample that is longer."""
        if not samples:
            raise DataError("conversations: no conversation to pack; name a .jsonl file that has some")
        for sample in samples:
            if len(sample.ids) > length:
                raise DataError(
                    f"{sample.origin}: {len(sample.ids)} tokens exceed the row length {length}; "
                    "raise the length or shorten the conversation"
                )
        self._samples = samples
        self._length = length
        self._pad_id = pad_id
        self._rows = pack_first_fit([len(sample.ids) for sample in samples], length)
        self._order = ShuffledOrder(len(self._rows))

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        tokenizer: Tokenizer,
        length: int,
        declare_tools: bool = True,
        clear_thinking: bool | None = False,
    ) -> ConversationDataset:
        """Read, render and pack a ``.jsonl`` file of conversations."""
        samples = [
            render_conversation(conversation, tokenizer, declare_tools, clear_thinking)
            for conversation in read_conversations(path)
        ]
        return cls(samples, length, tokenizer.pad_id)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    def row(self, number: int, length: int, seed: int) -> Row:
        """Row ``number`` of the endless sequence of shuffled epochs; ``length`` is the one that was packed for."""
        if length != self._length:
            raise DataError(f"conversations are packed for rows of {self._length} tokens, not {length}; pack again")
        members = [self._samples[index] for index in self._rows[self._order.item(number, seed)]]
        documents = np.repeat(np.arange(len(members)), [len(sample.ids) for sample in members])
        return make_row(
            np.concatenate([sample.ids for sample in members]),
            documents,
            length,
            self._pad_id,
            np.concatenate([sample.trained for sample in members]),
        )

    def batches(self, batch_rows: int, seed: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """Endless training batches from ``start_step`` on."""
        return batches(self, batch_rows, self._length, seed, start_step)
