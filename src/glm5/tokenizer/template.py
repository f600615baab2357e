"""Tokenizers of models with a chat template of their own: any Transformers directory that has one.

The template (Jinja, run in a sandbox as Transformers does) decides the prompt; ids equal those of Transformers'
``apply_chat_template``. Around it:

- **Bridge.** A conversation goes on by ids: what the template writes after an assistant's answer is rendered behind a
  stand-in history and appended, so the recorded ids are never tokenised again. The stop token is not doubled where the
  model sampled it, and is added where it did not.
- **Fall-back.** A template that knows no tools gets them declared in the system message, calls written as JSON between
  ``<tool_call>`` tags and results as user messages between ``<tool_response>`` tags.
- **Safety.** Characters of a message that spell a special token stay characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from glm5.errors import CheckpointError, ConfigError, DataError
from glm5.tokenizer.bpe import Rendered, Tokenizer
from glm5.tokenizer.calls import JsonCallParser
from glm5.tokenizer.chat import Message, Tool, call_arguments, text_of
from glm5.tokenizer.fit import TOKENIZER_FILE, tokenizer_sha256
from glm5.tokenizer.parse import ParsedMessage, join_deltas

TEMPLATE_FILE = "chat_template.jinja"
_STAND_IN = "stand-in"
"""Text of the assistant's answer in a stand-in history."""
_PRIVATE = 0xF0000
"""First of the private characters that stand for special tokens in messages while the template runs."""
_DECLARATION = (
    "You may call these functions:\n{tools}\n\nTo call one, answer with its name and arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": <name>, "arguments": <arguments>}}\n</tool_call>')


