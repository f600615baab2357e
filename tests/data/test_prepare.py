"""From sources to shards: every document counted once, copies, held-out files, the cache, resume over shards."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm5.data.config import BucketConfig, CorpusConfig, DedupConfig, FilterConfig, InfillingConfig, RepositoryConfig
from glm5.data.mixture import Mixture
from glm5.data.packing import Row, TokenDataset, batches
from glm5.data.prepare import corpus_from_settings, prepare, write_kept
from glm5.data.selection import Preparation, bucket_copies
from glm5.data.sources import read_documents
from glm5.errors import ConfigError, DataError
from glm5.tokenizer import Tokenizer

LENGTH = 32


def records(path: Path, values: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def numbered(path: Path, count: int, **more: Any) -> str:
    return records(path, [{"text": f"text number {n} " + f"word{n} " * (n % 7), **more} for n in range(count)])


def plan(*corpora: CorpusConfig, **more: Any) -> Preparation:
    return Preparation(corpora=corpora, length=LENGTH, **more)


def texts(dataset: Any, tokenizer: Tokenizer) -> Counter[str]:
    """Documents of one epoch of a dataset in ``whole`` packing."""
    found: Counter[str] = Counter()
    for number in range(dataset.num_rows(4096)):
        row = dataset.row(number, 4096, 0)
        text = tokenizer.decode(row.ids[row.documents >= 0].tolist())
        found.update(text.split("<|endoftext|>")[:-1])
    return found


def same(first: Row, second: Row) -> bool:
    return np.array_equal(first.ids, second.ids) and np.array_equal(first.documents, second.documents)


def test_one_corpus_as_it_is_gives_the_rows_of_the_plain_dataset(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = numbered(tmp_path / "a.jsonl", 40)
    ((dataset, weight),) = prepare(plan(CorpusConfig(sources=(source,))), tokenizer, tmp_path / "c").datasets("train")
    plain = TokenDataset.from_documents(read_documents([source]), tokenizer)
    assert weight == 1 and dataset.num_rows(LENGTH) == plain.num_rows(LENGTH)
    assert all(same(dataset.row(n, LENGTH, 5), plain.row(n, LENGTH, 5)) for n in range(3 * plain.num_rows(LENGTH)))


def test_every_document_is_kept_or_dropped_for_one_reason(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = " ".join(f"word{n}" for n in range(80))
    source = records(tmp_path / "a.jsonl", [
        {"body": "short", "lang": "en"}, {"body": "a fine text of words", "lang": "en"},
        {"body": "A fine text of  words", "lang": "en"}, {"body": long, "lang": "en"},
        {"body": long + " x", "lang": "en"},
        {"body": "ein anderer feiner Text", "lang": "de"}, {"body": "this one is good", "lang": "en"}])
    corpus = CorpusConfig(name="web", sources=(source,), text_field="body", packing="whole",
                          filters=FilterConfig(min_chars=10, metadata={"lang": ("en",)}))
    books = records(tmp_path / "b.jsonl", [{"text": long}, {"text": "new words"}])
    other = CorpusConfig(name="books", sources=(books,))
    prepared = prepare(plan(corpus, other, dedup=DedupConfig(exact=True, near=True)), tokenizer, tmp_path / "c")
    assert {row["name"]: row["value"] for row in prepared.rows()} == {
        "data.web.read": 7, "data.web.kept": 3, "data.web.copies": 3, "data.web.dropped.too_short": 1,
        "data.web.dropped.exact_duplicate": 1, "data.web.dropped.near_duplicate": 1,
        "data.web.dropped.metadata_lang": 1,
        "data.books.read": 2, "data.books.kept": 1, "data.books.copies": 1, "data.books.dropped.exact_duplicate": 1}
    dropped = [json.loads(line) for line in (prepared.directory / "dropped.jsonl").read_text().splitlines()]
    assert [(item["path"], item["reason"]) for item in dropped] == [
        ("a.jsonl:1", "too_short"), ("a.jsonl:3", "exact_duplicate"), ("a.jsonl:5", "near_duplicate"),
        ("a.jsonl:6", "metadata_lang"), ("b.jsonl:1", "exact_duplicate")]
    (web, _), _ = prepared.datasets("train")
    assert texts(web, tokenizer) == Counter(["a fine text of words", long, "this one is good"])


def test_buckets_and_long_documents_set_the_copies(tokenizer: Tokenizer, tmp_path: Path) -> None:
    values = [{"text": f"number {n} " + "x" * (50 * (n == 9)), "score": n} for n in range(10)]
    source = records(tmp_path / "a.jsonl", values)
    corpus = CorpusConfig(sources=(source,), packing="whole", long_chars=40, long_copies=2.0,
                          buckets=BucketConfig(score="score", copies=(0.0, 1.0, 1.0, 1.0, 3.0)))
    prepared = prepare(plan(corpus), tokenizer, tmp_path / "c")
    ((dataset, _),) = prepared.datasets("train")
    found = texts(dataset, tokenizer)
    assert [found[f"number {n} "] for n in range(9)] == [0, 0, 1, 1, 1, 1, 1, 1, 3]
    assert found["number 9 " + "x" * 50] == 6
    assert prepared.facts["text"]["dropped"] == {"lowest_bucket": 2}


def test_buckets_are_equal_parts_by_rank() -> None:
    assert bucket_copies([5, 1, 3, 3], BucketConfig(copies=(0.5, 2.0))) == [2.0, 0.5, 0.5, 2.0]
    assert bucket_copies([1, 2, 3], BucketConfig(copies=(0.0, 1.0))) == [0.0, 0.0, 1.0]
    assert bucket_copies([1.0, 2.0], BucketConfig()) == [1.0, 1.0]
    assert bucket_copies([], BucketConfig(copies=(1.0,))) == []


def test_a_fraction_of_a_copy_goes_to_that_share_of_the_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = CorpusConfig(sources=(numbered(tmp_path / "a.jsonl", 400, s=1),),
                          buckets=BucketConfig(score="s", copies=(1.4,)))
    assert 520 < prepare(plan(corpus), tokenizer, tmp_path / "c").facts["text"]["copies"] < 600


def test_the_perplexity_filter_and_buckets_go_by_the_scorer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = numbered(tmp_path / "a.jsonl", 100)
    loaded: list[str] = []

    def load(checkpoint: str) -> Any:
        loaded.append(checkpoint)
        return lambda batch: [float(text.split()[2]) for text in batch]

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    filters = FilterConfig(perplexity_model=str(tmp_path / "model"), perplexity_quantiles=(0.1, 0.8))
    corpus = CorpusConfig(sources=(source,), filters=filters, packing="whole",
                          buckets=BucketConfig(score="perplexity", copies=(1.0, 2.0)))
    prepared = prepare(plan(corpus), tokenizer, tmp_path / "c", load)
    ((dataset, _),) = prepared.datasets("train")
    copies = {int(text.split()[2]): count for text, count in texts(dataset, tokenizer).items()}
    assert copies == {n: 2 if n < 45 else 1 for n in range(10, 80)}
    assert (loaded, prepared.facts["text"]["dropped"]) == ([str(tmp_path / "model")], {"perplexity": 30})
    with pytest.raises(DataError, match="no model is loaded"):
        prepare(plan(corpus), tokenizer, tmp_path / "d")


def test_held_out_files_are_decided_by_path_and_stay_as_they_are(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = numbered(tmp_path / "a.jsonl", 200, s=1)
    plain = CorpusConfig(sources=(source,))
    changed = replace(plain, infilling=InfillingConfig(rate=1.0), packing="whole", filters=FilterConfig(min_chars=30),
                      buckets=BucketConfig(score="s", copies=(2.0,)))
    held_out = []
    for name, corpus in (("c", plain), ("d", changed)):
        prepared = prepare(plan(corpus, held_out_fraction=0.2, split_seed=3), tokenizer, tmp_path / name)
        sides = [texts(dict(zip("ab", prepared.datasets(part)[0], strict=True))["a"], tokenizer)
                 for part in ("train", "held_out")]
        held_out.append(sides[1])
        assert not sides[0].keys() & sides[1].keys()
    assert 20 < held_out[0].total() < 60
    kept = Counter({text: count for text, count in held_out[0].items() if len(text) >= 30})
    assert held_out[1] == kept
    assert "<|code_middle|>" in "".join(sides[0])


def test_shards_hold_everything_and_rows_need_only_the_shards_up_to_theirs(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpus = CorpusConfig(sources=(numbered(tmp_path / "a.jsonl", 120),), packing="whole")
    one = prepare(plan(corpus), tokenizer, tmp_path / "c").datasets("train")[0][0]
    prepared = prepare(plan(corpus, shard_chars=900), tokenizer, tmp_path / "c")
    many = prepared.datasets("train")[0][0]
    assert len(many.shards) > 3
    many.row(0, LENGTH, 0)
    assert len(prepared.pending("train")) == len(many.shards) - 1
    assert prepared.pending("train")[0].stem.name == "train-00001"
    assert texts(many, tokenizer) == texts(one, tokenizer)
    assert not prepared.pending("train") and not list(prepared.directory.rglob("*.jsonl"))[1:]
    rows = many.num_rows(LENGTH)
    epochs = [sorted(many.row(epoch * rows + n, LENGTH, 0).ids.tobytes() for n in range(rows)) for epoch in (0, 1)]
    assert epochs[0] == epochs[1]
    assert [many.row(n, LENGTH, 0).ids.tobytes() for n in range(rows)] != [
        many.row(rows + n, LENGTH, 0).ids.tobytes() for n in range(rows)]


def test_a_mixture_stopped_anywhere_goes_on_with_the_same_rows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    web = CorpusConfig(name="web", sources=(numbered(tmp_path / "a.jsonl", 90),), weight=3.0)
    code = CorpusConfig(name="code", sources=(numbered(tmp_path / "b.jsonl", 60),), packing="whole",
                        infilling=InfillingConfig(rate=0.5))

    def source() -> Mixture:
        return Mixture(prepare(plan(web, code, shard_chars=700), tokenizer, tmp_path / "c").datasets("train"))

    straight = list(islice(batches(source(), 3, LENGTH, 1), 60))
    for step in (0, 1, 17, 41, 59):
        resumed = next(batches(source(), 3, LENGTH, 1, step))
        assert resumed.ids_BT.equal(straight[step].ids_BT) and resumed.documents_BT.equal(straight[step].documents_BT)


def test_similar_documents_share_a_sequence(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [{"text": "".join(f"{topic} {topic}-{line} is {(line + n) % 3}\n" for line in range(12))}
             for n in range(3) for topic in ("alpha", "zebra")]
    corpus = CorpusConfig(sources=(records(tmp_path / "a.jsonl", lines),), packing="similar", similarity=0.5)
    preparation = Preparation(corpora=(corpus,), length=900)
    ((dataset, _),) = prepare(preparation, tokenizer, tmp_path / "c").datasets("train")
    found = texts(dataset, tokenizer)
    assert found.total() == 2
    assert {("alpha" in text, "zebra" in text) for text in found} == {(True, False), (False, True)}
    assert sum(text.count("\n") for text in found) == 72


def test_repository_sequences_fit_into_a_row(tokenizer: Tokenizer, repository: Path, tmp_path: Path) -> None:
    corpus = CorpusConfig(sources=(f"git:{repository}",), packing="whole",
                          repository=RepositoryConfig(enabled=True, commits=5))
    preparation = Preparation(corpora=(corpus,), length=400)
    prepared = prepare(preparation, tokenizer, tmp_path / "c")
    ((dataset, _),) = prepared.datasets("train")
    dataset.shard(0)
    table = np.load(dataset.shards[0].stem.with_name("train-00000.documents.npy"))
    assert np.diff(table[:, 0], prepend=0).max() <= 400
    assert prepared.facts["text"]["dropped"] == {"change_too_long": 1}  # the first commit adds everything
    assert any("### Commit " in text and "### File: " in text for text in texts(dataset, tokenizer))


def test_the_cache_is_used_and_renewed_after_a_change(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, cache = tmp_path / "a.jsonl", tmp_path / "c"
    corpus = CorpusConfig(sources=(numbered(source, 10),))
    first = prepare(plan(corpus), tokenizer, cache)
    assert prepare(plan(replace(corpus, weight=2.0)), tokenizer, cache).directory == first.directory
    assert prepare(replace(plan(corpus), length=64), tokenizer, cache).directory == first.directory
    filtered = replace(corpus, filters=FilterConfig(min_chars=1))
    assert prepare(plan(filtered), tokenizer, cache).directory != first.directory
    numbered(source, 11)
    assert prepare(plan(corpus), tokenizer, cache).directory != first.directory


def test_leftovers_of_a_killed_process_do_no_harm(tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = CorpusConfig(sources=(numbered(tmp_path / "a.jsonl", 10),))
    directory = prepare(plan(corpus), tokenizer, tmp_path / "c").directory
    before = prepare(plan(corpus), tokenizer, tmp_path / "c").datasets("train")[0][0].row(0, LENGTH, 0)
    shutil.rmtree(directory)
    leftover = directory.with_name(f".{directory.name}.999999.tmp")
    leftover.mkdir()
    (leftover / "spool.jsonl").write_text("half")
    dataset = prepare(plan(corpus), tokenizer, tmp_path / "c").datasets("train")[0][0]
    (directory / "text" / ".train-00000.tokens.npy.999999.tmp").write_text("half")
    assert same(dataset.row(0, LENGTH, 0), before)
    assert not list((tmp_path / "c").rglob("*.tmp"))


def test_what_cannot_be_prepared_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = CorpusConfig(sources=(numbered(tmp_path / "a.jsonl", 10),), filters=FilterConfig(min_chars=500))
    with pytest.raises(DataError, match=r"nothing is left to train on: 10 documents read, dropped: {'too_short': 10}"):
        prepare(plan(corpus), tokenizer, tmp_path / "c")
    assert not [path for path in (tmp_path / "c").iterdir() if path.suffix != ".lock"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="file: cannot write the token cache"):
        prepare(plan(corpus), tokenizer, tmp_path / "file")
    scored = replace(corpus, filters=FilterConfig(), buckets=BucketConfig(score="s", copies=(1.0,)))
    records(tmp_path / "a.jsonl", [{"text": "x", "s": "high"}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: field 's' is 'high'; quality buckets need a number"):
        prepare(plan(scored), tokenizer, tmp_path / "c")
    with pytest.raises(ConfigError, match=r"buckets\.score='quality' needs filters\.quality_model"):
        CorpusConfig(sources=("stdlib",), buckets=BucketConfig(copies=(1.0,)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir(mode=0o500)
    with pytest.raises(DataError, match="cannot write the token cache"):
        prepare(plan(CorpusConfig(sources=(numbered(tmp_path / "a.jsonl", 10),))), tokenizer, tmp_path / "c")


def test_kept_documents_are_written_with_their_names(tmp_path: Path) -> None:
    source = records(tmp_path / "a.jsonl", [{"text": "first text"}, {"text": "x"}, {"text": "First  text"}])
    preparation = corpus_from_settings([source], ["filters.min_chars=3"], {"exact": True})
    rows = write_kept(preparation, tmp_path / "out.jsonl")
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        {"text": "first text", "path": "a.jsonl:1"}]
    assert {row["name"]: row["value"] for row in rows}["data.text.dropped.exact_duplicate"] == 1
    with pytest.raises(ConfigError, match=r"--set: filters\.min_char: unknown key; did you mean 'min_chars'"):
        corpus_from_settings([source], ["filters.min_char=3"])
