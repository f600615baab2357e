"""``glm5 bench engine``: the engine against Transformers and llama.cpp on one checkpoint, and against itself.

The checkpoint is a bf16 model of about nine million parameters with random weights from a stated seed: speed does not
depend on what a model has learned. One process, the same threads for everybody; the candidates alternate within every
round and a row is the median of the rounds' ratios, with the smallest and largest as its bounds.

Decoding starts with the keys of the prompts in the cache, except in Transformers' ``generate``, which computes them:
32 tokens each in its cases. Rows of a candidate that is left out have the value None.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm5.engine.config import EngineConfig
from glm5.engine.engine import Engine
from glm5.engine.peer_llama_cpp import LlamaCpp
from glm5.engine.peers import Peer, Transformers
from glm5.engine.replacement import load_weights
from glm5.errors import ConfigError
from glm5.model.checkpoint import save_model
from glm5.model.config import ModelConfig, preset
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.records import SamplingParams

SEED = 20260
SECTIONS = ("peers", "context", "session", "update", "speculative")
_WAIT_S = 3600.0
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to measure."""

    quick: bool = False
    """Short contexts and one round: whether everything runs, not how fast."""
    rounds: int = 3
    """Rounds of alternating measurements."""
    threads: int = 0
    """Threads of every candidate; 0 takes those that torch would."""
    llama_source: Path | None = None
    """Source tree of llama.cpp, whose converter writes the GGUF file; None leaves llama.cpp out."""
    checkpoint: Path | None = None
    """A trained checkpoint for the rows of speculative decoding; None leaves them out."""
    sections: tuple[str, ...] = SECTIONS
    """Which of ``SECTIONS`` to measure."""

    def __post_init__(self) -> None:
        for name in self.sections:
            if name not in SECTIONS:
                raise ConfigError(f"section {name!r}: expected one of {', '.join(SECTIONS)}; correct it")
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds}: must be at least 1; raise it")


@dataclass(frozen=True, slots=True)
class _Case:
    """One comparison: a prompt of ``context`` tokens for each of ``batch`` requests, ``new`` tokens each."""

    name: str
    batch: int
    context: int
    new: int
    goals: dict[str, float]
    """By peer; a peer without a goal is not measured."""

    @property
    def tokens(self) -> int:
        """What is counted: prompt tokens of a prefill, sampled ones otherwise."""
        return self.context if self.new == 1 else self.batch * self.new


_CASES = (
    _Case("decode.b1", 1, 32, 128, {"transformers": 5.0, "llama_cpp": 1.0}),
    _Case("decode.b64", 64, 32, 64, {"transformers": 5.0, "llama_cpp": 3.0}),
    _Case("decode.b1.4096", 1, 4096, 64, {"llama_cpp": 2.0}),
    _Case("prefill.4096", 1, 4096, 1, {"transformers": 10.0, "llama_cpp": 4.0}),
    _Case("prefill.8192", 1, 8192, 1, {"transformers": 20.0}),
)
_QUICK_CASES = (
    _Case("decode.b1", 1, 32, 8, {"transformers": 5.0, "llama_cpp": 1.0}),
    _Case("decode.b64", 64, 32, 4, {"transformers": 5.0, "llama_cpp": 3.0}),
    _Case("prefill.512", 1, 512, 1, {"transformers": 1.0, "llama_cpp": 1.0}),
)


def measure(options: Options) -> list[Row]:
    """The rows of ``glm5 bench engine``. Raises ConfigError when a library that was asked for is missing."""
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="glm5-bench-") as scratch:
        directory = Path(scratch) / "model"
        model = GlmMoeDsaForCausalLM(benchmark_config(), torch.Generator().manual_seed(SEED)).to(torch.bfloat16)
        save_model(model, directory)
        model = load_weights(directory, EngineConfig())  # as a server would
        rows: list[Row] = [{"name": "model.parameters", "value": _count(model), "unit": "parameters"}]
        if "peers" in options.sections:
            rows += _peer_rows(options, model, directory)
        if "context" in options.sections:
            rows += _context_rows(options, model)
        if "session" in options.sections:
            rows += _session_rows(model)
        if "update" in options.sections:
            rows += _update_rows(options, Path(scratch))
    if "speculative" in options.sections and options.checkpoint is not None:
        rows += _speculative_rows(options, options.checkpoint)
    return rows


def benchmark_config() -> ModelConfig:
    """About nine million parameters with every part of the architecture; the indexer keeps 256 keys."""
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 256,
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 0,
    }
    return preset("nano").replace(**sizes)


