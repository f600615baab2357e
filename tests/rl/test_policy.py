"""A dense Transformers model as the policy: one step, its checkpoints, its publication, whole runs."""

import dataclasses
import math
import os
import sys

import pytest
import torch
import transformers

from glm5.device import find_device
from glm5.engine.broadcast import snapshot
from glm5.engine.config import EngineConfig
from glm5.engine.engine import Engine
from glm5.records import Sample, SamplingParams, Trajectory
from glm5.rl.ledger import LeasedBatch
from glm5.rl.policy import load_policy
from glm5.rl.step import policy_step
from glm5.rl.trainer import run_rl
from glm5.rl.weights import publish, read_version, verify
from glm5.runlog import read_jsonl
from glm5.train.checkpoint import TrainerState, load_trainer_state, save_checkpoint
from glm5.train.optimizers import build_optimizer
from tests.dense import MODELS, write_dense

from .coin_taskset import install
from .test_run import CONFIG


@pytest.fixture(scope="module", params=sorted(MODELS))
def directory(request, tmp_path_factory):
    return write_dense(tmp_path_factory.mktemp(request.param) / "model", request.param)


def reference_logprobs(directory, ids):
    """Of ``ids[1:]``, by Transformers alone."""
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.no_grad():
        logprobs_TW = torch.log_softmax(network(torch.tensor([ids])).logits[0].float(), -1)
    return [float(logprobs_TW[t - 1, ids[t]]) for t in range(1, len(ids))]


def batch_of(directory, advantages):
    samples = []
    for index, advantage in enumerate(advantages):
        ids = torch.randint(0, 250, (12 + 5 * index,), generator=torch.Generator().manual_seed(index)).tolist()
        mask = [t > 4 for t in range(len(ids))]
        logprobs = [value if on else 0.0 for value, on in zip([0.0, *reference_logprobs(directory, ids)], mask,
                                                              strict=True)]
        samples.append(Sample(
            sample_id=f"e{index}/0", episode_id=f"e{index}", group_id="g", taskset="coin", advantage=advantage,
            weight=1.0, trajectory=Trajectory(ids=ids, loss_mask=mask, logprobs=logprobs,
                                              versions=[0 if on else -1 for on in mask])))
    return LeasedBatch(1, 0, 1, len(samples), samples, {sample.sample_id: 0 for sample in samples})


def mean_logprob(model, sample):
    ids = torch.tensor([sample.trajectory.ids])
    with torch.no_grad():
        logprobs_TW = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    chosen = logprobs_TW.gather(-1, ids[0, 1:, None])[:, 0]
    return float(chosen[torch.tensor(sample.trajectory.loss_mask[1:])].mean())


def test_a_step_scores_as_transformers_does_and_favours_what_was_better(directory):
    model = load_policy(directory, find_device("cpu"))
    batch = batch_of(directory, [0.5, -0.5, 0.0])
    before = [mean_logprob(model, sample) for sample in batch.samples]
    result = policy_step(model, build_optimizer(model, CONFIG.optimizer), batch, CONFIG, 1.0)
    after = [mean_logprob(model, sample) for sample in batch.samples]
    assert result.finite and result.metrics["k3"] < 1e-8 and abs(result.metrics["ratio"] - 1) < 1e-4
    assert after[0] > before[0] and after[1] < before[1]


def test_a_checkpoint_continues_and_loads_in_transformers(directory, tmp_path):
    model = load_policy(directory, find_device("cpu"))
    optimizer = build_optimizer(model, CONFIG.optimizer)
    batch = batch_of(directory, [1.0, -1.0])
    policy_step(model, optimizer, batch, CONFIG, 1.0)
    path = save_checkpoint(tmp_path, TrainerState(step=1), model, optimizer.state_dict(), directory)
    again = load_policy(path, find_device("cpu"))
    resumed = build_optimizer(again, CONFIG.optimizer)
    assert load_trainer_state(path, resumed).step == 1
    for trained, stepper in ((model, optimizer), (again, resumed)):
        policy_step(trained, stepper, batch, CONFIG, 1.0)
    ours, theirs = model.state_dict(), again.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    sample = batch.samples[0].trajectory
    assert reference_logprobs(path, sample.ids) != reference_logprobs(directory, sample.ids)
    assert transformers.AutoTokenizer.from_pretrained(path).chat_template


def test_a_published_version_has_checksums_and_a_canary(directory, tmp_path):
    model = load_policy(directory, find_device("cpu"))
    published = publish(model, tmp_path, version=1, step=0, parent=None, tokenizer_dir=directory)
    found = read_version(published.directory)
    verify(found)
    assert found.canary_logprobs == pytest.approx(reference_logprobs(published.directory, found.canary_ids), abs=1e-4)


@pytest.mark.parametrize("transport", ["delta", "collective"])
def test_the_engine_takes_a_difference_and_tensors_from_memory(directory, tmp_path, transport):
    model = load_policy(directory, find_device("cpu"))
    first = publish(model, tmp_path, version=1, step=0, parent=None, tokenizer_dir=directory)
    batch = batch_of(directory, [1.0, -1.0])
    policy_step(model, build_optimizer(model, CONFIG.optimizer), batch, CONFIG, 1.0)
    second = publish(model, tmp_path, version=2, step=1, parent=1, tokenizer_dir=directory, full_every=4)
    assert second.links == 1 and not (second.directory / "model.safetensors").exists()
    with Engine.from_directory(first.directory, [258], EngineConfig(max_slots=1, max_context=96)) as engine:
        if transport == "delta":
            taken = engine.update_weights(second.directory, 2)
        else:
            taken = engine.replace_tensors(snapshot(model), 2)
        assert taken.success, taken.message
        scored = engine.submit(second.canary_ids, SamplingParams(max_new_tokens=0), prompt_logprobs=True).result(60)
    assert scored.prompt_logprobs[1:] == pytest.approx(second.canary_logprobs, abs=1e-4)
    assert first.canary_logprobs != pytest.approx(second.canary_logprobs, abs=1e-4)


@pytest.mark.slow
def test_a_whole_run_with_the_built_in_engine(tmp_path, monkeypatch):
    """Every process real: gateway with the model's own template, engine, orchestrator, task service, trainer."""
    site = tmp_path / "site"
    site.mkdir()
    install(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *sys.path]))
    directory = write_dense(tmp_path / "model", "llama")
    final = run_rl(dataclasses.replace(CONFIG, max_context=300), tmp_path / "run", directory)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    fresh = [record["k3"] for record in records if record["staleness_max"] == 0]
    assert fresh and max(fresh) < 1e-5 and all(math.isfinite(record["k3"]) for record in records)
    assert transformers.AutoModelForCausalLM.from_pretrained(final).config.model_type == "llama"
