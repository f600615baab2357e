"""Training checkpoints: complete or absent, exact, pruned, refused in one line."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm5.errors import CheckpointError
from glm5.model.checkpoint import load_model
from glm5.process import lock_directory
from glm5.train.checkpoint import (
    TrainerState,
    checkpoint_path,
    complete_checkpoints,
    final_checkpoint,
    latest_checkpoint,
    load_trainer_state,
    mark_final,
    prune_checkpoints,
    save_checkpoint,
)
from glm5.train.config import OptimizerConfig
from glm5.train.optimizers import build_optimizer

from .conftest import tiny_model

ROOT = Path(__file__).parents[2]
OPTIMIZER = OptimizerConfig(lr=0.01)


def write(run_dir, step, model=None):
    model = model or tiny_model()
    return save_checkpoint(run_dir, TrainerState(step=step, tokens=7 * step, batch_ids=("b1", "b2"), policy_version=3),
                           model, build_optimizer(model, OPTIMIZER).state_dict(), None, {"stage": "pretrain"})


def test_what_is_saved_is_what_is_loaded(tmp_path):
    model = tiny_model()
    torch.manual_seed(5)
    path = write(tmp_path, 12, model)
    expected = torch.rand(3)
    torch.manual_seed(6)
    state = load_trainer_state(path, build_optimizer(model, OPTIMIZER))
    assert torch.equal(torch.rand(3), expected)
    assert state == TrainerState(step=12, tokens=84, batch_ids=("b1", "b2"), policy_version=3)
    loaded = load_model(path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    meta = json.loads((path / "meta.json").read_text())
    assert meta["format"] == 1 and meta["step"] == 12 and meta["stage"] == "pretrain"


def test_an_incomplete_directory_is_ignored(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    whole, torn = write(tmp_path, 1), write(tmp_path, 2)
    (torn / "meta.json").unlink()
    assert latest_checkpoint(tmp_path) == whole


@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_around_the_renames_of_a_replacement_loses_no_checkpoint(tmp_path, renames):
    program = """
import os, signal, sys
from pathlib import Path
from glm5 import runlog
from tests.train.test_checkpoint import write
path, left = write(Path(sys.argv[1]), 1), int(sys.argv[2])
rename = os.rename
def rename_or_die(source, target):
    global left
    if Path(source) == path or Path(target) == path:
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
    rename(source, target)
runlog.os.rename = rename_or_die
write(Path(sys.argv[1]), 1)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path), str(renames)], cwd=ROOT, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    with lock_directory(tmp_path):
        assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 1)
    load_model(checkpoint_path(tmp_path, 1))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000001"]


def test_pruning_keeps_the_newest_and_the_named_ones(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    prune_checkpoints(tmp_path, 2, frozenset({1}))
    assert complete_checkpoints(tmp_path) == [checkpoint_path(tmp_path, step) for step in (1, 4, 5)]


def test_a_run_is_final_only_when_marked(tmp_path):
    path = write(tmp_path, 3)
    assert final_checkpoint(tmp_path) is None
    mark_final(tmp_path, path)
    assert final_checkpoint(tmp_path) == path


def test_a_disk_that_refuses_leaves_the_old_checkpoint_and_nothing_half_written(tmp_path):
    program = """
import resource, sys
from pathlib import Path
from tests.train.test_checkpoint import write
write(Path(sys.argv[1]), 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
write(Path(sys.argv[1]), 2)
"""
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
                            timeout=120)
    assert "CheckpointError" in result.stderr.splitlines()[-1], result.stderr
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000001"]
    assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 1)


def test_a_newer_format_and_a_torn_optimizer_file_are_refused_in_one_line(tmp_path):
    path, model = write(tmp_path, 1), tiny_model()
    optimizer_file = path / "trainer" / "optimizer.safetensors"
    optimizer_file.write_bytes(optimizer_file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read") as torn:
        load_trainer_state(path, build_optimizer(model, OPTIMIZER))
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99") as newer:
        load_trainer_state(path, build_optimizer(model, OPTIMIZER))
    assert all("\n" not in str(caught.value) for caught in (torn, newer))
