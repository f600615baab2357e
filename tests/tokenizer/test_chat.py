"""The published format: golden strings, the Jinja file, the loss mask."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jinja2
import pytest

from glm5.errors import DataError
from glm5.tokenizer import Tokenizer
from glm5.tokenizer.chat import conversation_segments

CALLS = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "x y", "n": 3}}},
    {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
]
SYSTEM, USER = {"role": "system", "content": "S"}, {"role": "user", "content": "U1"}
TURN = [
    SYSTEM,
    USER,
    {"role": "assistant", "content": "", "reasoning_content": "R1", "tool_calls": CALLS},
    {"role": "tool", "content": "o1", "tool_call_id": "1"},
    {"role": "tool", "content": "o2", "tool_call_id": "2"},
]
SECOND = [*TURN, {"role": "assistant", "content": "A1", "reasoning_content": "R2"}, {"role": "user", "content": "U2"}]
CALL_TEXT = (
    "<tool_call>f<arg_key>a</arg_key><arg_value>x y</arg_value><arg_key>n</arg_key><arg_value>3</arg_value></tool_call>"
    "<tool_call>g</tool_call>"
)
RESULT_TEXT = "<|observation|><tool_response>o1</tool_response><tool_response>o2</tool_response>"
START = "[gMASK]<sop><|system|>S<|user|>U1<|assistant|>"
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "größer", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]
TOOLS_TEXT = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "f", "description": "größer", "parameters": {"type": "object"}}}\n'
    '{"type": "function", "function": {"name": "g"}}\n'
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
REASONED = START + "<think>R1</think>" + CALL_TEXT + RESULT_TEXT

GOLDEN: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    ("tools turn", TURN, {"add_generation_prompt": True}, REASONED + "<|assistant|><think>"),
    (
        "history loses its reasoning",
        SECOND,
        {"add_generation_prompt": True},
        START + "</think>" + CALL_TEXT + RESULT_TEXT + "<|assistant|></think>A1<|user|>U2<|assistant|><think>",
    ),
    (
        "preserved thinking",
        SECOND,
        {"add_generation_prompt": True, "clear_thinking": False},
        REASONED + "<|assistant|><think>R2</think>A1<|user|>U2<|assistant|><think>",
    ),
    ("no thinking", [SYSTEM, USER], {"add_generation_prompt": True, "enable_thinking": False}, START + "</think>"),
    ("no generation prompt", [SYSTEM, USER], {}, START.removesuffix("<|assistant|>")),
    ("tools", [USER], {"tools": TOOLS}, "[gMASK]<sop>" + TOOLS_TEXT + "<|user|>U1"),
    (
        "tools before the system message",
        [SYSTEM, USER],
        {"tools": TOOLS, "add_generation_prompt": True},
        "[gMASK]<sop>" + TOOLS_TEXT + "<|system|>S<|user|>U1<|assistant|><think>",
    ),
    (
        "whitespace reasoning",
        [USER, {"role": "assistant", "content": " a\n", "reasoning_content": " \n"}],
        {},
        "[gMASK]<sop><|user|>U1<|assistant|><think></think>a",
    ),
    (
        "empty reasoning",
        [USER, {"role": "assistant", "content": "a", "reasoning_content": ""}],
        {},
        "[gMASK]<sop><|user|>U1<|assistant|></think>a",
    ),
    (
        "inline reasoning",
        [USER, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nbecause"}],
        {},
        "[gMASK]<sop><|user|>U1<|assistant|><think>why</think>because",
    ),
    (
        "content in parts",
        [{"role": "user", "content": [{"type": "text", "text": "a "}, "b"]}, {"role": "assistant", "content": "c"}],
        {},
        "[gMASK]<sop><|user|>a b<|assistant|></think>c",
    ),
    (
        "missing content and JSON values",
        [USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "h", "arguments": {"o": {"k": "é"}, "l": [1, "2"], "b": True, "z": None, "s": "3"}}}
        ]}],
        {},
        "[gMASK]<sop><|user|>U1<|assistant|></think><tool_call>h"
        '<arg_key>o</arg_key><arg_value>{"k": "é"}</arg_value><arg_key>l</arg_key><arg_value>[1, "2"]</arg_value>'
        "<arg_key>b</arg_key><arg_value>true</arg_value><arg_key>z</arg_key><arg_value>null</arg_value>"
        "<arg_key>s</arg_key><arg_value>3</arg_value></tool_call>",
    ),
]  # fmt: skip
CASES = pytest.mark.parametrize(("messages", "options", "text"), [case[1:] for case in GOLDEN],
                                ids=[case[0] for case in GOLDEN])  # fmt: skip


def jinja_text(messages: list[dict[str, Any]], **options: Any) -> str:
    """The exported template, rendered with the settings of the Transformers library."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, ensure_ascii: json.dumps(value, ensure_ascii=ensure_ascii)
    source = resources.files("glm5.tokenizer").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render(messages=messages, **options)