def _peer_rows(options: Options, model: GlmMoeDsaForCausalLM, directory: Path) -> list[Row]:
    """The engine against every candidate that was asked for."""
    rows: list[Row] = []
    peers: list[Peer] = [Transformers(directory)]
    if options.llama_source is None:
        print("llama.cpp is left out: give --llama-source (docs/engine.md says how to build it)", file=sys.stderr)
    else:
        threads = options.threads or torch.get_num_threads()
        rows += _agreement_rows(options, model, directory, options.llama_source, threads)
        peers.append(LlamaCpp(directory, options.llama_source, threads))
    try:
        return rows + _against_peers(options, model, peers)
    finally:
        for peer in peers:
            peer.close()


def _against_peers(options: Options, model: GlmMoeDsaForCausalLM, peers: list[Peer]) -> list[Row]:
    rows: list[Row] = []
    for case in _QUICK_CASES if options.quick else _CASES:
        context = case.context + case.new
        settings = EngineConfig(max_slots=case.batch, max_context=context, threads=options.threads,
                                prefix_cache=case.new > 1)
        with Engine(model, [], settings) as engine:

            def ours(engine: Engine = engine, case: _Case = case) -> None:
                _generate(engine, _prompts(case.batch, case.context), case.new)

            wanted = [peer for peer in peers if peer.name in case.goals]
            candidates = {"ours": ours}
            for peer in wanted:
                candidates[peer.name] = peer.prepare(_prompts(case.batch, case.context), case.new)
            seconds = _alternate(candidates, 1 if options.quick else options.rounds)
        rate = case.tokens / statistics.median(seconds["ours"])
        rows.append({"name": f"{case.name}.tokens_per_s", "value": round(rate, 1), "unit": "tokens/s"})
        for peer_name, goal in case.goals.items():
            rows.append(_ratio_row(f"{case.name}.vs_{peer_name}", seconds.get(peer_name), seconds["ours"], goal))
        print(f"{case.name}: {rate:.1f} tokens/s", file=sys.stderr)
    return rows


def _agreement_rows(options: Options, model: GlmMoeDsaForCausalLM, directory: Path, source: Path,
                    threads: int) -> list[Row]:
    """Whether llama.cpp computes the same model, both in fp32: log-probs, and greedy tokens behind a prompt that is
    longer than what the indexer keeps. The median, since near-ties of a router decide otherwise now and then."""
    length, new = (300, 8) if options.quick else (1000, 64)
    [prompt] = _prompts(1, length)
    with Engine(model, [], EngineConfig(max_slots=1, max_context=length + new, threads=options.threads)) as engine:
        done = engine.submit(prompt, _params(new), prompt_logprobs=True).result(_WAIT_S)
    peer = LlamaCpp(directory, source, threads, "f32")
    try:
        theirs_TW = peer.log_probs(prompt + done.output_ids[:-1])
    finally:
        peer.close()
    ids = np.array(prompt[1:] + done.output_ids)
    ours = np.array([value for value in done.prompt_logprobs if value is not None] + done.logprobs)
    difference = np.abs(theirs_TW[np.arange(len(ids)), ids] - ours)
    agreed = int((theirs_TW[length - 1 :].argmax(-1) == done.output_ids).sum())
    return [
        {"name": "agreement.llama_cpp.logprob", "value": float(np.median(difference)), "unit": "nats", "n": len(ids),
         "low": float(difference.min()), "high": float(difference.max())},
        {"name": "agreement.llama_cpp.greedy", "value": agreed / new, "unit": "share", "n": new},
    ]


def _context_rows(options: Options, model: GlmMoeDsaForCausalLM) -> list[Row]:
    """Time per decoded token at 64K tokens of context over that at 4K."""
    short, long, new = (256, 1024, 8) if options.quick else (4096, 65536, 64)
    settings = EngineConfig(max_slots=2, max_context=long + new, threads=options.threads, prefill_chunk=2048)
    with Engine(model, [], settings) as engine:
        prompts = {length: _prompts(1, length) for length in (short, long)}
        for prompt in prompts.values():
            _generate(engine, prompt, 1)  # afterwards the prompts are in the prefix cache
        candidates = {str(length): _decode_only(engine, prompt, new) for length, prompt in prompts.items()}
        seconds = _alternate(candidates, 1 if options.quick else options.rounds)
    row = _ratio_row(f"decode.context.{long}_over_{short}", seconds[str(long)], seconds[str(short)], 1.5)
    row["met"] = row["value"] <= 1.5
    return [row]


