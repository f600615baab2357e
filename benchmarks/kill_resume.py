"""Kill a whole tiny run again and again, in every step of the pipeline, and prove that nothing was lost or done twice.

    python benchmarks/kill_resume.py [--rounds 1] [--seed 0] [--form pipeline|full]

An uninterrupted run is the reference. A second run of the same configuration gets, per round and step, one SIGKILL and
one SIGINT (Ctrl-C) at a random moment after that step began, and is started again after each. It must end with sound
books, no process and no unfinished file left, a checkpoint that Transformers loads, and the loss curves of the
reference. Prints a table on stderr and the result object as the last line of standard output.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
from tiny_pipeline import FORMS, STAGES, processes_that_name, start, write_tiny_pipeline  # noqa: E402

from glm5.eval.report import results_object  # noqa: E402
from glm5.runlog import read_jsonl  # noqa: E402

STEPS = 16
"""Optimizer steps of a training stage, so that it takes some seconds."""
LONGEST_DELAY_S = 1.5
STEP_TIMEOUT_S = 600.0
_UNFINISHED = re.compile(r"\..+\.\d+\.(tmp|old)")
_TIMES = {"time", "tokens_per_s", "data_wait"}
Row = dict[str, Any]
Signs = dict[str, tuple[str, str]]
"""Step of the pipeline → the file that every start of it writes, and the one that tells that it is finished."""


def main() -> None:
    """Run the reference and the killed run; exit with 1 when a row misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="SIGKILLs and SIGINTs per step")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--form", choices=sorted(FORMS), default="pipeline", help="agentic RL alone, or every RL stage")
    options = parser.parse_args()
    # Started in the background by a shell, this process ignores SIGINT, and so would the runs, which inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="glm5-kill-resume-") as directory:
        reference, killed = (_pipeline(Path(directory) / name, options.form) for name in ("reference", "killed"))
        finish(reference)
        rows = kill_everywhere(killed, signs(options.form), options.rounds, random.Random(options.seed))
        finish(killed)
        rows += check(killed.parent) + compare_curves(reference.parent / "run", killed.parent / "run")
    for row in rows:
        print(f"{row['name']:28} {row['value']:>10} {row['unit']}", file=sys.stderr)
    print(json.dumps(results_object("benchmarks/kill_resume.py", rows)))
    sys.exit(0 if all(row.get("met", True) for row in rows) else 1)


def signs(form: str) -> Signs:
    """The steps of a form in order."""
    stages = [*STAGES, *FORMS[form][0].values()]
    last = stages[-1]
    return {"tokenizer": ("events.jsonl", "tokenizer"),
            **{stage: (f"{stage}/events.jsonl", f"{stage}/final.json") for stage in stages},
            "report": (f"evaluation/{last}/ready/engine.json", f"rows/pass_at_1.{last}.json")}


def _pipeline(directory: Path, form: str) -> Path:
    directory.mkdir()
    return write_tiny_pipeline(directory, STEPS, form)


def finish(pipeline: Path) -> None:
    """Run to the end."""
    process = start(pipeline)
    _, errors = process.communicate(timeout=2 * STEP_TIMEOUT_S)
    if process.returncode:
        raise SystemExit(f"{pipeline}: exited with {process.returncode}: {errors}")


def kill_everywhere(pipeline: Path, steps: Signs, rounds: int, moments: random.Random) -> list[Row]:
    """Start, wait for a step to begin, wait a random time, send the signal; for every step and signal."""
    sent = {signal.SIGKILL: 0, signal.SIGINT: 0}
    as_promised = 0
    run_dir = pipeline.parent / "run"
    for step, (sign, done) in steps.items():
        for number in [*sent] * rounds:
            code = kill_in(pipeline, run_dir / sign, run_dir / done, number, moments.uniform(0, LONGEST_DELAY_S))
            print(f"{step}: {number.name}: exit code {code}", file=sys.stderr, flush=True)
            if code is not None:
                sent[number] += 1
                as_promised += code == (130 if number is signal.SIGINT else -signal.SIGKILL)
    rows = [{"name": f"kills.{number.name.lower()}", "value": count, "unit": "kills"} for number, count in sent.items()]
    return [*rows, _goal("exits_as_promised", as_promised, "kills", sum(sent.values()))]


def kill_in(pipeline: Path, sign: Path, done: Path, number: signal.Signals, delay_s: float) -> int | None:
    """Exit code of a start that got ``number`` ``delay_s`` after ``sign`` was written; None when ``done`` exists."""
    if done.exists():
        return None
    before = time.time()
    process = start(pipeline)
    while not (sign.exists() and sign.stat().st_mtime >= before):
        if process.poll() is not None or time.time() - before > STEP_TIMEOUT_S:
            process.kill()
            raise SystemExit(f"{sign}: not written: {process.communicate()[1]}")
        time.sleep(0.02)
    try:
        process.wait(delay_s)
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


def check(directory: Path) -> list[Row]:
    """What the killed run left."""
    from transformers import AutoModelForCausalLM

    run_dir = directory / "run"
    deadline = time.monotonic() + 10
    while (left := processes_that_name(str(directory))) and time.monotonic() < deadline:
        time.sleep(0.1)
    report = {row["name"]: row["value"] for row in json.loads((run_dir / "report.json").read_text())["rows"]}
    unfinished = [path for path in run_dir.rglob("*") if _UNFINISHED.fullmatch(path.name)]
    try:
        AutoModelForCausalLM.from_pretrained(run_dir / "final")
        loads = 1
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{run_dir / 'final'}: {error}", file=sys.stderr)
        loads = 0
    violations = sum(value for name, value in report.items() if name.endswith("ledger.violations"))
    return [_goal("ledger.violations", int(violations), "invariants", 0),
            _goal("processes_left", len(left), "processes", 0),
            _goal("unfinished_files", len(unfinished), "files", 0),
            _goal("final_loads_in_transformers", loads, "checkpoints", 1)]


def compare_curves(reference: Path, killed: Path) -> list[Row]:
    """Per training stage the metrics that differ from the reference; the last record of a step counts."""
    rows = []
    for stage in STAGES:
        expected, found = (_curve(run_dir / stage / "metrics.jsonl") for run_dir in (reference, killed))
        differing = sum(expected.get(key) != found.get(key) for key in expected.keys() | found.keys())
        rows.append({**_goal(f"curve_differences.{stage}", differing, "values", 0), "n": len(expected)})
    return rows


def _curve(path: Path) -> dict[tuple[int, str], float]:
    return {(record["step"], key): value for record in read_jsonl(path) for key, value in record.items()
            if key not in _TIMES}


def _goal(name: str, value: int, unit: str, goal: int) -> Row:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "met": value == goal}


if __name__ == "__main__":
    main()
