"""Constrained sampling: what a random model writes follows the grammar, and a broken grammar is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from glm5.engine.config import EngineConfig
from glm5.engine.engine import Engine
from glm5.engine.grammar import Grammars
from glm5.engine.requests import InvalidRequestError
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.records import SamplingParams
from glm5.tokenizer.bpe import train_tokenizer

from .conftest import tiny_config

pytest.importorskip("llguidance")
TOKENIZER = train_tokenizer(['plain words, über 日本語 😀 {"a": 1} ' * 30], 330)
GRAMMARS = Grammars(TOKENIZER)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = replace(tiny_config(), vocab_size=384)  # more rows than ids
    model = GlmMoeDsaForCausalLM(config, torch.Generator().manual_seed(0)).eval()
    sizes = EngineConfig(max_slots=8, max_context=256, threads=1, seed=0)
    with Engine(model, TOKENIZER.stop_ids, sizes, grammars=GRAMMARS) as engine:
        yield engine


def test_a_random_model_writes_what_the_grammar_says_beside_free_requests(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 999}, "w": {"enum": ["x", "yy"]}},
        "required": ["n", "w"],
        "additionalProperties": False,
    }
    grammar = f"start: %json {json.dumps(schema)}"
    free = engine.submit([5, 6], SamplingParams(max_new_tokens=40, seed=3, stop_token_ids=()))
    bound = [engine.submit([7], SamplingParams(max_new_tokens=200, seed=seed, grammar=grammar)) for seed in range(4)]
    for generation in bound:
        done = generation.result()
        assert done.finish_reason == "stop" and done.output_ids[-1] in TOKENIZER.stop_ids
        value = json.loads(TOKENIZER.decode(done.output_ids[:-1]))
        assert isinstance(value["n"], int) and value["n"] <= 999 and value["w"] in ("x", "yy")
        assert np.isfinite(done.logprobs).all()
    assert len(free.result().output_ids) == 40


def test_tags_are_symbols_that_text_cannot_spell() -> None:
    tag = TOKENIZER.special_id("<tool_call>")
    state = GRAMMARS.start(f"start: TEXT <[{tag}]>\nTEXT: /(.|\\n)*/")
    plain = TOKENIZER.encode("a<b", allow_special=False)
    for token in plain:
        state.advance(token)
    allowed = state.allowed()
    assert allowed is not None and allowed[tag] and not allowed[TOKENIZER.special_id("</tool_call>")]
    assert not allowed[list(TOKENIZER.stop_ids)].any()
    state.advance(tag)
    done = state.allowed()
    assert done is not None and set(np.flatnonzero(done)) == set(TOKENIZER.stop_ids)
    state.advance(TOKENIZER.stop_ids[0])
    state.advance(0)
    assert np.flatnonzero(state.allowed()).tolist() == sorted(TOKENIZER.stop_ids)


def test_states_of_one_grammar_do_not_share_their_position() -> None:
    first, second = (GRAMMARS.start('start: "ab"') for _ in range(2))
    for token in TOKENIZER.encode("ab"):
        first.advance(token)
    assert np.flatnonzero(first.allowed()).tolist() == sorted(TOKENIZER.stop_ids)
    assert not second.allowed()[list(TOKENIZER.stop_ids)].any()


@pytest.mark.parametrize("wrong", ['start: %json {"type": "objekt"}', "begin: /a/", ""])
def test_a_wrong_grammar_is_refused_in_one_line(engine: Engine, wrong: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit([1], SamplingParams(grammar=wrong))
    assert "\n" not in str(caught.value)
