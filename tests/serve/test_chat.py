"""Chat completions and completions from scripted ids: what a model samples, and what the client then sees."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm5.engine.generation import Generation, wake
from glm5.engine.requests import Sequence
from glm5.errors import DataError
from glm5.records import SamplingParams
from glm5.serve.answer import Run, answer_events, answer_whole
from glm5.serve.chat import ChatFormat, parse_chat
from glm5.serve.completions import parse_completion
from glm5.serve.protocol import ApiError
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]
CALL = (
    "I think</think>Sure 日本😀<tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value><arg_key>b</arg_key>"
    '<arg_value>x "y"</arg_value></tool_call><tool_call>add</tool_call>'
)
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(checkpoint)


def scripted(tokenizer: Tokenizer, text: str, stop: str | None, reason: str = "stop") -> Generation:
    """A finished generation that sampled ``text`` and then the stop token."""
    ids = tokenizer.encode(text, allow_special=True) + ([tokenizer.special_id(stop)] if stop else [])
    sequence = Sequence(
        request_id=1,
        prompt=np.array([1, 2]),
        params=SamplingParams(),
        stop_ids=frozenset(),
        seed=0,
        max_new_tokens=9,
        output_ids=ids,
        logprobs=[-0.5] * len(ids),
        versions=[0] * len(ids),
        finish_reason=reason,
    )
    return Generation(sequence, lambda request_id: None)


def body(**extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, **extra}


def whole(tokenizer: Tokenizer, generation: Generation, **extra: Any) -> dict[str, Any]:
    return run_whole(tokenizer, generation, parse_chat(body(**extra), tokenizer, "tiny", 99))


def run_whole(tokenizer: Tokenizer, generation: Generation, form: Any) -> dict[str, Any]:
    return asyncio.run(answer_whole(form, Run(form.request, tokenizer, [generation])))


def parsed(tokenizer: Tokenizer, **extra: Any) -> ChatFormat:
    return parse_chat(body(**extra), tokenizer, "tiny", 99)


def events(tokenizer: Tokenizer, generation: Generation, **extra: Any) -> list[dict[str, Any]]:
    async def read() -> list[bytes]:
        form = parsed(tokenizer, stream=True, **extra)
        return [event async for event in answer_events(form, Run(form.request, tokenizer, [generation]))]

    raw = b"".join(asyncio.run(read())).removesuffix(b"\n\n").split(b"\n\n")
    assert raw[-1] == b"data: [DONE]"
    return [json.loads(event.removeprefix(b"data: ")) for event in raw[:-1]]


def trickle(tokenizer: Tokenizer, text: str, stop: str) -> Generation:
    """The same as ``scripted``, its ids arriving one by one from another thread."""
    complete = scripted(tokenizer, text, stop).sequence
    live = Sequence(
        request_id=1, prompt=complete.prompt, params=complete.params, stop_ids=frozenset(), seed=0, max_new_tokens=9
    )
    generation = Generation(live, lambda request_id: None)

    def play() -> None:
        for token in complete.output_ids:
            live.output_ids.append(token)
            live.logprobs.append(-0.5)
            live.versions.append(0)
            if len(live.versions) == len(complete.output_ids):
                live.finish_reason = "stop"
            wakeups: dict = {}
            generation.notify(wakeups)
            wake(wakeups)
            threading.Event().wait(0.0005)

    threading.Thread(target=play, daemon=True).start()
    return generation


def test_a_whole_answer_has_reasoning_content_and_typed_calls(tokenizer: Tokenizer) -> None:
    found = whole(tokenizer, scripted(tokenizer, CALL, "<|observation|>"), tools=TOOLS)
    choice = found["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] == tokenizer.special_id("<|observation|>")
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("I think", "Sure 日本😀")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "add"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 3, "b": 'x "y"'}, {}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert found["usage"]["completion_tokens"] == len(tokenizer.encode(CALL, allow_special=True)) + 1


@pytest.mark.parametrize("make", [scripted, trickle])
def test_streamed_deltas_add_up_to_the_whole_answer(tokenizer: Tokenizer, make) -> None:
    expected = whole(tokenizer, scripted(tokenizer, CALL, "<|observation|>"), tools=TOOLS)["choices"][0]
    found = events(
        tokenizer, make(tokenizer, CALL, "<|observation|>"), tools=TOOLS, stream_options={"include_usage": True}
    )
    deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I think"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Sure 日本😀"
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"].get("arguments", "")
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == [
        ("add", {"a": 3, "b": 'x "y"'}),
        ("add", {}),
    ]
    finals = [event["choices"][0] for event in found if event["choices"] and event["choices"][0]["finish_reason"]]
    assert [(choice["finish_reason"], choice["stop_reason"]) for choice in finals] == [
        (expected["finish_reason"], expected["stop_reason"])
    ]
    assert found[-1]["choices"] == [] and found[-1]["usage"]["prompt_tokens"] > 0
    if make is trickle:
        assert len(found) > 15


def test_thinking_off_gives_plain_content(tokenizer: Tokenizer) -> None:
    for switch in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
    ):
        request = parsed(tokenizer, **switch).request
        assert tokenizer.decode(request.prompts[0]).endswith("<|assistant|></think>") and not request.thinking
        message = whole(tokenizer, scripted(tokenizer, "just text", "<|user|>"), **switch)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "just text"}
    for switch in ({}, {"reasoning_effort": "high"}, {"reasoning_effort": "none", "enable_thinking": True}):
        assert tokenizer.decode(parsed(tokenizer, **switch).request.prompts[0]).endswith("<|assistant|><think>")


def test_preserved_thinking_keeps_earlier_reasoning(tokenizer: Tokenizer) -> None:
    messages = [
        *USER,
        {"role": "assistant", "content": "yo", "reasoning_content": "hm"},
        {"role": "user", "content": "more"},
    ]
    kept, cleared = (
        tokenizer.decode(parsed(tokenizer, messages=messages, **switch).request.prompts[0])
        for switch in ({"clear_thinking": False}, {})
    )
    assert "<think>hm</think>yo" in kept and "hm" not in cleared


def test_tools_are_declared_unless_the_choice_is_none(tokenizer: Tokenizer) -> None:
    declared, hidden = (
        tokenizer.decode(parsed(tokenizer, tools=TOOLS, tool_choice=choice).request.prompts[0])
        for choice in ("auto", "none")
    )
    assert '"name": "add"' in declared and "add" not in hidden


def test_a_stop_string_ends_the_answer(tokenizer: Tokenizer) -> None:
    found = whole(tokenizer, scripted(tokenizer, "think</think>one two three", "<|user|>"), stop=" two")["choices"][0]
    assert found["message"]["content"] == "one" and (found["finish_reason"], found["stop_reason"]) == ("stop", " two")
    streamed = events(tokenizer, trickle(tokenizer, "think</think>one two three", "<|user|>"), stop=[" two", "zzz"])
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed) == "one"
    assert streamed[-1]["choices"][0]["stop_reason"] == " two"


def test_truncated_answers_say_length_and_aborted_ones_fail(tokenizer: Tokenizer) -> None:
    assert (
        whole(tokenizer, scripted(tokenizer, "so</think>half", None, "length"))["choices"][0]["finish_reason"]
        == "length"
    )
    with pytest.raises(ApiError, match="aborted"):
        whole(tokenizer, scripted(tokenizer, "so", None, "abort"))


def test_log_probs_and_token_ids_cover_every_sampled_id(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a</think>日本", allow_special=True), tokenizer.special_id("<|user|>")]
    found = whole(tokenizer, scripted(tokenizer, "a</think>日本", "<|user|>"), logprobs=True, return_token_ids=True)
    choice = found["choices"][0]
    assert choice["token_ids"] == ids and found["prompt_token_ids"] == parsed(tokenizer).request.prompts[0]
    assert [item["logprob"] for item in choice["logprobs"]["content"]] == [-0.5] * len(ids)
    streamed = events(tokenizer, trickle(tokenizer, "a</think>日本", "<|user|>"), logprobs=True, return_token_ids=True)
    choices = [event["choices"][0] for event in streamed]
    assert [token for item in choices for token in item.get("token_ids", [])] == ids
    assert sum(len((item["logprobs"] or {"content": []})["content"]) for item in choices) == len(ids)


@pytest.mark.parametrize(
    ("extra", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"model": None}, 400, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [3]}, 400, "messages"),
        ({"messages": [{"role": {}, "content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, 400, "messages"),
        ({"n": 0}, 400, "n"),
        ({"n": 10**6}, 400, "n"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"stream": "yes"}, 400, "stream"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"stop": [1]}, 400, "stop"),
        ({"tools": [{}]}, 400, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tools"),
        ({"tool_choice": "sometimes"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS}, 400, "tool_choice"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"logit_bias": {"x": 2}}, 400, "logit_bias"),
        ({"logit_bias": {"1": 200}}, 400, "logit_bias"),
        ({"logit_bias": {"1": None}}, 400, "logit_bias"),
        ({"reasoning_effort": "extreme"}, 400, "reasoning_effort"),
        ({"functions": [{}]}, 400, "functions"),
        ({"temperature": 10**400}, 400, "temperature"),
    ],
)
def test_wrong_chat_requests_name_the_field(
    tokenizer: Tokenizer, extra: dict[str, Any], status: int, param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body(**extra), tokenizer, "tiny", 99)
    assert (caught.value.status, caught.value.param) == (status, param)


def test_messages_that_the_format_cannot_express_are_data_errors(tokenizer: Tokenizer) -> None:
    for message in (
        {"role": "wizard", "content": "x"},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": 5},
    ):
        with pytest.raises(DataError):
            parse_chat(body(messages=[message]), tokenizer, "tiny", 99)


def test_completions_take_text_or_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    for prompt in ("the fox", ids, ["the fox"], [ids]):
        assert parse_completion({"model": "tiny", "prompt": prompt}, tokenizer, "tiny").request.prompts == [ids]
    two = parse_completion({"model": "tiny", "prompt": ["the fox", ids]}, tokenizer, "tiny")
    assert two.request.prompts == [ids, ids]
    for prompt in ([1.5], ["a", 1], [["a"]], 7, None):
        with pytest.raises(ApiError, match="prompt"):
            parse_completion({"model": "tiny", "prompt": prompt}, tokenizer, "tiny")
    request = parse_completion({"model": "tiny", "prompt": ids, "logprobs": 0}, tokenizer, "tiny")
    found = run_whole(tokenizer, scripted(tokenizer, "over <think>", "<|user|>"), request)
    assert (
        found["choices"][0]["text"] == "over <think>" and found["choices"][0]["logprobs"]["token_logprobs"][0] == -0.5
    )
