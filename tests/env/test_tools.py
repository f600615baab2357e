"""Arguments of tool calls and the calculator."""

import pytest

from glm5.env.tasks import ToolError
from glm5.env.tools import (
    evaluate,
    final_answer,
    integer_argument,
    parse_arguments,
    progress_reward,
    text_argument,
    used_tool,
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 * 3", 7), ("(1 + 2)*3", 9), ("7 - 10", -3), ("-4 * 2", -8), ("7 // 2", 3), ("7 % 4", 3), (" 12 ", 12)],
)
def test_the_calculator_computes(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 ** 9",
        "1 / 2",
        "a + 1",
        "__import__('os')",
        "1.5",
        "'a' * 9",
        "(" * 90,
        "9" * 201,
        "1 //",
        "True",
        "9" * 150 + "*" + "9" * 40,
        "1 << 100",
        "[1][0]",
        "\0",
    ],
)
def test_the_calculator_refuses_everything_else_in_one_line(expression):
    with pytest.raises(ToolError) as caught:
        evaluate(expression)
    assert str(caught.value).startswith("error: ") and "\n" not in str(caught.value)


def test_the_calculator_reports_division_by_zero():
    with pytest.raises(ToolError, match="division by zero"):
        evaluate("1 // 0")


def test_arguments_come_as_json_text_or_object():
    assert parse_arguments({"function": {"name": "f", "arguments": '{"a": 1}'}}) == ("f", {"a": 1})
    assert parse_arguments({"function": {"name": "f", "arguments": {"a": 1}}}) == ("f", {"a": 1})
    assert parse_arguments({"function": {"name": "f", "arguments": ""}}) == ("f", {})


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", None])
def test_malformed_arguments_are_the_models_error(arguments):
    with pytest.raises(ToolError):
        parse_arguments({"function": {"name": "f", "arguments": arguments}})


def test_argument_types_are_checked():
    assert text_argument({"a": "x"}, "a") == "x"
    assert integer_argument({"a": "-3"}, "a") == -3 and integer_argument({"a": 4}, "a") == 4
    for bad in ({}, {"a": True}, {"a": 1.0}, {"a": "x"}, {"a": "9" * 5000}):
        with pytest.raises(ToolError):
            integer_argument(bad, "a")
    with pytest.raises(ToolError, match="a is missing"):
        text_argument({}, "a")


def test_only_a_last_assistant_text_is_an_answer():
    assert final_answer([{"role": "assistant", "content": " 5 "}]) == "5"
    assert final_answer([]) == ""
    assert final_answer([{"role": "assistant", "content": "5"}, {"role": "tool", "content": "6"}]) == ""
    assert final_answer([{"role": "assistant", "content": "5", "tool_calls": [{}]}]) == ""
    assert used_tool([{"role": "assistant", "tool_calls": [{}]}]) == 1.0 and used_tool([{"role": "assistant"}]) == 0.0


def test_the_first_turn_with_the_result_earns_the_progress():
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    messages = [{"role": "user", "content": "42"}, call, {"role": "tool", "content": "41"}, call,
                {"role": "tool", "content": "42"}, call, {"role": "tool", "content": "42"}]
    assert progress_reward(messages, "42") == {"turn.1": 0.5}
    assert progress_reward(messages, "43") == progress_reward([], "42") == {}
