import dataclasses
import json

import pytest
import torch

from glm5.errors import ConfigError, DataError, ServiceError
from glm5.model.checkpoint import load_model
from glm5.rl.config import LossConfig, ReplayConfig, RLConfig
from glm5.rl.ledger import Ledger
from glm5.rl.offline import import_groups, read_source
from glm5.rl.replay import EpisodeFilter, export_episodes
from glm5.rl.trainer import run_rl
from glm5.runlog import read_jsonl
from glm5.train.config import OptimizerConfig

from .factories import add_group, make_episode, open_ledger

CONFIG = RLConfig(name="offline", tasksets={"calculator": 1.0}, mode="offline", groups_per_batch=2, steps=50,
                  checkpoint_every=2, replay=ReplayConfig(source="nowhere", max_uses=2),
                  loss=LossConfig(kind="ppo"),  # against the trainer's own log-probs: the recorded ones are made up
                  optimizer=OptimizerConfig(lr=1e-3, kind="adamw", weight_decay=0.0))


@pytest.fixture
def source(tmp_path):
    """The run directory of another run: three groups with signal, of different ages, one without, one retried slot."""
    directory = tmp_path / "source"
    directory.mkdir()
    ledger = open_ledger(directory)
    ledger.record_version(3, 7)
    ledger.record_version(4, 8)
    add_group(ledger, 0, version=3)
    add_group(ledger, 1, version=4)
    add_group(ledger, 2, rewards=(1.0, 1.0), version=4)
    ledger.open_group("calculator-3", taskset="calculator", task_id="task-calculator-3", task_index=3, size=2)
    failed = make_episode("calculator-3", 0, None, "infra_error", trajectories=0)
    ledger.close_group("calculator-3", [[failed, make_episode("calculator-3", 0, 1.0, version=4, attempt=1)],
                                        [make_episode("calculator-3", 1, 0.0, version=4)]])
    ledger.ack(ledger.lease(1, 8).batch_id, 9)
    ledger.close()
    return directory


def make_config(source, **changes):
    return dataclasses.replace(CONFIG, replay=dataclasses.replace(CONFIG.replay, source=str(source)), **changes)


def import_into(directory, source):
    directory.mkdir(exist_ok=True)
    ledger = Ledger.of_run(make_config(source), directory)
    return ledger, import_groups(source, ledger)


def test_a_run_directory_and_its_export_give_the_same_groups(tmp_path, source):
    exported = tmp_path / "episodes.jsonl"
    export_episodes(source, exported, EpisodeFilter(oldest_first=True))
    assert [item.episode for item in read_source(exported)] == [item.episode for item in read_source(source)]
    for number, origin in enumerate((source, exported)):
        ledger, imported = import_into(tmp_path / str(number), origin)
        counts = ledger.counts()
        assert imported == 4 and counts.groups["ready"] == 3 and counts.dropped_groups == {"zero_variance": 1}
        assert counts.retried == 1 and ledger.check() == []
        batch = ledger.lease(3, 0)
        assert batch.samples[1].trajectory == make_episode("calculator-0", 1, version=3).trajectories[0]
        ledger.close()


def test_an_import_that_was_cut_off_goes_on(tmp_path, source):
    ledger, imported = import_into(tmp_path / "run", source)
    assert imported == 4 and import_groups(source, ledger) == 0
    ledger.close()
    other = Ledger.of_run(make_config(source), tmp_path)
    other.open_group("calculator-0", taskset="calculator", task_id="task-calculator-0", task_index=0, size=4)
    assert import_groups(source, other) == 4 and other.counts().groups["ready"] == 3
    other.close()


def test_what_cannot_be_read_is_named(tmp_path, source):
    with pytest.raises(ConfigError, match=r"replay\.source=.*cannot be read"):
        list(read_source(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ServiceError, match="give the run directory"):
        list(read_source(tmp_path))
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"episode_id": "e"}) + "\n")
    with pytest.raises(DataError, match=r"lines.jsonl:1: no episode"):
        list(read_source(lines))
    export_episodes(source, lines, EpisodeFilter())
    rows = lines.read_text().splitlines()
    lines.write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    ledger = Ledger.of_run(make_config(lines), tmp_path)
    with pytest.raises(DataError, match="do not stand together"):
        import_groups(lines, ledger)
    ledger.close()


def test_offline_and_a_source_need_each_other():
    with pytest.raises(ConfigError, match='mode "offline" and a source need each other'):
        dataclasses.replace(CONFIG, mode="async")
    with pytest.raises(ConfigError, match="need each other"):
        dataclasses.replace(CONFIG, replay=ReplayConfig())


def test_a_run_trains_every_group_as_often_as_asked_and_resumes(tmp_path, source, checkpoint):
    config, run_dir = make_config(source), tmp_path / "run"
    final = run_rl(config, run_dir, checkpoint)
    records = read_jsonl(run_dir / "metrics.jsonl")
    assert [(record["step"], record["reused_groups"]) for record in records] == [(1, 0), (2, 1), (3, 2)]
    ledger = Ledger.of_run(config, run_dir)
    assert ledger.counts().groups == {"acked": 3, "dropped": 1} and ledger.counts().reuses == 3
    assert ledger.check() == []
    ledger.close()
    whole = load_model(final).state_dict()
    assert not torch.equal(load_model(checkpoint).state_dict()["lm_head.weight"], whole["lm_head.weight"])
    # the same in two starts: one step, then the rest
    parts = tmp_path / "parts"
    run_rl(dataclasses.replace(config, steps=1), parts, checkpoint)
    (parts / "final.json").unlink()
    resumed = load_model(run_rl(config, parts, checkpoint)).state_dict()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_a_source_without_signal_is_one_line(tmp_path, source, checkpoint):
    lines = tmp_path / "lines.jsonl"
    export_episodes(source, lines, EpisodeFilter(state="dropped"))
    with pytest.raises(ServiceError, match=r"no group can be trained on; dropped \{'zero_variance': 1\}"):
        run_rl(make_config(lines), tmp_path / "run", checkpoint)
