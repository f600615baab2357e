"""Sessions of a model with a chat template of its own: continued by ids, whatever was sampled."""

import json

from glm5.gateway.history import HistoryReader, extend_chain, read_message
from glm5.gateway.sessions import Session, SessionSettings
from glm5.gateway.tree import Node, Origin
from glm5.tokenizer.template import TemplateTokenizer
from tests.dense import write_tokenizer

USER = {"role": "user", "content": "where is Ada"}
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "", "parameters": {
    "type": "object", "properties": {"person": {"type": "string"}}}}}]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"person":   "Ada"}}\n</tool_call>'  # no encoder writes it so


def take_turn(session, tokenizer, messages, sampled, stop=True):
    history = HistoryReader().read(messages, TOOLS)
    origin = Origin.of(history, TOOLS, True, "m")
    plan = session.plan(history, origin, TOOLS, tokenizer)
    parsed = tokenizer.parse(sampled, TOOLS)
    message = {"role": "assistant", "content": parsed.content}
    if parsed.tool_calls:
        message["tool_calls"] = [{"id": "x", "type": "function", "function": {
            "name": call.name, "arguments": json.dumps(call.arguments)}} for call in parsed.tool_calls]
    ids = [*tokenizer.encode(sampled), *([tokenizer.stop_ids[0]] if stop else [])]
    session.add(Node(
        turn_id=session.next_turn_id(), parent=plan.parent, kind=plan.kind, tail_ids=plan.tail_ids, output_ids=ids,
        logprobs=[-1.0] * len(ids), versions=[1] * len(ids), finish_reason="stop" if stop else "length",
        chain=extend_chain(history.chains[-1], read_message(message, "answer")), num_messages=len(messages) + 1,
        digest=str(messages).encode(), origin=origin, role="main"))
    return plan, message


def test_an_episode_with_tools_is_one_path_of_the_sampled_ids(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = TemplateTokenizer.from_directory(tmp_path)
    session = Session(SessionSettings(session_id="s", enable_thinking=False), "key", 1e9)
    _, call = take_turn(session, tokenizer, [USER], CALL)
    assert call["tool_calls"][0]["function"]["arguments"] == '{"person": "Ada"}'
    messages = [USER, call, {"role": "tool", "tool_call_id": "x", "content": "room 7"}]
    plan, cut = take_turn(session, tokenizer, messages, "It is room", stop=False)
    assert plan.kind == "extend"
    text = tokenizer.decode(plan.prompt_ids)
    assert CALL + "<|im_end|>\n<|im_start|>user\n<tool_response>\nroom 7\n</tool_response><|im_end|>\n" in text
    plan, _ = take_turn(session, tokenizer, [*messages, cut, {"role": "user", "content": "go on"}], "7")
    assert plan.kind == "extend"
    assert tokenizer.decode(plan.tail_ids) == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert session.num_mismatches() == 0 and session.kinds() == {"root": 1, "extend": 2}
