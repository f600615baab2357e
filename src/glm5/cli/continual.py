"""Commands of continual learning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import AsJson, Overrides, default_run_dir, print_results


def continual_run(config: Path, run_dir: Annotated[Path | None, typer.Option(help="Run directory.")] = None,
                  as_json: AsJson = False, overrides: Overrides = None) -> None:
    """Filter recorded answers, train on them, and publish the model unless the regression gate refuses it (exit code
    1). Continues where it stopped."""
    from glm5.config import load_config
    from glm5.continual.config import ContinualConfig
    from glm5.continual.learn import read_rollouts, run_continual

    loaded = load_config(ContinualConfig, config, overrides or [])
    result = run_continual(loaded, read_rollouts(loaded, config), run_dir or default_run_dir(config, loaded.name))
    print_results(f"continual run {loaded.name}", result.rows, as_json, published=str(result.published or ""))
    if result.refusal:
        print(result.refusal, file=sys.stderr)
        raise typer.Exit(1)
    if not as_json:
        print(result.published)


def continual_filter(config: Path, as_json: AsJson = False, overrides: Overrides = None) -> None:
    """What a round would learn from the collections: answers by fate. Writes nothing."""
    from glm5.config import load_config
    from glm5.continual.config import ContinualConfig
    from glm5.continual.learn import filter_collections

    loaded = load_config(ContinualConfig, config, overrides or [])
    print_results(f"continual filter {loaded.name}", filter_collections(loaded).rows(), as_json)
