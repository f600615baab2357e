"""A conversation as every chat dialect hands it over: messages, tools, modes → ids and the rules of the answer.

Messages and tools have the form of chat completions; the other dialects translate theirs into it. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from glm5.dialects.protocol import ApiError
from glm5.dialects.protocol import field as value_of
from glm5.dialects.structure import answer_grammar
from glm5.tokenizer.bpe import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Words of ``reasoning_effort``; ``none`` turns thinking off, GLM-5 knows no other grades."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is given for a conversation."""

    ids: list[int]
    grammar: str | None = None
    """Grammar of the answer; None when it is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which calls an answer may or must hold."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The only tool that may be called."""
    parallel: bool = True
    """Whether there may be several calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat answer continues."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    choice: ToolChoice = field(default_factory=ToolChoice)
    schema: dict[str, Any] | None = None
    """JSON schema that the content follows."""
    enable_thinking: bool | None = None
    """None leaves it to the model: on."""
    clear_thinking: bool | None = None
    """False keeps the reasoning of all turns in the prompt."""

    @property
    def thinking(self) -> bool:
        """Whether the answer begins with reasoning."""
        return self.enable_thinking is not False

    @property
    def declared_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the prompt declares; None when there are none or none may be called."""
        return None if self.choice.mode == "none" else self.tools or None

    def prompt(self, tokenizer: Tokenizer) -> Prompt:
        """The rendered prompt and the rules of the answer. Raises DataError or ApiError."""
        return Prompt(self.render(tokenizer), self.grammar(tokenizer))

    def render(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt. Raises DataError for a message that the chat format cannot express."""
        return tokenizer.render(self.messages, self.declared_tools, True, self.enable_thinking, self.clear_thinking).ids

    def grammar(self, tokenizer: Tokenizer) -> str | None:
        """The grammar of the answer; None when it is free. Raises ApiError for a choice that cannot be met."""
        tools = self.declared_tools or []
        if self.choice.mode == "required" and not tools:
            raise ApiError(400, "tool_choice: a call is required but there are no tools", "invalid_request", "tools")
        if self.choice.name is not None:
            tools = [tool for tool in tools if tool["function"]["name"] == self.choice.name]
            if not tools:
                raise ApiError(
                    400, f"tool_choice: there is no tool {self.choice.name!r}", "invalid_request", "tool_choice"
                )
        return answer_grammar(
            tokenizer, self.thinking, tools, self.choice.mode == "required", self.choice.parallel, self.schema
        )


Prompter = Callable[[Conversation], Prompt]
"""Another way to the prompt than rendering: the gateway's, which extends what was recorded."""


def check_model(data: dict[str, Any], model: str) -> None:
    """Raises ApiError 404 when ``data`` asks for another model than the one that is served."""
    name = value_of(data, "model", str, required=True)
    if name != model:
        raise ApiError(404, f"The model `{name}` does not exist; this server has `{model}`", "model_not_found", "model")


def check_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages in the form of chat completions. Raises ApiError 400; the renderer checks the rest."""
    if not messages:
        raise ApiError(400, "messages: empty; send at least one message", "invalid_request", "messages")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ApiError(400, f"messages[{index}]: expected an object", "invalid_type", "messages")
        if not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{index}].role: expected a string", "invalid_type", "messages")
        calls = message.get("tool_calls")
        if calls and not (
            isinstance(calls, list)
            and all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls)
        ):
            raise ApiError(
                400, f"messages[{index}].tool_calls: expected a list of function calls", "invalid_type", "messages"
            )
        if isinstance(message.get("reasoning"), str) and "reasoning_content" not in message:
            message = {**message, "reasoning_content": message["reasoning"]}
        checked.append(message)
    return checked


def check_tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Tools in the form of chat completions. Raises ApiError 400."""
    for index, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        is_function = isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]
        if not is_function or not isinstance(function.get("parameters") or {}, dict):
            raise ApiError(
                400,
                f"tools[{index}]: expected {{type: function, function: {{name, parameters, …}}}}",
                "invalid_type",
                "tools",
            )
    return tools or None


def check_choice(choice: Any, parallel: bool) -> ToolChoice:
    """``tool_choice`` of chat completions and responses. Raises ApiError 400."""
    if choice is None or choice in ("auto", "none", "required"):
        return ToolChoice(mode=choice or "auto", parallel=parallel)
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            400,
            "tool_choice: expected auto, none, required or {type: function, function: {name}}",
            "invalid_request",
            "tool_choice",
        )
    return ToolChoice(mode="required", name=function["name"], parallel=False)


def check_format(data: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The JSON schema that ``data[name]``, an OpenAI response format, asks for; None for free text."""
    wanted = value_of(data, name, dict, {})
    kind = value_of(wanted, "type", str, "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    # Chat completions wrap the schema in one more object than responses do.
    schema = value_of(value_of(wanted, "json_schema", dict, wanted), "schema", dict)
    if kind != "json_schema" or schema is None:
        raise ApiError(
            400, f"{name}: expected type text, json_object, or json_schema with a schema", "invalid_request", name
        )
    return schema


def check_effort(effort: str | None) -> bool | None:
    """What an effort says about thinking: off, or nothing. Raises ApiError 400 for a word that is none."""
    if effort is not None and effort not in EFFORTS:
        raise ApiError(
            400,
            f"reasoning_effort: got {effort!r}, expected one of {', '.join(EFFORTS)}",
            "invalid_request",
            "reasoning_effort",
        )
    return False if effort == "none" else None


def thinking_switches(data: dict[str, Any]) -> tuple[bool | None, bool | None]:
    """(enable_thinking, clear_thinking): top level, then ``chat_template_kwargs``, then ``thinking: {type}``, then
    ``reasoning_effort``."""
    kwargs = value_of(data, "chat_template_kwargs", dict, {})
    thinking = value_of(data, "thinking", dict, {})
    by_type = {"enabled": True, "disabled": False}.get(value_of(thinking, "type", str, ""))
    by_effort = check_effort(value_of(data, "reasoning_effort", str, value_of(kwargs, "reasoning_effort", str)))
    switches: list[bool | None] = []
    for name, last in (("enable_thinking", by_type), ("clear_thinking", value_of(thinking, "clear_thinking", bool))):
        switches.append(value_of(data, name, bool, value_of(kwargs, name, bool, last)))
    return (by_effort if switches[0] is None else switches[0]), switches[1]