class TemplateTokenizer(Tokenizer):
    """The interface of ``Tokenizer`` over a vocabulary and a template of another family."""

    def __init__(self, encoder: tokenizers.Tokenizer, source: str, template: str, *, stop_ids: Sequence[int],
                 variables: Mapping[str, str] | None = None, sha256: str | None = None) -> None:
        """``stop_ids`` are the ids that end an answer according to the checkpoint; ``variables`` the special tokens
        that the template may name (``bos_token``, ``eos_token``). Raises ConfigError without Jinja."""
        self._encoder, self._source, self.sha256 = encoder, source, sha256
        self._plain = tokenizers.Tokenizer.from_str(_without_added_tokens(encoder))
        self._added = {token.content: index for index, token in encoder.get_added_tokens_decoder().items()}
        self._special_ids = {token.content: index for index, token in encoder.get_added_tokens_decoder().items()
                             if token.special}
        self._control_ids = frozenset(self._special_ids.values())
        self._vocab_size = max(encoder.get_vocab(with_added_tokens=True).values()) + 1
        self._variables = dict(variables or {})
        self._template, self._names = _compile(template, source)
        self._knows_calls = "tool_calls" in template and "tools" in self._names
        closing = self._closing_token()
        self._closing = closing
        self._stop_ids = tuple(dict.fromkeys([*stop_ids, *([self._added[closing]] if closing else [])]))
        if not self._stop_ids:
            raise CheckpointError(f"{source}: neither generation_config.json nor the template names a token that ends "
                                  "an answer; set eos_token_id")

    @classmethod
    def from_directory(cls, path: str | Path) -> TemplateTokenizer:
        """Read ``tokenizer.json``, the template and the ids that end an answer. Raises CheckpointError."""
        directory = Path(path)
        settings = _read_json(directory / "tokenizer_config.json")
        template_file = directory / TEMPLATE_FILE
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else settings.get(
            "chat_template")
        if not isinstance(template, str):
            raise CheckpointError(f"{template_file}: missing, and tokenizer_config.json has no chat_template; a policy "
                                  "needs one")
        try:
            encoder = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER_FILE))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise CheckpointError(f"{directory / TOKENIZER_FILE}: not a tokenizer.json ({error}); copy the file "
                                  "again") from None
        variables = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = settings.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                variables[name] = text
        ends = [_read_json(directory / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
        stop_ids = [index for end in ends for index in (end if isinstance(end, list) else [end]) if index is not None]
        if "eos_token" in variables and (eos := encoder.token_to_id(variables["eos_token"])) is not None:
            stop_ids.append(eos)
        tokenizer = cls(encoder, str(directory / TOKENIZER_FILE), template, stop_ids=stop_ids, variables=variables,
                        sha256=tokenizer_sha256(directory))
        rows = _read_json(directory / "config.json").get("vocab_size", tokenizer.vocab_size)
        if tokenizer.vocab_size > rows:
            raise CheckpointError(f"{directory / TOKENIZER_FILE}: has {tokenizer.vocab_size} ids, the model "
                                  f"vocab_size={rows}; take the tokenizer that the model was trained with")
        return tokenizer

    @property
    def pad_id(self) -> int:
        """Id that pads rows."""
        pad = self._variables.get("pad_token", "")
        return self._added.get(pad, self._stop_ids[0])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return self._stop_ids

    def render_text(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None,
                    add_generation_prompt: bool = False, enable_thinking: bool | None = None,
                    clear_thinking: bool | None = None) -> str:
        """The conversation as the template writes it. Raises DataError for messages that it refuses."""
        del clear_thinking  # what becomes of earlier reasoning is the template's affair
        import jinja2

        plain, declared = self._plain_messages(messages, tools)
        switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            return str(self._template.render(messages=plain, tools=declared, documents=None,
                                             add_generation_prompt=add_generation_prompt, **switch, **self._variables))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"messages: the chat template of {self._source} refuses them ({error})") from None

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None,
               add_generation_prompt: bool = False, enable_thinking: bool | None = None,
               clear_thinking: bool | None = None) -> Rendered:
        """The conversation as ids and loss mask: every answer up to the token that ends it is trained."""
        text = self.render_text(self._guarded(messages), tools, add_generation_prompt, enable_thinking, clear_thinking)
        spans = self._trained_spans(messages, tools, text, enable_thinking)
        ids: list[int] = []
        loss_mask: list[bool] = []
        for start, stop, trained in spans:
            piece = self._encode_rendered(text[start:stop])
            ids += piece
            loss_mask += [trained] * len(piece)
        return Rendered(ids, loss_mask)

    def bridge(self, previous_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool] | None = None,
               add_generation_prompt: bool = True, enable_thinking: bool | None = None) -> list[int] | None:
        """Ids to append to ``previous_ids``, as in ``Tokenizer.bridge``: new messages are tool results, then at most
        one user message; None means that appending cannot express it."""
        del tools
        roles = [message.get("role") for message in new_messages]
        results = roles[:-1] if roles and roles[-1] == "user" else roles
        if not roles or not previous_ids or any(role != "tool" for role in results) or not self._closing:
            return None
        history = [{"role": "user", "content": "u"}, self._stand_in_answer(with_call=roles[0] == "tool")]
        try:
            text = self.render_text([*history, *self._guarded(new_messages)], None, add_generation_prompt,
                                    enable_thinking)
        except DataError:
            return None
        answer = text.find(_STAND_IN)
        end = text.find(self._closing, answer)
        if answer < 0 or end < 0:
            return None
        if previous_ids[-1] == self._added[self._closing]:
            end += len(self._closing)
        return self._encode_rendered(text[end:])

    def closing_ids(self, with_calls: bool) -> list[int]:
        """Nothing: the template has written it."""
        return []

    def parse(self, text: str, tools: Sequence[Tool] | None = None, thinking: bool = True) -> ParsedMessage:
        """Reasoning, content and tool calls of sampled text (see ``calls``)."""
        return join_deltas(self.stream_parser(tools, thinking).finish(text))

    def stream_parser(self, tools: Sequence[Tool] | None = None, thinking: bool = True) -> JsonCallParser:
        """A parser that takes the text in pieces."""
        opening = self.render_text([{"role": "user", "content": "u"}], None, True, thinking)
        return JsonCallParser(tools, in_reasoning=opening.rstrip().endswith("<think>"))

    def _closing_token(self) -> str:
        """The added token that the template writes after an answer; "" when there is none."""
        history = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _STAND_IN}]
        rest = self.render_text(history).partition(_STAND_IN)[2]
        found = [(position, token) for token in self._added if token and (position := rest.find(token)) >= 0]
        return min(found)[1] if found else ""

    def _stand_in_answer(self, with_call: bool) -> dict[str, Any]:
        answer: dict[str, Any] = {"role": "assistant", "content": _STAND_IN}
        if with_call and self._knows_calls:
            answer["tool_calls"] = [{"type": "function", "function": {"name": _STAND_IN, "arguments": {}}}]
        return answer

    def _trained_spans(self, messages: Sequence[Message], tools: Sequence[Tool] | None, text: str,
                       enable_thinking: bool | None) -> list[tuple[int, int, bool]]:
        """Cuts of ``text`` at the borders of answers, where the template renders a beginning of the conversation as
        the beginning of the text; answers for which it does not are not trained."""
        spans: list[tuple[int, int, bool]] = []
        position = 0
        for index, message in enumerate(messages):
            if message.get("role") != "assistant" or not self._closing:
                continue
            before = self.render_text(self._guarded(messages[:index]), tools, True, enable_thinking)
            end = text.find(self._closing, len(before))
            if text.startswith(before) and end >= 0:
                stop = end + len(self._closing)
                spans += [(position, len(before), False), (len(before), stop, True)]
                position = stop
        return [*spans, (position, len(text), False)]

    def _plain_messages(self, messages: Sequence[Message],
                        tools: Sequence[Tool] | None) -> tuple[list[dict[str, Any]], Sequence[Tool] | None]:
        """Messages in the template's form, and the tools that it declares itself."""
        plain = [self._plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
        if not tools or self._knows_calls:
            return plain, list(tools) if tools else None
        lines = "\n".join(json.dumps(tool.get("function") or tool, ensure_ascii=False) for tool in tools)
        declaration = _DECLARATION.format(tools=lines)
        if plain and plain[0]["role"] == "system":
            first = {"role": "system", "content": f"{plain[0]['content']}\n\n{declaration}"}
            return [first, *plain[1:]], None
        return [{"role": "system", "content": declaration}, *plain], None

    def _plain_message(self, message: Message, where: str) -> dict[str, Any]:
        role = "system" if message.get("role") == "developer" else message.get("role")
        content = text_of(message.get("content"), f"{where}.content")
        calls = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or call
            arguments = call_arguments(function.get("arguments"), f"{where}.tool_calls[{number}].function.arguments")
            calls.append({"type": "function", "function": {"name": function.get("name"), "arguments": arguments}})
        plain: dict[str, Any] = {"role": role, "content": content}
        if isinstance(message.get("reasoning_content"), str):
            plain["reasoning_content"] = message["reasoning_content"]
        if self._knows_calls:
            return {**plain, "tool_calls": calls} if calls else plain
        if role == "tool":
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        for call in calls:
            spelled = f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            plain["content"] = f"{plain['content']}\n{spelled}" if plain["content"] else spelled
        return plain

    def _guarded(self, messages: Sequence[Message]) -> list[Message]:
        """``messages`` whose texts spell no special token: private characters stand for them."""
        return [self._guard(message) for message in messages]

    def _guard(self, value: Any) -> Any:
        if isinstance(value, str):
            for number, token in enumerate(self._special_ids):
                value = value.replace(token, chr(_PRIVATE + number))
            return value
        if isinstance(value, Mapping):
            return {key: item if key == "role" else self._guard(item) for key, item in value.items()}
        return [self._guard(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode_rendered(self, text: str) -> list[int]:
        """Ids of the template's text: its special tokens are tokens, those of messages are characters."""
        stand_ins = {chr(_PRIVATE + number): token for number, token in enumerate(self._special_ids)}
        ids: list[int] = []
        piece = ""
        for character in text:
            if character not in stand_ins:
                piece += character
                continue
            ids += [*self.encode(piece, allow_special=True), *self.encode(stand_ins[character])]
            piece = ""
        return ids + self.encode(piece, allow_special=True)


def _compile(template: str, source: str) -> tuple[Any, set[str]]:
    """The compiled template and the names that it reads. Raises ConfigError without Jinja, CheckpointError."""
    try:
        import jinja2
        import jinja2.meta
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(f"{source}: its chat template needs jinja2; pip install 'glm5[policy]'") from None

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
                sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template), jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError as error:
        raise CheckpointError(f"{source}: its chat template cannot be read ({error})") from None


def _without_added_tokens(encoder: tokenizers.Tokenizer) -> str:
    """``tokenizer.json`` of the same vocabulary without added tokens and without what adds tokens to a text."""
    data = json.loads(encoder.to_str())
    return json.dumps({**data, "added_tokens": [], "post_processor": None})


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when the file is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
