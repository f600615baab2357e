"""A small tokenizer for the tests of this layer."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import settings

from glm5.tokenizer import Tokenizer, train_tokenizer

# Examples take longer on a busy machine, which is no failure.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([Path(argparse.__file__).read_text(encoding="utf-8")], 500)
