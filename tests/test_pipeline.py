"""A whole run, killed on the way, continues and ends with a report and a checkpoint that Transformers loads."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm5.config import load_config
from glm5.errors import ConfigError
from glm5.pipeline import Pipeline, PipelineConfig
from glm5.rl.config import RLConfig
from glm5.train.config import StageConfig

NANO = Path(__file__).parents[1] / "configs" / "nano"
STAGES = ("pretrain", "midtrain", "dsa-warmup", "dsa-sparse", "sft")


def write_tiny_pipeline(directory: Path) -> Path:
    """The nano pipeline with a few steps of each stage, on a small corpus."""
    corpus = directory / "corpus"
    corpus.mkdir()
    for number in range(40):
        lines = [f"def function_{number}_{line}(value):\n    return value + {line * number}\n" for line in range(40)]
        (corpus / f"part{number}.txt").write_text("".join(lines))
    for name in STAGES:
        text = (NANO / f"{name}.toml").read_text().replace('["stdlib"]', json.dumps([str(corpus)]))
        lines = [line for line in text.splitlines() if not line.startswith(("max_minutes", "every", "patience"))]
        changes = {"steps": "steps = 4", "batch_rows": "batch_rows = 2", "checkpoint_every": "checkpoint_every = 2",
                   "warmup_steps": "warmup_steps = 1"}
        lines = [changes.get(line.split(" =")[0], line) for line in lines]
        if name == "sft":
            lines = [f"{line}\nevery = 4" if line == "[evaluation]" else line for line in lines]
        (directory / f"{name}.toml").write_text("\n".join(lines) + "\n")
    (directory / "rl.toml").write_text(f'extends = "{NANO}/rl.toml"\nsteps = 1\nmax_minutes = 0.15\nconcurrency = 8\n'
                                       'groups_per_batch = 2\ngroup_size = 2\nsandbox = "none"\n')
    pipeline = directory / "pipeline.toml"
    pipeline.write_text(
        f'extends = "{NANO}/pipeline.toml"\nname = "tiny"\nrun_dir = "{directory}/run"\n'
        f'[tokenizer]\nvocab_size = 1024\nsources = ["{corpus}"]\n'
        "[demonstrations]\ncalculator = 3\nshell = 3\nrepair = 3\n"
        "[report]\ntasks = 3\nstop_tasks = 2\n")
    return pipeline


def start(pipeline: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "glm5", "run", str(pipeline)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def kill_when(process: subprocess.Popen[str], path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def processes_that_name(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid() and text in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_run_that_is_killed_continues_to_its_report(tmp_path):
    pipeline = write_tiny_pipeline(tmp_path)
    run_dir = tmp_path / "run"
    kill_when(start(pipeline), run_dir / "midtrain" / "checkpoints" / "000002")
    kill_when(start(pipeline), run_dir / "rl" / "turns.sqlite")
    finished = start(pipeline)
    output, errors = finished.communicate(timeout=300)
    assert finished.returncode == 0, errors
    assert output.strip() == str(run_dir / "report.md")

    results = json.loads((run_dir / "report.json").read_text())
    names = {row["name"] for row in results["rows"]}
    assert {"bpb.initial", "bpb.final", "loss.dense", "loss.sparse", "mtp.acceptance_length", "pass_at_1.sft.mean",
            "pass_at_1.rl.mean", "pass_at_1.rl.shell", "wall_s.run", "wall_s.sft", "peak_rss_bytes"} <= names
    violations = [row["value"] for row in results["rows"] if row["name"] == "ledger.violations"]
    assert violations == [0]
    assert json.loads((run_dir / "clock.json").read_text())["attempts"] == 3

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run_dir / "final")
    deadline = time.monotonic() + 10
    while processes_that_name(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_that_name(str(tmp_path)) == []

    with pytest.raises(ConfigError, match="other settings"):
        Pipeline(pipeline, ["report.tasks=4"]).run()


def test_every_nano_configuration_is_valid():
    for name in STAGES:
        assert load_config(StageConfig, NANO / f"{name}.toml").name == name
    assert load_config(RLConfig, NANO / "rl.toml").name == "rl"
    loaded = load_config(PipelineConfig, NANO / "pipeline.toml")
    assert sum(loaded.demonstrations.values()) <= 300
    assert loaded.report.tasks >= 200
