"""One running episode as a tree of turns, and the rule that decides which ids a request becomes.

A request continues the longest recorded turn whose messages are a prefix of its own. The ids of the new messages are
then appended to that turn's prompt and output ids (a bridge): what the model sampled is never tokenised again. Where
no turn fits, or appending cannot express the change, the whole history is rendered and the turn starts a new path.

Kinds of turns:

- ``root``     the first call, or one without earlier answers in its history (sub-agent, compaction, another sample);
- ``extend``   the prompt starts with all ids of the parent;
- ``rewrite``  the client changed the answer of the parent: the ids differ after the parent's prompt;
- ``fork``     the client changed something earlier; the parent is the turn with the longest common beginning.

``rewrite`` and ``fork`` count as mismatches. A turn holds only its own ids; those before it are its parent's, so a long
session takes memory in proportion to its length, not to its square.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.errors import GatewayError
from glm5.gateway.dialect import RequestError
from glm5.gateway.history import History
from glm5.records import FinishReason, SamplingParams, Turn, TurnKind
from glm5.tokenizer.bpe import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Body of ``POST /sessions``."""

    session_id: str
    """Chosen by the caller; the same id gives the same session."""
    group_id: str = ""
    """Group of the episode; kept for the reader of the store."""
    ttl_s: float = 3600.0
    """Seconds from creation until the session is closed and its turns are given up."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How every turn is sampled, whatever the client asks for. ``max_new_tokens`` is an upper bound per turn."""
    max_turns: int | None = None
    """Model calls in the whole session; None sets no limit."""
    max_tokens: int | None = None
    """Sampled tokens in the whole session; None sets no limit."""
    enable_thinking: bool = True
    """False ends every prompt with ``</think>``, so that the model answers at once."""
    declare_tools: bool = True
    """False leaves the tools of a request out of the prompt; they still give parsed arguments their types."""

    def __post_init__(self) -> None:
        if not self.session_id or "/" in self.session_id:
            raise GatewayError(f"session_id: got {self.session_id!r}, expected a name without '/'")
        for name, value in (("ttl_s", self.ttl_s), ("max_turns", self.max_turns), ("max_tokens", self.max_tokens),
                            ("sampling.max_new_tokens", self.sampling.max_new_tokens)):
            if value is not None and value <= 0:
                raise GatewayError(f"{name}: got {value}, expected a positive number")


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
    """Messages of the request plus the answer."""
    digest: bytes
    """Digest of the request body: finds retries."""
    answer: dict[str, Any]
    """The completion object as it was sent."""
    abandoned: bool = False
    """The client went away before the answer was sent. Never continued, never exported."""
    start: int = 0
    """Number of ids before ``tail_ids``; derived."""

    def __post_init__(self) -> None:
        self.start = self.parent.length if self.parent is not None and self.kind == "extend" else 0

    @property
    def length(self) -> int:
        """Number of prompt and output ids."""
        return self.start + len(self.tail_ids) + len(self.output_ids)

    @property
    def reasoning(self) -> str:
        """Reasoning of the answer, "" when there is none."""
        return str(self.answer["choices"][0]["message"].get("reasoning_content") or "").strip()

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


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request attaches and which ids are sent to the engine."""

    parent: Node | None
    kind: TurnKind
    prompt_ids: list[int]

    @property
    def tail_ids(self) -> list[int]:
        """The prompt ids that are not the parent's."""
        if self.parent is None or self.kind != "extend":
            return self.prompt_ids
        return self.prompt_ids[self.parent.length:]


@dataclass(slots=True)
class PendingCall:
    """A call that is being answered; identical requests that arrive meanwhile wait for the same task."""

    task: asyncio.Task[Node]
    waiters: int = 0
    is_recording: bool = False
    """Sampled, and being written: the call can no longer be cancelled."""


