"""Grammars of answers that must hold tool calls or JSON, in the Lark form that ``llguidance`` reads.

A call is written in the chat format: tags are special tokens, strings stand raw between them and everything else is
JSON. What a schema says about a string beyond ``enum`` and ``const`` (length, pattern, format) is not enforced in tool
arguments; in JSON content it is. Arguments come in the order in which the schema declares them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from glm5.tokenizer.bpe import Tokenizer
from glm5.tokenizer.schema import ArgumentTypes

_WHITESPACE = "[ \\n]{0,8}"
"""Bounded, so that a model cannot fill its answer with it."""


def answer_grammar(
    tokenizer: Tokenizer,
    thinking: bool,
    tools: Sequence[dict[str, Any]],
    is_call_required: bool,
    is_parallel: bool,
    schema: dict[str, Any] | None,
) -> str | None:
    """Grammar of an answer; None when nothing has to be enforced.

    ``tools`` are those that may be called. A call is enforced if required; the form of voluntary calls if a tool is
    ``strict``. With ``schema`` the content is JSON, or a call in its place if there are tools.
    """
    is_strict = any(tool["function"].get("strict") is True for tool in tools)
    if not (is_call_required or is_strict or schema is not None):
        return None
    rules = _Rules(tokenizer)
    calls = rules.calls(tools, is_parallel) if tools else None
    if is_call_required:
        body = calls
    elif schema is not None:
        body = rules.json(schema) if calls is None else f"({rules.json(schema)} | {calls})"
    else:
        body = f"{rules.text()} ({calls})?"
    opening = f"{rules.text()} {rules.tag('</think>')} " if thinking else ""
    return "\n".join([f"start: {opening}{body}", *rules.lines]) + "\n"


class _Rules:
    """Rules of one grammar, each added when it is first asked for; every method gives an expression."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._terms: dict[str, str] = {}
        self.lines: list[str] = []

    def tag(self, name: str) -> str:
        """One special token."""
        return f"<[{self._tokenizer.special_id(name)}]>"

    def text(self) -> str:
        """Reasoning or content: any text that the parser does not read as a tag."""
        return self._without("TEXT", ("</think>", "<tool_call>"))

    def value(self) -> str:
        """A raw string in an argument."""
        return self._without("VALUE", ("</arg_value>",))

    def json(self, schema: dict[str, Any]) -> str:
        """JSON that follows ``schema``."""
        guided = {"x-guidance": {"whitespace_pattern": _WHITESPACE}, **schema}
        return self._rule("json", f"%json {json.dumps(guided, ensure_ascii=False)}")

    def calls(self, tools: Sequence[dict[str, Any]], is_parallel: bool) -> str:
        """One call of one of ``tools``, or several."""
        choices = " | ".join(self._tool(tools, tool["function"]) for tool in tools)
        call = self._rule("call", f"{self.tag('<tool_call>')} ({choices}) {self.tag('</tool_call>')}")
        return f"{call}+" if is_parallel else call

    def _tool(self, tools: Sequence[dict[str, Any]], function: dict[str, Any]) -> str:
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties")
        if not isinstance(properties, dict):
            properties = {}
        required = parameters.get("required")
        required = required if isinstance(required, list) else []
        types = ArgumentTypes.of_tool(tools, function["name"])
        arguments = []
        for key, schema in properties.items():
            argument = self._argument(_literal(key), self._value_of(schema, parameters, types.is_text(key)))
            arguments.append(argument if key in required else f"({argument})?")
        if not properties and parameters.get("additionalProperties"):
            arguments.append(f"({self._argument(self._without('KEY', ('</arg_key>',)), self.value())})*")
        return self._rule("tool", " ".join([_literal(function["name"]), *arguments]))

    def _argument(self, key: str, value: str) -> str:
        tags = [self.tag(name) for name in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")]
        return f"{tags[0]} {key} {tags[1]} {tags[2]} {value} {tags[3]}"

    def _value_of(self, schema: Any, root: dict[str, Any], is_text: bool) -> str:
        if not is_text:
            definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return self.json({**definitions, **schema})
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None) if _is_schema(schema) else None
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            return self.value()
        options = " | ".join(_literal(choice) for choice in choices if choice)
        return f"({options})?" if "" in choices else f"({options})"

    def _without(self, name: str, forbidden: tuple[str, ...]) -> str:
        """A terminal for text without any of ``forbidden``."""
        if name not in self._terms:
            anything = r"/(.|\n)*/"
            parts = [rf"~/(.|\n)*{text.replace('/', chr(92) + '/')}(.|\n)*/" for text in forbidden]
            self._terms[name] = name
            self.lines.append(f"{name}: {' & '.join([anything, *parts])}")
        return name

    def _rule(self, stem: str, body: str) -> str:
        name = f"{stem}_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _is_schema(schema: Any) -> bool:
    return isinstance(schema, dict)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
