"""Whole runs: every process real, a tiny random model, tasks that it solves half of the time."""

import dataclasses
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from glm5.model.checkpoint import load_model
from glm5.rl.config import RLConfig
from glm5.rl.launch.local import RolloutStack
from glm5.rl.ledger import Ledger
from glm5.rl.operation import WeightsConfig
from glm5.rl.summary import summary_rows
from glm5.rl.timeline import read_spans
from glm5.rl.trainer import run_rl
from glm5.rl.transcripts import read_transcripts
from glm5.rl.weights import latest, verify
from glm5.runlog import read_jsonl
from glm5.train.config import OptimizerConfig

from .coin_taskset import install

CONFIG = RLConfig(name="smoke", tasksets={"coin": 1.0}, groups_per_batch=2, group_size=4, steps=3, concurrency=8,
                  max_new_tokens=8, max_turns=1, max_context=256, checkpoint_every=2, sandbox="none",
                  stall_minutes=2.0, optimizer=OptimizerConfig(lr=1e-3, kind="adamw", weight_decay=0.0))


@pytest.fixture
def coin(tmp_path, monkeypatch):
    """The taskset ``coin``, installed for the processes that a test starts."""
    directory = tmp_path / "site"
    directory.mkdir()
    install(directory)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), *sys.path]))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "transport"), [("async", "delta"), ("sync", "collective")])
def test_a_run_trains_publishes_and_balances_its_books(coin, checkpoint, tmp_path, mode, transport):
    config = dataclasses.replace(CONFIG, mode=mode, weights=WeightsConfig(transport=transport, full_every=4))
    final = run_rl(config, tmp_path / "run", checkpoint)
    before, after = load_model(checkpoint), load_model(final)
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    frozen = [name for name in before.state_dict() if ".indexer." in name or "correction_bias" in name]
    assert frozen and all(torch.equal(before.state_dict()[name], after.state_dict()[name]) for name in frozen)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(math.isfinite(record["k3"]) and record["staleness_max"] <= config.tau for record in records)
    fresh = [record["k3"] for record in records if record["staleness_max"] == 0]
    assert fresh and max(fresh) < 1e-5  # sampled by exactly the weights that score it
    rows = {row["name"]: row["value"] for row in summary_rows(tmp_path / "run")}
    assert rows["ledger.violations"] == 0 and rows["groups.acked"] == 6
    assert run_rl(config, tmp_path / "run", checkpoint) == final
    newest = latest(tmp_path / "run")
    verify(newest)
    assert newest.version == 4 and newest.links == (3 if transport == "delta" else 0)
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert ("weights_broadcast" in {event["kind"] for event in events}) == (transport == "collective")
    assert {span.name for span in read_spans(tmp_path / "run")} >= {"train", "publish", "wait for a batch"}
    assert [item["step"] for item in read_transcripts(tmp_path / "run", 3)] == [3, 3]


@pytest.mark.slow
def test_an_evaluation_gives_one_measured_episode_per_task(coin, checkpoint, tmp_path):
    with RolloutStack(CONFIG, checkpoint, tmp_path / "run") as stack:
        episodes = stack.evaluate(count=5, temperature=1.0, label="five coins")
        assert stack.engine_stats()["generated_tokens"] > 0
        stack.update_weights(checkpoint, 7)
        assert stack.engine_stats()["weight_version"] == 7
    assert [episode.task_id for episode in episodes] == [f"coin/heldout/{index}" for index in range(5)]
    assert all(episode.outcome in ("ok", "truncated") and episode.reward in (0.0, 1.0) for episode in episodes)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_trains_nothing_twice(coin, checkpoint, tmp_path):
    run_dir = tmp_path / "run"
    script = tmp_path / "start.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.rl.test_run import CONFIG\nimport dataclasses\n"
        "from glm5.rl.trainer import run_rl\n"
        "run_rl(dataclasses.replace(CONFIG, steps=5), Path(sys.argv[1]), Path(sys.argv[2]))\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ["PYTHONPATH"]])}
    kills = 0
    deadline = time.monotonic() + 240
    for kill_at in (3, None):
        process = subprocess.Popen([sys.executable, str(script), str(run_dir), str(checkpoint)], env=environment)
        while process.poll() is None and time.monotonic() < deadline:
            steps = [record["step"] for record in read_jsonl(run_dir / "metrics.jsonl")]
            if kill_at is not None and steps and steps[-1] >= kill_at:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.05)
        code = process.wait(10)
        if kill_at is None:
            assert code == 0
    assert kills == 1
    ledger = Ledger(run_dir / "ledger.sqlite", max_staleness=2, pad_groups=True)
    assert ledger.check() == []
    assert ledger.counts().groups["acked"] == 5 * CONFIG.groups_per_batch
    ledger.close()
    versions = sqlite3.connect(run_dir / "ledger.sqlite").execute("SELECT version FROM versions").fetchall()
    assert versions == sorted(set(versions))
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