class Session:
    """Turns of one episode. Not thread-safe: everything happens on the gateway's event loop, and planning and adding
    have no await inside, so parallel calls are independent branches of the tree."""

    def __init__(self, settings: SessionSettings, api_key: str, deadline: float) -> None:
        """``deadline`` is on the clock of the event loop."""
        self.settings = settings
        self.api_key = api_key
        self.deadline = deadline
        self.nodes: list[Node] = []
        self.pending: dict[bytes, PendingCall] = {}
        self.calls = 0
        """Model calls so far, those included that failed."""
        self.num_aborted = 0
        """Calls whose clients went away before anything was recorded."""
        self.is_closed = False
        self._by_chain: dict[bytes, list[Node]] = {}

    def add(self, node: Node) -> None:
        """Record a turn; later requests may continue it."""
        self.nodes.append(node)
        self._by_chain.setdefault(node.chain, []).append(node)

    def retried(self, digest: bytes) -> Node | None:
        """The last turn when its request had this digest: the same request again, before anything else happened."""
        return self.nodes[-1] if self.nodes and self.nodes[-1].digest == digest else None

    def next_turn_id(self) -> str:
        """A new id, unique in the store."""
        self.calls += 1
        return f"{self.settings.session_id}-{self.calls}"

    def turns(self) -> list[Turn]:
        """All turns that may be exported, oldest first."""
        return [Turn(turn_id=node.turn_id, session_id=self.settings.session_id,
                     parent=node.parent.turn_id if node.parent is not None else None, kind=node.kind,
                     prompt_ids=node.prompt_ids(), output_ids=node.output_ids, logprobs=node.logprobs,
                     versions=node.versions, finish_reason=node.finish_reason) for node in self._live()]

    def num_abandoned(self) -> int:
        """Calls whose clients went away before their answer."""
        return self.num_aborted + sum(node.abandoned for node in self.nodes)

    def num_mismatches(self) -> int:
        """Turns whose history was not the recorded one."""
        return sum(node.kind in ("rewrite", "fork") for node in self._live())

    def kinds(self) -> dict[str, int]:
        """Number of turns of each kind, abandoned ones left out."""
        return dict(Counter(node.kind for node in self._live()))

    def remaining_tokens(self, context_room: int, requested: int | None) -> int:
        """Tokens that the next turn may sample. Raises RequestError when a limit of the session is reached.

        ``context_room`` is what the model's context leaves; ``requested`` the client's wish.
        """
        settings = self.settings
        # Calls that are being answered count as well, or parallel calls could pass the limit together.
        if settings.max_turns is not None and len(self.nodes) + len(self.pending) > settings.max_turns:
            raise RequestError(400, f"the session has reached its limit of {settings.max_turns} turns",
                               code="turn_limit_exceeded")
        limits = [settings.sampling.max_new_tokens, context_room]
        if settings.max_tokens is not None:
            left = settings.max_tokens - sum(len(node.output_ids) for node in self.nodes)
            if left <= 0:
                raise RequestError(400, f"the session has reached its limit of {settings.max_tokens} sampled tokens",
                                   code="token_limit_exceeded")
            limits.append(left)
        return min(limits if requested is None else [*limits, requested])

    def plan(self, history: History, declared_tools: Sequence[dict[str, Any]] | None, tokenizer: Tokenizer) -> Plan:
        """The exact prompt of a request. Raises DataError when the history cannot be rendered."""
        thinking = self.settings.enable_thinking
        node = self._deepest_match(history)
        if node is not None:
            previous = node.ids()
            appended = tokenizer.bridge(previous, history.messages[node.num_messages:], tools=declared_tools,
                                        enable_thinking=thinking)
            if appended is not None:
                return Plan(node, "extend", previous + appended)
        # Preserved thinking: with reasoning kept in every turn, the next prompt starts with this one.
        ids = tokenizer.render(history.messages, tools=declared_tools, add_generation_prompt=True,
                               enable_thinking=thinking, clear_thinking=False).ids
        return self._classify(ids, history.has_reply())

    def _live(self) -> Iterator[Node]:
        return (node for node in self.nodes if not node.abandoned)

    def _deepest_match(self, history: History) -> Node | None:
        for length in range(len(history.messages), 0, -1):
            for node in reversed(self._by_chain.get(history.chains[length], ())):
                if not node.abandoned and _reasoning_agrees(node, history):
                    return node
        return None

    def _classify(self, ids: list[int], has_reply: bool) -> Plan:
        """Attach a rendered prompt to the recorded turn that it shares the most with."""
        common: dict[str, int] = {}
        best: Node | None = None
        for node in self.nodes:  # parents come before their children
            shared = _shared_length(node, ids, common)
            common[node.turn_id] = shared
            if not node.abandoned and (best is None or shared > common[best.turn_id]):
                best = node
        if best is not None and common[best.turn_id] == best.length:
            return Plan(best, "extend", ids)
        if best is None or not has_reply:
            return Plan(None, "root", ids)
        changed_answer = common[best.turn_id] >= best.length - len(best.output_ids)
        return Plan(best, "rewrite" if changed_answer else "fork", ids)


def _reasoning_agrees(node: Node, history: History) -> bool:
    """Whether every reasoning that the client sends back is the recorded one; a missing one is no change."""
    for turn in node.path():
        sent = history.messages[turn.num_messages - 1].get("reasoning_content")
        if sent is not None and sent.strip() != turn.reasoning:
            return False
    return True


def _shared_length(node: Node, ids: list[int], common: dict[str, int]) -> int:
    """Number of leading ids that ``ids`` and the turn have in common; ``common`` holds those of earlier turns."""
    if node.parent is not None and node.kind == "extend" and common[node.parent.turn_id] < node.parent.length:
        return common[node.parent.turn_id]
    own = node.tail_ids + node.output_ids
    other = ids[node.start:node.start + len(own)]
    if own == other:
        return node.length
    return node.start + next((n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), len(other))
