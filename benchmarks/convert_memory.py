"""Peak memory of ``glm5 convert``: a random checkpoint of 4 GB to FP8 and back, each in a process of its own.

Run: ``python benchmarks/convert_memory.py [--directory DIR]``. Needs 11 GB of disk. Prints a table and, last,
the result object with these rows: ``convert.source_bytes``, and for each DIRECTION
(``bf16_to_fp8``, ``fp8_to_bf16``) ``convert.peak_rss.DIRECTION`` with its goal and ``convert.wall_s.DIRECTION``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from glm5.eval.report import results_object
from glm5.model.checkpoint import replacing, state_dict_published, write_config
from glm5.model.config import ModelConfig
from glm5.model.shards import ShardWriter, TensorSpec
from glm5.model.transformer import GlmMoeDsaForCausalLM

GOAL_BYTES = 1.5e9
CONFIG = ModelConfig(
    vocab_size=65536, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=1024, num_hidden_layers=9,
    num_attention_heads=16, num_key_value_heads=16, q_lora_rank=768, kv_lora_rank=512, n_routed_experts=32,
    first_k_dense_replace=1, index_n_heads=16)


def write_random_checkpoint(directory: Path) -> int:
    """A bf16 checkpoint of ``CONFIG`` with random values, written tensor by tensor; its bytes."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in
                  state_dict_published(GlmMoeDsaForCausalLM(CONFIG)).items()}
    specs = {name: TensorSpec(torch.float32 if name.endswith("_bias") else torch.bfloat16, shape)
             for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    with replacing(directory) as temporary:
        writer = ShardWriter(temporary, specs, 5 * 10**9)
        for name, spec in specs.items():
            writer.write(name, torch.empty(spec.shape, dtype=spec.dtype).normal_(0, 0.02, generator=generator))
        writer.close()
        write_config(CONFIG, temporary)
    return sum(spec.nbytes for spec in specs.values())


def convert(source: Path, target: Path, *options: str) -> tuple[int, float]:
    """Peak resident bytes and seconds of one conversion."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "glm5", "convert", str(source), str(target), *options],
                               stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"glm5 convert ended with {process.returncode}")
    return usage.ru_maxrss * 1024, time.perf_counter() - started


def main() -> None:
    """Make the checkpoint, convert it both ways, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="where to put the checkpoints; they are removed afterwards")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        folder = Path(name)
        size = write_random_checkpoint(folder / "bf16")
        rows = [{"name": "convert.source_bytes", "value": size, "unit": "bytes"}]
        for direction, source, target, options in (
                ("bf16_to_fp8", "bf16", "fp8", ["--fp8"]), ("fp8_to_bf16", "fp8", "back", ["--dtype", "bfloat16"])):
            peak, seconds = convert(folder / source, folder / target, *options)
            rows.append({"name": f"convert.peak_rss.{direction}", "value": peak, "unit": "bytes", "goal": GOAL_BYTES,
                         "met": peak < GOAL_BYTES})
            rows.append({"name": f"convert.wall_s.{direction}", "value": seconds, "unit": "s"})
    for row in rows:
        print(f"{row['name']:32} {row['value']:>16,.0f} {row['unit']}")
    print(json.dumps(results_object("benchmarks/convert_memory.py", rows)))


if __name__ == "__main__":
    main()
