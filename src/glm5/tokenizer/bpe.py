"""Byte-level BPE with the GLM special tokens, and everything that a chat needs on top of it.

Invariants:

- ``decode(encode(text)) == text`` for every text: all 256 bytes are in the vocabulary, nothing is normalised.
- Every digit is one token.
- Text that users or tools wrote never becomes a special token; only ``encode(..., allow_special=True)`` and the
  template of ``render`` produce those. Two encoders over one vocabulary make sure of it: one knows the special tokens,
  the other does not.
- The ids of a rendered conversation are cut at special tokens only, so a prompt followed by the ids that a model
  sampled is tokenised as the finished conversation would be.

The special tokens follow the vocabulary in the order of the published tokenizer. Some of them (``<think>``, the
tool-call tags) are text that a parser reads: ``decode(skip_special=True)`` keeps those and drops the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from glm5.errors import CheckpointError, ConfigError, DataError
from glm5.runlog import tracked, write_atomic
from glm5.tokenizer.chat import (
    CLOSING_ROLES,
    PREFIX,
    Message,
    Segment,
    Tool,
    continuation_segments,
    conversation_segments,
    generation_prompt,
)
from glm5.tokenizer.fit import TOKENIZER_FILE, is_foreign, require_fit, tokenizer_sha256
from glm5.tokenizer.parse import ParsedMessage, StreamParser, parse_message

END_OF_TEXT = "<|endoftext|>"
CONTROL_TOKENS = (
    END_OF_TEXT,
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
)
"""Tokens that are never part of an answer's text, in the published order."""
TAG_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
"""Tokens that stay in decoded text, in the published order."""
SPECIAL_TOKENS = CONTROL_TOKENS + TAG_TOKENS
REQUIRED_TOKENS = (END_OF_TEXT, *PREFIX, "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *TAG_TOKENS[:10])
"""Without one of these a tokenizer cannot express the chat format."""
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)

# Words keep one leading non-letter, digits stand alone, symbols take the line breaks that follow them.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as token ids. Both lists have the same length."""

    ids: list[int]
    loss_mask: list[bool]
    """True where the token is one that the model samples, and so is trained."""


