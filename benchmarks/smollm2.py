"""A real public model learns to use a tool: SmolLM2-135M-Instruct before, during and after agentic RL.

``python benchmarks/smollm2.py [--config configs/smollm2/rl.toml] [--run-dir DIR] [--json] [OVERRIDES]`` evaluates the
model on held-out tasks, trains it asynchronously, and evaluates it again, with the engine that the configuration names
(``engine.kind=vllm engine.url=...`` for one of others). ``--report`` only reads a run that was made. Rows:

- ``pass_at_1.before.rooms``, ``pass_at_1.after.rooms``: held-out tasks solved, with 95% intervals;
- ``reward.first``, ``reward.last``: mean reward over the first and the last ten steps, with 95% intervals over steps;
- ``difference.trained.mean``, ``.largest``: mean |log-prob difference| between engine and trainer over the sampled
  tokens of a step, those of up to ``max_staleness`` older weights included, and its largest value of any step;
- ``difference.fresh.largest``: the same over the tokens that the very weights sampled which are trained, where a step
  has such;
- ``difference.canary.mean``, ``.largest``: the same over a fixed prompt, after every weight update;
- ``difference.self_test``: the same at the start, over prompts and answers;
- ``steps``, ``weight_updates``, ``wall_s``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from glm5.config import load_config
from glm5.eval.report import results_object
from glm5.eval.statistics import bootstrap_mean, wilson_interval
from glm5.rl.config import RLConfig
from glm5.rl.launch.local import RolloutStack
from glm5.rl.summary import reward_curve
from glm5.rl.trainer import pass_rows, resolve_init, run_rl
from glm5.runlog import read_jsonl, write_atomic

WINDOW = 10
"""Steps at either end of the reward curve that are compared."""
LIMIT = 0.02
"""Accepted mean |log-prob difference| in nats."""


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/smollm2/rl.toml"))
    parser.add_argument("--run-dir", type=Path, default=Path("runs/smollm2/rl"))
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(RLConfig, arguments.config, arguments.overrides)
    if not arguments.report:
        _run(config, arguments.run_dir)
    rows = _rows(arguments.run_dir)
    for row in rows:
        interval = f"  [{row['low']:.3f}, {row['high']:.3f}]" if "low" in row else ""
        print(f"{row['name']:32} {row['value']:>12.5g} {row['unit']}{interval}")
    if arguments.json:
        print(json.dumps(results_object("benchmarks/smollm2.py", rows)))


def _run(config: RLConfig, run_dir: Path) -> None:
    """Evaluation, training, evaluation; each is kept, so that a killed run goes on where it stopped."""
    init = resolve_init(config.init, run_dir)
    _evaluate(config, init, run_dir, "before")
    _evaluate(config, run_rl(config, run_dir, init), run_dir, "after")


def _evaluate(config: RLConfig, checkpoint: Path, run_dir: Path, name: str) -> None:
    target = run_dir.parent / f"{run_dir.name}-{name}"
    kept = target / "rows.json"
    if kept.exists():
        return
    with RolloutStack(dataclasses.replace(config, name=name), checkpoint, target) as stack:
        episodes = stack.evaluate(label=f"evaluate {name}")

    def bounds(successes: int, n: int) -> tuple[float, float]:
        found = wilson_interval(successes, n)
        return found.low, found.high

    write_atomic(kept, json.dumps(pass_rows(f"pass_at_1.{name}", episodes, bounds)))


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in ("before", "after"):
        kept = run_dir.parent / f"{run_dir.name}-{name}" / "rows.json"
        found = json.loads(kept.read_text()) if kept.exists() else []
        rows += [row for row in found if not row["name"].endswith(".mean")]
    records = read_jsonl(run_dir / "metrics.jsonl")
    events = read_jsonl(run_dir / "events.jsonl")
    curve = [reward for _, reward in reward_curve(run_dir)]
    for name, part in (("first", curve[:WINDOW]), ("last", curve[-WINDOW:])):
        found = bootstrap_mean([[value] for value in part])
        rows.append({"name": f"reward.{name}", "value": found.value, "unit": "reward", "n": len(part),
                     "low": found.low, "high": found.high})
    canary = [event["canary_error"] for event in events if event["kind"] == "weights_pushed"]
    trained = [record["abs_difference"] for record in records]
    fresh = [record["abs_difference.staleness_0"] for record in records if "abs_difference.staleness_0" in record]
    tests = [event for event in events if event["kind"] == "engine_self_test"]
    for name, values in (("trained", trained), ("canary", canary)):
        rows.append(_difference(f"{name}.mean", sum(values) / len(values), len(values)))
    for name, values in (("trained", trained), ("fresh", fresh), ("canary", canary)):
        rows += [_difference(f"{name}.largest", max(values), len(values))] if values else []
    rows += [_difference("self_test", max(test["prompt_mean"], test["sampled_mean"]), test["tokens"])
             for test in tests[-1:]]
    rows += [{"name": "steps", "value": records[-1]["step"], "unit": "steps"},
             {"name": "weight_updates", "value": len(canary), "unit": "updates"},
             {"name": "wall_s", "value": records[-1]["elapsed_s"], "unit": "s"}]
    return rows


def _difference(name: str, value: float, n: int) -> dict[str, Any]:
    return {"name": f"difference.{name}", "value": value, "unit": "nats", "n": n, "goal": LIMIT, "met": value <= LIMIT}


if __name__ == "__main__":
    main()
