"""From sources to shards of text: what is kept, how often it is seen, what is held out; each document decided once.

``glm5.data.selection`` decides about every document and spools the texts; here they are split into training and
held-out parts and written as shards of text, which ``glm5.data.shards`` tokenises.

Invariants: the result is a function of the configuration, the sources and the tokenizer, and lies under a name that is
a hash of them; a directory with that name is complete; held-out files are decided by their path alone, so they are the
same whatever the filters are, and they are neither repeated nor rearranged; every document that is dropped is counted
under one reason, and listed in ``dropped.jsonl``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

from glm5.config import apply_overrides, build_config
from glm5.data.config import CorpusConfig, DedupConfig
from glm5.data.filters import LoadScorer
from glm5.data.selection import Candidate, Preparation, describe, select
from glm5.data.shards import Shard, ShardedDataset, ShardRecipe, locked, read_texts, write_text
from glm5.data.sources import corpus_fingerprint, held_out_paths, path_place
from glm5.errors import DataError
from glm5.runlog import temporary_path
from glm5.tokenizer import Tokenizer

Part = Literal["train", "held_out"]
_FORMAT = 1
_BUFFERED_CHARS = 1 << 20
_SHARD_SALT = 1


class PreparedData:
    """The shards of a stage on disk."""

    def __init__(self, directory: Path, preparation: Preparation, tokenizer: Tokenizer) -> None:
        self.directory = directory
        self._preparation, self._tokenizer = preparation, tokenizer
        self.facts: dict[str, Any] = json.loads((directory / "facts.json").read_text(encoding="utf-8"))
        """Counts of each corpus by name; see ``rows``."""

    def datasets(self, part: Part) -> list[tuple[ShardedDataset, float]]:
        """Rows and weight of every corpus that has documents in ``part``."""
        found = []
        for corpus in self._preparation.corpora:
            recipe = _recipe(corpus, self._preparation.length, part)
            shards = [Shard(self.directory / corpus.name / stem, self._tokenizer, recipe)
                      for stem in self.facts[corpus.name]["shards"] if stem.startswith(f"{part}-")]
            if shards:
                found.append((ShardedDataset(shards), corpus.weight))
        return found

    def pending(self, part: Part) -> list[Shard]:
        """Shards that are not tokenised yet, in the order in which their rows are needed: the first of each corpus,
        then the second of each."""
        by_corpus = [dataset.shards for dataset, _ in self.datasets(part)]
        ordered = chain.from_iterable(zip_longest(*by_corpus))
        return [shard for shard in ordered if shard is not None and not shard.is_tokenised]

    def rows(self) -> list[dict[str, Any]]:
        """Result rows: documents read, kept and dropped by reason, of every corpus."""
        return [row for corpus in self._preparation.corpora for row in count_rows(corpus.name, self.facts[corpus.name])]


def prepare(
    preparation: Preparation, tokenizer: Tokenizer, cache_dir: Path, load_scorer: LoadScorer | None = None
) -> PreparedData:
    """The shards of a stage, from ``cache_dir`` when they are there already.

    ``load_scorer`` gives the scorer of a checkpoint directory, for corpora with ``filters.perplexity_model``. Raises
    DataError for sources that cannot be read and for a corpus of which nothing is left.
    """
    directory = cache_dir / _key(preparation, tokenizer)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{cache_dir}: cannot write the token cache ({error.strerror}); free space there") from None
    if not directory.is_dir():
        with locked(directory.with_name(f"{directory.name}.lock")):
            if not directory.is_dir():
                _prepare_directory(directory, preparation, tokenizer, load_scorer)
    return PreparedData(directory, preparation, tokenizer)


def corpus_from_settings(
    sources: Sequence[str], settings: Sequence[str], dedup: Mapping[str, Any] | None = None
) -> Preparation:
    """The preparation of one corpus named ``text`` with dotted ``key=value`` settings of ``CorpusConfig``."""
    corpus = apply_overrides({"sources": list(sources)}, settings)
    return Preparation(corpora=(build_config(CorpusConfig, corpus, "--set"),), length=1 << 30,
                       dedup=build_config(DedupConfig, dict(dedup or {}), "dedup"))


def write_kept(preparation: Preparation, output: Path, load_scorer: LoadScorer | None = None) -> list[dict[str, Any]]:
    """Write the kept documents of a preparation to a ``.jsonl`` file: ``text``, ``path``, and ``quality`` and
    ``nats_per_byte`` where they were measured. Give the result rows."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        spool = Path(folder) / "spool.jsonl"
        candidates = select(preparation, spool, len, load_scorer)
        unfinished = Path(folder) / output.name
        with unfinished.open("w", encoding="utf-8") as stream:
            spooled = (item for item in candidates if item.spooled)
            for item, (text, _, _) in zip(spooled, read_texts(spool), strict=True):
                if item.reason is None:
                    measured = {"quality": item.score, "nats_per_byte": item.nats_per_byte}
                    known = {key: value for key, value in measured.items() if value is not None}
                    stream.write(json.dumps({"text": text, "path": item.path, **known}) + "\n")
        os.replace(unfinished, output)
    return [row for number, corpus in enumerate(preparation.corpora)
            for row in count_rows(corpus.name, describe(item for item in candidates if item.corpus == number))]


