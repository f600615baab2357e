"""Commands over tasksets and task services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import AsJson, Host, Port, ReadyFile, print_results


def env_serve(names: Annotated[list[str], typer.Argument(help="Tasksets to serve.")],
              host: Host = "127.0.0.1", port: Port = 8300, ready_file: ReadyFile = None,
              register: Annotated[str | None, typer.Option(help="Orchestrator URL to register at.")] = None,
              sandbox: Annotated[str, typer.Option(help="bwrap, or none for no isolation at all.")] = "bwrap",
              capacity: Annotated[int, typer.Option(help="Episodes at once.")] = 64,
              ratio: Annotated[float, typer.Option(help="Factor on the shares of these tasksets.")] = 1.0,
              speed: Annotated[float, typer.Option(help="Episodes started in a second at most; 0: no limit.")] = 0.0,
              rewards: Annotated[Path | None, typer.Option(help="JSON file of rewards by taskset.")] = None,
              reward_model: Annotated[str, typer.Option(help="URL of a served reward model.")] = "") -> None:
    """Serve tasksets over HTTP."""
    from glm5.env.service import run_service

    run_service(names, host, port, ready_file, register, sandbox, capacity, ratio, speed, rewards, reward_model)


def env_list() -> None:
    """Tasksets that are installed."""
    from glm5.env.tasks import available_tasksets

    for name in available_tasksets():
        print(name)


def env_check(name: str, count: Annotated[int, typer.Option(help="Tasks per split.")] = 16,
              sandbox: Annotated[str, typer.Option(help="bwrap, or none for no isolation at all.")] = "bwrap",
              as_json: AsJson = False) -> None:
    """Prove a taskset: the oracle scores 1, doing nothing scores 0, splits do not overlap."""
    from glm5.env.check import check_taskset

    rows = check_taskset(name, count, sandbox)
    print_results(f"env check {name}", rows, as_json)
    if not all(row.get("met", True) for row in rows):
        raise typer.Exit(1)


def env_demos(name: str, output: Annotated[Path, typer.Option(help="File to write, one conversation a line.")],
              count: Annotated[int, typer.Option(help="Demonstrations.")] = 100,
              sandbox: Annotated[str, typer.Option(help="bwrap, or none for no isolation at all.")] = "bwrap",
              verdicts: Annotated[bool, typer.Option("--verdicts", help="Go on with a verdict, every second time on a "
                                                     "wrong answer.")] = False) -> None:
    """Write demonstrations of the scripted expert as a conversations file."""
    from glm5.env.check import write_demonstrations
    from glm5.env.rewards.config import VerificationConfig

    verification = VerificationConfig() if verdicts else None
    print(f"{write_demonstrations(name, count, output, sandbox, verification)} demonstrations in {output}")
