"""A small tokenizer trained on a few standard-library sources, shared by the tests of this layer."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

import pytest

from glm5.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return [Path(module.__file__).read_text(encoding="utf-8") for module in (argparse, textwrap, json)]


@pytest.fixture(scope="session")
def tokenizer(corpus: list[str]) -> Tokenizer:
    return train_tokenizer(corpus, 600)
