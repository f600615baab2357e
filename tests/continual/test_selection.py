"""Which recorded answers are learnt: every fate once, by hand."""

import json

import pytest

from glm5.continual.config import FilterConfig
from glm5.continual.selection import Exchange, read_collection, select
from glm5.env.rewards.rules import RuleConfig
from glm5.errors import ConfigError, DataError


def exchange(number, text="fine", question=None, **changes):
    return Exchange(**{
        "response_id": f"r{number}", "time": float(number), "owner": "ann", "tools": [], "finish_reason": "stop",
        "messages": [{"role": "user", "content": question or f"question {number}"},
                     {"role": "assistant", "content": text}], "score": 1.0, **changes})


def chosen(exchanges, misfit=lambda messages, tools: "", **config):
    return select(exchanges, FilterConfig(**config), misfit)


def answers(selection):
    return [conversation["messages"][-1]["content"] for conversation in selection.conversations]


@pytest.mark.parametrize(("changes", "fate"), [
    ({}, "kept"), ({"score": None}, "no_feedback"), ({"score": 0.4}, "disliked"), ({"score": 0.5}, "kept"),
    ({"finish_reason": "length"}, "cut_off"), ({"text": "  "}, "too_short"), ({"text": "mail me: a@b.cc"}, "kept"),
    ({"text": "use sk-abcdefghijklmnop1234"}, "secret")])
def test_fates(changes, fate):
    assert chosen([exchange(1, **changes)]).counts[fate] == 1


def test_newest_first_duplicates_and_the_limit_of_an_owner():
    found = [exchange(1, "Fine", "q"), exchange(2, "fine ", "Q"), exchange(3, "other", "q")]
    selection = chosen(found)
    assert answers(selection) == ["other", "fine "] and selection.counts == {"kept": 2, "duplicate": 1}
    assert answers(chosen(found, max_per_owner=1)) == ["other"]
    assert chosen(found, max_per_owner=1).counts["owner_limit"] == 2


def test_rules_take_the_place_of_feedback():
    rules = (RuleConfig(kind="length", options={"most": 1}),)
    found = [exchange(1, "short", score=None), exchange(2, "too long", score=None), exchange(3, "bad", score=0.0)]
    selection = chosen(found, require_feedback=False, rules=rules)
    assert answers(selection) == ["short"] and selection.counts == {"kept": 1, "rule": 1, "disliked": 1}
    with pytest.raises(ConfigError, match="needs rules"):
        FilterConfig(require_feedback=False)


def test_personal_data_is_replaced_everywhere_and_counted():
    found = exchange(1, "ok", question="I am a@b.cc", correction="ask a@b.cc")
    selection = chosen([found])
    assert selection.conversations[0]["messages"] == [{"role": "user", "content": "I am <email>"},
                                                      {"role": "assistant", "content": "ask <email>"}]
    assert selection.counts["scrubbed.email"] == 2
    assert selection.pairs[0]["chosen"] == [{"role": "assistant", "content": "ask <email>"}]
    assert chosen([found], personal="drop").counts == {"personal": 1}
    assert "a@b.cc" in str(chosen([found], personal="keep").conversations)
    assert answers(chosen([exchange(1, "key sk-abcdefghijklmnop1234")], secrets="scrub")) == ["key <api-key>"]


def test_only_the_last_answer_is_trained():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    [conversation] = chosen([exchange(1, messages=messages)]).conversations
    assert [message.get("erroneous", False) for message in conversation["messages"]] == [False, True, False, False]


def test_pairs_of_a_correction_and_of_liked_against_disliked():
    corrected = exchange(1, "wrong", score=0.0, correction="right")
    selection = chosen([corrected])
    assert answers(selection) == ["right"]
    assert selection.pairs == [{"messages": corrected.messages[:1], "tools": [],
                                "chosen": [{"role": "assistant", "content": "right"}],
                                "rejected": [{"role": "assistant", "content": "wrong"}]}]
    selection = chosen([exchange(1, "good", "q"), exchange(2, "bad", "q", score=0.0), exchange(3, "alone", score=0.0)])
    [pair] = selection.pairs
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("good", "bad")
    assert chosen([exchange(1, "same", "q"), exchange(2, "same", "q", score=0.0)]).pairs == []


def test_what_does_not_fit_is_counted():
    assert chosen([exchange(1)], misfit=lambda messages, tools: "too_long").counts == {"too_long": 1}


def test_a_collection_as_it_may_be_found(tmp_path):
    """Half a line of a crash, a stranger's feedback, a change of mind, and records that somebody wrote by hand."""
    record = {"time": 1.0, "response_id": "a", "owner": "ann", "tools": [], "finish_reason": "stop",
              "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]}
    responses = [record, {**record, "response_id": "b"}, record, {**record, "response_id": "c", "messages": "q"}, [], 3]
    opinions = [{"response_id": "a", "owner": "ann", "score": 1.0}, {"response_id": "a", "owner": "ann", "score": 0.0},
                {"response_id": "b", "owner": "bob", "score": 0.0}, {"response_id": "b", "owner": "ann", "score": 7},
                {"response_id": "b", "owner": "ann", "score": True}, {"response_id": "b"}]
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in responses) + '{"time": 1.')
    (tmp_path / "feedback.jsonl").write_text("".join(json.dumps(line) + "\n" for line in opinions))
    found, bad = read_collection(tmp_path)
    assert [(item.response_id, item.score) for item in found] == [("a", 0.0), ("b", None)]
    assert bad == 5 + 3  # a repeated id, no messages, no object twice, half a line; three opinions that are none
    with pytest.raises(DataError, match="--collect"):
        read_collection(tmp_path / "elsewhere")
