"""Planning: which ids a request becomes and where it attaches."""

import json

import pytest

from glm5.dialects.protocol import ApiError
from glm5.errors import GatewayError
from glm5.gateway.history import HistoryReader, extend_chain, read_message
from glm5.gateway.sessions import Session, SessionSettings
from glm5.gateway.tree import Node, Origin
from glm5.records import SamplingParams

USER = {"role": "user", "content": "what is the answer"}
AGAIN = {"role": "user", "content": "make three"}


def new_session(**extra):
    return Session(SessionSettings(session_id="s", enable_thinking=False, **extra), "key", 1e9)


def take_turn(session, tokenizer, messages, reply, tools=None, model="m"):
    """Plan and record one turn whose sampled text is ``reply``; the plan and the message that the client would get."""
    history = HistoryReader().read(messages, tools)
    origin = Origin.of(history, tools, True, model)
    plan = session.plan(history, origin, tools, tokenizer)
    role = session.role(plan, origin, history.system)
    parsed = tokenizer.parse(reply, thinking=session.settings.enable_thinking)
    message = {"role": "assistant", "content": parsed.content, "reasoning_content": parsed.reasoning}
    output_ids = tokenizer.encode(reply, allow_special=True)
    node = Node(turn_id=session.next_turn_id(), parent=plan.parent, kind=plan.kind, tail_ids=plan.tail_ids,
                output_ids=output_ids, logprobs=[-1.0] * len(output_ids), versions=[1] * len(output_ids),
                finish_reason="stop", chain=extend_chain(history.chains[-1], read_message(message, "answer")),
                num_messages=len(messages) + 1, digest=str(messages).encode(),
                reasoning=parsed.reasoning.strip(), origin=origin, role=role, reason=plan.reason)
    session.add(node)
    assert node.prompt_ids() == plan.prompt_ids == json.loads(f"[{plan.prompt_text()}]")
    return plan, message


def test_a_continued_chat_is_a_bridge_over_what_was_sampled(tokenizer):
    session = new_session()
    _, answer = take_turn(session, tokenizer, [USER], "seven<|user|>")
    plan, _ = take_turn(session, tokenizer, [USER, answer, AGAIN], "seven<|user|>")
    first = session.nodes[0]
    assert plan.kind == "extend" and plan.parent is first
    assert plan.prompt_ids[:first.length] == first.ids()
    assert tokenizer.decode(plan.tail_ids) == "make three<|assistant|></think>"
    assert session.num_mismatches() == 0


def test_a_changed_answer_is_a_rewrite_and_a_changed_question_a_fork(tokenizer):
    session = new_session()
    _, answer = take_turn(session, tokenizer, [USER], "seven<|user|>")
    _, second = take_turn(session, tokenizer, [USER, answer, AGAIN], "three and four<|user|>")
    changed = [USER, answer, AGAIN, {**second, "content": "three and"}, USER]
    rewritten, _ = take_turn(session, tokenizer, changed, "x<|user|>")
    assert rewritten.kind == "rewrite" and rewritten.parent is session.nodes[1]
    earlier = [{"role": "user", "content": "what is three"}, answer, AGAIN]
    forked, _ = take_turn(session, tokenizer, earlier, "y<|user|>")
    assert forked.kind == "fork"
    assert session.num_mismatches() == 2
    assert session.kinds() == {"root": 1, "extend": 1, "rewrite": 1, "fork": 1}


def test_calls_without_earlier_answers_are_roots_and_no_mismatch(tokenizer):
    session = new_session()
    take_turn(session, tokenizer, [USER], "seven<|user|>")
    plan, _ = take_turn(session, tokenizer, [{"role": "system", "content": "summarise"}, USER], "x<|user|>")
    again, _ = take_turn(session, tokenizer, [USER], "three<|user|>")
    assert plan.kind == again.kind == "root" and plan.parent is None
    assert session.num_mismatches() == 0


