"""Results: one schema for every command that measures, and the report of a run.

A result file is one JSON object ``{"command", "commit", "hardware", "rows"}``; a row is ``{"name", "value", "unit"}``
and, where they apply, ``n low high baseline ratio goal met``. Names are dotted and stable; ``ROW_NAMES`` says what each
means. Commands may pass rows as ``Row`` or as plain objects of this form; unknown keys are refused either way.

``build_report`` writes ``report.json``, ``report.md`` and ``rl_curve.png`` into a run directory.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import DataError
from glm5.eval.figures import Series, draw_lines
from glm5.eval.provenance import commit, hardware
from glm5.runlog import write_atomic

CURVE_FILE = "rl_curve.png"
ROW_NAMES = {
    "bpb.initial": "bits per byte of held-out files, before pre-training",
    "bpb.final": "bits per byte of held-out files, after pre-training",
    "loss.dense_before": "held-out loss with dense attention, before sparse training",
    "loss.dense": "held-out loss with dense attention, after sparse training",
    "loss.sparse": "held-out loss with sparse attention, after sparse training",
    "mtp.acceptance_length": "tokens kept per verification of drafted tokens, the model's own token included",
    "pass_at_1.sft.NAME": "share of held-out tasks of a taskset solved at the first attempt, after SFT",
    "pass_at_1.rl.NAME": "the same after reinforcement learning",
    "pass_at_1.STAGE.mean": "unweighted mean over the tasksets",
    "pass_at_1.LABEL.NAME": "share of tasks of a taskset solved at the first attempt",
    "excluded.LABEL.REASON": "evaluated episodes that count for nothing, by reason",
    "wall_s.run": "seconds of the whole run, all attempts together",
    "wall_s.STAGE": "seconds of a stage, all attempts together",
    "tokens_per_s.STAGE": "training tokens per second of a stage",
    "peak_rss_bytes": "largest resident memory of all processes of the run together",
    "steps.MODE": "RL steps of a mode",
    "speedup": "wall time of the synchronous run over that of the asynchronous one, same number of steps",
    "busy.trainer": "share of the RL time in which the trainer computed",
    "busy.engine": "share of the RL time in which the engine computed",
    "episodes.REASON": "RL episodes by what became of them",
    "groups.reused": "how often an RL group that had been trained was trained again",
    "groups.STATE": "RL groups by state",
    "groups.dropped.REASON": "RL groups that were not trained, by reason",
    "staleness.STEPS": "trained episodes by age in trainer steps",
    "KIND.TOPK.LENGTH.vs_torch_dense": "speed-up over PyTorch's dense attention by selected and visible keys",
    "KIND.TOPK.LENGTH.vs_native_dense": "speed-up over the native dense form",
    "KIND.TOPK.LENGTH.ceiling_share": "time that operations and bytes allow at the measured ceilings over that taken",
    "quantize.loss.original": "next-token loss of the float checkpoint on held-out text",
    "quantize.loss.VARIANT": "the same after quantisation: as written (quantized), or one part of it alone",
    "quantize.kl.VARIANT": "mean KL of the quantised next-token distribution from the float one",
    "quantize.bytes.SIDE": "bytes of all tensors of the float or the quantised checkpoint",
    "ledger.violations": "broken invariants of the ledger",
    "payload_bytes.PLACE": "compressed bytes of recorded tokens: in the database, in files beside it, removed",
}
"""Meaning of row names; a part in capitals stands for any word. The first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number."""

    name: str
    value: float | int | None
    """None: could not be measured."""
    unit: str
    n: int | None = None
    """Observations behind the value."""
    low: float | None = None
    """Bounds of the 95% interval."""
    high: float | None = None
    baseline: str | float | None = None
    """What the value is compared with: the name of a row, or a number."""
    ratio: float | None = None
    """Value over baseline."""
    goal: str | float | None = None
    met: bool | None = None
    """Whether the goal is met."""

    def to_json(self) -> dict[str, Any]:
        """Plain object; keys that do not apply are left out."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None or key == "value"}


