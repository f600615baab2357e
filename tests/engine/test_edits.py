"""Penalties, bias, min-p and top log-probs against hand computation and through the engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from glm5.engine.edits import LogitEdits, needs_edits
from glm5.engine.requests import InvalidRequestError, check_sampling
from glm5.engine.sampler import RowSettings, mix_seed, sample, top_log_probs
from glm5.records import SamplingParams

from .conftest import VOCABULARY, MakeEngine


def edited(params: SamplingParams, prompt: list[int], sampled: list[int], logits: list[float]) -> list[float]:
    edits = LogitEdits(params, np.array(prompt), [], None)
    for token in sampled:
        edits.advance(token)
    logits_W = torch.tensor(logits)
    edits.apply(logits_W)
    return logits_W.tolist()


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_known_tokens() -> None:
    found = edited(SamplingParams(repetition_penalty=2.0), [0, 1], [2], [4.0, -4.0, 1.0, 3.0])
    assert found == [2.0, -8.0, 0.5, 3.0]


def test_presence_counts_once_and_frequency_every_time_in_the_answer_only() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert edited(params, [0], [], [1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
    assert edited(params, [0], [1, 2, 2], [1.0, 1.0, 1.0]) == [1.0, 0.25, 0.0]


def test_bias_is_added_after_penalties() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias=((0, 1.0), (2, -100.0)))
    assert edited(params, [0], [], [4.0, 0.0, 1.0]) == [3.0, 0.0, -99.0]


def test_defaults_edit_nothing() -> None:
    assert not needs_edits(SamplingParams(min_p=0.5, top_logprobs=3))
    for changed in ({"logit_bias": ((1, 1.0),)}, {"presence_penalty": -1.0}, {"grammar": 'start: "a"'}):
        assert needs_edits(SamplingParams(**changed))


def test_min_p_keeps_tokens_relative_to_the_most_likely_one() -> None:
    rows = 4000
    weights = torch.tensor([0.5, 0.25, 0.124, 0.126])

    def draw(min_p: float) -> list[int]:
        settings = RowSettings(
            np.ones(rows, np.float32),
            np.ones(rows, np.float32),
            np.full(rows, -1, np.int64),
            np.full(rows, min_p, np.float32),
            np.full(rows, mix_seed(1), np.uint64),
            np.arange(rows, dtype=np.uint64),
        )
        ids, _ = sample(weights.log().expand(rows, 4), settings)
        return torch.bincount(ids, minlength=4).tolist()

    counts = draw(0.25)
    assert counts[2] == 0 and min(counts[0], counts[1], counts[3]) > 0
    assert abs(counts[0] / rows - 0.5 / 0.876) < 0.04
    assert draw(1.0) == [rows, 0, 0, 0] and min(draw(0.0)) > 0


def test_top_log_probs_are_those_of_the_softmax_and_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, -math.inf])
    found = top_log_probs(logits, 3)
    expected = torch.log_softmax(logits.double(), 0)
    assert [token for token, _ in found] == [1, 2, 0]
    assert [value for _, value in found] == pytest.approx(expected[[1, 2, 0]].tolist(), abs=1e-6)


def test_a_biased_request_samples_what_it_is_told_and_reports_the_models_log_probs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt, plain = [1, 2, 3], {"temperature": 0.0, "stop_token_ids": ()}
    forced = engine.submit(prompt, SamplingParams(max_new_tokens=4, logit_bias=((7, 1000.0),), **plain)).result()
    assert forced.output_ids == [7] * 4
    scored = engine.submit(
        [*prompt, *forced.output_ids], SamplingParams(max_new_tokens=0), prompt_logprobs=True
    ).result()
    assert forced.logprobs == pytest.approx(scored.prompt_logprobs[len(prompt) :], abs=1e-4)


def test_edits_of_one_request_leave_the_others_in_the_batch_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SamplingParams(max_new_tokens=12, seed=5, stop_token_ids=())
    alone = engine.submit([1, 2, 3], params).result().output_ids
    engine.pause()
    beside = engine.submit([1, 2, 3], params)
    others = [
        engine.submit([4, 5], SamplingParams(max_new_tokens=12, frequency_penalty=2.0, stop_token_ids=())),
        engine.submit([6], SamplingParams(max_new_tokens=12, logit_bias=((9, 50.0),), stop_token_ids=(), seed=1)),
    ]
    engine.resume()
    assert beside.result().output_ids == alone and others[1].result().output_ids == [9] * 12
    assert len(others[0].result().output_ids) == 12
    again = engine.submit([1, 2, 3], params).result().output_ids  # a slot forgets the edits of its last request
    assert again == alone


def test_top_log_probs_come_with_every_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0.0, max_new_tokens=5, top_logprobs=3, stop_token_ids=())
    generation = engine.submit([1, 2], params)
    done = generation.result()
    tops = generation.sequence.top_logprobs
    assert [top[0][0] for top in tops] == done.output_ids and all(len(top) == 3 for top in tops)
    assert [top[0][1] for top in tops] == pytest.approx(done.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": math.nan},
        {"logit_bias": ((VOCABULARY, 1.0),)},
        {"logit_bias": ((0, math.inf),)},
        {"top_logprobs": 21},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        check_sampling(SamplingParams(**wrong), VOCABULARY)


def test_a_grammar_needs_an_engine_with_a_tokenizer(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        make_engine().submit([1], SamplingParams(grammar='start: "a"'))
