"""The official clients against a real server: responses, messages, forced calls, JSON, several choices, log-probs."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from .conftest import MODEL, Server

USER = [{"role": "user", "content": "the quick brown fox"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": PARAMETERS}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def check_arguments(arguments: Any) -> None:
    assert arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_follows_its_schema(server: Server, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "nothing"}}
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=USER,
            tools=[{"type": "function", "function": FUNCTION}, other],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=200,
            seed=2,
            extra_body={"enable_thinking": False},
        )
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls" and len(answer.choices[0].message.tool_calls) == 1
    if isinstance(choice, dict) or call.function.name == "weather":
        check_arguments(json.loads(call.function.arguments))


def test_json_content_follows_its_schema(server: Server) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "v", "schema": SCHEMA, "strict": True}}
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=USER,
            response_format=wanted,
            max_tokens=100,
            seed=1,
            extra_body={"enable_thinking": False},
        )
        with pytest.raises(openai.BadRequestError, match="objekt"):
            broken = {"type": "json_schema", "json_schema": {"name": "v", "schema": {"type": "objekt"}}}
            client.chat.completions.create(model=MODEL, messages=USER, response_format=broken)
    assert isinstance(json.loads(answer.choices[0].message.content)["ok"], bool)


def test_several_choices_stream_as_they_are_whole_and_differ(server: Server) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 20,
        "n": 3,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"enable_thinking": False, "min_p": 0.01},
    }
    with server.client() as client:
        whole = client.chat.completions.create(**asked)
        texts = {0: "", 1: "", 2: ""}
        tokens = {0: 0, 1: 0, 2: 0}
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert list(texts.values()) == [choice.message.content or "" for choice in whole.choices]
    assert sum(tokens.values()) == whole.usage.completion_tokens and len(set(texts.values())) > 1
    entry = whole.choices[0].logprobs.content[0]
    assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob >= entry.logprob


def test_penalties_and_bias_reach_the_sampler(server: Server) -> None:
    token = server.tokenizer.encode("z")[0]
    with server.client() as client:
        answer = client.completions.create(
            model=MODEL,
            prompt=["a", "b"],
            max_tokens=5,
            logit_bias={str(token): 100},
            n=2,
            logprobs=1,
            presence_penalty=0.1,
        )
    assert [choice.text for choice in answer.choices] == ["zzzzz"] * 4
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]
    assert len(answer.choices[0].logprobs.top_logprobs) == 5


def test_responses_stream_as_they_are_whole_and_continue(server: Server) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 24, "instructions": "be brief"}
    extra = {"seed": 3, "stop": None}
    with server.client() as client:
        whole = client.responses.create(**asked, extra_body=extra)
        with client.responses.stream(**asked, extra_body=extra) as stream:
            for _ in stream:
                continue
            streamed = stream.get_final_response() if whole.status == "completed" else None
        raw = list(client.responses.create(**asked, extra_body=extra, stream=True))
        last = raw[-1].response
        assert [event.sequence_number for event in raw] == list(range(len(raw)))
        assert last.status == whole.status and last.output_text == whole.output_text
        assert [item.type for item in last.output] == [item.type for item in whole.output]
        assert streamed is None or streamed.output_text == whole.output_text
        more = client.responses.create(
            model=MODEL, input="and then what does the dog do?", previous_response_id=whole.id, max_output_tokens=4
        )
        assert more.usage.input_tokens > whole.usage.input_tokens and more.usage.output_tokens <= 4
        assert client.responses.retrieve(whole.id).id == whole.id
        client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)


def test_a_response_calls_a_function_and_takes_its_result(server: Server) -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    with server.client() as client:
        first = client.responses.create(
            model=MODEL,
            input="weather?",
            tools=tools,
            tool_choice="required",
            max_output_tokens=200,
            reasoning={"effort": "none"},
            parallel_tool_calls=False,
            extra_body={"seed": 4},
        )
        call = next(item for item in first.output if item.type == "function_call")
        check_arguments(json.loads(call.arguments))
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = client.responses.create(
            model=MODEL, input=[result], previous_response_id=first.id, tools=tools, max_output_tokens=8
        )
    assert second.usage.output_tokens > 0


def test_anthropic_messages_stream_as_they_are_whole(server: Server) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 40,
        "messages": USER,
        "system": "be brief",
        "extra_body": {"seed": 5},
    }
    with claude(server) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        counted = client.messages.count_tokens(model=MODEL, messages=USER, system="be brief")
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_anthropic_tools_go_there_and_back(server: Server) -> None:
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    asked: dict[str, Any] = {"model": MODEL, "tools": tools, "thinking": {"type": "disabled"}, "max_tokens": 200}
    with claude(server) as client:
        choice: Any = {"type": "tool", "name": "weather"}
        with client.messages.stream(**asked, messages=USER, tool_choice=choice, extra_body={"seed": 6}) as stream:
            first = stream.get_final_message()
        (block,) = first.content
        assert first.stop_reason == "tool_use" and block.type == "tool_use"
        check_arguments(block.input)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny", "is_error": False}
        history = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = client.messages.create(**{**asked, "max_tokens": 6}, messages=history)
    assert second.usage.output_tokens > 0 and second.usage.cache_read_input_tokens > 0


def test_anthropic_errors_and_models(server: Server) -> None:
    with claude(server) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(model="claude", max_tokens=5, messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(model=MODEL, max_tokens=0, messages=USER)
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).display_name == MODEL
