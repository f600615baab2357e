"""Devices by name: what is found, what is missing, and a whole stage on one that PyTorch does not bring."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from glm5.device import accelerator_names, collective_backend, find_device, local_device, peak_memory_bytes, synchronize
from glm5.errors import ConfigError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "glm5"

ON_A_PLUGIN = """
    import json, sys
    from pathlib import Path
    import torch
    from glm5.device import find_device, peak_memory_bytes, synchronize
    from glm5.engine.config import EngineConfig
    from glm5.engine.engine import Engine
    from glm5.records import SamplingParams
    from glm5.runlog import read_jsonl
    from glm5.tokenizer.bpe import load_tokenizer, train_tokenizer
    from glm5.train.config import ParallelConfig
    from glm5.train.stages import run_stage
    from tests import toy_device
    from tests.train.processes import stage
    import dataclasses

    directory = Path(sys.argv[1])
    (directory / "texts").mkdir()
    for number in range(8):
        text = " ".join(f"sentence {number * word} of some text" for word in range(40))
        (directory / "texts" / f"{number}.txt").write_text(text)
    train_tokenizer(["some text to have a vocabulary from"], 300).save(directory / "tokenizer")
    found = {}
    for name in ("npu", "cpu"):  # PyTorch counts devices at its first backward pass
        before = len(toy_device.CALLS)
        config = dataclasses.replace(stage(directory, ParallelConfig()), device=name, steps=2)
        final = run_stage(config, directory / name / "s")
        stops = load_tokenizer(final).stop_ids
        with Engine.from_directory(final, stops, EngineConfig(device=name, max_slots=2, max_context=32)) as engine:
            result = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=4, temperature=0.0)).result(60)
        metrics = read_jsonl(directory / name / "s" / "metrics.jsonl")
        found[name] = {"loss": [record["loss"] for record in metrics], "ids": list(result.output_ids),
                       "calls": len(toy_device.CALLS) - before, "device": str(find_device(name))}
    assert find_device("auto").type == "npu" and find_device("npu:0").type == "npu"
    found["backward_ran_there"] = any("backward" in name for name in toy_device.CALLS)
    print(json.dumps(found))
"""


def test_a_plugin_that_is_missing_is_named():
    for name, package in (("npu", "torch_npu"), ("musa:0", "torch_musa"), ("mlu", "torch_mlu")):
        needs = f"device='{name}' needs the PyTorch plug-in {package}, .*; install {package}"
        with pytest.raises(ConfigError, match=needs):
            find_device(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_is_not_there_is_one_line():
    for name in ("cuda", "cuda:1", "abacus"):
        lacks = f"device='{name}': this machine has no accelerator that PyTorch sees; use"
        with pytest.raises(ConfigError, match=lacks):
            find_device(name)
    with pytest.raises(ConfigError, match=r"device='cuda:x': expected a device type and perhaps an index"):
        find_device("cuda:x")
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    assert accelerator_names() == []


def test_processes_of_one_machine_share_its_cores():
    threads = torch.get_num_threads()
    try:
        assert local_device("cpu", 1, 10_000) == torch.device("cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_what_the_processor_offers():
    host = torch.device("cpu")
    assert collective_backend(host) == "gloo"
    synchronize(host)
    assert peak_memory_bytes(host) == peak_memory_bytes() > 10**7
    with pytest.raises(ConfigError, match="device='meta' has no communication library"):
        collective_backend(torch.device("meta"))


def test_a_stage_and_an_engine_run_on_a_device_of_a_plugin(tmp_path):
    plugin = tmp_path / "plugin" / "torch_npu"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("from tests.toy_device import register\nregister('npu')\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), str(plugin.parent)])}
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(ON_A_PLUGIN), str(tmp_path)], env=environment,
                            capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["npu"]["device"].startswith("npu") and found["cpu"]["calls"] == 0
    assert found["npu"]["calls"] > 1000 and found["backward_ran_there"]
    assert found["npu"]["loss"] == pytest.approx(found["cpu"]["loss"], rel=1e-5)
    assert found["npu"]["ids"] == found["cpu"]["ids"]


def test_no_other_module_names_a_device():
    names = "cuda|rocm|nvidia|npu|musa|mlu|xpu|hpu|mps|nccl|hccl|gloo"
    pattern = re.compile(rf"\b(torch_)?({names})\b|is_cuda|[\"']cpu[\"'\]:]", re.IGNORECASE)
    allowed = {PACKAGE / "device.py"}
    wrong = [f"{path}:{number}: {line.strip()}" for path in sorted(PACKAGE.rglob("*.py"))
             if path not in allowed and PACKAGE / "kernels" / "triton" not in path.parents
             for number, line in enumerate(path.read_text().splitlines(), 1) if pattern.search(line)]
    assert not wrong, "\n".join(wrong)
