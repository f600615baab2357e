"""Commands over preference pairs and reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.cli.options import AsJson, Device, Host, Overrides, Port, ReadyFile, default_run_dir, print_results
from glm5.device import AUTO


def reward_train(config: Path, run_dir: Annotated[Path | None, typer.Option(help="Run directory.")] = None,
                 as_json: AsJson = False, overrides: Overrides = None) -> None:
    """Train a reward model, or the policy itself (objective = "dpo"), from preference pairs; its accuracy on held-out
    pairs. Continues from its newest complete checkpoint."""
    from glm5.config import load_config
    from glm5.train.preference_config import PreferenceConfig
    from glm5.train.preferences import held_out_result, run_preferences

    loaded = load_config(PreferenceConfig, config, overrides or [])
    directory = run_dir or default_run_dir(config, loaded.name)
    final = run_preferences(loaded, directory)
    print_results(f"reward train {loaded.name}", [accuracy_row(loaded.name, *held_out_result(directory))], as_json,
                  checkpoint=str(final))


def accuracy_row(name: str, right: int, pairs: int) -> dict[str, Any]:
    """Result row ``accuracy.NAME``: the share of held-out pairs whose better answer has the higher score."""
    from glm5.eval.statistics import wilson_interval

    interval = wilson_interval(right, pairs)
    return {"name": f"accuracy.{name}", "value": interval.value, "unit": "fraction", "n": pairs, "low": interval.low,
            "high": interval.high}


def reward_serve(directory: Path, host: Host = "127.0.0.1", port: Port = 8400, ready_file: ReadyFile = None,
                 threads: Annotated[int, typer.Option(help="CPU threads; 0 takes all cores.")] = 0,
                 device: Device = None) -> None:
    """Serve a reward model: POST /score {"conversations": [[message, …], …]}."""
    from glm5.serve.reward import serve_reward_model

    serve_reward_model(directory, host, port, ready_file, threads, device or AUTO)


def reward_pairs(source: Annotated[str, typer.Argument(help="A taskset, or the run directory of an RL run.")],
                 output: Annotated[Path, typer.Option(help="File to write, one pair a line.")],
                 count: Annotated[int, typer.Option(help="Pairs at most.")] = 200,
                 split: Annotated[str, typer.Option(help="Split of the taskset.")] = "demo",
                 tokenizer: Annotated[Path | None, typer.Option(help="Checkpoint or tokenizer directory, to read a "
                                                                     "ledger's tokens.")] = None,
                 anchors: Annotated[str, typer.Option(help="Of a ledger: compare its answers with anchors (solution or "
                                                           "a .jsonl file), not with each other.")] = "") -> None:
    """Write preference pairs: a taskset's own, or from recorded episodes (best against worst of each group, or anchors
    against what the policy answered)."""
    if (Path(source) / "ledger.sqlite").is_file():
        from glm5.errors import ConfigError
        from glm5.rl.pairs import write_ledger_pairs

        if tokenizer is None:
            raise ConfigError("--tokenizer: needed to read the tokens of a ledger; give the checkpoint of that run")
        number = write_ledger_pairs(Path(source), tokenizer, output, count, anchors)
    else:
        from glm5.env.check import write_pairs

        number = write_pairs(source, count, output, split)
    print(f"{number} pairs in {output}")
