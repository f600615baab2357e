"""A small tokenizer trained on a few standard-library sources, shared by the tests of this layer."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

import pytest
from hypothesis import settings

from glm5.tokenizer import Tokenizer, train_tokenizer

# Examples take longer on a busy machine, which is no failure.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return [Path(module.__file__).read_text(encoding="utf-8") for module in (argparse, textwrap, json)]


@pytest.fixture(scope="session")
def tokenizer(corpus: list[str]) -> Tokenizer:
    return train_tokenizer(corpus, 600)
