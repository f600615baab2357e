"""Commands over what an RL run recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import AsJson, Host, Port, print_results
from glm5.errors import ServiceError

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
    from glm5.tokenizer.bpe import load_tokenizer

    item = read_episode(run_dir, episode_id)
    print(transcript(item, load_tokenizer(checkpoint)), file=sys.stderr if as_json else sys.stdout)
    if score:
        print_results(f"ledger replay {episode_id}", mismatch_rows(item, checkpoint), as_json)


def transcripts(run_dir: RunDir, step: Annotated[int | None, typer.Option(help="Of this step; the newest without it.")]
                = None, taskset: TasksetFilter = None, as_json: AsJson = False) -> None:
    """Episodes that a run kept as text (``observation.transcripts``), sampled tokens between ⟦ and ⟧."""
    from glm5.rl.transcripts import read_transcripts

    for record in read_transcripts(run_dir, step, taskset):
        if as_json:
            print(json.dumps(record))
        else:
            print(f"step {record['step']}  advantage {record['advantage']:+.3f}  staleness {record['staleness']}\n"
                  f"{record['text']}\n")


def timeline(run_dir: RunDir, output: Annotated[Path | None, typer.Option(help="Write Chrome's trace format, for "
                                                                            "ui.perfetto.dev.")] = None,
             as_json: AsJson = False) -> None:
    """What every component of a run did and whom it waited for."""
    from glm5.rl.timeline import wait_rows, write_trace

    rows = wait_rows(run_dir)
    if output is not None:
        print(f"{write_trace(run_dir, output)} spans in {output}", file=sys.stderr)
    print_results(f"timeline {run_dir}", rows, as_json)


def exporter(run_dir: RunDir, host: Host = "127.0.0.1", port: Port = 9400) -> None:
    """Serve the numbers of a run to Prometheus at /metrics until interrupted."""
    import threading

    from glm5.rl.exporter import exporting

    if not run_dir.is_dir():
        raise ServiceError(f"{run_dir}: no such run directory")
    with exporting(run_dir, host, port) as taken:
        print(f"http://{host}:{taken}/metrics", flush=True)
        threading.Event().wait()
