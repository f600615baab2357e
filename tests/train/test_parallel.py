"""Layouts of two and four processes against one process: losses, gradients, updates, logits."""

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm5.errors import ConfigError
from glm5.model.checkpoint import load_model
from glm5.runlog import read_jsonl
from glm5.tokenizer.bpe import train_tokenizer
from glm5.train.config import BatchRampConfig, ParallelConfig
from glm5.train.parallel.layout import Layout, connect
from glm5.train.parallel.rows import part_of_batch
from glm5.train.parallel.shards import balanced_owners

from .conftest import packed_batch
from .processes import JOBS, LAYOUTS, PROCESSES, alone, free_ports, process, run, stage, start_model

ROOT = Path(__file__).parents[2]



@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every process found in every layout, by layout and rank."""
    directory = tmp_path_factory.mktemp("layouts")
    (directory / "texts").mkdir()
    for number in range(12):
        text = " ".join(f"sentence {number * word} of some text" for word in range(40))
        (directory / "texts" / f"{number}.txt").write_text(text)
    train_tokenizer(["some text to have a vocabulary from"], 300).save(directory / "tokenizer")
    run(directory, "one", ParallelConfig())
    context = multiprocessing.get_context("forkserver")  # imports torch once for all four
    context.set_forkserver_preload(["glm5.train.parallel.spread", "glm5.train.loop"])
    ports = free_ports(len(JOBS))
    started = [context.Process(target=process, args=(rank, ports, str(directory))) for rank in range(PROCESSES)]
    for each in started:
        each.start()
    for each in started:
        each.join(600)
        assert each.exitcode == 0
    results = {name: [torch.load(path, weights_only=False) for path in sorted(directory.glob(f"{name}.?.pt"))]
               for name in JOBS}
    for name, ranks in results.items():
        for result in ranks:
            assert "error" not in result, f"{name}: {result['error']}"
    return results | {"directory": directory}


@pytest.fixture(scope="module")
def expected():
    torch.set_num_threads(1)
    return alone()


def assert_same_training(found, expected):
    for mine, reference in zip(found["steps"], expected["steps"], strict=True):
        assert mine["losses"] == pytest.approx(reference["losses"], rel=1e-5, abs=1e-6)
        assert mine["norms"] == pytest.approx(reference["norms"], rel=1e-4)
        assert mine["tokens"] == reference["tokens"]
        torch.testing.assert_close(mine["load"], reference["load"])
    for key in ("gradients", "weights", "optimizer"):
        assert found[key].keys() == expected[key].keys()
        for name, tensor in expected[key].items():
            scale = float(tensor.abs().max()) if tensor.is_floating_point() else 1.0
            torch.testing.assert_close(found[key][name], tensor, rtol=1e-4, atol=1e-5 * scale + 1e-9,
                                       msg=lambda text, name=name, key=key: f"{key} {name}: {text}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_steps_are_those_of_one_process(found, expected, name):
    assert_same_training(found[name][0]["sparse"], expected["sparse"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_processes_know_the_same_numbers(found, name):
    first, *others = (result["sparse"]["steps"] for result in found[name])
    for other in others:
        assert [step["losses"] for step in other] == [step["losses"] for step in first]
        assert [step["norms"] for step in other] == [step["norms"] for step in first]


def test_the_split_into_micro_batches_changes_nothing(found, expected):
    assert_same_training(found["ep2"][0]["micro"], expected["sparse"])


def test_a_loss_of_weight_zero_leaves_gradients_of_zeros(found):
    gradients = found["fsdp2"][0]["weightless"]["gradients"]
    assert gradients.keys() == found["fsdp2"][0]["sparse"]["gradients"].keys()
    indexers = [gradient for name, gradient in gradients.items() if ".indexer." in name]
    assert indexers and not any(gradient.any() for gradient in indexers)


def test_experts_and_processes_without_tokens(found, expected):
    busy, idle = (result["lonely"] for result in found["ep2"])
    for key in ("y", "dx", "dweights"):
        torch.testing.assert_close(busy[key], expected["lonely"][key])
        assert idle[key].shape[0] == 0
    whole = torch.cat([busy["down"], idle["down"]])
    torch.testing.assert_close(whole, expected["lonely"]["down"])
    assert whole[1].any() and not whole[[0, 2, 3]].any()


@pytest.mark.parametrize("name", ["cp2", "tp2"])
def test_the_warmup_of_the_indexers_is_that_of_one_process(found, expected, name):
    assert_same_training(found[name][0]["warmup"], expected["warmup"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_of_the_tokens_of_each_process_are_those_of_one_process(found, expected, name):
    covered = set()
    for result in found[name]:
        places = result["logits"]["places"]
        covered |= set(places.tolist())
        torch.testing.assert_close(result["logits"]["logits"], expected["logits"]["logits"][:, places], rtol=1e-4,
                                   atol=1e-5)
    assert covered == set(range(24))


def assert_same_checkpoint(found, expected):
    for file in ("model.safetensors", "trainer/optimizer.safetensors"):
        mine, reference = load_file(found / file), load_file(expected / file)
        assert mine.keys() == reference.keys()
        for name, tensor in reference.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(mine[name], tensor, rtol=1e-3, atol=1e-4 * float(tensor.abs().max()) + 1e-9)


def test_a_checkpoint_of_four_processes_goes_on_in_one(found):
    directory = found["directory"]
    final = found["run4"][0]["path"]
    moved = run(directory, "four_to_one", ParallelConfig(), final.with_name("000002"))
    assert_same_checkpoint(moved, final)
    assert_same_checkpoint(final, directory / "one/s/checkpoints/000004")
    load_model(final)


def test_a_checkpoint_of_one_process_goes_on_in_four(found):
    assert_same_checkpoint(found["move4"][0]["path"], found["directory"] / "one/s/checkpoints/000004")


def test_one_process_writes_the_run_directory(found):
    four, one = (read_jsonl(found["directory"] / name / "s/metrics.jsonl") for name in ("four", "one"))
    assert [record["step"] for record in four] == [1, 2, 3, 4]
    for mine, reference in zip(four, one, strict=True):
        for key in ("loss", "mtp_loss", "indexer_kl", "balance_loss", "grad_norm", "tokens", "expert_imbalance"):
            assert mine[key] == pytest.approx(reference[key], rel=1e-4)
    four, one = ([event["nats_per_token"] for event in read_jsonl(found["directory"] / name / "s/events.jsonl")
                  if event["kind"] == "held_out"] for name in ("four", "one"))
    assert four == pytest.approx(one, rel=1e-4)


def test_torchrun_starts_a_stage(found):
    directory = found["directory"]
    config = directory / "s.toml"
    config.write_text(as_toml(stage(directory, ParallelConfig(ep=2))))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
               str(free_ports(1)[0]), "-m", "glm5", "train", str(config), "--device", "cpu", "--run-dir",
               str(directory / "torchrun/s")]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
                            timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == [str(directory / "torchrun/s/checkpoints/000004")]
    assert result.stderr.count("s: 4/4") == 1
    assert_same_checkpoint(Path(result.stdout.strip()), directory / "one/s/checkpoints/000004")


def as_toml(config, prefix=""):
    """A dataclass as TOML: values first, then its tables."""
    lines, tables = [], []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            tables.append(f"[{prefix}{item.name}]\n{as_toml(value, f'{prefix}{item.name}.')}")
        elif isinstance(value, dict):
            table = "".join(f"{key} = {json.dumps(each)}\n" for key, each in value.items())
            tables.append(f"[{prefix}{item.name}]\n{table}")
        elif value is not None:
            lines.append(f"{item.name} = {json.dumps(value)}\n")
    return "".join((*lines, *tables))


@pytest.mark.parametrize(("config", "message"), [
    (ParallelConfig(ep=2), r"fsdp=1 x ep=2 x cp=1 x tp=1 are 2 processes, but 1 run; start with torchrun "
                           r"--nproc-per-node 2"),
    (ParallelConfig(fsdp=4), "fsdp=4 .* are 4 processes, but 1 run"),
])
def test_axes_that_do_not_multiply_to_the_processes_are_refused(config, message):
    with pytest.raises(ConfigError, match=message), connect(config, "cpu"):
        pass


@pytest.mark.parametrize(("axes", "changes", "message"), [
    ({"fsdp": 3}, {}, r"batch_rows=4 is not a multiple of 3 \(fsdp x ep of \[parallel\]\)"),
    ({"ep": 3}, {"batch_rows": 3}, r"n_routed_experts=4 is not a multiple of 3 \(ep of"),
    ({"cp": 5}, {}, r"length=24 is not a multiple of 10 \(2 x cp of"),
    ({"fsdp": 2}, {"batch_ramp": BatchRampConfig(first_rows=2, steps=2)}, r"batch_ramp: the 3 rows of step 2 are not a "
                                                                          r"multiple of 2 \(fsdp x ep of"),
    ({"tp": 4}, {}, r"num_attention_heads=2 is not a multiple of 4 \(tp of"),
])
def test_a_layout_that_does_not_divide_stage_and_model_is_refused(tmp_path, axes, changes, message):
    layout = Layout(torch.device("cpu"), **axes)
    config = dataclasses.replace(stage(tmp_path, ParallelConfig()), **changes)
    with pytest.raises(ConfigError, match=message):
        layout.check(config, start_model().config)


def test_parts_of_a_small_batch_are_filled_with_padding():
    made = packed_batch(rows=3)
    parts = [part_of_batch(made, part, 2, torch.device("cpu")) for part in range(2)]
    assert torch.equal(torch.cat([part.ids_BT for part in parts])[:3], made.ids_BT)
    assert [part.documents_BT.shape[0] for part in parts] == [2, 2]
    assert (parts[1].documents_BT[1] == -1).all() and not parts[1].loss_mask_BT[1].any()


def test_owners_are_balanced():
    owners = balanced_owners({"a": 10, "b": 7, "c": 4, "d": 3, "e": 2}, 2)
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_lost_process_ends_the_others_with_one_line(found, how):
    message = found[how][0]["message"]
    assert message.startswith("process 0 of 2 lost the others") and "timeout_s=2" in message
    assert "\n" not in message
