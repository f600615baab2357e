"""Tools as the model sees them: definitions, arguments, and the calculator."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

from glm5.env.tasks import Message, ToolError

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_EXPRESSION = 200
_MAX_VALUE = 10**30


def function_tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """OpenAI definition of a tool whose ``parameters`` (name → JSON type) are all required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def parse_arguments(call: Message) -> tuple[str, dict[str, Any]]:
    """(tool name, arguments) of an OpenAI tool call. Raises ToolError when it is malformed."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError:
            raise ToolError("error: arguments are not JSON") from None
    if not isinstance(arguments, dict):
        raise ToolError("error: arguments are not an object")
    return str(function.get("name")), arguments


def text_argument(arguments: dict[str, Any], name: str) -> str:
    """A required string argument. Raises ToolError when it is missing or no string."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"error: {name} is missing" if value is None else f"error: {name} is not a string")
    return value


def integer_argument(arguments: dict[str, Any], name: str) -> int:
    """A required integer argument, also as decimal text. Raises ToolError otherwise."""
    value = arguments.get(name)
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 10:
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ToolError(f"error: {name} is missing" if value is None else f"error: {name} is not an integer")
    return value


def final_answer(messages: list[Message]) -> str:
    """Text of the last message when it is an answer of the assistant (no tool call), stripped; else empty."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return ""
    content = last.get("content")
    return content.strip() if isinstance(content, str) else ""


def used_tool(messages: list[Message]) -> float:
    """1.0 when the assistant called a tool, else 0.0."""
    return float(any(message.get("tool_calls") for message in messages))


def progress_reward(messages: list[Message], result: str, value: float = 0.5) -> dict[str, float]:
    """A reward inside the episode, as the part ``turn.K``: turn K is the first whose tool gave exactly ``result``;
    empty when none did."""
    turn = -1
    for message in messages:
        if message.get("role") == "assistant":
            turn += 1
        elif message.get("role") == "tool" and message.get("content") == result:
            return {f"turn.{turn}": value}
    return {}


def evaluate(expression: str) -> int:
    """Value of an integer expression with + - * // % and parentheses. Raises ToolError for anything else.

    Evaluated on its syntax tree, with bounds on size, so that no expression can cost more than microseconds.
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ToolError("error: expression too long")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("error: bad expression") from None
    except ZeroDivisionError:
        raise ToolError("error: division by zero") from None
    return value


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError
    if abs(value) > _MAX_VALUE:
        raise ValueError
    return value