def _session_rows(model: GlmMoeDsaForCausalLM, turns: int = 20) -> list[Row]:
    """An agent's session: what is computed again, of the tokens that the session has in the end."""
    with Engine(model, [], EngineConfig(max_slots=4, max_context=4096, seed=SEED)) as engine:
        ids, again = _prompts(1, 600)[0], 0
        known = 0
        for turn in range(turns):
            before = engine.stats().prefilled_tokens
            done = engine.submit(ids, SamplingParams(max_new_tokens=40, stop_token_ids=())).result(_WAIT_S)
            # The last sampled id of a turn has no key yet, so computing it is no repetition.
            again += engine.stats().prefilled_tokens - before - (len(ids) - known)
            known = len(ids) + len(done.output_ids) - 1
            ids = [*ids, *done.output_ids, *_prompts(1, 60, seed=turn)[0]]
    share = again / known
    return [{"name": "prefix_cache.session20.recomputed", "value": share, "unit": "share", "n": known, "goal": 0.02,
             "met": share < 0.02}]


def _update_rows(options: Options, scratch: Path) -> list[Row]:
    """Milliseconds of a weight update of the nano model while requests run."""
    nano = GlmMoeDsaForCausalLM(preset("nano"), torch.Generator().manual_seed(SEED))
    directory = scratch / "nano"
    save_model(nano, directory)
    count, milliseconds = (2 if options.quick else 9), []
    settings = EngineConfig(max_slots=8, max_context=512, threads=options.threads)
    with Engine(load_weights(directory, settings), [], settings) as engine:
        for version in range(1, count + 1):
            running = [engine.submit(prompt, _params(256)) for prompt in _prompts(8, 32, limit=nano.config.vocab_size)]
            outcome = engine.update_weights(directory, version)
            assert outcome.success, outcome.message
            milliseconds.append(outcome.load_ms)
            for generation in running:
                generation.abort()
    value = statistics.median(milliseconds)
    return [{"name": "weight_update.nano", "value": round(value, 1), "unit": "ms", "n": count, "low": min(milliseconds),
             "high": max(milliseconds), "goal": 300, "met": value < 300}]


def _speculative_rows(options: Options, checkpoint: Path) -> list[Row]:
    """Acceptance length and speed-up of drafting with a trained model, by batch and number of drafts."""
    model = load_weights(checkpoint, EngineConfig())
    new = 16 if options.quick else 128
    rows: list[Row] = []
    for batch in (1, 16):
        settings = {"max_slots": batch, "max_context": 512, "threads": options.threads}
        prompts = _prompts(batch, 32, limit=model.config.vocab_size)
        for drafts in (1, 3):
            plain, drafting = EngineConfig(**settings), EngineConfig(**settings, speculative=drafts)
            with Engine(model, [], plain) as without, Engine(model, [], drafting) as with_drafts:
                engines = {"plain": without, "drafts": with_drafts}
                candidates = {name: _decode_only(engine, prompts, new) for name, engine in engines.items()}
                seconds = _alternate(candidates, options.rounds)
                length = with_drafts.stats().acceptance_length
            name = f"speculative.b{batch}.n{drafts}"
            rows.append({"name": f"{name}.acceptance_length", "value": round(length, 3), "unit": "tokens"})
            rows.append(_ratio_row(f"{name}.speedup", seconds["plain"], seconds["drafts"], None))
    return rows


def _alternate(candidates: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every candidate in every round, after one that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _ratio_row(name: str, slower: list[float] | None, faster: list[float], goal: float | None) -> Row:
    """Median of slower over faster, round by round."""
    row: Row = {"name": name, "value": None, "unit": "x", "goal": goal}
    if slower is not None:
        ratios = sorted(a / b for a, b in zip(slower, faster, strict=True))
        row |= {"value": statistics.median(ratios), "n": len(ratios), "low": ratios[0], "high": ratios[-1]}
        row["met"] = None if goal is None else row["value"] >= goal
    return row


def _generate(engine: Engine, prompts: list[list[int]], new: int) -> None:
    for generation in [engine.submit(prompt, _params(new)) for prompt in prompts]:
        generation.result(_WAIT_S)


def _decode_only(engine: Engine, prompts: list[list[int]], new: int) -> Callable[[], None]:
    return lambda: _generate(engine, prompts, new)


def _params(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=new, stop_token_ids=())


def _prompts(batch: int, length: int, seed: int = SEED, limit: int = 4000) -> list[list[int]]:
    """Random ids that are no special token in any of the candidates."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, limit, (batch, length), generator=generator).tolist()


def _count(model: GlmMoeDsaForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