@CASES
def test_rendered_text_is_the_golden_string(tokenizer: Tokenizer, messages, options, text) -> None:
    assert tokenizer.render_text(messages, **options) == text


@CASES
def test_the_jinja_file_renders_the_golden_string(messages, options, text) -> None:
    assert jinja_text(messages, **options) == text


@CASES
def test_ids_spell_the_golden_string(tokenizer: Tokenizer, messages, options, text) -> None:
    rendered = tokenizer.render(messages, **options)
    assert tokenizer.decode(rendered.ids) == text
    assert rendered.ids == tokenizer.encode(text, allow_special=True)
    assert len(rendered.ids) == len(rendered.loss_mask)


def test_documented_differences_from_the_jinja_file(tokenizer: Tokenizer) -> None:
    nothing = [USER, {"role": "assistant", "content": None, "tool_calls": CALLS[1:]}]
    assert jinja_text(nothing) == "[gMASK]<sop><|user|>U1<|assistant|></think>None<tool_call>g</tool_call>"
    assert tokenizer.render_text(nothing) == "[gMASK]<sop><|user|>U1<|assistant|></think><tool_call>g</tool_call>"
    parts = [USER, {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "{'type': 'text', 'text': 'a'}" in jinja_text(parts)
    assert tokenizer.render_text(parts).endswith("<|observation|><tool_response>ab</tool_response>")


def test_arguments_may_be_json_text(tokenizer: Tokenizer) -> None:
    def text(arguments: object) -> str:
        call = {"function": {"name": "f", "arguments": arguments}}
        return tokenizer.render_text([{"role": "assistant", "content": "", "tool_calls": [call]}])

    assert text('{"a": 1}') == text({"a": 1})
    assert text("") == text({}) == text(None)


def trained_text(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The trained stretches of a rendered conversation."""
    rendered = tokenizer.render(messages, **options)
    stretches: list[list[int]] = [[]]
    for index, trained in zip(rendered.ids, rendered.loss_mask, strict=True):
        if trained:
            stretches[-1].append(index)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(ids) for ids in stretches if ids]


def test_loss_mask_covers_what_the_model_samples_and_the_closing_role_token(tokenizer: Tokenizer) -> None:
    assert trained_text(tokenizer, SECOND, clear_thinking=False) == [
        "R1</think>" + CALL_TEXT + "<|observation|>",
        "R2</think>A1<|user|>",
    ]
    assert trained_text(tokenizer, TURN, add_generation_prompt=True) == ["R1</think>" + CALL_TEXT + "<|observation|>"]


def test_a_lone_closing_think_tag_is_not_trained(tokenizer: Tokenizer) -> None:
    assert trained_text(tokenizer, SECOND) == [CALL_TEXT + "<|observation|>", "A1<|user|>"]


def test_prompt_tokens_are_never_trained(tokenizer: Tokenizer) -> None:
    assert trained_text(tokenizer, [SYSTEM, USER], tools=TOOLS, add_generation_prompt=True) == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": ""}, r"messages\[0\]\.role: got 'robot'"),
        ({"content": "x"}, r"messages\[0\]\.role: got None"),
        ({"role": "user", "content": 3}, r"messages\[0\]\.content: got int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text parts"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "arguments: not JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "got list"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\]\.function\.name"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_named(message: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        conversation_segments([message])
    assert "\n" not in str(caught.value)
