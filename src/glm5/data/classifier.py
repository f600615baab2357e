"""A text classifier that a user can retrain: hashed byte n-grams and multinomial logistic regression.

It serves as quality filter (labels ``good``, ``bad``) and as language filter (one label a language). A text is scored
in chunks whose probabilities are averaged, so that a long document is judged by all of it and not by its length.

Invariants: training is deterministic in the order of the examples; a file holds weights, labels and the format, and
nothing that is executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from glm5.data.sources import held_out_paths, read_documents
from glm5.errors import DataError

FORMAT = "glm5-ngrams-1"
BUCKETS = 1 << 16
"""Hashed features; n-grams that collide share a weight."""
SIZES = (1, 2, 3, 4, 5)
"""Bytes per n-gram."""
CHUNK_BYTES = 2048
MAX_CHUNKS = 16
"""Chunks of a longer text are taken at equal distances."""
_HELD_OUT = 0.1
_EPOCHS = 8
_RATE = 0.5
_PRIME, _MULTIPLIER = np.uint64(1_099_511_628_211), np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Share of correct answers on texts that were kept out of training."""

    correct: int
    texts: int


class NgramClassifier:
    """Probability of each label for a text."""

    def __init__(
        self, labels: Sequence[str], weights: np.ndarray, bias: np.ndarray, source: str = "classifier"
    ) -> None:
        """``weights`` [labels, buckets] and ``bias`` [labels], fp32; ``source`` names the origin in errors."""
        self.labels = tuple(labels)
        self._weights, self._bias, self._source = weights.astype(np.float32), bias.astype(np.float32), source

    @classmethod
    def train(cls, examples: Mapping[str, Iterable[str]], seed: int = 0) -> NgramClassifier:
        """Fit texts by label; every label counts the same however many texts it has. Raises DataError for less than
        two labels or a label without text."""
        labels = list(examples)
        chunks = [[chunk for text in examples[label] for chunk in _chunks(text)] for label in labels]
        empty = [label for label, texts in zip(labels, chunks, strict=True) if not texts]
        if len(labels) < 2 or empty:
            raise DataError(f"classifier labels {labels}: expected two or more with text; "
                            f"{'no text for ' + repr(empty[0]) if empty else 'name another label'}")
        features = [_features(chunk) for texts in chunks for chunk in texts]
        classes = np.repeat(np.arange(len(labels)), [len(texts) for texts in chunks])
        importance = (len(features) / len(labels)) / np.bincount(classes)[classes]
        weights = np.zeros((len(labels), BUCKETS), dtype=np.float32)
        bias = np.zeros(len(labels), dtype=np.float32)
        squares = np.full((len(labels), BUCKETS), 1e-4, dtype=np.float32)  # AdaGrad: rare n-grams take large steps
        rng = np.random.default_rng(seed)
        for _ in range(_EPOCHS):
            for index in rng.permutation(len(features)):
                buckets, values = features[index]
                error = _softmax(weights[:, buckets] @ values + bias)
                error[classes[index]] -= 1
                gradient = np.float32(importance[index]) * error[:, None] * values
                squares[:, buckets] += gradient**2
                weights[:, buckets] -= _RATE * gradient / np.sqrt(squares[:, buckets])
                bias -= np.float32(0.01 * importance[index]) * error
        return cls(labels, weights, bias)

    def probabilities(self, text: str) -> np.ndarray:
        """fp32 [labels], summing to 1; a text without characters gives what the bias alone says."""
        scores = [_softmax(self._weights[:, buckets] @ values + self._bias)
                  for buckets, values in map(_features, _chunks(text))]
        return np.mean(scores, axis=0) if scores else _softmax(self._bias)

    def label(self, text: str) -> str:
        """The most probable label; the first among equals."""
        return self.labels[int(self.probabilities(text).argmax())]

    def accuracy(self, examples: Mapping[str, Iterable[str]]) -> Accuracy:
        """How many texts get their own label."""
        answers = [self.label(text) == label for label, texts in examples.items() for text in texts]
        return Accuracy(sum(answers), len(answers))

    def save(self, path: Path) -> None:
        """Write labels and weights (in half precision) as one safetensors file."""
        tensors = {"weights": self._weights.astype(np.float16), "bias": self._bias}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"format": FORMAT, "labels": json.dumps(self.labels)})

    @classmethod
    def load(cls, path: str | Path) -> NgramClassifier:
        """Read what ``save`` wrote. Raises DataError when the file is missing or is none of ours."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise DataError(f"{path}: format {metadata.get('format')!r}, expected {FORMAT!r}; train it again "
                                    "by glm5 data train-filter")
                labels = json.loads(metadata["labels"])
                return cls(labels, file.get_tensor("weights"), file.get_tensor("bias"), str(path))
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: not a classifier file ({error}); train one by glm5 data train-filter") from None

    def require_labels(self, labels: Sequence[str]) -> None:
        """Raise DataError naming the first of ``labels`` that this classifier does not know."""
        unknown = [label for label in labels if label not in self.labels]
        if unknown:
            raise DataError(f"{self._source}: no label {unknown[0]!r}; it knows {', '.join(self.labels)}")


def train_from_sources(labelled: Sequence[str], output: Path) -> list[dict[str, Any]]:
    """Train from ``LABEL=SOURCE`` pairs and save; give result rows with the accuracy on texts kept out of training.

    A tenth of the texts of each label, decided by a hash of their names, is kept out.
    """
    train: dict[str, list[str]] = {}
    held_out: dict[str, list[str]] = {}
    for item in labelled:
        label, separator, source = item.partition("=")
        if not separator or not label:
            raise DataError(f"label {item!r}: expected LABEL=SOURCE, for example good=books/")
        documents = list(read_documents([source]))
        kept_out = held_out_paths((document.path for document in documents), _HELD_OUT, 0)
        for document in documents:
            part = held_out if document.path in kept_out else train
            part.setdefault(label, []).append(document.text)
    classifier = NgramClassifier.train(train)
    classifier.save(output)
    measured = classifier.accuracy(held_out)
    counts = {label: len(texts) for label, texts in train.items()}
    share = measured.correct / measured.texts
    return [*({"name": f"filter.examples.{label}", "value": count, "unit": "texts"} for label, count in counts.items()),
            {"name": "filter.accuracy", "value": share, "unit": "share", "n": measured.texts}]


def _chunks(text: str) -> Iterator[bytes]:
    data = text.encode("utf-8", "replace")
    count = -(-len(data) // CHUNK_BYTES)
    for index in np.unique(np.linspace(0, count - 1, MAX_CHUNKS).astype(int)) if count > MAX_CHUNKS else range(count):
        yield data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def hashed_ngrams(data: bytes, sizes: Sequence[int]) -> np.ndarray:
    """A 64-bit hash of every run of each of ``sizes`` (ascending) bytes of ``data``, repeated runs included."""
    values = np.frombuffer(data, dtype=np.uint8).astype(np.uint64) + np.uint64(1)
    hashed = np.zeros(len(values), dtype=np.uint64)
    found = [np.empty(0, dtype=np.uint64)]
    for size in range(1, min(sizes[-1], len(values)) + 1):
        hashed = hashed[: len(values) - size + 1] * _PRIME ^ values[size - 1 :]
        if size in sizes:
            found.append((hashed * _MULTIPLIER) >> np.uint64(32))
    return np.concatenate(found)


def _features(chunk: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Buckets of the n-grams of ``chunk``, each once, and their values: root of the count, of unit length together."""
    buckets, counts = np.unique(hashed_ngrams(chunk, SIZES) % np.uint64(BUCKETS), return_counts=True)
    values = np.sqrt(counts).astype(np.float32)
    return buckets.astype(np.int64), values / np.linalg.norm(values)


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()
