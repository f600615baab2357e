"""The ``glm5`` command: parse → load → one library call → print. Results go to stdout, progress to stderr.

Exit codes: 0 done, 1 a check or comparison failed, 2 the user can fix it (one line says how), 130 interrupted.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.errors import Glm5Error

app = typer.Typer(name="glm5", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="The complete GLM-5 system: train, reinforce and serve.")
env_app = typer.Typer(no_args_is_help=True, help="Tasksets and task services.")
tokenizer_app = typer.Typer(no_args_is_help=True, help="Byte-level BPE tokenizers.")
model_app = typer.Typer(no_args_is_help=True, help="Model configurations and checkpoints.")
bench_app = typer.Typer(no_args_is_help=True, help="Measurements against other implementations.")
app.add_typer(bench_app, name="bench")
app.add_typer(env_app, name="env")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(model_app, name="model")

Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as steps=100 or optimizer.lr=3e-4.")]
Port = Annotated[int, typer.Option(help="TCP port; 0 takes a free one.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
ReadyFile = Annotated[Path | None, typer.Option(help="Write {url, pid} here once the service accepts connections.")]


@app.command()
def run(config: Path, overrides: Overrides = None) -> None:
    """Run a whole pipeline: tokenizer, every training stage, RL, evaluation, report. Continues where it stopped."""
    from glm5.pipeline import run_pipeline

    print(run_pipeline(config, overrides or []))


@app.command()
def train(config: Path, run_dir: Annotated[Path | None, typer.Option(help="Run directory.")] = None,
          overrides: Overrides = None) -> None:
    """Run one training stage up to SFT. Continues from its newest complete checkpoint."""
    from glm5.config import load_config
    from glm5.train.config import StageConfig
    from glm5.train.stages import run_stage

    stage = load_config(StageConfig, config, overrides or [])
    print(run_stage(stage, run_dir or _run_dir(config, stage.name)))


@app.command()
def rl(config: Path, run_dir: Annotated[Path | None, typer.Option(help="Run directory.")] = None,
       compare_sync: Annotated[bool, typer.Option("--compare-sync", help="Train once asynchronously and once with "
                               'mode = "sync" from the same checkpoint, and compare.')] = False,
       overrides: Overrides = None) -> None:
    """Asynchronous reinforcement learning from a checkpoint. Continues from its newest complete checkpoint."""
    from glm5.config import load_config
    from glm5.rl.config import RLConfig
    from glm5.rl.trainer import compare_modes, run_rl

    loaded = load_config(RLConfig, config, overrides or [])
    directory = run_dir or _run_dir(config, f"{loaded.name}-compare" if compare_sync else loaded.name)
    if compare_sync:
        from glm5.eval.statistics import wilson_interval

        def bounds(successes: int, n: int) -> tuple[float, float]:
            interval = wilson_interval(successes, n)
            return interval.low, interval.high

        _print_results("rl --compare-sync", compare_modes(loaded, directory, bounds))
    else:
        print(run_rl(loaded, directory))


@app.command()
def serve(directory: Path, host: Host = "127.0.0.1", port: Port = 8000, ready_file: ReadyFile = None,
          max_slots: Annotated[int, typer.Option(help="Sequences held in the cache at once.")] = 16,
          max_context: Annotated[int, typer.Option(help="Tokens per sequence; 0 takes the model's maximum.")] = 0,
          threads: Annotated[int, typer.Option(help="CPU threads of the engine; 0 takes all cores.")] = 0,
          weight_version: Annotated[int, typer.Option(help="Policy version of these weights.")] = 0) -> None:
    """Serve a checkpoint: the token-level protocol and the OpenAI API."""
    from glm5.engine.config import EngineConfig
    from glm5.serve.app import serve as serve_directory

    config = EngineConfig(max_slots=max_slots, max_context=max_context, threads=threads)
    serve_directory(directory, host, port, ready_file, config, weight_version=weight_version)


@app.command()
def generate(directory: Path, prompt: str,
             max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 128,
             temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
             seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0) -> None:
    """Continue a text with a checkpoint, without a server."""
    from glm5.records import SamplingParams
    from glm5.serve.generate import generate_text

    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    for piece in generate_text(directory, prompt, params):
        print(piece, end="", flush=True)
    print()


@app.command()
def chat(target: Annotated[str, typer.Argument(help="A checkpoint directory or the base URL of a server.")],
         temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
         thinking: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = True) -> None:
    """Talk to a checkpoint or a server in the terminal."""
    from glm5.serve.generate import chat_loop

    chat_loop(target, temperature=temperature, thinking=thinking)


@app.command()
def gateway(engine: Annotated[list[str], typer.Option(help="Engine URL; repeat for several.")],
            tokenizer: Annotated[Path, typer.Option(help="Directory with tokenizer.json.")],
            store: Annotated[Path, typer.Option(help="SQLite file of the recorded turns.")],
            host: Host = "127.0.0.1", port: Port = 8100, ready_file: ReadyFile = None) -> None:
    """Record agents token-exactly: OpenAI API in front, token-level engine protocol behind."""
    from glm5.gateway.app import run_gateway

    run_gateway(engine, tokenizer, store, host, port, ready_file)


@app.command()
def orchestrator(config: Path, run_dir: Annotated[Path, typer.Option(help="Run directory with the ledger.")],
                 gateway_url: Annotated[str, typer.Option(help="URL of the gateway.")],
                 host: Host = "127.0.0.1", port: Port = 8200, ready_file: ReadyFile = None) -> None:
    """Start episodes, group them, pace them; task services register here. Usually started by ``glm5 rl``."""
    from glm5.rl.orchestrator import run_orchestrator

    run_orchestrator(config, run_dir, gateway_url, host, port, ready_file)


@app.command()
def results(first: Path, second: Path) -> None:
    """Show two result files (``report.json``, ``--json`` output) side by side."""
    from glm5.eval.report import compare

    print(compare(first, second))


@env_app.command("serve")
def env_serve(names: Annotated[list[str], typer.Argument(help="Tasksets to serve.")],
              host: Host = "127.0.0.1", port: Port = 8300, ready_file: ReadyFile = None,
              register: Annotated[str | None, typer.Option(help="Orchestrator URL to register at.")] = None,
              sandbox: Annotated[str, typer.Option(help="bwrap, or none for no isolation at all.")] = "bwrap",
              capacity: Annotated[int, typer.Option(help="Episodes at once.")] = 64) -> None:
    """Serve tasksets over HTTP."""
    from glm5.env.service import run_service

    run_service(names, host, port, ready_file, register, sandbox, capacity)


@env_app.command("list")
def env_list() -> None:
    """Tasksets that are installed."""
    from glm5.env.tasks import available_tasksets

    for name in available_tasksets():
        print(name)


@env_app.command("check")
def env_check(name: str, count: Annotated[int, typer.Option(help="Tasks per split.")] = 16,
              sandbox: Annotated[str, typer.Option(help="bwrap, or none for no isolation at all.")] = "bwrap",
              as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """Prove a taskset: the oracle scores 1, doing nothing scores 0, splits do not overlap."""
    from glm5.env.check import check_taskset

    rows = check_taskset(name, count, sandbox)
    _print_results(f"env check {name}", rows, as_json)
    if not all(row.get("met", True) for row in rows):
        raise typer.Exit(1)


@env_app.command("demos")
def env_demos(name: str, output: Annotated[Path, typer.Option(help="File to write, one conversation a line.")],
              count: Annotated[int, typer.Option(help="Demonstrations.")] = 100,
              sandbox: Annotated[str, typer.Option(help="bwrap, or none for no isolation at all.")] = "bwrap") -> None:
    """Write demonstrations of the scripted expert as a conversations file."""
    from glm5.env.check import write_demonstrations

    print(f"{write_demonstrations(name, count, output, sandbox)} demonstrations in {output}")


@tokenizer_app.command("train")
def tokenizer_train(sources: Annotated[list[str], typer.Argument(help='"stdlib", folders, .jsonl or .parquet files.')],
                    output: Annotated[Path, typer.Option(help="Directory to write.")],
                    vocab_size: Annotated[int, typer.Option(help="Size, special tokens included.")] = 1024) -> None:
    """Train a byte-level BPE tokenizer with the GLM special tokens."""
    from glm5.data.sources import read_documents
    from glm5.tokenizer.bpe import train_tokenizer

    trained = train_tokenizer((document.text for document in read_documents(sources)), vocab_size)
    trained.save(output)
    print(output)


@model_app.command("info")
def model_info(target: Annotated[str, typer.Argument(help="A preset or a checkpoint directory.")],
               as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """Exact parameter counts of a preset or checkpoint."""
    from glm5.model.config import ModelConfig, parameter_counts, preset

    config = ModelConfig.from_json_file(Path(target) / "config.json") if Path(target).is_dir() else preset(target)
    rows = [{"name": f"parameters.{name}", "value": value, "unit": "parameters"}
            for name, value in parameter_counts(config).items()]
    _print_results(f"model info {target}", rows, as_json)


@bench_app.command("attention")
def bench_attention(quick: Annotated[bool, typer.Option(help="Small sizes, seconds instead of minutes.")] = False,
                    threads: Annotated[int, typer.Option(help="Threads; 0 takes all.")] = 0,
                    as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Sparse against dense attention of one layer: decode, prefill, training, memory. About 10 minutes."""
    from glm5.kernels.bench import bench_attention as measure

    rows = measure(quick, threads, lambda line: print(line, file=sys.stderr, flush=True))
    _print_results("bench attention", rows, as_json)


def _run_dir(config: Path, name: str) -> Path:
    """Where a stage runs by default: beside the stages of the pipeline whose configurations lie in the same folder."""
    return Path("runs") / config.resolve().parent.name / name


def _print_results(command: str, rows: list[dict[str, Any]], as_json: bool = False) -> None:
    """A table for people on stderr when stdout is for machines; the result object as the last line of stdout."""
    from glm5.eval.report import results_object

    out = sys.stderr if as_json else sys.stdout
    for row in rows:
        interval = f"  [{row['low']:.3f}, {row['high']:.3f}]" if "low" in row else ""
        print(f"{row['name']:40} {row['value']:>18} {row['unit']}{interval}", file=out)
    if as_json:
        print(json.dumps(results_object(command, rows)))


def main() -> None:
    """Entry point: errors that a user can fix are one line and exit code 2."""
    from glm5.process import die_with_parent

    die_with_parent()
    try:
        app()
    except Glm5Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as error:
        if error.code == 130:  # typer's answer to Ctrl-C
            print("interrupted; run the same command again to continue", file=sys.stderr)
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; free some space or choose another run directory, then run again",
              file=sys.stderr)
        sys.exit(2)
