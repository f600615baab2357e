"""Bad input through the command line: one line that names the file, key or value and what to do, exit code 2, nothing
half-written."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train.conftest import tiny_model

from glm5.model.checkpoint import save_model
from glm5.tokenizer.bpe import train_tokenizer

ROOT = Path(__file__).parents[1]
NANO = ROOT / "configs" / "nano"
LIMIT = 1000
"""Bytes of a file where a size limit stands in for a full disk."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint whose tokenizer is its own."""
    root = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer(["one two three four " * 40], 320)
    tokenizer.save(root / "tokenizer")
    save_model(tiny_model(), root / "checkpoint", tokenizer_source=root / "tokenizer")
    return root / "checkpoint"


def glm5(*arguments, cwd, limit=None, **variables):
    """Run a command without waiting for a second thread's work; ``limit`` bounds the size of every file it writes."""
    def bound():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **variables}
    return subprocess.run([sys.executable, "-m", "glm5", *map(str, arguments)], capture_output=True, text=True, cwd=cwd,
                          timeout=120, env=environment, preexec_fn=bound if limit else None)


def assert_refused(done, *words):
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and not done.stdout, done.stderr
    assert lines[0].startswith("error: ") and all(str(word) in lines[0] for word in words), lines[0]


def drop(tensors):
    del tensors["model.norm.weight"]


def add(tensors):
    tensors["model.surplus.weight"] = torch.zeros(2)


def reshape(tensors):
    tensors["model.norm.weight"] = torch.zeros(3)


@pytest.mark.parametrize(("damage", "words"), [
    (drop, ["tensor model.norm.weight is missing", "use a complete checkpoint"]),
    (add, ["model.safetensors", "unexpected tensor model.surplus.weight", "remove it"]),
    (reshape, ["model.safetensors", "model.norm.weight has shape [3]", "correct config.json"]),
    (None, ["model.safetensors", "truncated", "copy or download it again"]),
], ids=["missing", "extra", "misshapen", "truncated"])
def test_a_damaged_checkpoint(checkpoint, tmp_path, damage, words):
    shutil.copytree(checkpoint, tmp_path / "copy")
    path = tmp_path / "copy" / "model.safetensors"
    if damage is None:
        path.write_bytes(path.read_bytes()[:-100])
    else:
        tensors = load_file(path)
        damage(tensors)
        save_file(tensors, path)
    assert_refused(glm5("generate", tmp_path / "copy", "one", cwd=tmp_path), tmp_path / "copy", *words)


def test_a_directory_that_is_no_checkpoint(tmp_path):
    (tmp_path / "folder").mkdir()
    assert_refused(glm5("generate", "folder", "one", cwd=tmp_path), "folder/tokenizer.json", "give a checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_tokenizer_that_does_not_fit_the_model(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "copy")
    other = train_tokenizer([f"{number:b} " * 20 + chr(97 + number % 26) * 9 for number in range(99)], 340)
    assert other.vocab_size > 320
    other.save(tmp_path / "copy")
    done = glm5("rl", NANO / "rl.toml", "--run-dir", "run", "init=copy", cwd=tmp_path)
    assert_refused(done, "copy/tokenizer.json", "copy/config.json", "trained with")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize(("text", "words"), [
    (None, ["bad.toml", "cannot be read", "give the path"]),
    ("name = ", ["bad.toml", "not valid TOML"]),
    (f'extends = "{NANO}/pipeline.toml"\n[report]\ntaks = 3\n', ["bad.toml", "report.taks", "did you mean 'tasks'"]),
    (f'extends = "{NANO}/pipeline.toml"\n[report]\ntasks = "many"\n', ["bad.toml", "report.tasks", "'many'"]),
], ids=["missing", "no TOML", "unknown key", "wrong value"])
def test_a_bad_configuration(tmp_path, text, words):
    if text is not None:
        (tmp_path / "bad.toml").write_text(text)
    assert_refused(glm5("run", "bad.toml", cwd=tmp_path), *words)
    assert {path.name for path in tmp_path.iterdir()} <= {"bad.toml"}


def test_an_empty_corpus(checkpoint, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "empty.txt").write_text("")
    assert_refused(glm5("tokenizer", "train", "corpus", "--output", "out", cwd=tmp_path), "corpus", "no text")
    done = glm5("train", NANO / "midtrain.toml", "--run-dir", "run", f"init={checkpoint}", "data.sources=['corpus']",
                "model={}", cwd=tmp_path)
    assert_refused(done, "corpus", "no text")
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.suffix != ".lock"}
    assert left == {"corpus", "corpus/empty.txt", "run", "run/.lock", "token-cache"}


def test_no_sandbox(tmp_path):
    assert_refused(glm5("env", "check", "shell", cwd=tmp_path, PATH="/nonexistent"), "bwrap", "install")
    done = glm5("run", NANO / "pipeline.toml", "run_dir=run", cwd=tmp_path, PATH="/nonexistent")
    assert_refused(done, "bwrap", "install")
    assert not list(tmp_path.iterdir())


def test_no_compiler(tmp_path):
    for name in ("Makefile", "setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("scripts", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in (["scripts/setup", "report"], [sys.executable, "setup.py", "build_ext"]):
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "CXX": "nonexistent", "PYTHON": sys.executable},
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1 and "nonexistent" in done.stderr and "install" in done.stderr
    made = subprocess.run(["make", "setup", "CXX=nonexistent", f"PYTHON={sys.executable}"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=60)
    assert made.returncode == 2 and "no C++ compiler (nonexistent)" in made.stderr
    assert not (tmp_path / ".venv").exists() and not (tmp_path / "build").exists()


def test_a_run_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = glm5("run", NANO / "pipeline.toml", "run_dir=file/below", cwd=tmp_path)
    assert_refused(done, "file/below", "cannot be written", "choose another run directory")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_fills_up(tmp_path):
    (tmp_path / "corpus.txt").write_text("one two three four " * 40)
    done = glm5("tokenizer", "train", "corpus.txt", "--output", "out", cwd=tmp_path, limit=LIMIT)
    assert done.returncode == 2
    assert "error: out/" in done.stderr.splitlines()[-1] and "free some space" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


def test_results_that_are_none(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"rows": []}))
    assert_refused(glm5("results", "a.json", "a.json", cwd=tmp_path), "a.json", "no results", "expected a JSON object")
