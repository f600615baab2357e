"""Every dialect: whatever the model writes and however it is cut, the events add up to the answer that is not streamed.

The assemblers below read events as the official clients do: a part is opened, grows and is closed, in order.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.serve.answer import Format, Run, answer_events, answer_whole
from glm5.serve.anthropic import count_tokens, parse_message
from glm5.serve.chat import parse_chat
from glm5.serve.memory import Remembered, ResponseMemory
from glm5.serve.protocol import ApiError
from glm5.serve.responses import parse_response
from glm5.tokenizer.bpe import train_tokenizer

from .replay import Replay

TOKENIZER = train_tokenizer(["plain words, über 日本語 😀 " * 30], 320)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
TAGS = ("</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>")
WORDS = ("add", "a", "b", "3", ' "x" {', "}", "日本😀", "\n", "\\", "stop!", "<tool", "_call>")
CALL = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value>{}"
    '<arg_key>b</arg_key><arg_value>}}"</arg_value></tool_call>'
)
TEXTS = st.lists(
    st.one_of(st.sampled_from(TAGS), st.sampled_from(WORDS), st.sampled_from([CALL.format(""), CALL.format("stray")])),
    max_size=14,
).map("".join)

Read = Callable[[list[tuple[str, dict[str, Any]]]], Any]


def chat(stream: bool, **extra: Any) -> Format:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": CHAT_TOOLS, "stop": ["stop!"]}
    return parse_chat({**body, "stream": stream, **extra}, TOKENIZER, "m", 99)


def response(stream: bool, memory: ResponseMemory | None = None, **extra: Any) -> Format:
    kept = memory or ResponseMemory(0)
    tools = [{"type": "function", **CHAT_TOOLS[0]["function"]}]
    body = {"model": "m", "input": "hi", "tools": tools, "stream": stream, **extra}
    return parse_response(
        body, TOKENIZER, "m", 99, lambda name: kept.recall("", name), lambda done: kept.remember("", done)
    )


def message(stream: bool, **extra: Any) -> Format:
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "add", "input_schema": PARAMETERS}],
        "stop_sequences": ["stop!"],
    }
    return parse_message({**body, "stream": stream, **extra}, TOKENIZER, "m")


def read_events(form: Format, source: Replay) -> list[tuple[str, dict[str, Any]]]:
    async def read() -> bytes:
        return b"".join([part async for part in answer_events(form, Run(form.request, TOKENIZER, [source]))])

    events = []
    for block in asyncio.run(read()).decode().removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines["data"] != "[DONE]":
            events.append((lines.get("event", ""), json.loads(lines["data"])))
    return events


def read_whole(form: Format, source: Replay) -> dict[str, Any]:
    return asyncio.run(answer_whole(form, Run(form.request, TOKENIZER, [source])))


def assemble_chat(events: list[tuple[str, dict[str, Any]]]) -> Any:
    found: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": []}
    ends = []
    for _, body in events:
        for choice in body["choices"]:
            for key in ("reasoning_content", "content"):
                found[key] += choice["delta"].get(key) or ""
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(found["calls"])
                    found["calls"].append([call["function"]["name"], ""])
                found["calls"][call["index"]][1] += call["function"]["arguments"]
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(ends) == 1
    return found, ends[0]


def pick_chat(body: dict[str, Any]) -> Any:
    choice = body["choices"][0]
    sent = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in sent.get("tool_calls", [])]
    texts = {key: sent.get(key) or "" for key in ("reasoning_content", "content")}
    return {**texts, "calls": calls}, choice["finish_reason"]


def assemble_response(events: list[tuple[str, dict[str, Any]]]) -> Any:
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    assert all(name == body["type"] for name, body in events)
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    is_open = False
    for name, body in events[2:-1]:
        if name == "response.output_item.added":
            assert not is_open and body["output_index"] == len(items)
            items.append({"type": body["item"]["type"], "text": "", "id": body["item"]["id"]})
            is_open = True
        elif name.endswith(".delta"):
            assert is_open and body["output_index"] == len(items) - 1 and body["item_id"] == items[-1]["id"]
            items[-1]["text"] += body["delta"]
        elif name == "response.output_item.done":
            assert flatten(body["item"]) == (items[-1]["type"], items[-1]["text"])
            is_open = False
    assert not is_open
    name, last = events[-1]
    assert name == f"response.{last['response']['status']}"
    return [(item["type"], item["text"]) for item in items], last["response"]["status"]


def flatten(item: dict[str, Any]) -> tuple[str, str]:
    if item["type"] == "function_call":
        return item["type"], item["arguments"]
    return item["type"], "".join(part["text"] for part in item["content"])


def pick_response(body: dict[str, Any]) -> Any:
    return [flatten(item) for item in body["output"]], body["status"]


def assemble_message(events: list[tuple[str, dict[str, Any]]]) -> Any:
    assert all(name == body["type"] for name, body in events)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    open_index = None
    for name, body in events[1:-2]:
        if name == "content_block_start":
            assert open_index is None and body["index"] == len(blocks)
            open_index = body["index"]
            blocks.append({**body["content_block"], "json": ""})
        elif name == "content_block_stop":
            assert body["index"] == open_index
            open_index = None
        else:
            assert body["index"] == open_index
            delta = body["delta"]
            key = {"input_json_delta": "json", "text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if key is not None:
                blocks[-1][key] += delta["partial_json" if key == "json" else key]
            else:
                blocks[-1]["signature"] += delta["signature"]
    assert open_index is None
    for block in blocks:
        arguments = block.pop("json")
        block.pop("id", None)
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return blocks, events[-2][1]["delta"]


def pick_message(body: dict[str, Any]) -> Any:
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in body["content"]]
    return blocks, {key: body[key] for key in ("stop_reason", "stop_sequence")}


DIALECTS = [
    (chat, assemble_chat, pick_chat),
    (response, assemble_response, pick_response),
    (message, assemble_message, pick_message),
]


@pytest.mark.parametrize(("parse", "assemble", "pick"), DIALECTS)
@settings(deadline=None, max_examples=25)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=12), reason=st.sampled_from(["stop", "length"]))
def test_any_cut_gives_the_same_answer(
    parse: Any, assemble: Read, pick: Any, text: str, cuts: list[int], reason: Any
) -> None:
    ids = [*TOKENIZER.encode(text, allow_special=True), TOKENIZER.special_id("<|user|>")]
    expected = pick(read_whole(parse(False), Replay(ids, [], reason)))
    found = assemble(read_events(parse(True), Replay(ids, cuts, reason)))
    assert found == expected


def test_blocks_follow_the_order_of_the_text_and_calls_stay_whole() -> None:
    text = f"think</think>before{CALL.format('stray')}after"
    body = read_whole(message(False), Replay(TOKENIZER.encode(text, allow_special=True), [], "length", cached=2))
    kinds = [block["type"] for block in body["content"]]
    assert kinds == ["thinking", "text", "tool_use", "text"]
    assert body["content"][2]["input"] == {"a": 3, "b": '}"'} and body["content"][3]["text"] == "strayafter"
    assert body["stop_reason"] == "max_tokens"
    assert (body["usage"]["input_tokens"], body["usage"]["cache_read_input_tokens"]) == (
        len_prompt(message(False)) - 2,
        2,
    )


def len_prompt(form: Format) -> int:
    return len(form.request.prompts[0])


@pytest.mark.parametrize(
    ("text", "last", "expected"),
    [
        ("a</think>b", "<|user|>", ("end_turn", None)),
        ("a</think>b stop! c", "<|user|>", ("stop_sequence", "stop!")),
        (f"a</think>{CALL.format('')}", "<|observation|>", ("tool_use", None)),
    ],
)
def test_anthropic_says_why_an_answer_ended(text: str, last: str, expected: tuple[str, str | None]) -> None:
    ids = [*TOKENIZER.encode(text, allow_special=True), TOKENIZER.special_id(last)]
    body = read_whole(message(False), Replay(ids, []))
    assert (body["stop_reason"], body["stop_sequence"]) == expected


def test_reasoning_tokens_are_counted_up_to_their_end() -> None:
    ids = [*TOKENIZER.encode("think</think>word", allow_special=True), TOKENIZER.special_id("<|user|>")]
    end = ids.index(TOKENIZER.special_id("</think>")) + 1
    usage = read_whole(response(False), Replay(ids, []))["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == end and usage["output_tokens"] == len(ids)
    cut = read_whole(response(False), Replay(ids[: end - 1], [], "length"))["usage"]
    assert cut["output_tokens_details"]["reasoning_tokens"] == end - 1
    off = response(False, reasoning={"effort": "none"})
    assert read_whole(off, Replay(ids, []))["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_anthropic_blocks_render_as_the_chat_form_does() -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "well"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
            ],
        },
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    plain = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "well", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    form = message(False, messages=history, system=[{"type": "text", "text": "sys"}])
    assert form.request.prompts == chat(False, messages=plain).request.prompts
    body = {"model": "m", "messages": history, "system": "sys", "tools": [{"name": "add", "input_schema": PARAMETERS}]}
    assert count_tokens(body, TOKENIZER, "m") == {"input_tokens": len_prompt(form)}


def test_response_items_render_as_the_chat_form_does() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    plain = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "well", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    found = response(False, input=items, instructions="sys").request.prompts
    assert found == chat(False, messages=plain).request.prompts


def test_a_response_can_be_continued_while_it_is_remembered() -> None:
    memory = ResponseMemory(10_000)
    ids = [*TOKENIZER.encode("hm</think>word", allow_special=True), TOKENIZER.special_id("<|user|>")]
    first = read_whole(response(False, memory, instructions="pirate"), Replay(ids, []))
    again = response(False, memory, input="more", previous_response_id=first["id"])
    text = TOKENIZER.decode(again.request.prompts[0])
    assert "<|user|>hi<|assistant|></think>word<|user|>more" in text and "pirate" not in text
    read_whole(response(False, memory, store=False), Replay(ids, []))
    assert memory.recall("", first["id"]) is not None and memory.recall("other", first["id"]) is None
    with pytest.raises(ApiError, match="not stored") as lost:
        response(False, memory, previous_response_id="resp_0")
    assert lost.value.status == 404


def test_memory_forgets_the_least_recently_used_beyond_its_bound() -> None:
    memory = ResponseMemory(300)
    for name in "abc":
        memory.remember("", Remembered({"id": name, "text": "x" * 100}, []))
        memory.recall("", "a")
    kept = [name for name in "abc" if memory.recall("", name)]
    assert kept == ["a", "c"] and memory.size_bytes <= 300
    memory.remember("", Remembered({"id": "d", "text": "x" * 1000}, []))
    assert memory.size_bytes == 0 and memory.recall("", "a") is None
    assert memory.forget("", "a") is False


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [3]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "grammar"}}}, "format"),
    ],
)
def test_wrong_responses_name_the_field(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        response(False, **extra)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "extra",
    [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [3]},
        {"tool_choice": {"type": "tool"}},
        {"tool_choice": {"type": "maybe"}},
        {"tool_choice": {"type": "tool", "name": "sub"}},
        {"stop_sequences": [""]},
        {"output_config": {"format": {"type": "json_object"}}},
    ],
)
def test_wrong_messages_are_refused_in_anthropics_shape(extra: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        message(False, **extra)
    body = caught.value.body("/v1/messages")
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert caught.value.status == 400 and re.search(r"\w", body["error"]["message"])


def test_an_abort_before_the_first_event_is_raised_and_later_it_is_an_event() -> None:
    ids = TOKENIZER.encode("one two three")
    with pytest.raises(ApiError, match="aborted"):
        read_events(message(True), Replay(ids, [], "abort"))
    events = read_events(message(True), Replay(ids, [1], "abort"))
    assert events[-1] == ("error", {"type": "error", "error": events[-1][1]["error"]})
    assert events[-1][1]["error"]["type"] == "overloaded_error"
    assert read_events(response(True), Replay(ids, [1], "abort"))[-1][1]["code"] == "aborted"


def test_answers_that_run_ahead_of_a_slow_reader_give_every_token_once() -> None:
    """Both generations have given all their chunks before the first piece is read."""
    form = chat(True, n=2, logprobs=True, return_token_ids=True, stop=[])
    ids = TOKENIZER.encode("one two three four five")
    sources = [Replay(ids, list(range(1, len(ids))), "length") for _ in range(2)]

    async def read() -> list[bytes]:
        return [part async for part in answer_events(form, Run(form.request, TOKENIZER, sources))]

    text = b"".join(asyncio.run(read())).decode()
    found: dict[int, list[int]] = {0: [], 1: []}
    ends = []
    for block in text.split("\n\n"):
        if block.startswith("data: {"):
            for choice in json.loads(block.removeprefix("data: "))["choices"]:
                found[choice["index"]] += choice.get("token_ids") or []
                ends += [choice["index"]] if choice["finish_reason"] else []
    assert found == {0: ids, 1: ids} and sorted(ends) == [0, 1]
