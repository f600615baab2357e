"""Commands over what an RL run recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import AsJson, print_results

RunDir = Annotated[Path, typer.Argument(help="Run directory of an RL run.")]
TasksetFilter = Annotated[str | None, typer.Option("--taskset", help="Only this taskset.")]
OutcomeFilter = Annotated[str | None, typer.Option("--outcome", help="Only this outcome.")]
StateFilter = Annotated[str | None, typer.Option("--state", help="Only groups that are ready, leased, acked, dropped.")]


def ledger_show(run_dir: RunDir,
                as_json: AsJson = False) -> None:
    """Counts of groups and episodes by fate, staleness, and whether the books balance."""
    from glm5.rl.summary import summary_rows

    print_results(f"ledger show {run_dir}", summary_rows(run_dir), as_json)


def ledger_list(run_dir: RunDir, taskset: TasksetFilter = None, outcome: OutcomeFilter = None,
                state: StateFilter = None, limit: Annotated[int, typer.Option(help="Newest so many.")] = 20) -> None:
    """One line per episode, newest first."""
    from glm5.rl.replay import EpisodeFilter, read_episodes

    chosen = EpisodeFilter(taskset=taskset, outcome=outcome, state=state, limit=limit)
    for item in read_episodes(run_dir, chosen):
        episode = item.episode
        fate = item.excluded or item.group_reason or item.group_state
        print(f"{episode.episode_id:40} {episode.outcome:12} reward {episode.reward!s:6} {fate:14} {episode.reason}")


def ledger_export(run_dir: RunDir, output: Annotated[Path, typer.Option(help="JSON lines file to write.")],
                  taskset: TasksetFilter = None, outcome: OutcomeFilter = None, state: StateFilter = None) -> None:
    """Write episodes with their exact tokens as JSON lines."""
    from glm5.rl.replay import EpisodeFilter, export_episodes

    count = export_episodes(run_dir, output, EpisodeFilter(taskset=taskset, outcome=outcome, state=state))
    print(f"{count} episodes in {output}")


def ledger_replay(run_dir: RunDir, episode_id: str,
                  checkpoint: Annotated[Path, typer.Option(help="Tokenizer to decode with; weights to score with.")],
                  score: Annotated[bool, typer.Option(help="Also compare the recorded log-probs with those that the "
                                                           "checkpoint gives now.")] = True,
                  as_json: AsJson = False) -> None:
    """Show an episode as text, and how a checkpoint scores it."""
    from glm5.rl.replay import mismatch_rows, read_episode, transcript

    item = read_episode(run_dir, episode_id)
    print(transcript(item, checkpoint), file=sys.stderr if as_json else sys.stdout)
    if score:
        print_results(f"ledger replay {episode_id}", mismatch_rows(item, checkpoint), as_json)
