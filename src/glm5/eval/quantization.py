"""``glm5 quantize``: the plan of the user, calibration text and its held-out part, and the figures as result rows.

A checkpoint that was trained for an export (``trained_for_quantization`` in its ``config.json``) is exported by that
plan and without transforms, which would move its weights off the levels that training has seen.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from glm5.data.packing import TokenDataset
from glm5.data.sources import Document, held_out_paths, read_documents
from glm5.errors import ConfigError
from glm5.eval.report import Row
from glm5.model.config import ModelConfig
from glm5.model.quantize.export import Exported, Quality, Rotation, Transforms, Variant, quantise_checkpoint
from glm5.model.quantize.plan import FAMILIES, TRAINED_FOR, QuantisationPlan
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer

_HELD_OUT_FRACTION = 0.2
_CHARACTERS_PER_TOKEN = 8
"""Characters that are tokenised for one token that is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationConfig:
    """The text behind scales and figures."""

    sources: tuple[str, ...] = ("stdlib",)
    """Document sources as in training; a fifth of the files is held out and measures the result."""
    rows: int = 16
    """Rows for the search of scales, and as many for the figures."""
    length: int = 256
    """Tokens per row."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.length < 2:
            raise ConfigError(f"rows={self.rows}, length={self.length}: expected at least 1 row of at least 2 tokens")


def quantise_directory(source: Path, target: Path, choices: Mapping[str, Any], rotation: Rotation | None,
                       scaling: bool | None, calibration: CalibrationConfig, compare: bool = False) -> list[Row]:
    """Write ``source`` quantised to ``target``; rows of quality and size.

    ``choices`` are fields of ``QuantisationPlan`` that differ from the default, or from what the checkpoint was trained
    for; ``rotation`` and ``scaling`` None take the default. ``compare`` also measures each family and each transform
    alone. Raises ConfigError, DataError or CheckpointError in one line.
    """
    trained = ModelConfig.from_json_file(source / "config.json").extra.get(TRAINED_FOR)
    base = QuantisationPlan.from_json(trained, str(source / "config.json")) if trained else QuantisationPlan()
    plan = dataclasses.replace(base, **choices)
    if trained and plan != base:
        raise ConfigError(f"{source}: was trained for {base}; export by that, or remove {TRAINED_FOR} from its "
                          "config.json")
    default = Transforms(rotation="none", scaling=False) if trained else Transforms()
    transforms = Transforms(rotation=default.rotation if rotation is None else rotation,
                            scaling=default.scaling if scaling is None else scaling)
    variants = {"quantized": Variant(plan=plan, transforms=transforms)}
    if compare:
        variants |= _comparisons(plan, transforms)
    tokenizer = load_tokenizer(source)
    documents = list(read_documents(calibration.sources))
    held_out = held_out_paths((document.path for document in documents), _HELD_OUT_FRACTION, seed=0)
    parts = [[document for document in documents if (document.path in held_out) == wanted] for wanted in (False, True)]
    ids = [_rows(part, tokenizer, calibration) for part in parts]
    return _result_rows(quantise_checkpoint(source, target, variants, *ids))


def _comparisons(plan: QuantisationPlan, transforms: Transforms) -> dict[str, Variant]:
    """The plan with each transform alone and with none, and each family of matrices alone."""
    none = Transforms(rotation="none", scaling=False)
    variants = {"plain": Variant(plan=plan, transforms=none),
                "rotation": Variant(plan=plan, transforms=dataclasses.replace(transforms, scaling=False)),
                "scaling": Variant(plan=plan, transforms=dataclasses.replace(transforms, rotation="none"))}
    for family in FAMILIES:
        if getattr(plan, family) != "none":
            others = dict.fromkeys([name for name in FAMILIES if name != family], "none")
            variants[family] = Variant(plan=dataclasses.replace(plan, **others), transforms=transforms)
    return variants


def _rows(documents: list[Document], tokenizer: Tokenizer, calibration: CalibrationConfig) -> Tensor:
    """Ids [rows, length] of full rows of documents drawn by a fixed seed; fewer rows when there is less text.

    Raises ConfigError without any.
    """
    random.Random(0).shuffle(documents)
    characters = itertools.accumulate(len(document.text) for document in documents)
    enough = _CHARACTERS_PER_TOKEN * calibration.rows * calibration.length
    count = 1 + sum(total < enough for total in characters)  # tokenising everything would take longer than the rest
    text = TokenDataset.from_documents(documents[:count], tokenizer)
    rows = min(calibration.rows, text.num_tokens // calibration.length)
    if not rows:
        raise ConfigError(f"calibration {list(calibration.sources)}: has {text.num_tokens} tokens on one side of the "
                          f"split, fewer than length={calibration.length}; give more text or a smaller length")
    return next(text.batches(rows, calibration.length)).ids_BT


def _result_rows(exported: Exported) -> list[Row]:
    n, original = exported.tokens, exported.original
    rows = [Row(name="quantize.loss.original", value=original.loss, unit="nats/token", n=n)]
    for name, quality in exported.variants.items():
        rows += _quality_rows(name, quality, original, n)
    rows.append(Row(name="quantize.bytes.original", value=exported.bytes_before, unit="bytes"))
    rows.append(Row(name="quantize.bytes.quantized", value=exported.bytes_after, unit="bytes",
                    baseline="quantize.bytes.original", ratio=exported.bytes_after / exported.bytes_before))
    return rows


def _quality_rows(name: str, quality: Quality, original: Quality, n: int) -> list[Row]:
    return [Row(name=f"quantize.loss.{name}", value=quality.loss, unit="nats/token", n=n,
                baseline="quantize.loss.original", ratio=quality.loss / original.loss),
            Row(name=f"quantize.kl.{name}", value=quality.kl, unit="nats/token", n=n)]
