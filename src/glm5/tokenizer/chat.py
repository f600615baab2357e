"""The GLM-5 chat format: messages → segments of template and content.

One function, ``conversation_segments``, decides the layout; the text, the ids and the loss mask are all read off its
result, so they cannot disagree. A segment is either one special token of the template or a piece of ordinary text;
two texts never follow each other. Ordinary text never becomes a special token, whatever characters it holds.

Invariants of the format: ``[gMASK]<sop>`` comes first; there is no end-of-turn token, the next role token ends a turn;
role tokens are followed by no newline; one ``<|observation|>`` opens a run of tool results; strings are written raw as
argument values and everything else as JSON.

Which segments are trained: what the model samples. That is reasoning and its ``</think>``, content, tool calls, and the
``<|user|>`` or ``<|observation|>`` that closes the turn. ``<|assistant|>``, the opening ``<think>`` and the lone
``</think>`` of a turn without reasoning belong to the prompt.

Reasoning is shown in turns after the last user message, and in all turns when ``clear_thinking`` is False (preserved
thinking: every turn is then a token prefix of the next prompt).

Two differences from the published Jinja template, which ``chat_template.jinja`` reproduces: content None is "" here
(the template prints ``None``), and list content of tool results is joined from its text parts (the template prints the
parts as Python literals). The role ``developer`` is read as ``system``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.errors import DataError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

PREFIX = ("[gMASK]", "<sop>")
CLOSING_ROLES = ("<|user|>", "<|observation|>")
"""Role tokens that a model samples to end its turn."""
_ROLE_TOKENS = {"system": "<|system|>", "developer": "<|system|>", "user": "<|user|>"}


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the rendered conversation."""

    text: str
    special: bool
    """True: one special token of the template. False: text that is tokenised as ordinary characters."""
    trained: bool = False
    """True when the model samples this piece."""


def conversation_segments(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = False,
    enable_thinking: bool | None = None,
    clear_thinking: bool | None = None,
) -> list[Segment]:
    """The whole conversation, from ``[gMASK]<sop>`` to the generation prompt if asked for.

    ``enable_thinking`` None means True; it only chooses the generation prompt. Raises DataError for a message that
    the format cannot express, naming its position.
    """
    segments = [Segment(token, special=True) for token in PREFIX]
    if tools:
        segments += _tools_segments(tools)
    segments += _message_segments(messages, clear_thinking)
    if add_generation_prompt:
        segments += generation_prompt(enable_thinking)
    return segments


def continuation_segments(new_messages: Sequence[Message]) -> list[Segment] | None:
    """Tool results, then at most one user message, as they follow an assistant turn; None for any other shape."""
    roles = [message.get("role") for message in new_messages]
    results = roles[:-1] if roles and roles[-1] == "user" else roles
    if not roles or any(role != "tool" for role in results):
        return None
    return list(_message_segments(new_messages, clear_thinking=None))


def generation_prompt(enable_thinking: bool | None) -> list[Segment]:
    """The tokens after which the model answers."""
    opening = "</think>" if enable_thinking is False else "<think>"
    return [Segment("<|assistant|>", special=True), Segment(opening, special=True)]


def text_of(content: Any, where: str = "content") -> str:
    """Text of a message's ``content``: a string, None (""), or a list of strings and ``{"type": "text"}`` parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise DataError(f"{where}: got {type(content).__name__}; expected a string, null or a list of text parts")
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "text":
            part = part.get("text")
        if not isinstance(part, str):
            raise DataError(f"{where}: got a part {str(part)[:60]!r}; only text parts can be rendered, remove it")
        parts.append(part)
    return "".join(parts)


def call_arguments(arguments: Any, where: str = "arguments") -> dict[str, Any]:
    """Arguments of a tool call as a dict; accepts the JSON text that the OpenAI format carries ("" is no argument)."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error}); send an object") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: got {type(arguments).__name__}; expected a JSON object")
    return dict(arguments)


def is_erroneous(message: Message, where: str) -> bool:
    """Whether an assistant message is marked ``"erroneous": true``: it stays in the context and is not trained."""
    marked = message.get("erroneous", False)
    if not isinstance(marked, bool):
        raise DataError(f"{where}.erroneous: got {marked!r}; expected true or false")
    return marked


