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
app.add_typer(env_app, name="env")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(model_app, name="model")
ledger_app = typer.Typer(no_args_is_help=True, help="Episodes that an RL run recorded.")
app.add_typer(ledger_app, name="ledger")

bench_app = typer.Typer(no_args_is_help=True, help="Measurements against other implementations.")
app.add_typer(bench_app, name="bench")

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
          weight_version: Annotated[int, typer.Option(help="Policy version of these weights.")] = 0,
          max_waiting: Annotated[int, typer.Option(help="Requests that may wait for a slot.")] = 4096,
          api_key: Annotated[list[str] | None, typer.Option(help="Key that clients must send; repeat for several.")] = None,
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


@bench_app.command("engine")
def bench_engine(quick: Annotated[bool, typer.Option(help="Small sizes and one round: does everything run?")] = False,
                 rounds: Annotated[int, typer.Option(help="Alternating rounds; the rows are their medians.")] = 3,
                 threads: Annotated[int, typer.Option(help="Threads of every candidate; 0 takes all cores.")] = 0,
                 llama_source: Annotated[Path | None, typer.Option(help="Source tree of llama.cpp, for its converter; "
                                                                        "without it llama.cpp is left out.")] = None,
                 checkpoint: Annotated[Path | None, typer.Option(help="Trained checkpoint for the rows of speculative "
                                                                      "decoding.")] = None,
                 as_json: Annotated[bool, typer.Option("--json", help="Print the result object.")] = False) -> None:
    """The engine against Transformers and llama.cpp, at long context, in a session, and while weights change."""
    from glm5.engine.benchmark import Options, measure

    options = Options(quick=quick, rounds=rounds, threads=threads, llama_source=llama_source, checkpoint=checkpoint)
    _print_results("bench engine", measure(options), as_json)


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
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS,
                               errno.ENOTDIR, errno.EEXIST):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; free some space or choose another run directory, then run again",
              file=sys.stderr)
        sys.exit(2)
