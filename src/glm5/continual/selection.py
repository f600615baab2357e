"""From recorded answers and feedback to conversations and preference pairs.

An answer is learnt when its users liked it, or when it satisfies the rules where nobody was asked. Only the answer
itself is trained: earlier answers of its conversation are marked as erroneous, which keeps them in the context.
Feedback counts only from the key that got the answer, and the last word of it only. A correction takes the place of the
answer, and is preferred to it; of two answers to one conversation the liked one is preferred to the disliked one.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5.continual.config import FilterConfig
from glm5.continual.privacy import scrub_personal, scrub_secrets
from glm5.errors import DataError
from glm5.serve.collection import FEEDBACK, RESPONSES

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A recorded answer and what its user said of it."""

    response_id: str
    time: float
    owner: str
    messages: list[Message]
    """The conversation; the answer is the last message."""
    tools: list[dict[str, Any]]
    finish_reason: str
    score: float | None = None
    """Mean feedback, 0 to 1."""
    correction: str = ""
    """The answer that the user would have wanted."""


@dataclass(slots=True)
class Selection:
    """What is learnt, and what became of the rest."""

    conversations: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Answers by fate: ``kept``, or why they were dropped; ``scrubbed.KIND``: replaced texts."""

    def rows(self) -> list[dict[str, Any]]:
        """Result rows ``filter.FATE`` and ``filter.pairs``."""
        rows = [{"name": f"filter.{fate}", "value": number,
                 "unit": "texts" if fate.startswith("scrubbed") else "answers"}
                for fate, number in sorted(self.counts.items())]
        return [*rows, {"name": "filter.pairs", "value": len(self.pairs), "unit": "pairs"}]


def read_collection(directory: Path) -> tuple[list[Exchange], int]:
    """(answers with their feedback, records that cannot be used) of a directory of ``glm5 serve --collect``.

    A line that a crash cut off, or that somebody changed into something else, is counted and left out. Raises
    DataError when there is no collection.
    """
    responses, bad_responses = _records(directory / RESPONSES)
    feedback, bad_feedback = _records(directory / FEEDBACK)
    opinions: dict[tuple[str, str], dict[str, Any]] = {}
    bad = bad_responses + bad_feedback
    for record in feedback:
        if _is_feedback(record):
            opinions[record["response_id"], record["owner"]] = record
        else:
            bad += 1
    exchanges: dict[str, Exchange] = {}
    for record in responses:
        exchange = _exchange(record)
        if exchange is None or exchange.response_id in exchanges:
            bad += 1
            continue
        opinion = opinions.get((exchange.response_id, exchange.owner), {})
        exchanges[exchange.response_id] = replace(exchange, score=opinion.get("score"),
                                                  correction=opinion.get("correction") or "")
    return list(exchanges.values()), bad


def select(exchanges: Iterable[Exchange], config: FilterConfig,
           misfit: Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], str]) -> Selection:
    """Filter, newest answers first. ``misfit`` tells why a conversation cannot be a row of training, "" if it can."""
    selection = Selection()
    seen: set[str] = set()
    owners: Counter[str] = Counter()
    judged: dict[str, list[tuple[bool, Exchange]]] = defaultdict(list)
    for found in sorted(exchanges, key=lambda item: -item.time):
        exchange, reason = _clean(found, config, selection.counts)
        reason = reason or _unusable(exchange) or misfit(_conversation(exchange), exchange.tools)
        if reason:
            selection.counts[reason] += 1
            continue
        if exchange.score is not None:
            judged[_prompt(exchange)].append((exchange.score >= config.min_score, exchange))
        reason = _refusal(exchange, config)
        text = _prompt(exchange) + _normal(_answer(exchange))
        if not reason and text in seen:
            reason = "duplicate"
        if not reason and config.max_per_owner and owners[exchange.owner] >= config.max_per_owner:
            reason = "owner_limit"
        selection.counts[reason or "kept"] += 1
        if not reason:
            seen.add(text)
            owners[exchange.owner] += 1
            selection.conversations.append({"messages": _conversation(exchange), "tools": exchange.tools})
        if exchange.correction and exchange.correction.strip() != _text(exchange.messages[-1]).strip():
            selection.pairs.append(_pair(exchange, exchange.correction, exchange))
    for group in judged.values():
        liked = [exchange for good, exchange in group if good]
        disliked = [exchange for good, exchange in group if not good]
        selection.pairs += [_pair(good, _text(good.messages[-1]), bad)
                            for good, bad in zip(liked, disliked, strict=False)
                            if _text(good.messages[-1]).strip() != _text(bad.messages[-1]).strip()]
    return selection


def _refusal(exchange: Exchange, config: FilterConfig) -> str:
    """Why an answer is not learnt, "" if it is."""
    answer = _answer(exchange)
    if not exchange.correction:
        if exchange.score is None and config.require_feedback:
            return "no_feedback"
        if exchange.score is not None and exchange.score < config.min_score:
            return "disliked"
    if len(answer.strip()) < config.min_characters:
        return "too_short"
    if any(rule.score(answer) < 1 for rule in config.rules):
        return "rule"
    return ""


def _unusable(exchange: Exchange) -> str:
    """Why nothing can be learnt from an answer whatever its user said."""
    if exchange.finish_reason == "length" and not exchange.correction:
        return "cut_off"
    if exchange.messages[-1].get("tool_calls") and not exchange.correction:
        return ""
    return "" if _answer(exchange).strip() else "too_short"


def _clean(exchange: Exchange, config: FilterConfig, counts: Counter[str]) -> tuple[Exchange, str]:
    """The exchange without secrets and personal data, or why it must be dropped."""
    found: Counter[str] = Counter()
    reasons: list[str] = []

    def scrub(value: Any) -> Any:
        if isinstance(value, str):
            text, secrets = scrub_secrets(value)
            personal: Counter[str] = Counter()
            if config.personal != "keep":
                text, personal = scrub_personal(text)
            if secrets and config.secrets == "drop":
                reasons.append("secret")
            if personal and config.personal == "drop":
                reasons.append("personal")
            found.update(secrets + personal)
            return text
        if isinstance(value, list):
            return [scrub(item) for item in value]
        if isinstance(value, dict):
            return {key: scrub(item) for key, item in value.items()}
        return value

    cleaned = replace(exchange, messages=scrub(exchange.messages), correction=scrub(exchange.correction))
    if not reasons:
        counts.update({f"scrubbed.{kind}": number for kind, number in found.items()})
    return cleaned, reasons[0] if reasons else ""


def _conversation(exchange: Exchange) -> list[Message]:
    """The messages to train on: only the last answer counts."""
    earlier = [{**message, "erroneous": True} if message.get("role") == "assistant" else message
               for message in exchange.messages[:-1]]
    last = {"role": "assistant", "content": exchange.correction} if exchange.correction else exchange.messages[-1]
    return [*earlier, last]


def _pair(better: Exchange, chosen: str, worse: Exchange) -> dict[str, Any]:
    rejected = worse.messages[-1]
    chosen_messages = [better.messages[-1] if chosen == _text(better.messages[-1])
                       else {"role": "assistant", "content": chosen}]
    return {"messages": better.messages[:-1], "tools": better.tools, "chosen": chosen_messages, "rejected": [rejected]}


def _answer(exchange: Exchange) -> str:
    return exchange.correction or _text(exchange.messages[-1])


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _prompt(exchange: Exchange) -> str:
    return _normal(json.dumps([[message.get("role"), message.get("content")] for message in exchange.messages[:-1]]))


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _exchange(record: Mapping[str, Any]) -> Exchange | None:
    """None for a record that is not one."""
    messages, tools = record.get("messages"), record.get("tools")
    is_one = (isinstance(record.get("response_id"), str) and isinstance(record.get("owner"), str)
              and isinstance(record.get("time"), int | float) and isinstance(record.get("finish_reason"), str)
              and isinstance(messages, list) and len(messages) > 1
              and all(isinstance(message, dict) for message in messages)
              and messages[-1].get("role") == "assistant" and isinstance(tools, list))
    if not is_one:
        return None
    assert isinstance(messages, list) and isinstance(tools, list)
    return Exchange(response_id=record["response_id"], time=float(record["time"]), owner=record["owner"],
                    messages=messages, tools=tools, finish_reason=record["finish_reason"])


def _is_feedback(record: Mapping[str, Any]) -> bool:
    score, correction = record.get("score"), record.get("correction")
    return (isinstance(record.get("response_id"), str) and isinstance(record.get("owner"), str)
            and (score is None or (type(score) in (int, float) and math.isfinite(score) and 0 <= score <= 1))
            and (correction is None or isinstance(correction, str)) and not (score is None and not correction))


def _records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(objects, lines that are none) of a file of JSON lines."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a directory of glm5 serve "
                        "--collect") from None
    records, bad = [], 0
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            bad += 1
    return records, bad
