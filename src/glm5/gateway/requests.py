"""Requests of a recorded session: what they ask, in any dialect, and the exact ids that they become.

Options that would make the recorded ids differ from what the client sees (stop strings), or the recorded log-probs from
those of the policy (logit bias, enforced calls and schemas), are refused. Temperature and the other sampling parameters
are read by nobody: the session decides them; a client can only shorten its answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from glm5.dialects.answer import AnswerRequest, Format
from glm5.dialects.anthropic import count_tokens, parse_message
from glm5.dialects.chat import parse_chat
from glm5.dialects.completions import parse_completion
from glm5.dialects.conversation import Conversation, Prompt
from glm5.dialects.protocol import ApiError
from glm5.dialects.responses import Remembered, ResponseFormat, parse_response
from glm5.errors import DataError
from glm5.gateway.history import digest
from glm5.gateway.sessions import Session
from glm5.gateway.tree import Node, Origin, Plan, answer_token
from glm5.records import TurnRole
from glm5.tokenizer.bpe import Tokenizer

DEFAULT_MODEL = "glm5"
Dialect = Literal["chat/completions", "completions", "responses", "messages"]
"""A dialect by its path below ``/v1/``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that is ready to be sampled."""

    turn_id: str
    number: int
    """Model calls of the session up to this one."""
    form: Any
    """The ``Format`` of the answer."""
    plan: Plan
    origin: Origin
    role: TurnRole
    chain: bytes
    """Digest of the history."""
    num_messages: int
    """Messages of the history; -1 for raw text."""
    response: tuple[str | None, list[dict[str, Any]]] | None
    """See ``Node.response``; without the answer."""


def read_call(session: Session, dialect: Dialect, data: dict[str, Any], tokenizer: Tokenizer, created: int) -> Call:
    """Check a request and plan its prompt. Raises ApiError."""
    planner = _Planner(session, tokenizer, _model(data))
    try:
        form = _parse(dialect, data, planner)
    except DataError as error:
        raise ApiError(400, str(error), "invalid_request", "messages") from None
    _refuse_unsupported(form.request)
    if not form.request.is_chat:
        planner.take_raw(form.request.prompts)
    assert planner.plan is not None, "every dialect asks for its prompt"
    turn_id = session.next_turn_id()
    return Call(
        turn_id=turn_id, number=session.calls, form=_identified(form, session, turn_id, created), plan=planner.plan,
        origin=planner.origin, role=session.role(planner.plan, planner.origin, planner.system), chain=planner.chain,
        num_messages=planner.num_messages, response=_continuation(form, data, planner))


def read_again(session: Session, dialect: Dialect, data: dict[str, Any], tokenizer: Tokenizer, node: Node) -> Format:
    """The format of a request that has been answered by ``node``."""
    planner = _Planner(session, tokenizer, _model(data), node.prompt_ids())
    return _identified(_parse(dialect, data, planner), session, node.turn_id, node.created)


def count_prompt(session: Session, data: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer of ``messages/count_tokens``: the length of the prompt that the request would become."""
    planner = _Planner(session, tokenizer, _model(data))
    return count_tokens(data, tokenizer, planner.model, planner.prompt)


class _Planner:
    """Gives a dialect the ids of its prompt by extending what the session has recorded."""

    def __init__(self, session: Session, tokenizer: Tokenizer, model: str, known: list[int] | None = None) -> None:
        """``known``: the prompt, if it is decided already."""
        self.session, self.tokenizer, self.model, self._known = session, tokenizer, model, known
        self.plan: Plan | None = None
        self.origin = Origin(b"", b"", b"", model)
        self.system = ""
        self.chain = b""
        self.num_messages = -1
        self.recalled = 0
        """Messages that came from an earlier response."""

    def prompt(self, conversation: Conversation) -> Prompt:
        """A ``Prompter``."""
        if self._known is not None:
            return Prompt(self._known)
        _refuse_constraints(conversation)
        is_declared = self.session.settings.declare_tools
        declared = conversation.tools if is_declared else None
        history = self.session.reader.read(conversation.messages, declared)
        self.system, self.chain, self.num_messages = history.system, history.chains[-1], len(history.messages)
        self.origin = Origin.of(history, conversation.tools, is_declared, self.model)
        self.plan = self.session.plan(history, self.origin, declared, self.tokenizer)
        return Prompt(self.plan.prompt_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of raw text."""
        return self._known if self._known is not None else self.session.encode(text, self.tokenizer)

    def take_raw(self, prompts: Sequence[list[int]]) -> None:
        """Plan a prompt of raw ids."""
        if len(prompts) != 1 or not prompts[0]:
            raise ApiError(400, f"prompt: got {len(prompts)} prompts, expected one that is not empty in a recorded "
                                "session", "unsupported_parameter", "prompt")
        self.plan = self.session.plan_raw(prompts[0])
        self.chain = digest(repr(prompts[0]).encode())

    def recall(self, response_id: str) -> Remembered | None:
        """The conversation of a recorded response and all before it."""
        turns = []
        current: str | None = response_id
        while current is not None:
            node = self.session.response(current)
            if node is None:
                return None
            assert node.response is not None
            current, messages = node.response
            turns.append(messages)
        recalled = [message for messages in reversed(turns) for message in messages]
        self.recalled = len(recalled)
        return Remembered({}, recalled)


def _parse(dialect: Dialect, data: dict[str, Any], planner: _Planner) -> Any:
    tokenizer, model, limit = planner.tokenizer, planner.model, planner.session.settings.sampling.max_new_tokens
    if dialect == "chat/completions":
        return parse_chat(data, tokenizer, model, limit, planner.prompt)
    if dialect == "completions":
        return parse_completion(data, tokenizer, model, planner.encode)
    if dialect == "responses":
        return parse_response(data, tokenizer, model, limit, planner.recall, _record_keeps_it, planner.prompt)
    return parse_message(data, tokenizer, model, planner.prompt)


def _record_keeps_it(response: Remembered) -> None:
    """Nothing to do: the recorded turn holds what a later request may continue."""


def _identified(form: Any, session: Session, turn_id: str, created: int) -> Any:
    """The format with the identifiers of its turn and the thinking of its session."""
    thinking = form.request.is_chat and session.settings.enable_thinking
    request = replace(form.request, token=answer_token(turn_id), created=created, thinking=thinking)
    return replace(form, request=request)


def _continuation(form: Any, data: dict[str, Any], planner: _Planner) -> tuple[str | None, list[dict[str, Any]]] | None:
    if not isinstance(form, ResponseFormat) or form.remember is None:
        return None
    return data.get("previous_response_id"), form.messages[planner.recalled:]


def _model(data: dict[str, Any]) -> str:
    """The model name that the client gives: any is served."""
    if data.get("model") is None:
        data["model"] = DEFAULT_MODEL
    return str(data["model"])


def _refuse_unsupported(request: AnswerRequest) -> None:
    for name, value in (("n", request.n if request.n != 1 else None), ("stop", request.stops),
                        ("logit_bias", request.params.logit_bias)):
        if value:
            raise _unsupported(name, value)


def _refuse_constraints(conversation: Conversation) -> None:
    if conversation.choice.mode == "required":
        raise _unsupported("tool_choice", conversation.choice.name or "required")
    if conversation.schema is not None:
        raise _unsupported("response_format", conversation.schema)


def _unsupported(name: str, value: Any) -> ApiError:
    return ApiError(400, f"{name}: {value!r} is not supported in a recorded session; leave it out",
                    "unsupported_parameter", name)
