"""Accuracy of a reward model on preference pairs that it was not trained on."""

from __future__ import annotations

from typing import Any

from glm5.eval.report import Row
from glm5.eval.statistics import wilson_interval


def accuracy_row(name: str, right: int, pairs: int) -> dict[str, Any]:
    """Result row ``accuracy.NAME``: the share of held-out pairs whose better answer has the higher score."""
    interval = wilson_interval(right, pairs)
    return Row(name=f"accuracy.{name}", value=interval.value, unit="fraction", n=pairs, low=interval.low,
               high=interval.high).to_json()
