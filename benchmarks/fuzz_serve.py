"""Random requests over the server's own OpenAPI description: no 5xx, no answer that the description does not allow.

    python benchmarks/fuzz_serve.py [DIRECTORY] [--seconds 100] [--examples 1000] [--seed 1] [--json]

Starts ``glm5 serve`` over the checkpoint in DIRECTORY (without it, over a small random one) and runs schemathesis
(extra ``test``) with each of its phases for a share of the time: its examples, its systematic coverage of boundary
values, fuzzing with valid and invalid data, and sequences of calls that are linked. An answer must not be a 5xx and
must have a status, a type and a body that the description names. Every failure is printed with the call that repeats
it.

Two routes are called last and apart from the others: ``/pause_generation``, because afterwards nothing is generated,
and ``/init_weights_update_group``, because it waits for peers as long as it is told to (here a tenth of a second).

Boundary values of all routes take longer than their share on most machines: give more ``--seconds`` to reach the last
route. Rows: per phase ``fuzz.PHASE.cases``, ``fuzz.PHASE.operations`` (reached in the time; ``n`` is their number) and
``fuzz.PHASE.failures``; ``fuzz.blocking.failures`` of those two routes; ``fuzz.alive`` (whether the server generates
afterwards).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from glm5.eval.report import results_object
from glm5.process import spawn, stop, wait_ready

PHASES = {"examples": 0.05, "coverage": 0.45, "fuzzing": 0.35, "stateful": 0.15}
"""Share of the time."""
_PAUSE, _JOIN = "/pause_generation", "/init_weights_update_group"
_CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
_CONTEXT, _REQUEST_TIMEOUT_S = 64, 60


@dataclass(frozen=True)
class Fuzzer:
    """Runs schemathesis against one server."""

    url: str
    folder: Path
    seed: int
    examples: int

    def run(self, name: str, document: dict[str, Any], phase: str, seconds: float) -> tuple[int, int, int]:
        """(cases, failures, operations reached) of one phase over ``document``; what failed is printed."""
        described, report = self.folder / f"{name}.openapi.json", self.folder / f"{name}.report.json"
        described.write_text(json.dumps(document))
        command = [sys.executable, "-m", "schemathesis.cli", "run", str(described), "--url", self.url,
                   "--phases", phase, "--checks", _CHECKS, "--max-examples", str(self.examples),
                   "--max-time", str(max(1, round(seconds))),
                   "--request-timeout", str(_REQUEST_TIMEOUT_S), "--seed", str(self.seed), "--continue-on-failure",
                   "--report-json-path", str(report), "--generation-database", "none", "--no-color"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)
        if not report.exists():
            sys.exit(f"fuzz serve: schemathesis gave no report; install glm5[test]:\n{done.stdout}{done.stderr}")
        found = json.loads(report.read_text())
        failures = sum(group["count"] for group in found["failures"] + found["errors"])
        if failures:
            print(done.stdout, file=sys.stderr)
        return found["test_cases"]["generated"], failures, found["operations"]["tested"]


def described(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The server's document without the routes that block others, and with these alone."""
    document = httpx.get(f"{url}/openapi.json", timeout=60).raise_for_status().json()
    paths = document["paths"]
    joining = paths[_JOIN]["post"]["requestBody"]["content"]["application/json"]["schema"]
    joining["properties"]["timeout_s"] = {"type": "number", "minimum": 0.05, "maximum": 0.1}
    joining["required"].append("timeout_s")
    blocking = {path: paths.pop(path) for path in (_PAUSE, _JOIN)}
    return document, {**document, "paths": blocking}


def measure(url: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all phases; result rows."""
    fuzzer = Fuzzer(url, folder, options.seed, options.examples)
    others, blocking = described(url)
    total = sum(len(methods) for methods in others["paths"].values())
    rows: list[dict[str, Any]] = []
    for phase, share in PHASES.items():
        cases, failures, reached = fuzzer.run(phase, others, phase, share * options.seconds)
        rows.append({"name": f"fuzz.{phase}.cases", "value": cases, "unit": "requests"})
        rows.append({"name": f"fuzz.{phase}.operations", "value": reached, "unit": "operations", "n": total})
        rows.append({"name": f"fuzz.{phase}.failures", "value": failures, "unit": "failures", "n": cases, "goal": 0,
                     "met": failures == 0})
    cases, failures, _ = fuzzer.run("blocking", blocking, "coverage", 10)
    rows.append({"name": "fuzz.blocking.failures", "value": failures, "unit": "failures", "n": cases, "goal": 0,
                 "met": failures == 0})
    httpx.post(f"{url}/continue_generation", timeout=60).raise_for_status()
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "stop_token_ids": []}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=_REQUEST_TIMEOUT_S)
    is_alive = answer.status_code == 200 and len(answer.json()["output_ids"]) == 4
    rows.append({"name": "fuzz.alive", "value": is_alive, "unit": "bool", "goal": True, "met": is_alive})
    return rows


def write_checkpoint(directory: Path) -> None:
    """A small random model with a tokenizer."""
    import torch

    from glm5.model.checkpoint import save_model
    from glm5.model.config import preset
    from glm5.model.transformer import GlmMoeDsaForCausalLM
    from glm5.tokenizer.bpe import train_tokenizer

    config = preset("nano").replace(vocab_size=320, hidden_size=32, num_hidden_layers=2, initializer_range=0.3)
    save_model(GlmMoeDsaForCausalLM(config, torch.Generator().manual_seed(0)), directory)
    train_tokenizer(["the quick brown fox jumps over the lazy dog, über 日本語 😀 " * 20], 320).save(directory)


@contextmanager
def server_of(directory: Path, folder: Path) -> Iterator[str]:
    """URL of a fresh server; its log stays in ``folder``."""
    ready, log = folder / "ready.json", folder / "serve.log"
    process = spawn(["serve", str(directory), "--port", "0", "--ready-file", str(ready), "--max-context", str(_CONTEXT),
                     "--threads", "1"], log)
    try:
        yield wait_ready(process, ready, log, 300)
    finally:
        stop(process)
        for line in log.read_text().splitlines():
            if line.partition(":")[0].isidentifier() and "Error" in line.partition(":")[0]:  # of a traceback
                print(f"server: {line}", file=sys.stderr)


def main() -> int:
    """Parse, fuzz, print; 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="checkpoint with its tokenizer")
    parser.add_argument("--seconds", type=float, default=100, help="of all phases together")
    parser.add_argument("--examples", type=int, default=1000, help="most cases of a route and phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="glm5-fuzz-") as scratch:
        folder, directory = Path(scratch), options.directory
        if directory is None:
            directory = folder / "random"
            write_checkpoint(directory)
        with server_of(directory.resolve(), folder) as url:
            rows = measure(url, folder, options)
    out = sys.stderr if options.as_json else sys.stdout
    for row in rows:
        print(f"{row['name']:26} {row['value']!s:>8} {row['unit']}", file=out)
    if options.as_json:
        print(json.dumps(results_object("fuzz serve", rows)))
    return 0 if all(row.get("met", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
