"""Options that several commands share, and how results are printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as steps=100 or optimizer.lr=3e-4.")]
Port = Annotated[int, typer.Option(help="TCP port; 0 takes a free one.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or an accelerator by name; over the configuration's.")]
ReadyFile = Annotated[Path | None, typer.Option(help="Write {url, pid} here once the service accepts connections.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result object.")]


def default_run_dir(config: Path, name: str) -> Path:
    """Where a stage runs by default: beside the stages of the pipeline whose configurations lie in the same folder."""
    return Path("runs") / config.resolve().parent.name / name


def print_results(command: str, rows: list[dict[str, Any]], as_json: bool = False, **more: Any) -> None:
    """A table for people on stderr when stdout is for machines; the result object as the last line of stdout."""
    from glm5.eval.report import results_object

    out = sys.stderr if as_json else sys.stdout
    for row in rows:
        interval = f"  [{row['low']:.3f}, {row['high']:.3f}]" if "low" in row else ""
        value = "-" if row["value"] is None else row["value"]
        print(f"{row['name']:40} {value:>18} {row['unit']}{interval}", file=out)
    if as_json:
        print(json.dumps({**results_object(command, rows), **more}))
