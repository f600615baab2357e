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
data_app = typer.Typer(no_args_is_help=True, help="Corpora: prepare, filter, look at batches.")
app.add_typer(env_app, name="env")
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(model_app, name="model")
bench_app = typer.Typer(no_args_is_help=True, help="Measurements against other implementations.")
app.add_typer(bench_app, name="bench")
ledger_app = typer.Typer(no_args_is_help=True, help="Episodes that an RL run recorded.")
app.add_typer(ledger_app, name="ledger")

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
          replay: Annotated[int, typer.Option(help="Run the batch of this skipped step again, row by row.")] = 0,
          overrides: Overrides = None) -> None:
    """Run one training stage up to SFT. Continues from its newest complete checkpoint."""
    from glm5.config import load_config
    from glm5.train.config import StageConfig
    from glm5.train.stages import replay_step, run_stage

    stage = load_config(StageConfig, config, overrides or [])
    if replay:
        _print_results(f"train --replay {replay}", replay_step(stage, run_dir or _run_dir(config, stage.name), replay))
        return
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
          weight_version: Annotated[int, typer.Option(help="Policy version of these weights.")] = 0,
          max_waiting: Annotated[int, typer.Option(help="Requests that may wait for a slot.")] = 4096,
          api_key: Annotated[list[str] | None, typer.Option(help="Key for clients; repeat for several.")] = None,
          api_key_file: Annotated[Path | None, typer.Option(help="File with one key a line.")] = None,
          cors: Annotated[list[str] | None, typer.Option(help="Web origin that may call; * means all.")] = None,
          max_body_mib: Annotated[int, typer.Option(help="Largest request body.")] = 16,
          max_concurrent: Annotated[int, typer.Option(help="Generating requests in flight.")] = 4096,
          request_timeout: Annotated[float, typer.Option(help="Seconds until an answer must be complete.")] = 3600,
          header_timeout: Annotated[float, typer.Option(help="Seconds for the head of a request.")] = 15,
          body_timeout: Annotated[float, typer.Option(help="Seconds for the body of a request.")] = 60,
          shutdown_timeout: Annotated[float, typer.Option(help="Seconds that answers may go on at the end.")] = 10,
          response_memory_mib: Annotated[int, typer.Option(help="Stored responses, in MiB; 0 stores none.")] = 64,
          access_log: Annotated[str, typer.Option(help="File for one JSON line a request; - is stdout.")] = "") -> None:
    """Serve a checkpoint: the token-level protocol, the OpenAI and the Anthropic API."""
    from glm5.engine.config import EngineConfig
    from glm5.serve.app import serve as serve_directory
    from glm5.serve.config import ServeConfig, read_keys

    config = EngineConfig(max_slots=max_slots, max_context=max_context, threads=threads, max_waiting=max_waiting)
    limits = ServeConfig(
        api_keys=(*(api_key or []), *(read_keys(api_key_file) if api_key_file else [])),
        cors_origins=tuple(cors or ()), max_body_bytes=max_body_mib << 20, max_concurrent=max_concurrent,
        request_timeout_s=request_timeout, header_timeout_s=header_timeout, body_timeout_s=body_timeout,
        shutdown_timeout_s=shutdown_timeout, response_memory_bytes=response_memory_mib << 20, access_log=access_log)
    serve_directory(directory, host, port, ready_file, config, weight_version=weight_version, config=limits)


