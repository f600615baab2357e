"""Where text comes from: named sources → documents.

A source is ``stdlib`` (the Python sources, docstrings included, of the running interpreter's standard library, without
its tests), a folder, a ``.jsonl`` or ``.parquet`` file with a text field, any other file of UTF-8 text, or
``git:PATH[@REVISION]``: the files of a local git repository at a revision (``HEAD``), read from its object store.

Invariants: the order is that of the sorted paths; a document's ``path`` does not depend on where the source lies on
this machine, so the split into training and held-out files is the same everywhere; text is passed on unchanged; empty
texts are left out. In a folder or repository, files that are not text (NUL bytes; in a repository also what is not
UTF-8) are left out. No torch here.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glm5.data.git import GitRepository
from glm5.errors import DataError

STDLIB = "stdlib"
GIT_PREFIX = "git:"
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_SNIFFED_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Document:
    """One text."""

    text: str
    path: str
    """Name of the file, relative to its source; ``file.jsonl:7`` for a record of a file."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """The fields of the record that were asked for."""


def read_documents(
    specs: Sequence[str], text_field: str = "text", fields: Sequence[str] = ()
) -> Iterator[Document]:
    """The documents of all ``specs``, one source after the other.

    ``text_field`` of a record is the text, ``fields`` become its metadata; files without records have none. Raises
    DataError, naming the file, when a source is missing, unreadable, malformed, lacks a field, or when there is no text
    at all.
    """
    found = False
    for spec in specs:
        for document in _read_source(spec, text_field, fields):
            if document.text:
                found = True
                yield document
    if not found:
        raise DataError(f"data {list(specs)}: no text found; name a source that has some, for example {STDLIB!r}")


def held_out_paths(paths: Iterable[str], held_out_fraction: float, seed: int) -> frozenset[str]:
    """Those of ``paths`` that are kept out of training, decided by a hash of each, so that no file is on both sides.

    The share held out is near ``held_out_fraction``; when it is above 0 at least one path is on each side. Raises
    DataError when that is impossible.
    """
    if held_out_fraction <= 0:
        return frozenset()
    places = {path: path_place(path, seed) for path in paths}
    if len(places) < 2 or held_out_fraction >= 1:
        raise DataError(
            f"held_out_fraction={held_out_fraction} of {len(places)} files leaves one side empty; "
            "name more files or another fraction"
        )
    ordered = sorted(places, key=lambda path: places[path])
    return frozenset(path for path in ordered[:-1] if places[path] < held_out_fraction) or frozenset(ordered[:1])


def path_place(path: str, seed: int) -> float:
    """A number in [0, 1) that only ``path`` and ``seed`` decide."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "big") / 2**64


def corpus_fingerprint(specs: Sequence[str]) -> str:
    """A hash that changes when a file of ``specs`` is added, removed or written; reads no contents."""
    digest = hashlib.sha256()
    for spec in specs:
        if spec.startswith(GIT_PREFIX):
            digest.update(f"{spec}\0{GitRepository.from_spec(spec).revision}\n".encode())
            continue
        for file, name in _files(spec):
            status = file.stat()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read_source(spec: str, text_field: str, fields: Sequence[str]) -> Iterator[Document]:
    if spec.startswith(GIT_PREFIX):
        repository = GitRepository.from_spec(spec)
        for path, text in repository.files():
            yield Document(text, f"{repository.name}/{path}")
        return
    for file, name in _files(spec):
        if file.suffix == ".jsonl":
            yield from _read_records(file, name, text_field, fields)
        elif file.suffix == ".parquet":
            yield from _read_parquet(file, name, text_field, fields)
        else:
            yield Document(_read_text(file, is_python=spec == STDLIB), name)


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


def _read_records(file: Path, name: str, text_field: str, fields: Sequence[str]) -> Iterator[Document]:
    for number, record in read_jsonl(file):
        text = record.get(text_field)
        if not isinstance(text, str):
            raise DataError(f"{file}:{number}: no string field {text_field!r}; found {sorted(record)[:8]}")
        missing = [key for key in fields if key not in record]
        if missing:
            raise DataError(f"{file}:{number}: no field {missing[0]!r}; found {sorted(record)[:8]}")
        yield Document(text, f"{name}:{number}", {key: record[key] for key in fields})


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


def _read_parquet(file: Path, name: str, text_field: str, fields: Sequence[str]) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            missing = [column for column in (text_field, *fields) if column not in columns]
            if missing:
                raise DataError(f"{file}: no column {missing[0]!r}; found {columns[:8]}")
            number = 0
            for batch in table.iter_batches(columns=[text_field, *fields]):
                for record in batch.to_pylist():
                    number += 1
                    text = record[text_field]
                    if not isinstance(text, str):
                        raise DataError(
                            f"{file}: row {number}: {text_field!r} is {type(text).__name__}; expected a string"
                        )
                    yield Document(text, f"{name}:{number}", {key: record[key] for key in fields})
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{file}: not a readable .parquet file ({reason}); write it again") from None
