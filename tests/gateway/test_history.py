"""What counts as the same history."""

import json

import pytest

from glm5.dialects.protocol import ApiError
from glm5.gateway.history import HistoryReader, extend_chain, read_message


def chain_of(*messages, tools=None):
    return HistoryReader().read(list(messages), tools).chains[-1]


def call_message(arguments, call_id="call_1", **extra):
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}], **extra}


def test_clients_may_write_the_same_message_in_many_ways():
    same = [
        call_message('{"a": 1, "b": "é"}', content=None),
        call_message('{"b":"\\u00e9","a":1.0}', "another id", content=""),
        call_message({"a": 1, "b": "é"}, content=[{"type": "text", "text": " \n"}], refusal=None),
    ]
    assert len({chain_of(message) for message in same}) == 1


def test_ends_of_messages_are_not_compared_but_their_beginnings_are():
    assert chain_of({"role": "user", "content": "a b \n"}) == chain_of({"role": "user", "content": "a b"})
    assert chain_of({"role": "user", "content": " a b"}) != chain_of({"role": "user", "content": "a b"})
    assert chain_of({"role": "developer", "content": "x"}) == chain_of({"role": "system", "content": "x"})


@pytest.mark.parametrize("other", [
    call_message('{"a": 2, "b": "é"}'), call_message('{"a": "1", "b": "é"}'), call_message('{"a": true, "b": "é"}'),
    call_message('{"a": 1, "b": "é", "c": null}'), call_message('{"a": 1, "b": "é"}', content="text"),
    {"role": "assistant", "content": "add"}, {"role": "user", "content": ""}])
def test_messages_that_mean_something_else_differ(other):
    assert chain_of(other) != chain_of(call_message('{"a": 1, "b": "é"}'))


def test_text_cannot_imitate_tool_calls():
    calls = json.dumps([["add", {}]], separators=(",", ":"))
    assert chain_of(call_message({})) != chain_of({"role": "assistant", "content": calls})


def test_declared_tools_are_part_of_the_history():
    user = {"role": "user", "content": "x"}
    assert chain_of(user) != chain_of(user, tools=[{"type": "function", "function": {"name": "add"}}])


def test_a_recorded_answer_extends_the_chain_as_the_client_sends_it_back():
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "yes "}
    history = HistoryReader().read([user], None)
    assert extend_chain(history.chains[-1], read_message(answer, "answer")) == chain_of(user, answer)


def test_reasoning_is_kept_for_the_renderer_but_not_in_the_chain():
    with_reasoning = {"role": "assistant", "content": "yes", "reasoning_content": "because"}
    history = HistoryReader().read([with_reasoning], None)
    assert history.messages[0]["reasoning_content"] == "because"
    assert history.chains[-1] == chain_of({"role": "assistant", "content": "yes"})


@pytest.mark.parametrize(("messages", "named"), [
    ([], "messages"), ("hi", "messages"), (["hi"], "messages[0]"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 3}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
    ([call_message("{not json")], "messages[0].tool_calls[0].function.arguments"),
    ([call_message("[1]")], "messages[0].tool_calls[0].function.arguments"),
    ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": 7}], "messages[0].tool_calls")])
def test_malformed_messages_are_named(messages, named):
    with pytest.raises(ApiError, match=named.replace("[", r"\[").replace("]", r"\]")) as caught:
        HistoryReader().read(messages, None)
    assert caught.value.status == 400


def test_a_history_reads_the_same_after_others_as_alone():
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "x"}
    calls = [call_message(value) for value in ({"a": 1}, {"a": True}, {"a": 1.0}, '{"a": 1}', '{"a": true}')]
    result = {"role": "tool", "content": [{"type": "text", "text": "done"}]}
    tools = [{"type": "function", "function": {"name": "add", "strict": strict}} for strict in (True, 1)]
    histories = [[system, user, call, result][:length] for call in calls for length in (2, 4, 3)]
    histories += [[user], [system, {"role": "user", "content": "y"}], [system, user, {**user, "name": "n"}, user]]
    reader = HistoryReader()
    for declared in (None, tools[:1], tools[1:], None):
        for messages in [*histories, *reversed(histories)]:
            alone = HistoryReader().read(messages, declared)
            assert reader.read(json.loads(json.dumps(messages)), declared) == alone


def test_a_malformed_message_is_named_wherever_it_stands_and_changes_nothing():
    user, reader = {"role": "user", "content": "x"}, HistoryReader()
    known = reader.read([user, user], None)
    for bad in (None, {**user, "role": "robot"}, {**user, "content": 3}):
        with pytest.raises(ApiError, match=r"messages\[2\]"):
            reader.read([user, user, bad], None)
    assert reader.read([user, user], None) == known
