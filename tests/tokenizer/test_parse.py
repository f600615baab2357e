"""Parsing of sampled text: golden messages, broken text, every way of cutting it, schema types."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.tokenizer.chat import conversation_segments
from glm5.tokenizer.parse import Delta, ParsedMessage, ParsedToolCall, StreamParser, join_deltas, parse_message

FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<|user|>", "<|observation|>", "<|endoftext|>", "f", "get", "a", "n", "3", "1.5", "true", "[1, 2]", '{"k": 1}', " ",
    "<tool_call>f", "<arg_key>a</arg_key>", "<arg_value>", "<tool_call>get<arg_key>n</arg_key><arg_value>",
    "\n", '"', "\\", "é", "<", "</", "<arg", "<|", "NaN", "1e999",
]  # fmt: skip
fragment_text = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=24).map("".join)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "$defs": {"point": {"type": "object"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("f", a={"type": "string"}, n={"type": "integer"}),
    tool("get", a={"type": ["integer", "null"]}, n={"anyOf": [{"type": "number"}, {"type": "boolean"}]}),
]


def call_text(name: str, **arguments: str) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{pairs}</tool_call>"


def stream(pieces: list[str], tools: list[dict[str, Any]] | None, thinking: bool) -> list[Delta]:
    parser = StreamParser(tools, thinking)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish()


def argument_texts(deltas: list[Delta]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for delta in deltas:
        if delta.kind == "tool_call_arguments":
            assert delta.index is not None
            texts[delta.index] = texts.get(delta.index, "") + delta.text
    return texts


GOLDEN = [
    ("R</think>A", True, ("R", "A", [])),
    ("<think>R</think>A", True, ("R", "A", [])),
    ("A", False, ("", "A", [])),
    ("</think>A", False, ("", "A", [])),
    ("unfinished thought", True, ("unfinished thought", "", [])),
    ("R</think>A" + call_text("f", a="x y"), True, ("R", "A", [("f", {"a": "x y"})])),
    ("R</think>" + call_text("f") + call_text("g"), True, ("R", "", [("f", {}), ("g", {})])),
    (call_text("f") + "<|observation|>", False, ("", "", [("f", {})])),
    ("A<|user|>", False, ("", "A", [])),
    ("A<|user|>B", False, ("", "A<|user|>B", [])),
    ("R" + call_text("f", a="1") + "after", True, ("R", "after", [("f", {"a": "1"})])),
    ("mention <tool_call> here.</think>A", True, ("mention <tool_call> here.", "A", [])),
    ("<tool_call>f\n<arg_key> a </arg_key>\n<arg_value>\nx\n</arg_value>\n</tool_call>", False,
     ("", "", [("f", {"a": "\nx\n"})])),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>tru", False, ("", "", [("f", {"a": "tru"})])),
    ("<tool_call>f<arg_key>a</arg_key>", False, ("", "<arg_key>a</arg_key>", [("f", {})])),
    ("<tool_call>f<arg_key>a</tool_call>x", False, ("", "<arg_key>ax", [("f", {})])),
    ("<tool_call>f", False, ("", "<tool_call>f", [])),
    ("<tool_call></tool_call>", False, ("", "<tool_call></tool_call>", [])),
    ("<tool_call>not a name</tool_call>", False, ("", "<tool_call>not a name</tool_call>", [])),
    ("<tool_call>f words<tool_call>g</tool_call>", False, ("", "<tool_call>f words", [("g", {})])),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value> b <arg_key>c</arg_key><arg_value>2</arg_value>", False,
     ("", " b ", [("f", {"a": "1", "c": "2"})])),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
     False, ("", "<arg_key>a</arg_key><arg_value>2</arg_value>", [("f", {"a": "1"})])),
    ("<tool_call>f<arg_key>a<arg_value>1</arg_value></tool_call>", False, ("", "", [("f", {"a": "1"})])),
    ("", True, ("", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "thinking", "expected"), GOLDEN)
def test_parsed_message_is_the_golden_one_whole_and_by_single_characters(text, thinking, expected) -> None:
    reasoning, content, calls = expected
    message = ParsedMessage(reasoning, content, [ParsedToolCall(*call) for call in calls])
    assert parse_message(text, thinking=thinking) == message
    assert join_deltas(stream(list(text), None, thinking)) == message


@pytest.mark.parametrize("text", [case[0] for case in GOLDEN])
@pytest.mark.parametrize("thinking", [True, False])
def test_every_split_in_two_gives_the_same_message(text: str, thinking: bool) -> None:
    whole = parse_message(text, TOOLS, thinking)
    for cut in range(len(text) + 1):
        assert join_deltas(stream([text[:cut], text[cut:]], TOOLS, thinking)) == whole


@settings(max_examples=400)
@given(fragment_text, st.lists(st.integers(0, 200), max_size=12), st.booleans(), st.sampled_from([None, TOOLS]))
def test_any_text_in_any_pieces_gives_the_same_message_and_valid_json(text, cuts, thinking, tools) -> None:
    whole = parse_message(text, tools, thinking)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    for deltas in (stream(pieces, tools, thinking), stream(list(text), tools, thinking)):
        assert join_deltas(deltas) == whole
        assert argument_texts(deltas) == {
            index: json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
            for index, call in enumerate(whole.tool_calls)
        }
        last = {delta.index: delta for delta in deltas if delta.kind == "tool_call_arguments"}
        assert [delta for delta in deltas if delta.ends_call] == list(last.values())


@settings(max_examples=300)
@given(fragment_text, st.booleans())
def test_no_letter_is_lost(text: str, thinking: bool) -> None:
    def letters(part: str) -> list[str]:
        for tag in [tag for tag in FRAGMENTS if tag[0] == "<" and tag[-1] == ">" and tag.count("<") == 1]:
            part = part.replace(tag, "\0")
        return sorted(character for character in part if character.isalnum())

    message = parse_message(text, None, thinking)
    kept = message.reasoning + "\0" + message.content
    for call in message.tool_calls:
        kept += "\0".join(["", call.name, *call.arguments.keys(), *call.arguments.values(), ""])
    assert letters(kept) == letters(text)


words = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20).map(str.strip)
names = st.from_regex(r"[a-z_]{1,10}", fullmatch=True)


@given(words.filter(bool), words, st.lists(st.tuples(names, st.dictionaries(names, words, max_size=3)), max_size=3))
def test_parsing_a_rendered_turn_restores_it(reasoning: str, content: str, calls: list) -> None:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    segments = conversation_segments([message])
    text = "".join(segment.text for segment in segments if segment.trained)
    parsed = parse_message(text)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls


def test_string_arguments_are_streamed_before_they_end() -> None:
    parser = StreamParser(thinking=False)
    deltas = parser.feed("<tool_call>f<arg_key>a</arg_key><arg_value>one ")
    assert [delta.kind for delta in deltas] == ["tool_call_start", "tool_call_arguments", "tool_call_arguments"]
    assert argument_texts(deltas) == {0: '{"a": "one '}


def test_possible_tags_are_held_back_and_released_as_text() -> None:
    parser = StreamParser(thinking=False)
    assert parser.feed("a <tool") == [Delta("content", "a ")]
    assert parser.feed("box>") == [Delta("content", "<toolbox>")]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, " 3\n", 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "3.0", 3.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "array"}, '[1, "é"]', [1, "é"]),
        ({"type": "array"}, "[1, ", "[1, "),
        ({"type": "object"}, '{"k": null}', {"k": None}),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"$ref": "#/$defs/point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/none"}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 5}, "5", 5),
        ({}, "1", "1"),
        (True, "1", "1"),
    ],
)
def test_values_follow_the_schema(schema: Any, text: str, value: Any) -> None:
    message = parse_message(call_text("f", a=text), [tool("f", a=schema)], thinking=False)
    assert message.tool_calls == [ParsedToolCall("f", {"a": value})]
    assert type(message.tool_calls[0].arguments["a"]) is type(value)


def test_values_stay_strings_without_a_schema_or_for_a_key_that_it_lacks() -> None:
    text = call_text("f", a="3", b="[1]")
    for tools in (None, [], [tool("g", a={"type": "integer"})], [{"name": "f"}]):
        assert parse_message(text, tools, thinking=False).tool_calls[0].arguments == {"a": "3", "b": "[1]"}
    typed = parse_message(text, [tool("f", a={"type": "integer"})], thinking=False)
    assert typed.tool_calls[0].arguments == {"a": 3, "b": "[1]"}