def count_rows(name: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Result rows of the corpus ``name``: documents read, kept and dropped by reason."""
    counts = {"read": facts["read"], "kept": facts["kept"], "copies": facts["copies"]}
    counts |= {f"dropped.{reason}": count for reason, count in facts["dropped"].items()}
    return [{"name": f"data.{name}.{key}", "value": value, "unit": "documents"} for key, value in counts.items()]


def _prepare_directory(
    directory: Path, preparation: Preparation, tokenizer: Tokenizer, load_scorer: LoadScorer | None
) -> None:
    """Write the shards of text under a temporary name and rename them whole."""
    for leftover in directory.parent.glob(f".{directory.name}.*.tmp"):  # of a process that was killed
        shutil.rmtree(leftover)
    temporary = temporary_path(directory)
    try:
        temporary.mkdir()
        spool = temporary / "spool.jsonl"
        candidates = select(preparation, spool, lambda text: len(tokenizer.encode(text)), load_scorer)
        facts = _write_shards(temporary, spool, candidates, preparation)
        spool.unlink()
        with (temporary / "dropped.jsonl").open("w", encoding="utf-8") as stream:
            for item in candidates:
                if item.reason:
                    name = preparation.corpora[item.corpus].name
                    stream.write(json.dumps({"corpus": name, "path": item.path, "reason": item.reason}) + "\n")
        (temporary / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        os.rename(temporary, directory)
    except OSError as error:
        raise DataError(f"{directory}: cannot write the token cache ({error.strerror}); free space there") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(
    directory: Path, spool: Path, candidates: Sequence[Candidate], preparation: Preparation
) -> dict[str, Any]:
    """Distribute the spooled documents over the shards; give the facts of each corpus."""
    held_out = held_out_paths((item.path for item in candidates), preparation.held_out_fraction, preparation.split_seed)
    chars: Counter[tuple[int, Part]] = Counter()
    for item in candidates:
        item.copies = min(item.copies, 1) if item.path in held_out else item.copies
        if item.reason is None:
            chars[item.corpus, _part(item, held_out)] += item.copies * item.chars
    writer = _ShardWriter()
    for copy in range(max((item.copies for item in candidates if item.reason is None), default=0)):
        spooled = (item for item in candidates if item.spooled)
        for item, (text, path, _) in zip(spooled, read_texts(spool), strict=True):
            if item.reason is None and copy < item.copies:
                part = _part(item, held_out)
                count = -(-chars[item.corpus, part] // preparation.shard_chars)
                index = int(path_place(f"{path}\0{copy}", _SHARD_SALT) * count)
                writer.add(directory / preparation.corpora[item.corpus].name / f"{part}-{index:05d}.jsonl",
                           text, path, copy)
    writer.flush()
    facts = {}
    for number, corpus in enumerate(preparation.corpora):
        counts = describe(item for item in candidates if item.corpus == number)
        if not chars[number, "train"]:
            raise DataError(f"corpus {corpus.name!r}: nothing is left to train on: {counts['read']} documents read, "
                            f"dropped: {counts['dropped'] or 'none'}; loosen the filters or name more sources")
        files = sorted((directory / corpus.name).glob("*.jsonl"))
        facts[corpus.name] = {**counts, "shards": [file.stem for file in files]}
    return facts


class _ShardWriter:
    """Appends to many files with few of them open."""

    def __init__(self) -> None:
        self._buffers: dict[Path, io.StringIO] = {}

    def add(self, file: Path, text: str, path: str, copy: int) -> None:
        buffer = self._buffers.setdefault(file, io.StringIO())
        write_text(buffer, text, path, copy)
        if buffer.tell() > _BUFFERED_CHARS:
            self._write(file)

    def flush(self) -> None:
        for file in list(self._buffers):
            self._write(file)

    def _write(self, file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        with file.open("a", encoding="utf-8", errors="surrogatepass") as stream:
            stream.write(self._buffers.pop(file).getvalue())


def _part(item: Candidate, held_out: frozenset[str]) -> Part:
    return "held_out" if item.path in held_out else "train"


def _recipe(corpus: CorpusConfig, length: int, part: Part) -> ShardRecipe:
    """Held-out documents stay as they are."""
    if part == "held_out":
        return ShardRecipe()
    similar = corpus.packing == "similar"
    return ShardRecipe(packing="stream" if corpus.packing == "stream" else "whole", infilling=corpus.infilling,
                       similarity=corpus.similarity if similar else None, sequence_length=length if similar else 0)


def _key(preparation: Preparation, tokenizer: Tokenizer) -> str:
    """Name of the directory: what its contents depend on."""
    bounded = any(corpus.repository.enabled or corpus.packing == "similar" for corpus in preparation.corpora)
    same_weights = tuple(dataclasses.replace(corpus, weight=1.0) for corpus in preparation.corpora)
    settings = dataclasses.replace(preparation, corpora=same_weights, length=preparation.length if bounded else 0)
    digest = hashlib.sha256(f"{_FORMAT}\n{tokenizer.to_json()}\n".encode())
    digest.update(json.dumps(dataclasses.asdict(settings), sort_keys=True).encode())
    for corpus in preparation.corpora:
        digest.update(corpus_fingerprint(corpus.sources).encode())
        filters = corpus.filters
        for name in (filters.language_model, filters.quality_model, filters.perplexity_model, corpus.repository.issues):
            digest.update(corpus_fingerprint([name]).encode() if name else b"-")
    return digest.hexdigest()[:24]