def test_two_continuations_of_one_turn_are_branches(tokenizer):
    session = new_session()
    _, answer = take_turn(session, tokenizer, [USER], "seven<|user|>")
    one, _ = take_turn(session, tokenizer, [USER, answer, AGAIN], "x<|user|>")
    two, _ = take_turn(session, tokenizer, [USER, answer, USER], "y<|user|>")
    assert one.parent is two.parent is session.nodes[0]
    assert one.kind == two.kind == "extend"


def test_reasoning_that_the_client_drops_stays_in_the_ids(tokenizer):
    session = Session(SessionSettings(session_id="s"), "key", 1e9)
    _, answer = take_turn(session, tokenizer, [USER], "because four</think>seven<|user|>")
    assert answer["reasoning_content"] == "because four"
    dropped = {"role": "assistant", "content": "seven"}
    for sent in (answer, dropped):
        plan, _ = take_turn(session, tokenizer, [USER, sent, AGAIN], "x</think>y<|user|>")
        assert plan.kind == "extend"
        assert "because four" in tokenizer.decode(plan.prompt_ids)
    other = {**dropped, "reasoning_content": "because three"}
    changed, _ = take_turn(session, tokenizer, [USER, other, AGAIN], "z<|user|>")
    assert changed.kind == "rewrite"


def test_mismatches_are_counted_by_what_the_client_changed(tokenizer):
    session = new_session()
    tools = [{"type": "function", "function": {"name": "add"}}]
    system = {"role": "system", "content": "be short"}
    _, answer = take_turn(session, tokenizer, [system, USER], "seven<|user|>", tools)
    _, second = take_turn(session, tokenizer, [system, USER, answer, AGAIN], "three<|user|>", tools)
    long = [system, USER, answer, AGAIN, second]
    other = {"role": "user", "content": "what is the result"}
    for reason, messages, declared in (
            ("tools", [*long, USER], None), ("system", [{**system, "content": "be kind"}, *long[1:], USER], tools),
            ("answer", [*long[:4], {**second, "content": "four"}, USER], tools),
            ("history", [system, other, *long[2:], USER], tools), ("compaction", [system, other, answer, USER], tools)):
        plan, _ = take_turn(session, tokenizer, messages, "x<|user|>", declared)
        assert (plan.kind, plan.reason) == ("rewrite" if reason == "answer" else "fork", reason)
    assert session.reasons() == {"tools": 1, "system": 1, "answer": 1, "history": 1, "compaction": 1}
    assert session.num_mismatches() == 5 and session.roles() == {"main": 7}


def test_a_history_that_was_never_recorded_is_a_root_of_its_own(tokenizer):
    session = new_session()
    take_turn(session, tokenizer, [USER], "seven<|user|>")
    own = [{"role": "system", "content": "explore"}, AGAIN, {"role": "assistant", "content": "four"}, AGAIN]
    plan, _ = take_turn(session, tokenizer, own, "x<|user|>")
    assert (plan.kind, plan.parent, plan.reason) == ("root", None, "")
    again, _ = take_turn(session, tokenizer, [{"role": "user", "content": "the summary"}], "x<|user|>")
    assert (again.kind, again.reason) == ("root", "compaction")
    assert session.num_mismatches() == 0


def test_raw_text_goes_on_from_the_recorded_ids(tokenizer):
    session = new_session()
    prompt = tokenizer.encode("what is the")
    output = [token for letter in "answer" for token in tokenizer.encode(letter)]
    take_raw(session, prompt, output, "length")
    ids = session.encode("what is theanswer? seven", tokenizer)
    assert ids == prompt + output + tokenizer.encode("? seven")
    plan = session.plan_raw(ids)
    assert (plan.kind, plan.parent) == ("extend", session.nodes[0])
    take_raw(session, ids, [*output, tokenizer.special_id("<|user|>")], "stop")
    ids = session.encode("what is theanswer? sevenanswer and", tokenizer)
    assert ids[-len(output) - len(tokenizer.encode(" and")):] == output + tokenizer.encode(" and")
    plan = session.plan_raw(ids)
    assert (plan.kind, plan.reason, plan.parent) == ("rewrite", "stop_token", session.nodes[1])
    assert session.plan_raw(tokenizer.encode("seven")).kind == "root"


