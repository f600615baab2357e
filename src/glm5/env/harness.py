"""The built-in agent loop: an OpenAI base URL, a key, tools, and nothing about training.

It sends the conversation, appends the assistant's message exactly as it came, runs its tool calls in order, appends the
results, and stops when there is no tool call or the turns are used up. What the model gets wrong is a tool result that
says so; what the machinery gets wrong is an exception.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from glm5.env.tasks import Message, ToolError
from glm5.env.tools import parse_arguments
from glm5.errors import ServiceError
from glm5.records import Outcome
from glm5.wire import HttpClient, HttpStatusError

CallTool = Callable[[str, dict[str, Any]], Awaitable[str]]
_LIMIT_CODES = frozenset({"context_length_exceeded", "turn_limit_exceeded", "token_limit_exceeded"})
"""Why a model call is refused when the conversation has used up a limit."""
_MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls")


@dataclass(slots=True)
class Run:
    """A finished conversation."""

    messages: list[Message]
    outcome: Outcome = "ok"
    reason: str = ""
    turns: int = 0
    bad_calls: int = 0
    """Tool calls that were malformed or had unusable arguments."""
    finish_reasons: list[str] = field(default_factory=list)


async def run_agent(http: HttpClient, *, base_url: str, api_key: str, messages: list[Message],
                    tools: list[dict[str, Any]], call_tool: CallTool, max_turns: int, call_timeout_s: float) -> Run:
    """Run the loop from ``messages`` to its end.

    Raises ServiceError when a model call fails for another reason than the model's own output, and whatever
    ``call_tool`` raises except ToolError.
    """
    run = Run(list(messages))
    last_was_bad = False
    for _ in range(max_turns):
        try:
            request = {"model": "policy", "messages": run.messages, "tools": tools}
            answer = await http.post(f"{base_url}/chat/completions", request, call_timeout_s, api_key)
        except HttpStatusError as error:
            if error.code not in _LIMIT_CODES or run.turns == 0:
                raise
            run.outcome, run.reason = "truncated", f"the model call was refused: {error.detail}"
            return run
        message, finish = _read_answer(answer, base_url)
        run.turns += 1
        run.finish_reasons.append(finish)
        run.messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            if finish == "length":
                run.outcome, run.reason = "truncated", "the answer reached the token limit"
            return run
        for call in calls:
            output, last_was_bad = await _run_call(call, call_tool)
            run.bad_calls += last_was_bad
            run.messages.append({"role": "tool", "tool_call_id": str(call.get("id", "")), "content": output})
    if last_was_bad:
        run.outcome, run.reason = "agent_error", f"{max_turns} turns used, the last tool call could not be run"
    else:
        run.outcome, run.reason = "truncated", f"{max_turns} turns used without an answer"
    return run


async def _run_call(call: Message, call_tool: CallTool) -> tuple[str, bool]:
    """(result, True when the call could not be run)."""
    try:
        name, arguments = parse_arguments(call)
        return await call_tool(name, arguments), False
    except ToolError as error:
        return str(error), True


def _read_answer(answer: Any, base_url: str) -> tuple[Message, str]:
    try:
        choice = answer["choices"][0]
        message = {key: choice["message"][key] for key in _MESSAGE_KEYS if choice["message"].get(key) is not None}
        if not isinstance(message.get("tool_calls") or [], list):
            raise TypeError
        return {"role": "assistant", "content": "", **message}, str(choice.get("finish_reason"))
    except (KeyError, IndexError, TypeError, AttributeError):
        found = str(answer)[:120]
        raise ServiceError(f"{base_url}/chat/completions: expected choices[0].message, got {found}") from None
