"""Grammars of answers: which texts they accept, in the words of the chat format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from glm5.engine.grammar import Grammars
from glm5.serve.conversation import Conversation, ToolChoice
from glm5.serve.protocol import ApiError
from glm5.tokenizer.bpe import train_tokenizer

pytest.importorskip("llguidance")
TOKENIZER = train_tokenizer(['plain words {"a": 1} <tool_call> ' * 30], 330)
GRAMMARS = Grammars(TOKENIZER)


def tool(name: str, strict: bool = False, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}


WEATHER = tool(
    "weather",
    properties={
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "at": {"$ref": "#/$defs/Point"},
    },
    required=["city"],
    **{"$defs": {"Point": {"type": "array", "items": {"type": "number"}, "maxItems": 2}}},
)


def grammar(**settings: Any) -> str | None:
    defaults: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "enable_thinking": False}
    return Conversation(**{**defaults, **settings}).grammar(TOKENIZER)


def accepts(text: str, rules: str | None, tags: bool = True) -> bool:
    """Whether the whole of ``text`` follows ``rules`` and may end there; without ``tags`` it is spelled in letters."""
    assert rules is not None
    state = GRAMMARS.start(rules)
    for token in [*TOKENIZER.encode(text, allow_special=tags), TOKENIZER.stop_ids[1]]:
        allowed = state.allowed()
        assert allowed is not None
        if not allowed[token]:
            return False
        state.advance(token)
    return True


def call(name: str, **arguments: str) -> str:
    values = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{values}</tool_call>"


def test_nothing_to_enforce_is_no_grammar() -> None:
    assert grammar() is None and grammar(tools=[WEATHER]) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("weather", city="Rome"), True),
        (call("weather", city='any <text> "here"\n{', unit="C", days="-3", at="[1.5, 2]"), True),
        (call("weather", city="Rome") * 2, True),
        ("", False),
        ("text", False),
        (call("weather"), False),
        (call("weather", city="Rome", unit="K"), False),
        (call("weather", city="Rome", days="many"), False),
        (call("weather", city="Rome", at="[1, 2, 3]"), False),
        (call("weather", days="1", city="Rome"), False),
        (call("other", city="Rome"), False),
        (call("weather", city="Rome") + "text", False),
    ],
)
def test_a_required_call_follows_its_schema(text: str, expected: bool) -> None:
    assert accepts(text, grammar(tools=[WEATHER], choice=ToolChoice(mode="required"))) is expected


def test_one_call_and_one_tool_when_asked_for() -> None:
    tools = [WEATHER, tool("ping")]
    one = grammar(tools=tools, choice=ToolChoice(mode="required", parallel=False))
    assert accepts(call("ping"), one) and not accepts(call("ping") * 2, one)
    named = grammar(tools=tools, choice=ToolChoice(mode="required", name="ping"))
    assert accepts(call("ping"), named) and not accepts(call("weather", city="Rome"), named)


def test_a_tool_without_properties_takes_none_unless_it_allows_others() -> None:
    required = ToolChoice(mode="required")
    assert not accepts(call("f", a="1"), grammar(tools=[tool("f")], choice=required))
    free = grammar(tools=[tool("f", additionalProperties=True)], choice=required)
    assert accepts(call("f"), free) and accepts(call("f", a="1", b="x y"), free)


@pytest.mark.parametrize("broken", [{"anyOf": 3}, 7, None, {"type": {}}, {"enum": "x"}, {"$ref": "#/nowhere"}])
def test_a_broken_argument_schema_is_read_as_text_or_refused(broken: Any) -> None:
    rules = grammar(tools=[tool("f", properties={"a": broken}, required=["a"])], choice=ToolChoice(mode="required"))
    assert accepts(call("f", a="x y"), rules)


def test_thinking_comes_first_and_ends_once() -> None:
    rules = grammar(tools=[WEATHER], choice=ToolChoice(mode="required"), enable_thinking=True)
    wanted = call("weather", city="Rome")
    assert accepts(f"hm\nwell</think>{wanted}", rules) and accepts(f"</think>{wanted}", rules)
    assert not accepts(wanted, rules) and not accepts(f"a</think>b</think>{wanted}", rules)


def test_text_cannot_spell_a_tag_that_the_parser_would_read() -> None:
    rules = grammar(tools=[tool("f", strict=True)])
    assert accepts("a < b", rules) and accepts(f"text{call('f')}", rules)
    assert not accepts("<tool_call>", rules, tags=False)
    value = grammar(tools=[WEATHER], choice=ToolChoice(mode="required"))
    spelled = "</arg_value>"
    ids = TOKENIZER.encode("<tool_call>weather<arg_key>city</arg_key><arg_value>", allow_special=True)
    state = GRAMMARS.start(str(value))
    for token in [*ids, *TOKENIZER.encode(spelled)[:-1]]:
        state.advance(token)
    assert not np.asarray(state.allowed())[TOKENIZER.encode(spelled)[-1]]


def test_voluntary_calls_of_strict_tools_follow_their_schema() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    rules = grammar(tools=[strict])
    assert accepts("just text", rules) and accepts(f"text{call('weather', city='Rome')}", rules)
    assert not accepts(call("weather", days="1"), rules)


def test_json_content_or_a_call_in_its_place() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts('{"a": 1}', grammar(schema=schema)) and not accepts('{"a": "x"}', grammar(schema=schema))
    assert accepts('{\n  "a": 1\n}', grammar(schema=schema))
    assert not accepts('{"a":' + " " * 40 + "1}", grammar(schema=schema))
    both = grammar(schema=schema, tools=[WEATHER])
    assert accepts('{"a": 1}', both) and accepts(call("weather", city="x"), both) and not accepts("hi", both)


def test_choices_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(ApiError, match="no tools"):
        grammar(choice=ToolChoice(mode="required"))
    with pytest.raises(ApiError, match="no tool 'x'"):
        grammar(tools=[WEATHER], choice=ToolChoice(mode="required", name="x"))
