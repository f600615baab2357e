"""Commands that serve and talk to a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.cli.options import AsJson, Device, Host, Port, ReadyFile, print_results
from glm5.device import AUTO
from glm5.errors import ConfigError


def serve(context: typer.Context, directory: Path, host: Host = "127.0.0.1", port: Port = 8000,
          ready_file: ReadyFile = None,
          max_slots: Annotated[int, typer.Option(help="Sequences held in the cache at once.")] = 16,
          max_context: Annotated[int, typer.Option(help="Tokens per sequence; 0 takes the model's maximum.")] = 0,
          threads: Annotated[int, typer.Option(help="CPU threads of the engine; 0 takes all cores.")] = 0,
          device: Device = None,
          weight_version: Annotated[int, typer.Option(help="Policy version of these weights.")] = 0,
          max_waiting: Annotated[int, typer.Option(help="Requests that may wait for a slot.")] = 4096,
          cache_mib: Annotated[int, typer.Option(help="Memory of the key cache; 0 fits all slots.")] = 0,
          cache_dtype: Annotated[str, typer.Option(help="Entries of the key cache: auto, int8 or fp8.")] = "auto",
          speculative: Annotated[int, typer.Option(help="Tokens that the MTP layer drafts, 0 to 7.")] = 0,
          replicas: Annotated[int, typer.Option(help="Engine processes behind this address.")] = 1,
          model_name: Annotated[str, typer.Option(help="Name of the model; the directory's without it.")] = "",
          role: Annotated[str, typer.Option(help="both, prefill or decode.")] = "both",
          peer: Annotated[str, typer.Option(help="With --role decode: URL of the server with --role prefill.")] = "",
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
          access_log: Annotated[str, typer.Option(help="File for one JSON line a request; - is stdout.")] = "",
          collect: Annotated[str, typer.Option(help="Directory in which answers and feedback are recorded.")] = ""
          ) -> None:
    """Serve a checkpoint: the token-level protocol, the OpenAI and the Anthropic API."""
    from glm5.engine.config import EngineConfig
    from glm5.serve.app import serve as serve_directory
    from glm5.serve.config import ServeConfig, read_keys

    config = EngineConfig(max_slots=max_slots, max_context=max_context, threads=threads, max_waiting=max_waiting,
                          device=device or AUTO, cache_bytes=cache_mib << 20, cache_dtype=cache_dtype,
                          speculative=speculative)
    limits = ServeConfig(
        api_keys=(*(api_key or []), *(read_keys(api_key_file) if api_key_file else [])),
        cors_origins=tuple(cors or ()), max_body_bytes=max_body_mib << 20, max_concurrent=max_concurrent,
        request_timeout_s=request_timeout, header_timeout_s=header_timeout, body_timeout_s=body_timeout,
        shutdown_timeout_s=shutdown_timeout, response_memory_bytes=response_memory_mib << 20, access_log=access_log,
        role=role, peer=peer, collect=collect)
    if replicas != 1:
        from glm5.serve.replicas import serve_replicas

        kept = {name: value for name, value in context.params.items() if name not in _OF_THE_FRONT}
        kept["threads"] = threads or max(1, (os.cpu_count() or 1) // max(replicas, 1))
        serve_replicas(directory, replicas, host, port, ready_file, weight_version, model_name, _options(kept), limits)
        return
    serve_directory(directory, host, port, ready_file, config, weight_version=weight_version, config=limits,
                    model_name=model_name)


_OF_THE_FRONT = ("directory", "host", "port", "ready_file", "replicas", "weight_version", "model_name", "cors",
                 "access_log")
"""Options of ``serve`` that replicas do not get."""


def _options(values: dict[str, Any]) -> list[str]:
    """``values`` of parameters as words of a command line; lists repeat, None is left out."""
    words: list[str] = []
    for name, value in values.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None:
                words += [f"--{name.replace('_', '-')}", str(one)]
    return words


def generate(directory: Path, prompt: str,
             max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 128,
             temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
             seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0) -> None:
    """Continue a text with a checkpoint, without a server."""
    from glm5.records import SamplingParams
    from glm5.serve.generate import generate_text

    if not prompt:
        raise ConfigError("PROMPT: got an empty text, expected at least one character; give the text to continue")
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens: got {max_new_tokens}, expected 1 or more")
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    for piece in generate_text(directory, prompt, params):
        print(piece, end="", flush=True)
    print()


def chat(target: Annotated[str, typer.Argument(help="A checkpoint directory or the base URL of a server.")],
         temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
         thinking: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = True,
         api_key: Annotated[str, typer.Option(help="Key of the server.", envvar="GLM5_API_KEY")] = "") -> None:
    """Talk to a checkpoint or a server in the terminal."""
    from glm5.serve.generate import chat_loop

    chat_loop(target, temperature=temperature, thinking=thinking, api_key=api_key)


def adapter(url: Annotated[str, typer.Argument(help="URL of the external engine.")],
            kind: Annotated[str, typer.Option(help="sglang or vllm.")],
            weights: Annotated[Path, typer.Option(help="Checkpoint that the engine loads first.")],
            weight_version: Annotated[int, typer.Option(help="Policy version of these weights.")] = 0,
            max_context: Annotated[int, typer.Option(help="Tokens per sequence; 0 takes the engine's limit.")] = 0,
            host: Host = "127.0.0.1", port: Port = 8300, ready_file: ReadyFile = None) -> None:
    """The token-level protocol in front of an SGLang or vLLM server. Usually started by ``glm5 rl``."""
    from glm5.serve.adapter import run_adapter

    run_adapter(kind, url, weights.resolve(), weight_version, host, port, ready_file, max_context)


def gateway(engine: Annotated[list[str], typer.Option(help="Engine URL; repeat for several.")],
            tokenizer: Annotated[Path, typer.Option(help="Directory with tokenizer.json.")],
            store: Annotated[Path, typer.Option(help="SQLite file of the recorded turns.")],
            host: Host = "127.0.0.1", port: Port = 8100, ready_file: ReadyFile = None) -> None:
    """Record agents token-exactly: OpenAI API in front, token-level engine protocol behind."""
    from glm5.gateway.app import run_gateway

    run_gateway(engine, tokenizer, store, host, port, ready_file)


def bench_engine(quick: Annotated[bool, typer.Option(help="Small sizes and one round: does everything run?")] = False,
                 rounds: Annotated[int, typer.Option(help="Alternating rounds; the rows are their medians.")] = 3,
                 threads: Annotated[int, typer.Option(help="Threads of every candidate; 0 takes all cores.")] = 0,
                 llama_source: Annotated[Path | None, typer.Option(help="Source tree of llama.cpp, for its converter; "
                                                                        "without it llama.cpp is left out.")] = None,
                 checkpoint: Annotated[Path | None, typer.Option(help="Trained checkpoint for the rows of speculative "
                                                                      "decoding.")] = None,
                 section: Annotated[list[str] | None, typer.Option(help="peers, context, session, update or "
                                                                        "speculative; repeat; all without it.")] = None,
                 as_json: AsJson = False) -> None:
    """The engine against Transformers and llama.cpp, at long context, in a session, and while weights change."""
    from glm5.engine.benchmark import SECTIONS, Options, measure

    options = Options(quick=quick, rounds=rounds, threads=threads, llama_source=llama_source, checkpoint=checkpoint,
                      sections=tuple(section or SECTIONS))
    print_results("bench engine", measure(options), as_json)