class Tokenizer:
    """Text ↔ ids, chats ↔ ids, model output → message."""

    def __init__(self, encoder: tokenizers.Tokenizer, source: str, sha256: str | None = None) -> None:
        """``encoder`` holds vocabulary and special tokens; ``source`` names its origin in error messages."""
        self.sha256 = sha256
        """SHA-256 of the file that it was read from, by which processes compare tokenizers; None without a file."""
        self._encoder = encoder
        self._source = source
        # The same model without any added token: characters that spell a special token stay characters.
        self._plain = tokenizers.Tokenizer(encoder.model)
        if encoder.normalizer is not None:
            self._plain.normalizer = encoder.normalizer
        self._plain.pre_tokenizer = encoder.pre_tokenizer
        known = {name: encoder.token_to_id(name) for name in SPECIAL_TOKENS}
        self._special_ids = {name: index for name, index in known.items() if index is not None}
        missing = [name for name in REQUIRED_TOKENS if name not in self._special_ids]
        if missing:
            raise CheckpointError(f"{source}: special token {missing[0]!r} is missing; use a GLM-5 tokenizer.json")
        self._control_ids = frozenset(self._special_ids[name] for name in CONTROL_TOKENS if name in self._special_ids)
        self._vocab_size = max(encoder.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` of a checkpoint directory; any Hugging Face file with the GLM special tokens works.

        Raises CheckpointError when the file is missing, malformed or lacks a special token.
        """
        file = Path(path) / TOKENIZER_FILE
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror}); give a checkpoint directory") from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file}: not UTF-8 text ({error.reason}); copy the file again") from None
        try:
            encoder = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise CheckpointError(f"{file}: not a tokenizer.json ({error}); copy the file again") from None
        return cls(encoder, str(file), tokenizer_sha256(Path(path)))

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` into directory ``path``."""
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }
        write_atomic(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        template = resources.files("glm5.tokenizer").joinpath("chat_template.jinja").read_text(encoding="utf-8")
        write_atomic(directory / "chat_template.jinja", template)
        write_atomic(directory / TOKENIZER_FILE, self.to_json())

    @property
    def vocab_size(self) -> int:
        """Largest id plus one; an embedding needs at least so many rows."""
        return self._vocab_size

    @property
    def pad_id(self) -> int:
        """Id of ``<|endoftext|>``, which ends documents and pads rows."""
        return self._special_ids[END_OF_TEXT]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: ``<|endoftext|>``, ``<|user|>``, ``<|observation|>``."""
        return self.pad_id, self._special_ids["<|user|>"], self._special_ids["<|observation|>"]

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Ids of all GLM special tokens that this vocabulary has."""
        return dict(self._special_ids)

    def special_id(self, name: str) -> int:
        """Id of one special token. Raises CheckpointError when the vocabulary lacks it."""
        if name not in self._special_ids:
            raise CheckpointError(f"{self._source}: special token {name!r} is missing; use a GLM-5 tokenizer.json")
        return self._special_ids[name]

    def to_json(self) -> str:
        """The ``tokenizer.json`` that describes this tokenizer completely; equal text means equal behaviour."""
        return self._encoder.to_str(pretty=True)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of ``text``. Only with ``allow_special`` do the characters of a special token become that token."""
        encoder = self._encoder if allow_special else self._plain
        return encoder.encode(_without_surrogates(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        cleaned = [_without_surrogates(text) for text in texts]
        return [item.ids for item in self._plain.encode_batch_fast(cleaned, add_special_tokens=False)]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD. ``skip_special`` drops all but the tag tokens."""
        kept = [index for index in ids if not (skip_special and index in self._control_ids)]
        return self._encoder.decode(kept, skip_special_tokens=False)

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
    ) -> str:
        """The conversation as the text of the chat template (see ``glm5.tokenizer.chat``)."""
        segments = conversation_segments(messages, tools, add_generation_prompt, enable_thinking, clear_thinking)
        return "".join(segment.text for segment in segments)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
    ) -> Rendered:
        """The conversation as ids and loss mask. Raises DataError for a message that the format cannot express."""
        segments = conversation_segments(messages, tools, add_generation_prompt, enable_thinking, clear_thinking)
        return self._render_segments(segments)

    def bridge(
        self,
        previous_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> list[int] | None:
        """Ids to append to ``previous_ids`` so that the chat goes on with ``new_messages``; history is never touched.

        ``previous_ids`` is the last prompt and what the model sampled after it. When that ends with the role token
        that the new messages start with, the token is not repeated; after any other ending it is added. ``tools`` are
        those declared in ``previous_ids``; they are not declared again. None means that appending cannot express it:
        the new messages are not tool results followed by at most one user message, the ids are no chat, or the model
        ended its turn with the role token of the other kind.
        """
        del tools
        segments = continuation_segments(new_messages)
        prefix = [self._special_ids[name] for name in PREFIX]
        if segments is None or list(previous_ids[: len(prefix)]) != prefix:
            return None
        last, opening = previous_ids[-1], self._special_ids[segments[0].text]
        if last == opening:
            segments = segments[1:]
        elif last in (self._special_ids[name] for name in CLOSING_ROLES):
            return None
        if add_generation_prompt:
            segments = [*segments, *generation_prompt(enable_thinking)]
        return self._render_segments(segments).ids

    def closing_ids(self, with_calls: bool) -> list[int]:
        """What ends a rendered conversation whose last message is an answer, ``with_calls`` or without."""
        return [self.special_id("<|observation|>" if with_calls else "<|user|>")]

    def parse(self, text: str, tools: Sequence[Tool] | None = None, thinking: bool = True) -> ParsedMessage:
        """Reasoning, content and tool calls of sampled text (see ``glm5.tokenizer.parse``)."""
        return parse_message(text, tools, thinking)

    def stream_parser(self, tools: Sequence[Tool] | None = None, thinking: bool = True) -> StreamParser:
        """A parser that takes the text in pieces; its deltas add up to what ``parse`` gives."""
        return StreamParser(tools, thinking)

    def _render_segments(self, segments: Sequence[Segment]) -> Rendered:
        ids: list[int] = []
        loss_mask: list[bool] = []
        # Two texts never touch, so piece by piece gives the ids of the rendered string.
        for segment in segments:
            piece = [self.special_id(segment.text)] if segment.special else self.encode(segment.text)
            ids += piece
            loss_mask += [segment.trained] * len(piece)
        return Rendered(ids, loss_mask)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Tokenizer of a checkpoint directory, made sure to belong to the model there (see ``glm5.tokenizer.fit``); one
    of another family when the model there is (see ``glm5.tokenizer.template``).

    Raises CheckpointError when it is missing, lacks a special token, or is not the model's.
    """
    if is_foreign(Path(directory)):
        from glm5.tokenizer.template import TemplateTokenizer

        return TemplateTokenizer.from_directory(directory)
    tokenizer = Tokenizer.from_directory(directory)
    require_fit(Path(directory), tokenizer.vocab_size, tokenizer.stop_ids, tokenizer.pad_id)
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE on ``texts``; deterministic. ``vocab_size`` counts the special tokens.

    A corpus without enough repetition gives a smaller vocabulary. Raises ConfigError when ``vocab_size`` has no room
    for the bytes and the special tokens, DataError when there is no text.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size={vocab_size}: 256 bytes and {len(SPECIAL_TOKENS)} special tokens need {SMALLEST_VOCABULARY}; "
            "raise it"
        )
    corpus = list(texts)
    if not any(corpus):
        raise DataError("tokenizer corpus: no text; name a source that has some")
    encoder = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(map(_without_surrogates, tracked(corpus, "tokenizer", "characters", len)), trainer)
    encoder.add_tokens(
        [AddedToken(name, special=name in CONTROL_TOKENS, normalized=False) for name in SPECIAL_TOKENS]
    )
    return Tokenizer(encoder, "trained tokenizer")


def _without_surrogates(text: str) -> str:
    """``text`` with lone surrogates, which have no UTF-8 form, as U+FFFD (JSON from the wire can carry them)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
