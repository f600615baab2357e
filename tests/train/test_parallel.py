"""Layouts of two and four processes against one process: losses, gradients, updates, logits."""

import multiprocessing

import pytest
import torch

from .processes import LAYOUTS, PROCESSES, alone, free_ports, process

TWO = [name for name in LAYOUTS if name in ("fsdp2", "ep2", "cp2", "tp2")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every process found in every layout, by layout and rank."""
    directory = tmp_path_factory.mktemp("layouts")
    context = multiprocessing.get_context("forkserver")  # imports torch once for all four
    context.set_forkserver_preload(["glm5.train.parallel.spread", "glm5.train.loop"])
    ports = free_ports(len(LAYOUTS))
    started = [context.Process(target=process, args=(rank, ports, str(directory))) for rank in range(PROCESSES)]
    for each in started:
        each.start()
    for each in started:
        each.join(300)
        assert each.exitcode == 0
    results = {name: [torch.load(path, weights_only=False) for path in sorted(directory.glob(f"{name}.?.pt"))]
               for name in LAYOUTS}
    for name, ranks in results.items():
        for result in ranks:
            assert "error" not in result, f"{name}: {result['error']}"
    return results


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


@pytest.mark.parametrize("name", TWO)
def test_the_split_into_micro_batches_changes_nothing(found, expected, name):
    assert_same_training(found[name][0]["micro"], expected["sparse"])


@pytest.mark.parametrize("name", TWO)
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
