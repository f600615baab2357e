"""Conversations: closing role token, mask in the packed row, packing, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5.data.conversations import (
    Conversation,
    ConversationDataset,
    read_conversations,
    render_conversation,
)
from glm5.errors import DataError
from glm5.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "1"}'}}
DEMO: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": "two"},
]
CALL_TEXT = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def trained_text(tokenizer: Tokenizer, batch: Any, row: int = 0) -> str:
    """What the loss of a packed row trains, read through the shifted mask."""
    labels = batch.ids_BT[row, 1:][batch.loss_mask_BT[row, :-1]]
    return tokenizer.decode(labels.tolist())


def test_a_packed_row_trains_what_the_model_samples_with_the_closing_role_token(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path / "demos.jsonl", {"messages": DEMO, "tools": TOOLS})
    batch = next(ConversationDataset.from_file(path, tokenizer, 900).batches(1))
    assert trained_text(tokenizer, batch) == f"{CALL_TEXT}<|observation|>two<|user|>"
    text = tokenizer.decode(batch.ids_BT[0][batch.documents_BT[0] >= 0].tolist())
    assert text == tokenizer.render_text(DEMO, TOOLS) + "<|user|>"


def test_tools_can_be_left_out_of_the_prompt(tokenizer: Tokenizer) -> None:
    sample = render_conversation(Conversation(DEMO, TOOLS, "x"), tokenizer, declare_tools=False)
    assert tokenizer.decode(sample.ids.tolist()) == tokenizer.render_text(DEMO) + "<|user|>"


def test_a_conversation_that_ends_with_calls_is_closed_by_observation(tokenizer: Tokenizer) -> None:
    sample = render_conversation(Conversation(DEMO[:2], [], "x"), tokenizer)
    assert sample.ids[-1] == tokenizer.special_id("<|observation|>")
    assert sample.trained[-1]


def test_an_erroneous_turn_stays_in_the_context_and_is_not_trained(tokenizer: Tokenizer) -> None:
    ask = {"role": "user", "content": "ask"}
    wrong = {"role": "assistant", "content": "wrong", "erroneous": True}
    right = {"role": "assistant", "content": "right"}
    conversation = Conversation([ask, wrong, ask, right], [], "x")
    sample = render_conversation(conversation, tokenizer)
    plain = render_conversation(Conversation([ask, {**wrong, "erroneous": False}, ask, right], [], "x"), tokenizer)
    assert (sample.ids == plain.ids).all()  # the context is the same
    assert tokenizer.decode(plain.ids[plain.trained].tolist()) == "wrong<|user|>right<|user|>"
    assert tokenizer.decode(sample.ids[sample.trained].tolist()) == "right<|user|>"


def test_a_wrong_call_hides_its_closing_token_too_and_the_last_turn_may_be_wrong(tokenizer: Tokenizer) -> None:
    marked = [DEMO[0], {**DEMO[1], "erroneous": True}, *DEMO[2:]]
    sample = render_conversation(Conversation(marked, TOOLS, "x"), tokenizer)
    assert tokenizer.decode(sample.ids[sample.trained].tolist()) == "two<|user|>"
    last = [*DEMO[:-1], {**DEMO[-1], "erroneous": True}]
    sample = render_conversation(Conversation(last, TOOLS, "x"), tokenizer)
    assert tokenizer.decode(sample.ids[sample.trained].tolist()) == f"{CALL_TEXT}<|observation|>"


def test_a_conversation_of_mistakes_only_and_a_mark_that_is_no_truth_value_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="no assistant message that is trained"):
        render_conversation(Conversation([DEMO[0], {**DEMO[-1], "erroneous": True}], [], "x"), tokenizer)
    with pytest.raises(DataError, match=r"messages\[1\].erroneous: got 'yes'; expected true or false"):
        render_conversation(Conversation([DEMO[0], {**DEMO[-1], "erroneous": "yes"}], [], "x"), tokenizer)


def test_reasoning_of_all_turns_is_kept_unless_cleared(tokenizer: Tokenizer) -> None:
    turn = {"role": "assistant", "content": "a", "reasoning_content": "why"}
    conversation = Conversation([DEMO[0], turn, DEMO[0], turn], [], "x")
    kept = tokenizer.decode(render_conversation(conversation, tokenizer).ids.tolist())
    cleared = tokenizer.decode(render_conversation(conversation, tokenizer, clear_thinking=None).ids.tolist())
    assert (kept.count("why"), cleared.count("why")) == (2, 1)


def test_samples_share_rows_as_separate_documents_and_resume_is_exact(tokenizer: Tokenizer, tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"answer {n} " * (n % 5)}]}
        for n in range(30)
    ]
    data = ConversationDataset.from_file(write(tmp_path / "demos.jsonl", *records), tokenizer, 96)
    assert data.num_rows < 30
    batch = next(data.batches(data.num_rows, seed=1))
    assert batch.documents_BT.max() >= 1
    seen = "".join(trained_text(tokenizer, batch, row) for row in range(data.num_rows))
    assert seen.count("<|user|>") == 30
    for number in range(30):
        assert seen.count(f"answer {number} ") >= number % 5 - 1
    third = list(zip(range(3), data.batches(2, seed=1), strict=False))[2][1]
    assert third.ids_BT.equal(next(data.batches(2, seed=1, start_step=2)).ids_BT)


def test_a_sample_longer_than_the_row_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x " * 200}, DEMO[3]]}
    path = write(tmp_path / "demos.jsonl", {"messages": DEMO}, long)
    with pytest.raises(DataError, match=r"demos\.jsonl:2: \d+ tokens exceed the row length 64"):
        ConversationDataset.from_file(path, tokenizer, 64)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "x"}, r"demos\.jsonl:1: no list of objects in field 'messages'"),
        ({"messages": "x"}, "no list of objects"),
        ({"messages": DEMO, "tools": {"a": 1}}, "field 'tools' is dict"),
        ({"messages": [{"role": "robot"}]}, r"demos\.jsonl:1: messages\[0\]\.role: got 'robot'"),
        ({"messages": DEMO[:1]}, r"demos\.jsonl:1: no assistant message"),
        ({"messages": []}, r"demos\.jsonl:1: no assistant message that is trained"),
    ],
)
def test_malformed_conversations_are_named(tokenizer: Tokenizer, tmp_path: Path, record: Any, words: str) -> None:
    path = write(tmp_path / "demos.jsonl", record)
    with pytest.raises(DataError, match=words) as caught:
        ConversationDataset.from_file(path, tokenizer, 512)
    assert "\n" not in str(caught.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no conversation to pack"):
        ConversationDataset([], 64, 0)
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"demos\.jsonl: no conversation"):
        read_conversations(write(tmp_path / "demos.jsonl"))
