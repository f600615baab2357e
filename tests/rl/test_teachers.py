"""Teachers: real engine processes score what the student sampled."""

import dataclasses

import pytest
import torch

from glm5.errors import CheckpointError, ConfigError, ServiceError
from glm5.model.checkpoint import load_model, save_model
from glm5.process import reserve
from glm5.records import Sample, Trajectory
from glm5.rl.config import RLConfig
from glm5.rl.credit import TeacherConfig
from glm5.rl.ledger import LeasedBatch
from glm5.rl.policy import freeze
from glm5.rl.step import policy_step
from glm5.rl.supervisor import Supervisor
from glm5.rl.teachers import Teachers, teacher_services
from glm5.rl.trainer import _resolve_teachers
from glm5.tokenizer.bpe import train_tokenizer
from glm5.train.config import OptimizerConfig
from glm5.train.optimizers import build_optimizer

from .conftest import TEXTS, build_model

CONFIG = RLConfig(
    name="distill", group_size=1, max_context=128, temperature=2.0,
    teachers={"first": TeacherConfig(checkpoint="a", tasksets={"maths": 1.0}),
              "second": TeacherConfig(checkpoint="b", tasksets={"shell": 1.0})},
    optimizer=OptimizerConfig(lr=3e-3, kind="adamw", weight_decay=0.0, clip_norm=0.0))


@pytest.fixture(scope="module")
def other(checkpoint, tmp_path_factory):
    """A second model with the same tokenizer."""
    directory = tmp_path_factory.mktemp("other") / "checkpoint"
    save_model(build_model(load_model(checkpoint).config.vocab_size, seed=1), directory, tokenizer_source=checkpoint)
    return directory


def logprobs_of(model, ids, temperature):
    with torch.no_grad():
        logprobs_TW = torch.log_softmax(model(torch.tensor([ids])).logits[0].float() / temperature, -1)
    return [0.0, *(float(logprobs_TW[t - 1, ids[t]]) for t in range(1, len(ids)))]


def batch_of(student, tasksets, length=12):
    generator = torch.Generator().manual_seed(3)
    samples = []
    for index, taskset in enumerate(tasksets):
        ids = torch.randint(10, 300, (length + index,), generator=generator).tolist()
        mask = [t >= 4 for t in range(len(ids))]
        logprobs = [value if on else 0.0
                    for value, on in zip(logprobs_of(student, ids, CONFIG.temperature), mask, strict=True)]
        trajectory = Trajectory(ids=ids, loss_mask=mask, logprobs=logprobs, versions=[0 if on else -1 for on in mask])
        samples.append(Sample(sample_id=f"e{index}/0", episode_id=f"e{index}", group_id="g", taskset=taskset,
                              trajectory=trajectory, advantage=0.0, weight=1.0))
    return LeasedBatch(1, 0, len(samples), len(samples), samples, {sample.sample_id: 0 for sample in samples})


@pytest.mark.slow
def test_every_taskset_is_scored_by_its_own_teacher_and_the_student_moves_towards_it(checkpoint, other, tmp_path):
    student, first, second = (load_model(path) for path in (checkpoint, checkpoint, other))
    batch = batch_of(student, ["shell", "maths", "shell"])
    services = teacher_services(CONFIG, {"first": checkpoint, "second": other})
    with Supervisor(tmp_path, lambda kind, **values: None) as supervisor:
        urls = {spec.name: supervisor.add(spec) for spec in services}
        supervisor.wait_until_ready()
        with Teachers(CONFIG, urls, supervisor.tend) as teachers:
            scored = teachers.score(batch)
    for sample, teacher in zip(scored.samples, (second, first, second), strict=True):
        expected = logprobs_of(teacher, sample.trajectory.ids, CONFIG.temperature)
        assert sample.teacher_logprobs == pytest.approx(expected, abs=2e-3)
    freeze(student)
    optimizer = build_optimizer(student, CONFIG.optimizer)
    first_step = policy_step(student, optimizer, scored, CONFIG, 1.0)
    # the teacher of "maths" is the student itself, so the distance is that of the two others
    mine = [logprobs_of(first, sample.trajectory.ids, CONFIG.temperature) for sample in scored.samples]
    gaps = [sum(a - b for a, b in zip(own[4:], sample.teacher_logprobs[4:], strict=True)) / len(own[4:])
            for own, sample in zip(mine, scored.samples, strict=True)]
    assert first_step.metrics["teacher_kl"] == pytest.approx(sum(gaps) / 3, abs=5e-3)
    assert abs(gaps[1]) < 2e-3 < abs(gaps[0])
    second_step = policy_step(student, optimizer, dataclasses.replace(scored), CONFIG, 1.0)
    assert second_step.metrics["teacher_kl"] < first_step.metrics["teacher_kl"]


def test_a_teacher_that_is_down_is_waited_for_and_then_named(monkeypatch):
    """The port is bound and nobody listens."""
    monkeypatch.setattr("glm5.rl.teachers.TIMEOUT_S", 0.1)
    monkeypatch.setattr("glm5.rl.teachers.RETRY_S", 0.01)
    trajectory = Trajectory(ids=[1, 2], loss_mask=[False, True], logprobs=[0.0, -1.0], versions=[-1, 0])
    sample = Sample(sample_id="e/0", episode_id="e", group_id="g", taskset="maths", trajectory=trajectory,
                    advantage=0.0, weight=1.0)
    batch = LeasedBatch(1, 0, 1, 1, [sample], {"e/0": 0})
    tended = []
    with reserve("127.0.0.1") as silent:
        urls = {f"teacher-{name}": f"http://127.0.0.1:{silent.getsockname()[1]}" for name in CONFIG.teachers}
        with Teachers(CONFIG, urls, lambda: tended.append(1)) as teachers, \
                pytest.raises(ServiceError, match=r"teacher of maths at .*no answer within"):
            teachers.score(batch)
    assert tended


def test_teachers_must_exist_and_speak_the_student_s_ids(checkpoint, tmp_path):
    config = dataclasses.replace(CONFIG, tasksets={}, teachers={"first": CONFIG.teachers["first"]})
    with pytest.raises(ConfigError, match="no checkpoint there"):
        _resolve_teachers(config, tmp_path, checkpoint)
    teacher = dataclasses.replace(CONFIG.teachers["first"], checkpoint=str(tmp_path / "stranger"))
    save_model(load_model(checkpoint), tmp_path / "stranger", tokenizer_source=checkpoint)
    config = dataclasses.replace(config, tasksets={}, teachers={"first": teacher})
    assert _resolve_teachers(config, tmp_path, checkpoint) == {"first": tmp_path / "stranger"}
    train_tokenizer([text.upper() for text in TEXTS], 300).save(tmp_path / "stranger")
    with pytest.raises(CheckpointError, match="differs from"):
        _resolve_teachers(config, tmp_path, checkpoint)
