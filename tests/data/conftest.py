"""A small tokenizer and a git repository for the tests of this layer."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Callable
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


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three commits: files that import each other, a fix that names issue 7, and a merge of a branch."""
    root = tmp_path_factory.mktemp("git") / "project"
    root.mkdir()
    identity = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
                "GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True,
                       env={**os.environ, **identity})

    def write(name: str, text: str) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode("latin-1"))

    commit = _committer(git)
    git("init", "--initial-branch=main")
    write("src/app/main.py", "import json\nfrom app.area import square\nfrom .unit import METRE\n\nprint(square(2))\n")
    write("src/app/area.py", "from app import unit\nimport app.unit\n\ndef square(x):\n    return x + x\n")
    write("src/app/unit.py", "METRE = 1\n")
    write("README.md", "A project.\n")
    write("image.png", "\x89PNG\0\0")
    write("latin.txt", "caf\xe9\n")
    (root / "link.txt").symlink_to("README.md")
    commit("First version")
    write("src/app/area.py", "from app import unit\nimport app.unit\n\ndef square(x):\n    return x * x\n")
    commit("Square multiplies (fixes #7, see #99)")
    git("checkout", "-b", "side", "HEAD~1")
    write("README.md", "A project of areas.\n")
    commit("Say what it is")
    git("checkout", "main")
    git("merge", "--no-ff", "-m", "Merge side", "side")
    return root


def _committer(git: Callable[..., None]) -> Callable[[str], None]:
    def commit(message: str) -> None:
        git("add", "-A")
        git("commit", "-m", message)

    return commit
