"""The n-gram classifier: it learns, keeps its answers through a file, and judges a long text by all of it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from glm5.data.classifier import BUCKETS, NgramClassifier, hashed_ngrams, train_from_sources
from glm5.data.sources import read_documents
from glm5.errors import DataError


def junk(seed: int) -> str:
    return "".join(random.Random(seed).choices("buy now! $$ click win 00 ", k=600))


@pytest.fixture(scope="module")
def library() -> list[str]:
    return [document.text for document in read_documents(["stdlib"])][:24]


@pytest.fixture(scope="module")
def classifier(library: list[str]) -> NgramClassifier:
    return NgramClassifier.train({"good": [text[:4000] for text in library[:12]], "bad": map(junk, range(30))})


def test_it_tells_library_code_from_junk_that_it_has_not_seen(
    classifier: NgramClassifier, library: list[str], tmp_path: Path
) -> None:
    unseen = {"good": library[12:], "bad": [junk(seed) for seed in range(100, 112)]}
    measured = classifier.accuracy(unseen)
    assert (measured.texts, measured.correct) == (24, 24)
    classifier.save(tmp_path / "quality.safetensors")
    loaded = NgramClassifier.load(tmp_path / "quality.safetensors")
    assert loaded.labels == ("good", "bad")
    for text in (library[12], junk(5), ""):
        assert np.abs(loaded.probabilities(text) - classifier.probabilities(text)).max() < 2e-3
        assert loaded.probabilities(text).sum() == pytest.approx(1, abs=1e-5)


def test_a_long_text_is_judged_by_all_of_its_chunks(classifier: NgramClassifier, library: list[str]) -> None:
    half = (library[0] * 20)[: 2048 * 8]
    mixed = half + (junk(1) * 40)[: 2048 * 8]
    assert 0.3 < classifier.probabilities(mixed)[0] < 0.7
    assert classifier.probabilities(half)[0] > 0.9


def test_hashes_depend_on_the_bytes_of_each_run_alone() -> None:
    assert len(hashed_ngrams(b"abcab", (2, 3))) == 4 + 3
    two = hashed_ngrams(b"abcab", (2,))
    assert two[0] == two[3] and len(set(two.tolist())) == 3
    assert two[0] == hashed_ngrams(b"xab", (2,))[1]
    assert len(hashed_ngrams(b"", (1, 2))) == 0 and len(hashed_ngrams(b"a", (1, 2))) == 1
    assert int((hashed_ngrams(bytes(range(256)), (1, 2)) % np.uint64(BUCKETS)).max()) < BUCKETS


def test_training_is_deterministic_and_needs_two_labels_with_text(library: list[str]) -> None:
    examples = {"a": library[:2], "b": [junk(0), junk(1)]}
    first, second = (NgramClassifier.train(examples).probabilities(library[3]) for _ in range(2))
    assert np.array_equal(first, second)
    with pytest.raises(DataError, match="two or more"):
        NgramClassifier.train({"a": library[:1]})
    with pytest.raises(DataError, match="no text for 'b'"):
        NgramClassifier.train({"a": library[:1], "b": [""]})


def test_files_of_other_kinds_and_unknown_labels_are_named(classifier: NgramClassifier, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: not a classifier file"):
        NgramClassifier.load(tmp_path / "none")
    (tmp_path / "text").write_text("weights")
    with pytest.raises(DataError, match=r"text: not a classifier file"):
        NgramClassifier.load(tmp_path / "text")
    with pytest.raises(DataError, match="no label 'en'; it knows good, bad"):
        classifier.require_labels(["en"])


def test_training_from_sources_reports_accuracy_on_texts_kept_out(tmp_path: Path) -> None:
    for label, word in (("good", "def f(x): return x\n"), ("bad", "win $$ now\n")):
        (tmp_path / label).mkdir()
        for number in range(6):
            (tmp_path / label / f"{number}.txt").write_text(word * (number + 5))
    rows = train_from_sources([f"good={tmp_path}/good", f"bad={tmp_path}/bad"], tmp_path / "q.safetensors")
    assert {row["name"]: row["value"] for row in rows}["filter.accuracy"] == 1
    assert sum(row["value"] for row in rows[:2]) + rows[2]["n"] == 12
    with pytest.raises(DataError, match="expected LABEL=SOURCE"):
        train_from_sources(["good"], tmp_path / "q.safetensors")
