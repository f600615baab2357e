"""``docs/model.md`` names rows and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from glm5.model.config import preset
from glm5.model.info import describe
from glm5.model.memory import Layout

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/model.md").read_text(encoding="utf-8")


def test_every_row_of_model_info_is_documented() -> None:
    rows = describe(preset("nano"), context=64, layout=Layout(), sequences=1)
    section = TEXT.split("## `glm5 model info")[1].split("\n## ")[0]
    names = set(re.findall(r"`([\w.*]+)`", section))
    for row in rows:
        prefix, _, last = row["name"].rpartition(".")
        assert {row["name"], f".{last}", f"{prefix}.*"} & names, row["name"]


def test_every_mistake_names_a_test_that_exists() -> None:
    table = TEXT.split("## Mistakes")[1]
    path = None
    found = re.findall(r"`(?:([\w/]+\.py)::|…)(test_\w+)", table)
    assert len(found) > 35
    for file, name in found:
        path = ROOT / "tests" / file if file else path
        assert f"def {name}" in path.read_text(encoding="utf-8"), f"{path}: {name}"
