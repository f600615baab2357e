"""Where text comes from: named sources → documents.

A source is ``stdlib`` (the Python sources, docstrings included, of the running interpreter's standard library, without
its tests), a folder, a ``.jsonl`` or ``.parquet`` file with a ``text`` field, or any other file of UTF-8 text.

Invariants: the order is that of the sorted paths; a document's ``path`` does not depend on where the source lies on
this machine, so the split into training and held-out files is the same everywhere; text is passed on unchanged; empty
texts are left out. No torch here.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5.errors import DataError

STDLIB = "stdlib"
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_SNIFFED_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Document:
    """One text."""

    text: str
    path: str
    """Name of the file, relative to its source; ``file.jsonl:7`` for a record of a file."""


def read_documents(specs: Sequence[str]) -> Iterator[Document]:
    """The documents of all ``specs``, one source after the other.

    Raises DataError, naming the file, when a source is missing, unreadable, malformed, or when there is no text at all.
    """
    found = False
    for spec in specs:
        for file, name in _files(spec):
            for document in _read_file(file, name, is_python=spec == STDLIB):
                if document.text:
                    found = True
                    yield document
    if not found:
        raise DataError(f"data {list(specs)}: no text found; name a source that has some, for example {STDLIB!r}")


def split_by_file(
    documents: Iterable[Document], held_out_fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents, decided by a hash of each path, so that no file is on both sides.

    The share held out is near ``held_out_fraction``; when it is above 0 at least one path is on each side. Raises
    DataError when that is impossible.
    """
    documents = list(documents)
    if held_out_fraction <= 0:
        return documents, []
    places = {document.path: _place(document.path, seed) for document in documents}
    if len(places) < 2 or held_out_fraction >= 1:
        raise DataError(
            f"held_out_fraction={held_out_fraction} of {len(places)} files leaves one side empty; "
            "name more files or another fraction"
        )
    ordered = sorted(places, key=lambda path: places[path])
    held_out = {path for path in ordered[:-1] if places[path] < held_out_fraction} or {ordered[0]}
    return (
        [document for document in documents if document.path not in held_out],
        [document for document in documents if document.path in held_out],
    )


def corpus_fingerprint(specs: Sequence[str]) -> str:
    """A hash that changes when a file of ``specs`` is added, removed or written; reads no contents."""
    digest = hashlib.sha256()
    for spec in specs:
        for file, name in _files(spec):
            status = file.stat()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _place(path: str, seed: int) -> float:
    """A number in [0, 1) that only ``path`` and ``seed`` decide."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "big") / 2**64


def _files(spec: str) -> Iterator[tuple[Path, str]]:
    """(file, name) of each file of a source, in the order of the names."""
    if spec == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        for file in sorted(_python_files(root)):
            yield file, f"{STDLIB}/{file.relative_to(root).as_posix()}"
        return
    path = Path(spec)
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            relative = file.relative_to(path)
            hidden = any(part.startswith(".") for part in relative.parts)
            if file.is_file() and not hidden and not _is_binary(file):
                yield file, f"{path.resolve().name}/{relative.as_posix()}"
    elif path.is_file():
        yield path, path.name
    else:
        raise DataError(f"data source {spec!r}: no such file or folder; give {STDLIB!r} or an existing path")


def _python_files(root: Path) -> Iterator[Path]:
    """Python sources under ``root``; folders that are no part of the library are not entered."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _is_binary(file: Path) -> bool:
    """True for a file of a folder that is not text (NUL bytes), .parquet apart."""
    if file.suffix == ".parquet":
        return False
    try:
        with file.open("rb") as stream:
            return b"\0" in stream.read(_SNIFFED_BYTES)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); fix its permissions or leave it out") from None


def _read_file(file: Path, name: str, is_python: bool) -> Iterator[Document]:
    if file.suffix == ".jsonl":
        for number, record in read_jsonl(file):
            if not isinstance(record.get("text"), str):
                raise DataError(f"{file}:{number}: no string field 'text'; found {sorted(record)[:8]}")
            yield Document(record["text"], f"{name}:{number}")
    elif file.suffix == ".parquet":
        yield from _read_parquet(file, name)
    else:
        yield Document(_read_text(file, is_python), name)


def _read_text(file: Path, is_python: bool) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); fix its permissions or leave it out") from None
    try:
        # A Python source may declare another encoding in its first lines.
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if is_python else "utf-8"
        return data.decode(encoding)
    except (UnicodeDecodeError, SyntaxError) as error:
        raise DataError(f"{file}: not UTF-8 text ({error}); convert it or leave it out") from None


def read_jsonl(file: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number from 1, object) of each non-empty line. Raises DataError naming file and line."""
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{file}:{number}: not JSON ({error}); write one object a line") from None
                if not isinstance(record, dict):
                    raise DataError(f"{file}:{number}: got {type(record).__name__}; write one JSON object a line")
                yield number, record
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); give an existing .jsonl file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text ({error}); convert it") from None


def _read_parquet(file: Path, name: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if "text" not in columns:
                raise DataError(f"{file}: no column 'text'; found {columns[:8]}")
            number = 0
            for batch in table.iter_batches(columns=["text"]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    if not isinstance(text, str):
                        raise DataError(f"{file}: row {number}: 'text' is {type(text).__name__}; expected a string")
                    yield Document(text, f"{name}:{number}")
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{file}: not a readable .parquet file ({reason}); write it again") from None
