"""Recall texts: answers can be copied from the facts, lengths hold, rows are reproducible."""

from __future__ import annotations

import re
from itertools import islice

import numpy as np
import pytest

from glm5.data.long_context import RecallSource, recall_document
from glm5.data.mixture import Mixture
from glm5.data.packing import Row, make_row
from glm5.tokenizer import Tokenizer


@pytest.mark.parametrize("length", [60, 200, 1000, 5000])
def test_texts_have_the_asked_length(length: int) -> None:
    sizes = [len(recall_document(np.random.default_rng(seed), length)) for seed in range(60)]
    assert max(sizes) <= length
    if length >= 200:
        assert min(sizes) >= length / 2


def test_every_answer_stands_in_the_facts() -> None:
    checked = 0
    for seed in range(200):
        text = recall_document(np.random.default_rng(seed), 900)
        for key, value in re.findall(r"^Which code has (\w+)\? (\w+)\.$", text, re.MULTILINE):
            assert text.index(f"The code of {key} is {value}.") < text.index(f"Which code has {key}?")
            checked += 1
        for line in re.findall(r"^copy (.*)$", text, re.MULTILINE):
            assert f"# {line}\n" in text
            checked += 1
        for topic, number, value in re.findall(r"^(\w+) number (\d+): (.*)$", text, re.MULTILINE):
            assert re.findall(rf"^note on {topic}: (.*)$", text, re.MULTILINE)[int(number) - 1] == value
            checked += 1
    assert checked > 200


def test_texts_vary_and_depend_on_the_generator_only() -> None:
    texts = [recall_document(np.random.default_rng(seed), 400) for seed in range(50)]
    assert len(set(texts)) == 50
    assert texts == [recall_document(np.random.default_rng(seed), 400) for seed in range(50)]


def test_texts_look_like_no_chat() -> None:
    for seed in range(200):
        text = recall_document(np.random.default_rng(seed), 600)
        assert not re.search(r"<\||tool|assistant|user|arg_|think", text)


def test_rows_are_full_reproducible_and_mix_with_others(tokenizer: Tokenizer) -> None:
    source = RecallSource(tokenizer)
    row = source.row(3, 256, 1)
    assert (row.documents >= 0).all()
    assert np.array_equal(row.ids, RecallSource(tokenizer).row(3, 256, 1).ids)
    assert not np.array_equal(row.ids, source.row(4, 256, 1).ids)
    mixed = Mixture([(source, 1.0)])
    (batch,) = islice(mixed.batches(2, 256, 1), 1)
    assert np.array_equal(batch.ids_BT[0].numpy(), source.row(0, 256, 1).ids)


@pytest.mark.parametrize("haystack", ["", "first line\nsecond line\n" * 400])
def test_needles_lie_at_all_depths_and_are_asked_for_once(haystack: str) -> None:
    depths = []
    for seed in range(100):
        text = recall_document(np.random.default_rng(seed), 3000, ("needles",), haystack)
        needles = dict(re.findall(r"^The special code of (\w+) is (\w+)\.$", text, re.MULTILINE))
        asked = dict(re.findall(r"^What is the special code of (\w+)\? (\w+)$", text, re.MULTILINE))
        assert needles == asked and needles
        assert 1500 < len(text) <= 3000
        assert text.index("What is") > max(text.index(f"of {key} is") for key in needles)
        assert not haystack or "second line" in text
        depths += [text.index(f"of {key} is") / len(text) for key in needles]
    assert np.histogram(depths, bins=4, range=(0, 1))[0].min() > len(depths) / 10


def test_a_turn_is_asked_for_again_by_its_ordinal_among_equal_requests() -> None:
    checked = 0
    for seed in range(60):
        text = recall_document(np.random.default_rng(seed), 2500, ("turns",))
        for mark, request, number, answer_mark, reply in re.findall(
            r"^Q: Begin with (\w+) and repeat (.*), number (\d+)\.\nA: (\w+) (.*)$", text, re.MULTILINE
        ):
            replies = re.findall(rf"^Q: Write {request}\.\nA: (.*)$", text, re.MULTILINE)
            assert (answer_mark, reply) == (mark, replies[int(number) - 1])
            checked += len(replies) > 1
    assert checked > 60


def test_the_haystack_of_a_row_is_the_text_of_the_other_source(tokenizer: Tokenizer) -> None:
    class Filler:
        def row(self, number: int, length: int, seed: int) -> Row:
            ids = (tokenizer.encode(f"filler {number}\n") * length)[:length]
            return make_row(np.array(ids), np.zeros(length, dtype=np.int64), length, tokenizer.pad_id)

    row = RecallSource(tokenizer, ("needles",), Filler()).row(7, 400, 0)
    assert "filler 7\n" in tokenizer.decode(row.ids.tolist())
    assert np.array_equal(row.ids, RecallSource(tokenizer, ("needles",), Filler()).row(7, 400, 0).ids)