AnyRow = Row | Mapping[str, Any]


def read_row(row: AnyRow) -> Row:
    """A row from either form. Raises DataError for an unknown or missing key."""
    if isinstance(row, Row):
        return row
    known = {item.name for item in dataclasses.fields(Row)}
    wrong = sorted(set(row) - known) or sorted({"name", "value", "unit"} - set(row))
    if wrong:
        raise DataError(f"result row {row.get('name', row)!r}: key {wrong[0]!r}; expected name, value, unit and, where "
                        "they apply, n low high baseline ratio goal met")
    return Row(**row)


def results_object(command: str, rows: Sequence[AnyRow]) -> dict[str, Any]:
    """The object that a measuring command prints as its last line or writes as ``report.json``."""
    return {"command": command, "commit": commit(), "hardware": hardware(),
            "rows": [read_row(row).to_json() for row in rows]}


def build_report(run_dir: Path, command: str, sections: Mapping[str, Sequence[AnyRow]],
                 curve: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write the report of a run; the path of ``report.md``.

    ``sections``: title → rows, in order. ``curve``: metric records of RL; their keys ``reward`` and ``reward.NAME``
    over ``step`` become ``rl_curve.png``. Raises ConfigError when there is a curve and matplotlib is missing.
    """
    rows = {title: [read_row(row) for row in items] for title, items in sections.items()}
    results = results_object(command, [row for items in rows.values() for row in items])
    series = reward_series(curve)
    if series:
        draw_lines(run_dir / CURVE_FILE, series, "Reward during reinforcement learning", "step", "mean reward")
    parts = [f"# Report: {command}", f"Commit {results['commit']}. {results['hardware']}."]
    for title, items in rows.items():
        parts += [f"## {title}", _section(items)]
    if series:
        parts.append(f"![Reward during reinforcement learning]({CURVE_FILE})")
    parts += ["## Names", _glossary([row for items in rows.values() for row in items])]
    write_atomic(run_dir / "report.json", json.dumps(results, indent=1) + "\n")
    write_atomic(run_dir / "report.md", "\n\n".join(parts) + "\n")
    return run_dir / "report.md"


def reward_series(records: Sequence[Mapping[str, Any]]) -> list[Series]:
    """One line per ``reward`` key of metric records; of a step that was done again after a crash the last record."""
    names = sorted({key for record in records for key in record if key == "reward" or key.startswith("reward.")})
    series = []
    for name in names:
        points = sorted({record["step"]: record[name] for record in records if name in record}.items())
        label = name.partition(".")[2] or "all"
        series.append(Series(label, [float(step) for step, _ in points], [float(value) for _, value in points]))
    return series


def describe(name: str) -> str:
    """Meaning of a row name, "" when it is not documented here."""
    for pattern, meaning in ROW_NAMES.items():
        expression = re.sub(r"[A-Z]+", r"[^.]+", pattern.replace(".", r"\."))
        if re.fullmatch(expression, name):
            return meaning
    return ""


def compare(first: str | Path, second: str | Path) -> str:
    """Two result files side by side, as a table. A directory means its ``report.json``.

    Raises DataError when a file is missing or no result file.
    """
    left, right = read_results(first), read_results(second)
    rows_a = {row["name"]: read_row(row) for row in left["rows"]}
    rows_b = {row["name"]: read_row(row) for row in right["rows"]}
    table = [["name", "A", "B", "B/A", "unit", ""]]
    for name in dict.fromkeys([*rows_a, *rows_b]):
        a, b = rows_a.get(name), rows_b.get(name)
        ratio = f"{b.value / a.value:.3f}" if a and b and a.value and b.value is not None else ""
        unit = next(row.unit for row in (a, b) if row is not None)
        table.append([name, _with_interval(a), _with_interval(b), ratio, unit, _verdict(a, b)])
    header = [f"{letter}: {side['command']}, commit {side['commit'][:20]}, {side['hardware']}"
              for letter, side in (("A", left), ("B", right))]
    return "\n".join([*header, "", *_aligned(table)])


def read_results(path: str | Path) -> dict[str, Any]:
    """A result file, or the last line of captured output. Raises DataError when it is none."""
    file = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}); give a result file such as report.json") from None
    for candidate in (text, text.strip().rpartition("\n")[2]):
        try:
            data = json.loads(candidate)
        except json.JSONDecodeError:
            continue
        if isinstance(data, dict) and {"command", "commit", "hardware", "rows"} <= set(data):
            return data
    raise DataError(f"{file}: no results; expected a JSON object with command, commit, hardware and rows")


def _section(rows: Sequence[Row]) -> str:
    """Table of a section; counts by staleness become a histogram below it."""
    ages = [row for row in rows if re.fullmatch(r"staleness\.\d+", row.name)]
    others = [row for row in rows if row not in ages]
    parts = [_markdown_table(others)] if others else []
    if ages:
        parts.append(_histogram(ages))
    return "\n\n".join(parts) or "Nothing was measured."


def _markdown_table(rows: Sequence[Row]) -> str:
    columns = {
        "name": [f"`{row.name}`" for row in rows],
        "value": [format_value(row.value, row.unit) for row in rows],
        "95% interval": [_interval(row) for row in rows],
        "n": [f"{row.n:,}" if row.n is not None else "" for row in rows],
        "unit": [row.unit for row in rows],
        "compared with": [f"`{row.baseline}`" if row.baseline is not None else "" for row in rows],
        "ratio": [f"{row.ratio:.3f}" if row.ratio is not None else "" for row in rows],
        "goal": [str(row.goal) if row.goal is not None else "" for row in rows],
        "met": [{True: "yes", False: "**no**", None: ""}[row.met] for row in rows],
    }
    used = {title: cells for title, cells in columns.items() if any(cells)}
    lines = ["| " + " | ".join(used) + " |", "|" + "---|" * len(used)]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in zip(*used.values(), strict=True)])


def _histogram(rows: Sequence[Row]) -> str:
    total = sum(row.value or 0 for row in rows)
    lines = ["| staleness (steps) | episodes | share | |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda item: int(item.name.partition(".")[2])):
        share = (row.value or 0) / total if total else 0.0
        bar = "█" * round(40 * share)
        lines.append(f"| {row.name.partition('.')[2]} | {format_value(row.value, row.unit)} | {share:.1%} | {bar} |")
    return "\n".join(lines)


def _glossary(rows: Sequence[Row]) -> str:
    meanings = {row.name: describe(row.name) for row in rows}
    return "\n".join(f"- `{name}`: {meaning}" for name, meaning in meanings.items() if meaning)


def format_value(value: float | int | None, unit: str) -> str:
    """A number for people: whole counts with separators, the rest with four significant digits."""
    if value is None:
        return "–"
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB" if value >= 1e8 else f"{value / 1e6:.2f} MB"
    if isinstance(value, int) or (abs(value) >= 1000 and float(value).is_integer()):
        return f"{int(value):,}"
    return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _interval(row: Row) -> str:
    return f"{row.low:.3f} – {row.high:.3f}" if row.low is not None and row.high is not None else ""


def _with_interval(row: Row | None) -> str:
    if row is None:
        return "–"
    interval = _interval(row)
    return format_value(row.value, row.unit) + (f" ({interval})" if interval else "")


def _verdict(a: Row | None, b: Row | None) -> str:
    """What two intervals say about each other."""
    if a is None or b is None or a.low is None or a.high is None or b.low is None or b.high is None:
        return ""
    return "intervals apart" if a.high < b.low or b.high < a.low else "intervals overlap"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