@app.command()
def deploy(directory: Annotated[Path, typer.Argument(help="Checkpoint; its config.json is enough.")],
           target: Annotated[str, typer.Option(help="vllm, sglang, ktransformers or xllm.")],
           hardware: Annotated[str, typer.Option(help="Devices, for example 8xH200.")],
           context: Annotated[int, typer.Option(help="Tokens that one request may have.")] = 32768,
           goal: Annotated[str, typer.Option(help="latency or throughput.")] = "latency",
           mtp: Annotated[bool, typer.Option(help="Draft with the MTP layer where the engine's guide does.")] = True,
           quantization: Annotated[str, typer.Option(help="Plan for bf16, fp8, nvfp4 or w8a8 weights.")] = "",
           host_memory_gb: Annotated[int, typer.Option(help="Memory of the machine, for offloaded experts.")] = 0,
           threads: Annotated[int, typer.Option(help="CPU threads for offloaded experts.")] = 96,
           as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """Print the command that serves a checkpoint with another engine, and the memory that it takes."""
    from glm5.config import build_config
    from glm5.deploy import Wish, plan_deployment

    wish = build_config(Wish, {
        "target": target, "hardware": hardware, "context": context, "goal": goal, "mtp": mtp,
        "quantization": quantization, "host_memory_gb": host_memory_gb, "threads": threads}, "deploy")
    plan = plan_deployment(directory, wish)
    print("\n".join(["", plan.command, "", *(f"# {source}" for source in plan.sources), ""]),
          file=sys.stderr if as_json else sys.stdout)
    _print_results(f"deploy {target}", plan.rows(), as_json)


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


Settings = Annotated[list[str] | None, typer.Option("--set", help="Key of a corpus, such as filters.min_chars=200.")]
Sources = Annotated[list[str], typer.Argument(help='"stdlib", folders, files, git:PATH.')]
TokenizerDir = Annotated[Path | None, typer.Option(help="Tokenizer directory; the stage's own when left out.")]
StageRunDir = Annotated[Path | None, typer.Option(help="Run directory of the stage.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result object.")]


@data_app.command("prepare")
def data_prepare(config: Path, overrides: Overrides = None, run_dir: StageRunDir = None, tokenizer: TokenizerDir = None,
                 as_json: AsJson = False) -> None:
    """Filter and tokenise the documents of a stage now, with its data.workers, so that it starts at once."""
    from glm5.train.stages import prepare_stage

    rows = prepare_stage(*_stage_tokenizer(config, overrides, run_dir, tokenizer))
    _print_results(f"data prepare {config}", rows, as_json)


@data_app.command("inspect")
def data_inspect(config: Path, overrides: Overrides = None, run_dir: StageRunDir = None, tokenizer: TokenizerDir = None,
                 batches: Annotated[int, typer.Option(help="Batches to show.")] = 1,
                 start_step: Annotated[int, typer.Option(help="Step of the first one.")] = 0,
                 as_json: AsJson = False) -> None:
    """Show batches of a stage: decoded text by document; what the loss does not train stands in ⟦ ⟧."""
    from glm5.train.stages import inspect_stage

    stage = _stage_tokenizer(config, overrides, run_dir, tokenizer)
    rows, shown = inspect_stage(*stage, range(start_step, start_step + batches), sys.stderr if as_json else sys.stdout)
    _print_results(f"data inspect {config}", rows, as_json, batches=shown)


@data_app.command("filter")
def data_filter(sources: Sources, output: Annotated[Path, typer.Option(help=".jsonl file to write.")],
                settings: Settings = None, as_json: AsJson = False) -> None:
    """Write the documents that pass the filters of a corpus; count the dropped ones by reason."""
    from glm5.data.prepare import corpus_from_settings, write_kept
    from glm5.train.scoring import load_scorer

    rows = write_kept(corpus_from_settings(sources, settings or []), output, load_scorer)
    _print_results("data filter", rows, as_json)


@data_app.command("dedup")
def data_dedup(sources: Sources, output: Annotated[Path, typer.Option(help=".jsonl file to write.")],
               threshold: Annotated[float, typer.Option(help="Jaccard similarity of near-duplicates.")] = 0.8,
               keep: Annotated[str, typer.Option(help="first or longest.")] = "first",
               exact_only: Annotated[bool, typer.Option(help="Leave near-duplicates.")] = False,
               settings: Settings = None, as_json: AsJson = False) -> None:
    """Write the documents without exact and near duplicates; count the dropped ones."""
    from glm5.data.prepare import corpus_from_settings, write_kept

    dedup = {"exact": True, "near": not exact_only, "threshold": threshold, "keep": keep}
    rows = write_kept(corpus_from_settings(sources, settings or [], dedup), output)
    _print_results("data dedup", rows, as_json)


@data_app.command("train-filter")
def data_train_filter(output: Path, label: Annotated[list[str], typer.Option(
        help="LABEL=SOURCE, twice or more; the first label is the one whose probability is the quality.")],
        as_json: AsJson = False) -> None:
    """Train an n-gram classifier for the quality or language filter from examples of each label."""
    from glm5.data.classifier import train_from_sources

    _print_results(f"data train-filter {output}", train_from_sources(label, output), as_json)


@model_app.command("info")
def model_info(target: Annotated[str, typer.Argument(help="A preset or a checkpoint directory.")],
               context: Annotated[int, typer.Option(help="Tokens of a sequence; 0 takes 4096 or what fits.")] = 0,
               layout: Annotated[str, typer.Option(help="Parallel axes, such as fsdp=4,ep=8,cp=1,tp=1.")] = "",
               sequences: Annotated[int, typer.Option(help="Sequences that a serving rank holds.")] = 1,
               as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """Parameters, cache and FLOPs of a preset or checkpoint, and memory per device for a layout."""
    from glm5.model.info import describe, find_config
    from glm5.model.memory import parse_layout

    config = find_config(target)
    rows = describe(config, context=context or min(4096, config.max_position_embeddings), layout=parse_layout(layout),
                    sequences=sequences)
    _print_results(f"model info {target}", rows, as_json)


@bench_app.command("attention")
def bench_attention(quick: Annotated[bool, typer.Option(help="Small sizes, seconds instead of minutes.")] = False,
                    threads: Annotated[int, typer.Option(help="Threads; 0 takes all.")] = 0,
                    as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Sparse against dense attention of one layer: decode, prefill, training, memory. About 10 minutes."""
    from glm5.kernels.bench import bench_attention as measure

    rows = measure(quick, threads, lambda line: print(line, file=sys.stderr, flush=True))
    _print_results("bench attention", rows, as_json)


@app.command()
def convert(source: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
            target: Annotated[Path, typer.Argument(help="Directory to write; a checkpoint there is replaced.")],
            dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32; nothing keeps what is stored.")] = "",
            fp8: Annotated[bool, typer.Option("--fp8", help="Store as a published FP8 checkpoint does.")] = False,
            max_shard_size: Annotated[str, typer.Option(help="Largest file.")] = "5GB",
            layers: Annotated[int, typer.Option(help="Keep so many layers, and the MTP layer; 0 keeps all.")] = 0,
            as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """Rewrite a checkpoint in another type (bf16, FP8 …), file size or depth, one tensor in memory at a time."""
    from glm5.model.convert import Conversion, convert_checkpoint, parse_dtype, parse_size

    conversion = Conversion(dtype=parse_dtype(dtype) if dtype else None, fp8=fp8, layers=layers or None,
                            max_shard_bytes=parse_size(max_shard_size))
    done = convert_checkpoint(source, target, conversion)
    rows = [{"name": "convert.tensors", "value": done.tensors, "unit": "tensors"},
            {"name": "convert.bytes", "value": done.nbytes, "unit": "bytes"},
            {"name": "convert.files", "value": done.files, "unit": "files"}]
    _print_results(f"convert {source} {target}", rows, as_json)


@bench_app.command("train")
def bench_train(section: Annotated[list[str] | None, typer.Option(help="transformers, memory, tokens or sparse; "
                                   "repeat for several, none for all.")] = None,
                rounds: Annotated[int, typer.Option(help="Steps that are timed.")] = 5,
                as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """Training steps against Transformers, tokens per second by model size, sparse attention over 16K tokens."""
    from glm5.train.benchmark import SECTIONS, Options, measure

    _print_results("bench train", measure(Options(tuple(section or SECTIONS), rounds)), as_json)


@app.command()
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
             as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """Write a checkpoint with INT4, INT8 or FP8 weights, layer by layer, and measure what it costs on held-out text."""
    from glm5.eval.quantization import CalibrationConfig, quantise_directory

    choices = {"experts": experts or None, "attention": attention or None, "mlp": mlp or None,
               "indexer": indexer or None, "group_size": group_size or None,
               "rounds_inputs": False if weights_only else None}
    choices = {name: value for name, value in choices.items() if value is not None}
    text = CalibrationConfig(sources=tuple(calibration or ("stdlib",)), rows=calibration_rows, length=length)
    rows = quantise_directory(source, target, choices, rotation or None, scaling, text, compare)
    _print_results(f"quantize {source} {target}", [row.to_json() for row in rows], as_json)


RunDir = Annotated[Path, typer.Argument(help="Run directory of an RL run.")]
TasksetFilter = Annotated[str | None, typer.Option("--taskset", help="Only this taskset.")]
OutcomeFilter = Annotated[str | None, typer.Option("--outcome", help="Only this outcome.")]
StateFilter = Annotated[str | None, typer.Option("--state", help="Only groups that are ready, leased, acked, dropped.")]


@ledger_app.command("show")
def ledger_show(run_dir: RunDir,
                as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """Counts of groups and episodes by fate, staleness, and whether the books balance."""
    from glm5.rl.summary import summary_rows

    _print_results(f"ledger show {run_dir}", summary_rows(run_dir), as_json)


@ledger_app.command("list")
def ledger_list(run_dir: RunDir, taskset: TasksetFilter = None, outcome: OutcomeFilter = None,
                state: StateFilter = None, limit: Annotated[int, typer.Option(help="Newest so many.")] = 20) -> None:
    """One line per episode, newest first."""
    from glm5.rl.replay import EpisodeFilter, read_episodes

    chosen = EpisodeFilter(taskset=taskset, outcome=outcome, state=state, limit=limit)
    for item in read_episodes(run_dir, chosen):
        episode = item.episode
        fate = item.excluded or item.group_reason or item.group_state
        print(f"{episode.episode_id:40} {episode.outcome:12} reward {episode.reward!s:6} {fate:14} {episode.reason}")


@ledger_app.command("export")
def ledger_export(run_dir: RunDir, output: Annotated[Path, typer.Option(help="JSON lines file to write.")],
                  taskset: TasksetFilter = None, outcome: OutcomeFilter = None, state: StateFilter = None) -> None:
    """Write episodes with their exact tokens as JSON lines."""
    from glm5.rl.replay import EpisodeFilter, export_episodes

    count = export_episodes(run_dir, output, EpisodeFilter(taskset=taskset, outcome=outcome, state=state))
    print(f"{count} episodes in {output}")


@ledger_app.command("replay")
def ledger_replay(run_dir: RunDir, episode_id: str,
                  checkpoint: Annotated[Path, typer.Option(help="Tokenizer to decode with; weights to score with.")],
                  score: Annotated[bool, typer.Option(help="Also compare the recorded log-probs with those that the "
                                                           "checkpoint gives now.")] = True,
                  as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """Show an episode as text, and how a checkpoint scores it."""
    from glm5.rl.replay import mismatch_rows, read_episode, transcript

    item = read_episode(run_dir, episode_id)
    print(transcript(item, checkpoint), file=sys.stderr if as_json else sys.stdout)
    if score:
        _print_results(f"ledger replay {episode_id}", mismatch_rows(item, checkpoint), as_json)


def _run_dir(config: Path, name: str) -> Path:
    """Where a stage runs by default: beside the stages of the pipeline whose configurations lie in the same folder."""
    return Path("runs") / config.resolve().parent.name / name


def _stage_tokenizer(config: Path, overrides: list[str] | None, run_dir: Path | None,
                     tokenizer: Path | None) -> tuple[Any, Any, Path]:
    """A stage's configuration, the tokenizer that it trains with, and its run directory."""
    from glm5.config import load_config
    from glm5.tokenizer.bpe import load_tokenizer
    from glm5.train.config import StageConfig
    from glm5.train.stages import resolve_init

    stage = load_config(StageConfig, config, overrides or [])
    directory = run_dir or _run_dir(config, stage.name)
    return stage, load_tokenizer(tokenizer or resolve_init(stage.init, directory) or stage.tokenizer), directory


def _print_results(command: str, rows: list[dict[str, Any]], as_json: bool = False, **more: Any) -> None:
    """A table for people on stderr when stdout is for machines; the result object as the last line of stdout."""
    from glm5.eval.report import results_object

    out = sys.stderr if as_json else sys.stdout
    for row in rows:
        interval = f"  [{row['low']:.3f}, {row['high']:.3f}]" if "low" in row else ""
        print(f"{row['name']:40} {row['value']:>18} {row['unit']}{interval}", file=out)
    if as_json:
        print(json.dumps({**results_object(command, rows), **more}))


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
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS,
                               errno.ENOTDIR, errno.EEXIST):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; free some space or choose another run directory, then run again",
              file=sys.stderr)
        sys.exit(2)
