"""Rule rewards against hand-counted answers."""

import pytest

from glm5.env.rewards.rules import VERIFIERS, RuleConfig, check_rule
from glm5.errors import ConfigError

SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"minimum": 3}}}


@pytest.mark.parametrize(("kind", "options", "answer", "expected"), [
    ("exact", {"text": "b12 "}, " b12", 1.0),
    ("exact", {"text": "b12"}, "", 0.0),
    ("exact", {"text": ""}, "", 0.0),
    ("length", {"least": 2, "most": 3}, "one two", 1.0),
    ("length", {"least": 2, "most": 3}, "one", 0.0),
    ("length", {"most": 3}, "", 0.0),
    ("length", {"least": 0, "most": 3}, "", 1.0),
    ("length", {"least": 4, "most": 4, "unit": "characters"}, "a\nbc", 1.0),
    ("length", {"least": 2, "most": 2, "unit": "lines"}, "a\nbc", 1.0),
    ("required", {"texts": ["a", "z"]}, "banana", 0.5),
    ("required", {"texts": ["an"], "count": 2}, "banana", 1.0),
    ("required", {"texts": ["an"], "count": 3}, "banana", 0.0),
    ("required", {"texts": ["AN"]}, "banana", 0.0),
    ("required", {"texts": ["AN"], "ignore_case": True}, "banana", 1.0),
    ("forbidden", {"texts": ["x"]}, "", 1.0),
    ("forbidden", {"texts": ["X"], "ignore_case": True}, "box", 0.0),
    ("pattern", {"regex": "a.c"}, " a\nc ", 1.0),
    ("pattern", {"regex": "a"}, "ab", 0.0),
    ("pattern", {"regex": "a", "whole": False}, "ba", 1.0),
    ("json_schema", {"schema": SCHEMA}, '{"n": 3}', 1.0),
    ("json_schema", {"schema": SCHEMA}, '{"n": 2}', 0.0),
    ("json_schema", {"schema": {}}, "not json", 0.0),
    ("json_value", {"value": {"size": 4}}, '{ "size":4 }', 1.0),
    ("json_value", {"value": {"size": 4}}, 'Sure: {"size": 4}', 0.0),
    ("json_value", {"value": 0}, "", 0.0),
    ("language", {"code": "de"}, "Das ist ein ganz gewöhnlicher deutscher Satz.", 1.0),
    ("language", {"code": "de"}, "This is a perfectly ordinary sentence.", 0.0),
    ("language", {"code": "en"}, " ", 0.0),
    ("script", {"name": "latin"}, "abc 123", 1.0),
    ("script", {"name": "latin"}, "где", 0.0),
    ("script", {"name": "cjk", "least": 0.5}, "水火 ab", 1.0),
    ("script", {"name": "latin"}, "123", 0.0),
    ("repetition", {"size": 2, "most": 0.25}, "a b a b c", 1.0),  # runs ab ba ab bc: one of four repeats
    ("repetition", {"size": 2, "most": 0.2}, "a b a b c", 0.0),
    ("repetition", {"size": 9}, "short", 1.0),
    ("items", {"least": 2, "most": 2}, "- a\n\n- b", 1.0),
    ("items", {"least": 2}, "- a\nb", 0.0),
    ("items", {}, "", 0.0),
])
def test_verifier(kind, options, answer, expected):
    assert RuleConfig(kind=kind, options=options).score(answer) == expected


@pytest.mark.parametrize(("kind", "options", "told"), [
    ("lenght", {}, "known rules"),
    ("length", {"maximum": 3}, "unknown option 'maximum'; options: least, most, unit"),
    ("length", {"unit": "pages"}, "unit"),
    ("pattern", {"regex": "("}, "pattern"),
    ("exact", {}, "text"),
    ("required", {"texts": "abc"}, "list of texts"),
    ("required", {"texts": []}, "list of texts"),
    ("repetition", {"size": 0}, "at least 1"),
    ("json_schema", {"schema": {"type": "objekt"}}, "schema is none"),
])
def test_a_rule_that_cannot_work_is_refused(kind, options, told):
    with pytest.raises(ConfigError, match=told.replace("(", r"\(")):
        check_rule(kind, options)


def test_nothing_satisfies_an_empty_answer_but_what_forbids():
    free = {"length": {"least": 0}, "forbidden": {"texts": ["a"]}, "repetition": {}}
    assert all(VERIFIERS[kind]("", **options) == 1 for kind, options in free.items())
