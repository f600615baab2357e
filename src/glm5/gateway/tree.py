"""Turns and how they hang together.

Kinds of turns:

- ``root``     the first call, one without earlier answers in its history, or one with a history of its own (sub-agent,
               compaction, another sample);
- ``extend``   the prompt starts with all ids of the parent;
- ``rewrite``  the client changed the answer of the parent: the ids differ after the parent's prompt;
- ``fork``     the client changed something earlier; the parent is the turn with the longest common beginning.

``rewrite`` and ``fork`` count as mismatches, by reason:

- ``tools``, ``system``, ``answer``, ``history``  what the client changed: the declared tools, the system prompt, the
                  recorded answer, something else;
- ``compaction``  the client sends a shorter history than was recorded (as a root: only system prompt and tools are the
                  same);
- ``thinking``    reasoning was changed, or dropped because the session says ``clear_thinking``;
- ``role_token``  the answer ended with a role token that the next message contradicts;
- ``shape``       what follows the answer is neither tool results nor a user message, and cannot be appended;
- ``stop_token``  raw text goes on without the stop token that ended the answer.

Every turn has a role: ``main`` for calls like the first one; a new root with another system prompt is a sub-agent's
(``sub``) if it declares tools or the main agent declares none, else auxiliary (``aux``: a title, a summary). The
session's settings name further auxiliary calls and the roles that are trained. Later turns inherit their parent's role.

A turn holds only its own ids; those before it are its parent's, so a long session takes memory in proportion to its
length, not to its square.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.gateway.history import History, canonical_json, digest
from glm5.records import FinishReason, TurnKind, TurnRole


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from: what tells agents, sub-agents and auxiliary calls of one session apart."""

    system: bytes
    """Digest of the system prompt."""
    tools: bytes
    """Digest of the tools as they were sent; empty for none."""
    opening: bytes
    """Digest of the first message that is no system message."""
    model: str
    """Model name that the client gave."""

    @classmethod
    def of(cls, history: History, tools: Sequence[dict[str, Any]] | None, is_declared: bool, model: str) -> Origin:
        """Origin of a chat request; ``is_declared`` says whether ``tools`` are those of the history."""
        known = history.tools if is_declared else digest(canonical_json(tools))
        return cls(digest(history.system.strip().encode("utf-8", "surrogatepass")), known if tools else b"",
                   history.opening, model)


    def to_text(self) -> str:
        """As one line."""
        return " ".join([self.system.hex(), self.tools.hex(), self.opening.hex(), self.model])

    @classmethod
    def from_text(cls, text: str) -> Origin:
        """Inverse of ``to_text``."""
        system, tools, opening, model = text.split(" ", 3)
        return cls(bytes.fromhex(system), bytes.fromhex(tools), bytes.fromhex(opening), model)


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A recorded turn. ``tail_ids`` are the prompt ids after the parent's (the whole prompt unless kind is extend)."""

    turn_id: str
    parent: Node | None
    kind: TurnKind
    tail_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    chain: bytes
    """Digest of the request's messages and the answer."""
    num_messages: int
    """Messages of the request plus the answer; 0 for raw text."""
    digest: bytes
    """Digest of the request: finds retries."""
    role: TurnRole = "main"
    reason: str = ""
    """Why the turn does not extend its parent; "" if it does, or has nothing to extend."""
    origin: Origin
    reasoning: str = ""
    """Reasoning of the answer."""
    created: int = 0
    """Unix seconds that the answer carries."""
    cached_tokens: int = 0
    """Prompt ids that the engine did not have to compute."""
    response: tuple[str | None, list[dict[str, Any]]] | None = None
    """Of a response that may be continued by its id: the response that it continued itself, and its own input."""
    abandoned: bool = False
    """The client went away before the answer was sent. Never continued, never exported."""
    start: int = 0
    """Number of ids before ``tail_ids``; derived."""
    _text: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.start = self.parent.length if self.parent is not None and self.kind == "extend" else 0

    @property
    def length(self) -> int:
        """Number of prompt and output ids."""
        return self.start + len(self.tail_ids) + len(self.output_ids)

    @property
    def token(self) -> str:
        """Text that the identifiers of the answer are made of."""
        return answer_token(self.turn_id)

    def path(self) -> list[Node]:
        """The turns whose ids this turn's prompt consists of, from the start of its path to itself."""
        nodes: list[Node] = [self]
        while nodes[-1].kind == "extend" and nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def prompt_ids(self) -> list[int]:
        """The exact prompt."""
        ids: list[int] = []
        for node in self.path():
            ids += node.tail_ids
            if node is not self:
                ids += node.output_ids
        return ids

    def ids(self) -> list[int]:
        """Prompt and output ids."""
        return self.prompt_ids() + self.output_ids

    def ids_text(self) -> str:
        """``tail_ids`` and ``output_ids`` as the function writes them; kept: later turns send them again."""
        self._text = self._text or ids_text(self.tail_ids + self.output_ids)
        return self._text

    def visible_ids(self) -> list[int]:
        """Prompt and output ids without the stop id, which the client of raw text does not see."""
        ids = self.ids()
        return ids[:-1] if self.finish_reason == "stop" else ids

    def has_reasoning(self) -> bool:
        """Whether there is reasoning in any answer of the path."""
        return any(turn.reasoning for turn in self.path())

    def with_reasoning(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``messages``, which continue this turn, with the recorded reasoning where the client left it out."""
        filled = list(messages)
        for turn in self.path():
            if turn.reasoning and turn.num_messages:
                filled[turn.num_messages - 1] = {**filled[turn.num_messages - 1], "reasoning_content": turn.reasoning}
        return filled

    def reasoning_agrees(self, messages: list[dict[str, Any]]) -> bool:
        """Whether every reasoning that the client sends back is the recorded one; a missing one is no change."""
        for turn in self.path():
            sent = messages[turn.num_messages - 1].get("reasoning_content") if turn.num_messages else None
            if sent is not None and sent.strip() != turn.reasoning:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request attaches and which ids are sent to the engine."""

    parent: Node | None
    kind: TurnKind
    prompt_ids: list[int]
    reason: str = ""

    @property
    def tail_ids(self) -> list[int]:
        """The prompt ids that are not the parent's."""
        if self.parent is None or self.kind != "extend":
            return self.prompt_ids
        return self.prompt_ids[self.parent.length:]

    def prompt_text(self) -> str:
        """``prompt_ids`` as ``ids_text`` writes them."""
        known = self.parent.path() if self.parent is not None and self.kind == "extend" else []
        return join_ids_texts([*(node.ids_text() for node in known), ids_text(self.tail_ids)])


def ids_text(ids: list[int]) -> str:
    """Ids as they stand between the brackets of a JSON list."""
    return str(ids)[1:-1]


def join_ids_texts(texts: Iterable[str]) -> str:
    """The text of lists of ids one after the other."""
    return ", ".join(text for text in texts if text)


def answer_token(turn_id: str) -> str:
    """Text that the identifiers of a turn's answer are made of."""
    return digest(turn_id.encode()).hex()[:24]


def changed(best: Node, history: History, origin: Origin, is_rewrite: bool) -> str:
    """What the client changed since the turn that shares the most with its request."""
    if best.origin.tools != origin.tools:
        return "tools"
    if best.origin.system != origin.system:
        return "system"
    if is_rewrite:
        return "answer"
    return "compaction" if len(history.messages) < best.num_messages else "history"


def shared_length(node: Node, ids: list[int], common: dict[str, int]) -> int:
    """Number of leading ids that ``ids`` and the turn have in common; ``common`` holds those of earlier turns."""
    if node.parent is not None and node.kind == "extend" and common[node.parent.turn_id] < node.parent.length:
        return common[node.parent.turn_id]
    own = node.tail_ids + node.output_ids
    other = ids[node.start:node.start + len(own)]
    if own == other:
        return node.length
    return node.start + next((n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), len(other))
