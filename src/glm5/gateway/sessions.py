"""One running episode as a tree of turns, and the rule that decides which ids a request becomes.

A request continues the longest recorded turn whose messages are a prefix of its own. The ids of the new messages are
then appended to that turn's prompt and output ids (a bridge): what the model sampled is never tokenised again. Where
no turn fits, or appending cannot express the change, the whole history is rendered and the turn starts a new path.
``tree`` says what the kinds and roles of turns are.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from glm5.dialects.answer import Format
from glm5.dialects.protocol import ApiError
from glm5.errors import GatewayError
from glm5.gateway.history import History, HistoryReader
from glm5.gateway.tree import Node, Origin, Plan, changed, shared_length
from glm5.records import SamplingParams, Turn, TurnRole, sampling_violation
from glm5.tokenizer.bpe import Tokenizer
from glm5.tokenizer.chat import continuation_segments

if TYPE_CHECKING:
    from glm5.gateway.reply import Reply


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
    clear_thinking: bool = False
    """False keeps the reasoning of all turns in the prompt; True drops it at each new user message, as the chat
    template does by default, which starts a new path there."""
    declare_tools: bool = True
    """False leaves the tools of a request out of the prompt; they still give parsed arguments their types."""
    aux_models: tuple[str, ...] = ()
    """Patterns (``*``, ``?``) of model names whose calls are auxiliary."""
    aux_prompts: tuple[str, ...] = ()
    """Texts that the system prompt of an auxiliary call contains."""
    trained_roles: tuple[TurnRole, ...] = ("main", "sub")
    """Roles whose sampled ids are trained."""
    answers: tuple[str, ...] = ()
    """Texts that the first calls are answered with instead of sampling, scored by the engine: human-written anchors."""

    def __post_init__(self) -> None:
        if not self.session_id.isprintable() or "/" in self.session_id or self.session_id in ("", ".", ".."):
            raise GatewayError(f"session_id: got {self.session_id!r}, expected a printable name without '/'")
        if not math.isfinite(self.ttl_s):
            raise GatewayError(f"ttl_s: got {self.ttl_s}, expected a finite number of seconds")
        for name, value in (("ttl_s", self.ttl_s), ("max_turns", self.max_turns), ("max_tokens", self.max_tokens),
                            ("sampling.max_new_tokens", self.sampling.max_new_tokens)):
            if value is not None and value <= 0:
                raise GatewayError(f"{name}: got {value}, expected a positive number")
        violation = sampling_violation(self.sampling)
        if violation is not None:
            raise GatewayError(f"sampling.{violation}")


@dataclass(slots=True)
class PendingCall:
    """A call that is being answered; identical requests that arrive meanwhile wait for the same task."""

    task: asyncio.Task[Reply]
    form: Format
    """How its answer is written."""
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
        self.reader = HistoryReader()
        self.nodes: list[Node] = []
        self.pending: dict[bytes, PendingCall] = {}
        self.main: Origin | None = None
        """Origin of the first request."""
        self.calls = 0
        """Model calls so far, those included that failed."""
        self.num_aborted = 0
        """Calls whose clients went away before anything was recorded."""
        self.is_closed = False
        self._by_chain: dict[bytes, list[Node]] = {}
        self._by_digest: dict[bytes, Node] = {}
        self._by_token: dict[str, Node] = {}
        self._texts: dict[str, str] = {}
        """What the ids of raw turns decode to, by turn id; filled when raw text is continued."""

    def add(self, node: Node) -> None:
        """Record a turn; later requests may continue it."""
        self.nodes.append(node)
        self._by_chain.setdefault(node.chain, []).append(node)
        self._by_digest[node.digest] = node
        self._by_token[node.token] = node
        self.main = self.main or node.origin

    def retried(self, request_digest: bytes, is_marked: bool) -> Node | None:
        """The turn that an identical request recorded. Without a mark of its client's (``is_marked``: a retry header)
        only the last turn counts: the same request after something else is a new sample."""
        node = self._by_digest.get(request_digest)
        return node if node is not None and (is_marked or node is self.nodes[-1]) else None

    def response(self, response_id: str) -> Node | None:
        """The turn that answered with this response, if it may be continued."""
        node = self._by_token.get(response_id.removeprefix("resp_"))
        return node if node is not None and node.response is not None else None

    def next_turn_id(self) -> str:
        """A new id, unique in the store."""
        self.calls += 1
        return f"{self.settings.session_id}-{self.calls}"

    def turns(self) -> list[Turn]:
        """All turns that may be exported, oldest first."""
        return [Turn(turn_id=node.turn_id, session_id=self.settings.session_id,
                     parent=node.parent.turn_id if node.parent is not None else None, kind=node.kind,
                     prompt_ids=node.prompt_ids(), output_ids=node.output_ids, logprobs=node.logprobs,
                     versions=node.versions, finish_reason=node.finish_reason, role=node.role) for node in self._live()]

    def num_abandoned(self) -> int:
        """Calls whose clients went away before their answer."""
        return self.num_aborted + sum(node.abandoned for node in self.nodes)

    def num_mismatches(self) -> int:
        """Turns whose history was not the recorded one."""
        return sum(node.kind in ("rewrite", "fork") for node in self._live())

    def reasons(self) -> dict[str, int]:
        """Mismatches by reason."""
        return dict(Counter(node.reason for node in self._live() if node.kind in ("rewrite", "fork")))

    def roles(self) -> dict[str, int]:
        """Number of turns of each role, abandoned ones left out."""
        return dict(Counter(node.role for node in self._live()))

    def kinds(self) -> dict[str, int]:
        """Number of turns of each kind, abandoned ones left out."""
        return dict(Counter(node.kind for node in self._live()))

    def remaining_tokens(self, context_room: int, requested: int | None) -> int:
        """Tokens that the next turn may sample. Raises ApiError when a limit of the session is reached.

        ``context_room`` is what the model's context leaves; ``requested`` the client's wish.
        """
        settings = self.settings
        # Calls that are being answered count as well, or parallel calls could pass the limit together.
        if settings.max_turns is not None and len(self.nodes) + len(self.pending) > settings.max_turns:
            raise ApiError(400, f"the session has reached its limit of {settings.max_turns} turns",
                               code="turn_limit_exceeded")
        limits = [settings.sampling.max_new_tokens, context_room]
        if settings.max_tokens is not None:
            left = settings.max_tokens - sum(len(node.output_ids) for node in self.nodes)
            if left <= 0:
                raise ApiError(400, f"the session has reached its limit of {settings.max_tokens} sampled tokens",
                                   code="token_limit_exceeded")
            limits.append(left)
        return min(limits if requested is None else [*limits, requested])

    def role(self, plan: Plan, origin: Origin, system: str = "") -> TurnRole:
        """Whose call it is; the rules are in ``tree``. ``system`` is the system prompt."""
        self.main = self.main or origin
        settings = self.settings
        if any(fnmatchcase(origin.model, pattern) for pattern in settings.aux_models):
            return "aux"
        if any(text in system for text in settings.aux_prompts):
            return "aux"
        if plan.parent is not None:
            return plan.parent.role
        if origin.system == self.main.system and bool(origin.tools) == bool(self.main.tools):
            return "main"
        return "sub" if origin.tools or not self.main.tools else "aux"

    def plan(self, history: History, origin: Origin, declared_tools: Sequence[dict[str, Any]] | None,
             tokenizer: Tokenizer) -> Plan:
        """The exact prompt of a chat request. Raises DataError when the history cannot be rendered."""
        settings = self.settings
        node, reason = self._deepest_match(history)
        messages = history.messages
        if node is not None:
            new = messages[node.num_messages:]
            if settings.clear_thinking and any(item["role"] == "user" for item in new) and node.has_reasoning():
                reason = "thinking"
                messages = node.with_reasoning(messages)
            else:
                previous = node.ids()
                appended = tokenizer.bridge(previous, new, tools=declared_tools,
                                            enable_thinking=settings.enable_thinking)
                if appended is not None:
                    return Plan(node, "extend", previous + appended)
                if all(item["role"] != "assistant" for item in new):
                    reason = reason or ("shape" if continuation_segments(new) is None else "role_token")
        # Preserved thinking: with reasoning kept in every turn, the next prompt starts with this one.
        ids = tokenizer.render(messages, tools=declared_tools, add_generation_prompt=True,
                               enable_thinking=settings.enable_thinking, clear_thinking=settings.clear_thinking).ids
        return self._classify(ids, history, origin, reason)

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Ids of raw text: those of the longest recorded raw turn that it continues, then new ones."""
        best: tuple[str, list[int]] = ("", [])
        for node in self._live():
            if node.num_messages == 0 and (known := self._text(node, tokenizer)) and text.startswith(known):
                best = max(best, (known, node.visible_ids()), key=lambda item: len(item[0]))
        known, ids = best
        return ids + tokenizer.encode(text[len(known):])

    def plan_raw(self, ids: list[int]) -> Plan:
        """Where raw ids attach."""
        best, shared = self._longest_common(ids)
        contained = [node for node in best.path() if node.length <= shared] if best is not None else []
        if best is not None and best not in contained and best.num_messages == 0 and shared == len(best.visible_ids()):
            return Plan(best, "rewrite", ids, "stop_token")
        return Plan(contained[-1], "extend", ids) if contained else Plan(None, "root", ids)

    def _text(self, node: Node, tokenizer: Tokenizer) -> str:
        if node.turn_id not in self._texts:
            self._texts[node.turn_id] = tokenizer.decode(node.visible_ids())
        return self._texts[node.turn_id]

    def _live(self) -> Iterator[Node]:
        return (node for node in self.nodes if not node.abandoned)

    def _deepest_match(self, history: History) -> tuple[Node | None, str]:
        """The longest recorded turn that the history continues; and ``thinking`` if there is none or only a shorter
        one because reasoning differs."""
        reason = ""
        for length in range(len(history.messages), 0, -1):
            for node in reversed(self._by_chain.get(history.chains[length], ())):
                if node.abandoned:
                    continue
                if node.reasoning_agrees(history.messages):
                    return node, reason
                reason = "thinking"
        return None, reason

    def _classify(self, ids: list[int], history: History, origin: Origin, reason: str) -> Plan:
        """Attach a rendered prompt to the recorded turn that it shares the most with."""
        best, shared = self._longest_common(ids)
        if best is not None and shared == best.length:
            return Plan(best, "extend", ids)
        known = [node.origin for node in self._live()]
        is_same_agent = any((item.system, item.tools) == (origin.system, origin.tools) for item in known)
        is_same_opening = any(item.opening == origin.opening for item in known)
        if best is None or not history.has_reply():
            return Plan(None, "root", ids, "compaction" if is_same_agent and not is_same_opening else "")
        if not is_same_agent and not is_same_opening:
            return Plan(None, "root", ids)  # a history of its own
        is_rewrite = shared >= best.length - len(best.output_ids)
        return Plan(best, "rewrite" if is_rewrite else "fork", ids,
                    reason or changed(best, history, origin, is_rewrite))

    def _longest_common(self, ids: list[int]) -> tuple[Node | None, int]:
        """The recorded turn that has the most leading ids in common with ``ids``, and how many."""
        common: dict[str, int] = {}
        best: Node | None = None
        for node in self.nodes:  # parents come before their children
            shared = shared_length(node, ids, common)
            common[node.turn_id] = shared
            if not node.abandoned and (best is None or shared > common[best.turn_id]):
                best = node
        return best, common[best.turn_id] if best is not None else 0