def take_raw(session, prompt_ids, output_ids, finish_reason):
    """Record a turn of raw text."""
    plan = session.plan_raw(prompt_ids)
    session.add(Node(turn_id=session.next_turn_id(), parent=plan.parent, kind=plan.kind, tail_ids=plan.tail_ids,
                     output_ids=output_ids, logprobs=[-1.0] * len(output_ids), versions=[1] * len(output_ids),
                     finish_reason=finish_reason, chain=b"x", num_messages=0, digest=b"x",
                     origin=Origin(b"", b"", b"", "m")))


def test_reasoning_stays_when_history_is_rendered_again(tokenizer):
    session = Session(SessionSettings(session_id="s"), "key", 1e9)
    messages = [USER, {"role": "assistant", "content": "seven", "reasoning_content": "because four"}, AGAIN]
    plan, _ = take_turn(session, tokenizer, messages, "x<|user|>")
    assert "<think>because four</think>seven" in tokenizer.decode(plan.prompt_ids)
    assert tokenizer.decode(plan.prompt_ids).endswith("<|assistant|><think>")


def test_a_truncated_answer_is_continued_with_the_role_token_that_it_lacks(tokenizer):
    session = new_session()
    _, answer = take_turn(session, tokenizer, [USER], "three and")
    plan, _ = take_turn(session, tokenizer, [USER, answer, AGAIN], "x<|user|>")
    assert plan.kind == "extend"
    assert tokenizer.decode(plan.prompt_ids[-len(plan.tail_ids):]).startswith("<|user|>make three")


def test_an_answer_that_ended_with_the_other_role_token_starts_a_new_path(tokenizer):
    session = new_session()
    _, answer = take_turn(session, tokenizer, [USER], "seven<|observation|>")
    plan, _ = take_turn(session, tokenizer, [USER, answer, AGAIN], "x<|user|>")
    assert plan.kind == "rewrite" and plan.parent is session.nodes[0]
    assert "seven<|user|>make three" in tokenizer.decode(plan.prompt_ids)


def test_abandoned_turns_are_not_continued(tokenizer):
    session = new_session()
    _, answer = take_turn(session, tokenizer, [USER], "seven<|user|>")
    session.nodes[0].abandoned = True
    plan, _ = take_turn(session, tokenizer, [USER, answer, AGAIN], "x<|user|>")
    assert plan.kind == "root" and plan.parent is None
    assert [turn.turn_id for turn in session.turns()] == ["s-2"]


def test_token_limits_take_the_smallest(tokenizer):
    session = new_session(sampling=SamplingParams(max_new_tokens=50), max_tokens=8)
    assert session.remaining_tokens(100, None) == 8
    assert session.remaining_tokens(100, 5) == 5
    assert session.remaining_tokens(3, 5) == 3
    take_turn(session, tokenizer, [USER], "what is the answer<|user|>" * 3)
    with pytest.raises(ApiError, match="limit of 8 sampled tokens") as caught:
        session.remaining_tokens(100, None)
    assert caught.value.code == "token_limit_exceeded"


@pytest.mark.parametrize(("wrong", "named"), [
    ({"session_id": ""}, "session_id"), ({"session_id": "a/b"}, "session_id"), ({"ttl_s": 0}, "ttl_s"),
    ({"max_turns": 0}, "max_turns"), ({"sampling": SamplingParams(max_new_tokens=0)}, "max_new_tokens")])
def test_settings_that_make_no_sense_are_refused(wrong, named):
    with pytest.raises(GatewayError, match=named):
        SessionSettings(**{"session_id": "s", **wrong})
