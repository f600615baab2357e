"""Documents of each kind of source, their errors, and the split by file."""

from __future__ import annotations

import ast
import os
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.data.sources import Document, corpus_fingerprint, held_out_paths, read_documents
from glm5.errors import DataError


def test_stdlib_gives_the_sources_of_this_interpreter_in_order() -> None:
    documents = list(read_documents(["stdlib"]))
    paths = [document.path for document in documents]
    by_path = {document.path: document.text for document in documents}
    assert by_path["stdlib/textwrap.py"] == (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_text("utf-8")
    assert ast.get_docstring(ast.parse(by_path["stdlib/textwrap.py"])) in by_path["stdlib/textwrap.py"]
    assert len(paths) == len(set(paths)) > 300
    assert sum(map(len, by_path.values())) > 5_000_000
    assert not [path for path in paths if "site-packages" in path or "/test/" in path or "__pycache__" in path]
    assert paths == [document.path for document in read_documents(["stdlib"])]


def test_a_folder_gives_its_text_files_and_skips_hidden_and_binary_ones(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b.txt").write_text("second\r\n", newline="")
    (root / "a.md").write_text("first")
    (root / "empty.txt").write_text("")
    (root / "sub" / "c.jsonl").write_text('{"text": "third"}\n\n{"text": "fourth", "more": 1}\n')
    (root / "image.bin").write_bytes(b"\x89PNG\0\0")
    (root / ".git" / "config").write_text("hidden")
    assert list(read_documents([str(root)])) == [
        Document("first", "corpus/a.md"),
        Document("second\r\n", "corpus/b.txt"),
        Document("third", "corpus/sub/c.jsonl:1"),
        Document("fourth", "corpus/sub/c.jsonl:3"),
    ]


def test_parquet_and_jsonl_give_one_document_a_record(tmp_path: Path) -> None:
    table, lines = tmp_path / "t.parquet", tmp_path / "l.jsonl"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["one", "zwei é"]}), table)
    lines.write_text('{"text": "three"}\n', encoding="utf-8")
    assert list(read_documents([str(table), str(lines)])) == [
        Document("one", "t.parquet:1"),
        Document("zwei é", "t.parquet:2"),
        Document("three", "l.jsonl:1"),
    ]


def failing(*specs: object) -> str:
    with pytest.raises(DataError) as caught:
        list(read_documents([str(spec) for spec in specs]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_sources_are_named_in_one_line(tmp_path: Path) -> None:
    assert "nowhere" in failing(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no text found" in failing(tmp_path / "empty")
    assert "no text found" in failing()
    for name, content, words in (
        ("a.jsonl", b'{"text": "x"}\n{"txt": 1}\n', "a.jsonl:2: no string field 'text'"),
        ("b.jsonl", b'{"text": \n', "b.jsonl:1: not JSON"),
        ("c.jsonl", b"[1]\n", "c.jsonl:1: got list"),
        ("d.jsonl", b'{"text": "\xff"}\n', "d.jsonl: not UTF-8"),
        ("e.txt", b"\xff\xfe", "e.txt: not UTF-8"),
        ("f.parquet", b"not parquet", "f.parquet: not a readable .parquet file"),
    ):
        (tmp_path / name).write_bytes(content)
        assert words in failing(tmp_path / name)
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "g.parquet")
    assert "g.parquet: no column 'text'; found ['body']" in failing(tmp_path / "g.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "h.parquet")
    assert "h.parquet: row 2" in failing(tmp_path / "h.parquet")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked.txt").write_text("x")
    (tmp_path / "locked.txt").chmod(0)
    assert "locked.txt: cannot be read" in failing(tmp_path)


def test_records_have_the_asked_text_and_metadata_fields(tmp_path: Path) -> None:
    lines, table = tmp_path / "l.jsonl", tmp_path / "t.parquet"
    lines.write_text('{"content": "one", "license": "mit", "stars": 3}\n', encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"content": ["two"], "license": ["bsd"], "stars": [4], "x": [0]}), table)
    assert list(read_documents([str(lines), str(table)], "content", ("license", "stars"))) == [
        Document("one", "l.jsonl:1", {"license": "mit", "stars": 3}),
        Document("two", "t.parquet:1", {"license": "bsd", "stars": 4}),
    ]
    with pytest.raises(DataError, match=r"l\.jsonl:1: no field 'stars2'"):
        list(read_documents([str(lines)], "content", ("stars2",)))
    with pytest.raises(DataError, match=r"t\.parquet: no column 'text'"):
        list(read_documents([str(table)]))


@given(st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=40), st.floats(0.01, 0.9), st.integers(0, 9))
def test_the_split_leaves_no_side_empty_and_is_stable(paths: set[str], fraction: float, seed: int) -> None:
    held_out = held_out_paths(paths, fraction, seed)
    assert held_out and held_out < paths
    assert held_out == held_out_paths(sorted(paths, reverse=True), fraction, seed)


def test_a_file_stays_on_its_side_when_others_are_added() -> None:
    paths = [f"file{number}" for number in range(400)]
    few, many = held_out_paths(paths[:200], 0.2, 1), held_out_paths(paths, 0.2, 1)
    assert few == many & set(paths[:200])
    assert 0.12 < len(many) / 400 < 0.28
    assert held_out_paths(paths, 0.2, 2) != many


def test_split_without_held_out_files_and_impossible_splits() -> None:
    assert held_out_paths(["one"], 0.0, 0) == frozenset()
    with pytest.raises(DataError, match="of 1 files leaves one side empty"):
        held_out_paths(["one"], 0.1, 0)


def test_fingerprint_changes_with_the_files_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = corpus_fingerprint([str(tmp_path)])
    assert corpus_fingerprint([str(tmp_path)]) == before
    (tmp_path / "a.txt").write_text("three")
    assert corpus_fingerprint([str(tmp_path)]) != before
