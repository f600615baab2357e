"""The report of a pipeline: every row is computed from files of its run directory.

Rows of the agentic stage, named ``rl``, have the plain names (``busy.trainer``); those of other RL stages begin with
the name of their stage (``reasoning.busy.trainer``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm5.clock import Clock
from glm5.errors import ConfigError, DataError
from glm5.rl.config import RLConfig
from glm5.runlog import read_jsonl
from glm5.train.config import StageConfig

AGENTIC = "rl"
NEAR = 0.02
"""How far a skill may be below its best teacher after distillation."""
Row = dict[str, Any]


def agentic(rl: Sequence[RLConfig]) -> RLConfig:
    """The agentic stage, or the last one of a pipeline without."""
    return next((stage for stage in rl if stage.name == AGENTIC), rl[-1])


def write(run_dir: Path, name: str, stages: Sequence[StageConfig], rl: Sequence[RLConfig], clock: Clock,
          goal_s: int) -> Path:
    """Write report, results and curves; the path of the report. ``goal_s``: wall time that is aimed at, 0 for none."""
    from glm5.eval.report import build_report
    from glm5.rl.summary import summary_rows

    sections = {"Language modelling": _language_rows(run_dir, stages),
                "Multi-token prediction": _stored(run_dir, "mtp"),
                "Held-out pass@1": _stored(run_dir, "pass_at_1.sft")}
    for before, stage in zip((None, *rl[:-1]), rl, strict=True):
        reward = f"accuracy.{stage.reward_model.removeprefix('stage:')}"
        if _is_stored(run_dir, reward):
            sections[f"Reward model of {stage.name}"] = _stored(run_dir, reward)
        skills = _distilled_rows(run_dir, stage, before) if stage.teachers else _skill_rows(run_dir, stage)
        sections[f"Held-out pass@1 after {stage.name}"] = skills
        sections[f"Reinforcement learning: {stage.name}"] = summary_rows(
            run_dir / stage.name, "" if stage.name == AGENTIC else stage.name)
    sections["Cost"] = _cost_rows(run_dir, stages, clock, goal_s)
    curves = {stage.name: read_jsonl(run_dir / stage.name / "metrics.jsonl") for stage in rl}
    return build_report(run_dir, f"run {name}", sections, curves)


def _language_rows(run_dir: Path, stages: Sequence[StageConfig]) -> list[Row]:
    pretrain, sparse = stages[0].name, _last_named(stages, "dsa-sparse")
    initial = _held_out(run_dir / pretrain, "initial", "dense")
    final = _held_out(run_dir / pretrain, "final", "dense")
    before = _held_out(run_dir / sparse, "initial", "dense")
    dense, selected = (_held_out(run_dir / sparse, "final", mode) for mode in ("dense", "sparse"))
    fall = 1 - final["bits_per_byte"] / initial["bits_per_byte"]
    gap = selected["nats_per_token"] / dense["nats_per_token"] - 1
    return [
        {"name": "bpb.initial", "value": initial["bits_per_byte"], "unit": "bits/byte", "n": initial["bytes"]},
        {"name": "bpb.final", "value": final["bits_per_byte"], "unit": "bits/byte", "n": final["bytes"],
         "baseline": "bpb.initial", "ratio": 1 - fall, "goal": "at least 45% below", "met": fall >= 0.45},
        {"name": "loss.dense_before", "value": before["nats_per_token"], "unit": "nats/token", "n": before["tokens"]},
        {"name": "loss.dense", "value": dense["nats_per_token"], "unit": "nats/token", "n": dense["tokens"]},
        {"name": "loss.sparse", "value": selected["nats_per_token"], "unit": "nats/token", "n": selected["tokens"],
         "baseline": "loss.dense", "ratio": 1 + gap, "goal": "within 0.5%", "met": abs(gap) <= 0.005},
    ]


def _skill_rows(run_dir: Path, stage: RLConfig) -> list[Row]:
    """Rows after an RL stage; its own tasksets are compared with what SFT left."""
    before = {row["name"].rpartition(".")[2]: row for row in _stored(run_dir, "pass_at_1.sft")}
    rows = _stored(run_dir, f"pass_at_1.{stage.name}")
    for row in rows:
        name = row["name"].rpartition(".")[2]
        if row["name"].startswith("excluded."):
            continue
        if name == "mean":
            _compare_means(row, [before[taskset] for taskset in stage.tasksets], before["mean"], stage.name)
        elif name in stage.tasksets:
            row |= {"baseline": before[name]["name"], "goal": "not below", "met": row["value"] >= before[name]["value"]}
            if before[name]["value"]:
                row["ratio"] = row["value"] / before[name]["value"]
    return rows


def _compare_means(row: Row, before: Sequence[Row], sft_mean: Row, stage: str) -> None:
    """Goal and baseline of the mean of a stage; ``sft_mean`` is the row over the tasksets of the agentic stage."""
    base = sum(item["value"] for item in before) / len(before)
    if stage == AGENTIC:
        row |= {"baseline": sft_mean["name"], "goal": "20 points above, intervals apart",
                "met": row["value"] - base >= 0.20 and row["low"] > sft_mean["high"]}
    else:
        row |= {"baseline": base, "goal": "above", "met": row["value"] > base}
    if base:
        row["ratio"] = row["value"] / base


def _distilled_rows(run_dir: Path, stage: RLConfig, before: RLConfig | None) -> list[Row]:
    """Every skill against the best of the teachers that were measured, with what was lost before and after."""
    teachers = [teacher.checkpoint.removeprefix("stage:") for teacher in stage.teachers.values()]
    measured = {name: _by_taskset(run_dir, name) for name in teachers if _is_stored(run_dir, f"pass_at_1.{name}")}
    earlier = _by_taskset(run_dir, before.name if before is not None else "sft")
    rows, lost = _stored(run_dir, f"pass_at_1.{stage.name}"), []
    for row in rows:
        taskset = row["name"].rpartition(".")[2]
        candidates = [found[taskset] for found in measured.values() if taskset in found]
        if taskset not in stage.tasksets or not candidates:
            continue
        best = max(candidates, key=lambda item: item["value"])
        loss = best["value"] - row["value"]
        row["baseline"] = best["name"]
        if best["value"]:
            row["ratio"] = row["value"] / best["value"]
        label = before.name if before is not None else "sft"
        lost += [{"name": f"lost.{label}.{taskset}", "value": best["value"] - earlier[taskset]["value"],
                  "unit": "fraction", "n": row["n"], "baseline": best["name"]},
                 {"name": f"lost.{stage.name}.{taskset}", "value": loss, "unit": "fraction", "n": row["n"],
                  "baseline": best["name"], "goal": f"at most {NEAR}", "met": loss <= NEAR + 1e-9}]
    return [*rows, *lost]


def _cost_rows(run_dir: Path, stages: Sequence[StageConfig], clock: Clock, goal_s: int) -> list[Row]:
    rows: list[Row] = [{"name": f"wall_s.{name}", "value": round(seconds, 1), "unit": "s"}
                       for name, seconds in clock.seconds.items()]
    for row in rows:
        if row["name"] == "wall_s.run" and goal_s:
            row |= {"goal": f"at most {goal_s} s", "met": row["value"] <= goal_s}
    rows.append({"name": "peak_rss_bytes", "value": clock.peak_rss_bytes, "unit": "bytes", "goal": "under 6 GB",
                 "met": clock.peak_rss_bytes < 6e9})
    for stage in stages:
        metrics = read_jsonl(run_dir / stage.name / "metrics.jsonl")
        speeds = [record["tokens_per_s"] for record in metrics if "tokens_per_s" in record]
        if speeds:
            mean = len(speeds) / sum(1 / speed for speed in speeds)
            rows.append({"name": f"tokens_per_s.{stage.name}", "value": round(mean, 1), "unit": "tokens/s",
                         "n": len(speeds)})
    return rows


def _by_taskset(run_dir: Path, label: str) -> dict[str, Row]:
    prefix = f"pass_at_1.{label}."
    return {row["name"].removeprefix(prefix): row for row in _stored(run_dir, f"pass_at_1.{label}")
            if row["name"].startswith(prefix)}


def _stored(run_dir: Path, name: str) -> list[Row]:
    """Rows of a measurement that the pipeline took."""
    return list(json.loads(_file(run_dir, name).read_text(encoding="utf-8")))


def _is_stored(run_dir: Path, name: str) -> bool:
    return _file(run_dir, name).exists()


def _file(run_dir: Path, name: str) -> Path:
    return run_dir / "rows" / f"{name}.json"


def _held_out(stage_dir: Path, when: str, attention: str) -> Row:
    """Last ``held_out`` event of a stage for this moment and attention."""
    for event in reversed(read_jsonl(stage_dir / "events.jsonl")):
        if (event["kind"], event.get("when"), event.get("attention")) == ("held_out", when, attention):
            return event
    raise DataError(f"{stage_dir}: no held_out event ({when}, {attention}); set data.held_out_rows above 0")


def _last_named(stages: Sequence[StageConfig], kind: str) -> str:
    names = [stage.name for stage in stages if stage.stage == kind]
    if not names:
        raise ConfigError(f"the pipeline has no {kind} stage; add one to stages")
    return names[-1]