def _message_segments(messages: Sequence[Message], clear_thinking: bool | None) -> Iterator[Segment]:
    roles = [message.get("role") for message in messages]
    last_user = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
    for index, message in enumerate(messages):
        role = roles[index]
        previous = roles[index - 1] if index else None
        where = f"messages[{index}]"
        after_good_turn = previous == "assistant" and not is_erroneous(messages[index - 1], f"messages[{index - 1}]")
        if role == "assistant":
            keeps_reasoning = clear_thinking is False or index > last_user
            erroneous = is_erroneous(message, where)
            for segment in _assistant_segments(message, keeps_reasoning, where):
                yield dataclasses.replace(segment, trained=False) if erroneous else segment
        elif role == "tool":
            if previous != "tool":
                yield Segment("<|observation|>", special=True, trained=after_good_turn)
            yield Segment("<tool_response>", special=True)
            yield Segment(text_of(message.get("content"), f"{where}.content"), special=False)
            yield Segment("</tool_response>", special=True)
        elif role in _ROLE_TOKENS:
            token = _ROLE_TOKENS[role]
            closes_turn = after_good_turn and token in CLOSING_ROLES
            yield Segment(token, special=True, trained=closes_turn)
            yield Segment(text_of(message.get("content"), f"{where}.content"), special=False)
        else:
            raise DataError(f"{where}.role: got {role!r}; expected system, user, assistant or tool")


def _assistant_segments(message: Message, keeps_reasoning: bool, where: str) -> Iterator[Segment]:
    yield Segment("<|assistant|>", special=True)
    content = text_of(message.get("content"), f"{where}.content")
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str):
        reasoning, content = _split_reasoning(content)
    # The test comes before the strip: reasoning of spaces alone still opens and closes a block.
    if keeps_reasoning and reasoning:
        yield Segment("<think>", special=True)
        yield Segment(reasoning.strip(), special=False, trained=True)
        yield Segment("</think>", special=True, trained=True)
    else:
        yield Segment("</think>", special=True)
    yield Segment(content.strip(), special=False, trained=True)
    for number, call in enumerate(message.get("tool_calls") or ()):
        yield from _call_segments(call, f"{where}.tool_calls[{number}]")


def _split_reasoning(content: str) -> tuple[str, str]:
    """Reasoning and answer of content that carries its thinking inline."""
    if "</think>" not in content:
        return "", content
    parts = content.split("</think>")
    return parts[0].rstrip("\n").split("<think>")[-1].lstrip("\n"), parts[-1].lstrip("\n")


def _call_segments(call: Mapping[str, Any], where: str) -> Iterator[Segment]:
    function = call.get("function") or call
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{where}.function.name: got {name!r}; expected the name of a function")

    def tag(text: str) -> Segment:
        return Segment(text, special=True, trained=True)

    yield tag("<tool_call>")
    yield Segment(name, special=False, trained=True)
    for key, value in call_arguments(function.get("arguments"), f"{where}.function.arguments").items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield tag("<arg_key>")
        yield Segment(str(key), special=False, trained=True)
        yield tag("</arg_key>")
        yield tag("<arg_value>")
        yield Segment(text, special=False, trained=True)
        yield tag("</arg_value>")
    yield tag("</tool_call>")


def _tools_segments(tools: Sequence[Tool]) -> Iterator[Segment]:
    """The declaration of the tools, as passed, one JSON object a line; its example call uses the real tag tokens."""
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    yield Segment("<|system|>", special=True)
    yield Segment(
        "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{lines}</tools>\n\n"
        "For each function call, output the function name and arguments within the following XML format:\n",
        special=False,
    )
    yield Segment("<tool_call>", special=True)
    yield Segment("{function-name}", special=False)
    for number in (1, 2):
        yield Segment("<arg_key>", special=True)
        yield Segment(f"{{arg-key-{number}}}", special=False)
        yield Segment("</arg_key>", special=True)
        yield Segment("<arg_value>", special=True)
        yield Segment(f"{{arg-value-{number}}}", special=False)
        yield Segment("</arg_value>", special=True)
    yield Segment("...", special=False)
    yield Segment("</tool_call>", special=True)
