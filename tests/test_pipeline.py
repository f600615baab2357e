"""A whole run, killed on the way, continues and ends with a report and a checkpoint that Transformers loads."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tiny_pipeline import FORMS, NANO, STAGES, processes_that_name, start, write_tiny_pipeline

from glm5.config import load_config
from glm5.data.packing import Batch
from glm5.errors import ConfigError
from glm5.pipeline import Pipeline, PipelineConfig, _document_starts
from glm5.rl.config import RLConfig
from glm5.train.config import StageConfig


def kill_when(process: subprocess.Popen[str], path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


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


def test_prompts_of_the_acceptance_length_lie_inside_one_document():
    end, size = 0, 64
    long, short, cut = list(range(1, 101)), list(range(200, 230)), list(range(300, 300 + size))
    ids = [*long, end, *short, end, *cut, end, end, end]
    documents = [0] * 101 + [1] * 31 + [2] * (size + 1) + [-1] * 2
    batch = Batch(ids_BT=torch.tensor([ids]), positions_BT=torch.zeros(1, len(ids)),
                  documents_BT=torch.tensor([documents]), loss_mask_BT=torch.zeros(1, len(ids)))
    assert _document_starts([batch], end) == [long[:size], cut]
    assert _document_starts([], end) == []


def test_every_nano_configuration_is_valid():
    for name in STAGES:
        assert load_config(StageConfig, NANO / f"{name}.toml").name == name
    for form, (files, tasksets) in FORMS.items():
        loaded = load_config(PipelineConfig, NANO / f"{form}.toml")
        assert loaded.rl == tuple(f"{name}.toml" for name in files) and tuple(loaded.demonstrations) == tasksets
        assert sum(loaded.demonstrations.values()) <= 320
        assert loaded.report.tasks >= (200 if form == "pipeline" else 100)
        stages = Pipeline(NANO / f"{form}.toml", []).rl
        before = ["sft", *(stage.name for stage in stages)]
        assert [stage.init for stage in stages] == [f"stage:{name}" for name in before[:-1]]
        assert all(stage.max_minutes > 0 for stage in stages)


def test_the_shortest_pipeline_goes_from_sft_to_agentic_rl():
    (stage,) = Pipeline(NANO / "pipeline.toml", []).rl
    assert stage == load_config(RLConfig, NANO / "rl.toml") and stage.name == "rl"


def test_the_long_form_is_valid_and_follows_the_same_stages():
    micro, nano = (Pipeline(NANO.parent / path, []) for path in ("micro/pipeline.toml", "nano/full.toml"))
    assert [stage.name for stage in micro.rl] == [stage.name for stage in nano.rl]
    assert [stage.init for stage in (*micro.stages, *micro.rl)] == [stage.init for stage in (*nano.stages, *nano.rl)]
    assert micro.stages[0].preset == "micro" and all(stage.max_minutes == 0 for stage in (*micro.stages, *micro.rl))


def test_demonstrations_and_practised_tasksets_must_be_the_same(tmp_path):
    with pytest.raises(ConfigError, match=r"demonstrations name .*'extra'.*; name the same ones"):
        Pipeline(NANO / "pipeline.toml", ["demonstrations.extra=3"])
    with pytest.raises(ConfigError, match="a name of its own"):
        Pipeline(NANO / "pipeline.toml", ['rl=["rl.toml", "agentic.toml"]'])


def test_a_reward_model_is_trained_where_a_stage_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"name the reward models \['stage:reward-model'\], reward_model trains \[\]"):
        Pipeline(NANO / "full.toml", ['reward_model=""'])
    with pytest.raises(ConfigError, match=r"name the reward models \[\]"):
        Pipeline(NANO / "pipeline.toml", ['reward_model="reward-model.toml"'])
