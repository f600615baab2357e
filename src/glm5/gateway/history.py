"""Chat histories as a client sends them, in one normal form.

Two histories are equal when they differ only in what clients change without meaning anything: tool-call ids, the JSON
text of arguments (key order, spaces, escapes, 1 against 1.0), content as null, "" or a list of text parts, spaces at
the end. Every prefix of a history has a chained digest, so that a recorded turn is found by dictionary look-up.

Reasoning is not part of the digests: many clients do not send it back, and the recorded ids still hold it. Where a
client does send it, ``sessions`` compares it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm5.dialects.protocol import ApiError
from glm5.errors import DataError
from glm5.tokenizer.chat import call_arguments, text_of

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that a client may send, and what each is called when it is rendered."""
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class History:
    """Messages in renderer form with the digest of every prefix."""

    messages: list[dict[str, Any]]
    """``role``, ``content`` (str); for the assistant also ``reasoning_content`` and ``tool_calls`` with arguments as
    dict where present."""
    chains: list[bytes]
    """``chains[n]`` is the digest of the first n messages; ``chains[0]`` that of the declared tools."""

    @property
    def tools(self) -> bytes:
        """Digest of the declared tools."""
        return self.chains[0]

    @property
    def system(self) -> str:
        """Text of the system messages at the beginning."""
        return "\n".join(message["content"] for message in self.messages[: self._opening])

    @property
    def opening(self) -> bytes:
        """Digest of the first message that is no system message."""
        return b"".join(extend_chain(b"", message) for message in self.messages[self._opening :][:1])

    @property
    def _opening(self) -> int:
        roles = (index for index, message in enumerate(self.messages) if message["role"] != "system")
        return next(roles, len(self.messages))

    def has_reply(self) -> bool:
        """Whether the client claims earlier answers."""
        return any(message["role"] == "assistant" for message in self.messages)


class HistoryReader:
    """Reads the histories of one session.

    A turn sends everything again that the turns before it sent. What equals the beginning of a history that was read
    lately is neither checked, normalised nor digested again, so a turn costs what is new in it.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []
        """Read lately, one for each agent of the session that takes turns with the others; the latest is last."""

    def read(self, raw: Any, declared_tools: Sequence[dict[str, Any]] | None) -> History:
        """Normalise the ``messages`` of a request. Raises ApiError naming the message that is malformed."""
        if not isinstance(raw, list) or not raw:
            raise ApiError(400, "messages: expected a list with at least one message", param="messages")
        count, known = max(((known.shared(raw), known) for known in self._known), key=lambda pair: pair[0],
                           default=(0, _NOTHING))
        new = raw[count:]
        try:
            added = [read_message(item, f"messages[{index}]") for index, item in enumerate(new, count)]
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from None
        messages = [*known.history.messages[:count], *added]
        tools = json.dumps(declared_tools)
        chains = known.history.chains[: count + 1] if tools == known.tools else [
            digest(canonical_json(declared_tools or []))]
        for message in messages[len(chains) - 1 :]:
            chains.append(extend_chain(chains[-1], message))
        history = History(messages, chains)
        if count == len(known.sent):
            self._known = [item for item in self._known if item is not known]
        self._known = [*self._known[1 - _MAX_KNOWN :], _Known([*known.sent[:count], *new], tools, history)]
        return history


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A history that was read."""

    sent: list[dict[str, Any]]
    """The messages as the client sent them."""
    tools: str
    """JSON of the declared tools."""
    history: History

    def shared(self, raw: list[Any]) -> int:
        """Number of messages at the beginning of ``raw`` that are the same here."""
        pairs = enumerate(zip(self.sent, raw, strict=False))
        return next((index for index, (old, new) in pairs if not _is_same(old, new)), min(len(self.sent), len(raw)))


_MAX_KNOWN = 4
_NOTHING = _Known([], "", History([], []))


def _is_same(old: dict[str, Any], new: Any) -> bool:
    """Whether two messages read alike. Their calls are also compared as text: Python takes 1 and true for equal."""
    return old == new and ("tool_calls" not in old or repr(old["tool_calls"]) == repr(new["tool_calls"]))


def extend_chain(chain: bytes, message: dict[str, Any]) -> bytes:
    """Digest of a history of digest ``chain`` followed by ``message`` (renderer form)."""
    role, content = message["role"], message["content"]
    text = content.strip() if role == "assistant" else content.rstrip()
    data = f"{role}\0{len(text)}\0{text}".encode("utf-8", "surrogatepass")
    if "tool_calls" in message:
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
        data += canonical_json(calls)
    return digest(data, chain)


def read_message(raw: Any, where: str) -> dict[str, Any]:
    """One message in renderer form; ``where`` names it in errors. Raises ApiError or DataError."""
    if not isinstance(raw, dict):
        raise ApiError(400, f"{where}: expected an object, got {type(raw).__name__}", param=where)
    role = raw.get("role")
    if role not in _ROLES:
        raise ApiError(400, f"{where}.role: got {role!r}, expected one of {', '.join(_ROLES)}", param=where)
    message: dict[str, Any] = {"role": _ROLES[role], "content": text_of(raw.get("content"), f"{where}.content")}
    if role == "assistant":
        reasoning = raw.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning.strip():
            message["reasoning_content"] = reasoning
        calls = raw.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls: got {type(calls).__name__}, expected a list", param=where)
        if calls:
            message["tool_calls"] = [_read_tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return message


def _read_tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(400, f"{where}: expected {{'function': {{'name', 'arguments'}}}}", param=where)
    arguments = call_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def canonical_json(value: Any) -> bytes:
    """JSON text that depends on the parsed value alone."""
    return _CANONICAL.encode(_canonical_numbers(value)).encode()


def _canonical_numbers(value: Any) -> Any:
    """Whole floats as integers: a client that re-serialises arguments may turn 1 into 1.0 and back."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {key: _canonical_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical_numbers(item) for item in value]
    return value


def digest(data: bytes, chain: bytes = b"") -> bytes:
    """16 bytes that stand for ``data`` after ``chain``."""
    return hashlib.blake2b(data, digest_size=16, key=chain).digest()
